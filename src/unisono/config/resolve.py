"""Determines the value of every setting from its possible sources, and records which source supplied it."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from unisono.config.fields import Field, fields_by_name, groups_in, with_aliases
from unisono.config.flags import SIMILAR, Explain, parse_flags
from unisono.config.include import INCLUDE, Entry, read_with_includes
from unisono.config.values import Mismatch, coerce, describe, did_you_mean, jsonable, shown
from unisono.errors import ConfigError, RecipeError

T = TypeVar("T")
Translate = Callable[[dict[str, Any], str], Mapping[str, Any]]
_EMPTY: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class _Assignment:
    """A value that a file, a flag or a Python caller assigns to a field, under one of its names."""

    name: str
    value: Any
    origin: str
    order: int = 0  # if a field is assigned twice, the assignment with the higher order wins


@dataclass(frozen=True)
class Resolved:
    """The value of every field, and its source."""

    values: dict[str, Any]
    sources: dict[str, str]
    """The source of each value: "default", "recipe", "file" or "flag", or a source that `with_values` recorded."""
    fields: Mapping[str, Field] = dataclasses.field(repr=False, compare=False)

    def build(self, cls: type[T]) -> T:
        """Creates an instance of one of the resolved dataclasses."""
        groups = groups_in(cls)
        arguments = {
            declared.name: self.build(groups[declared.name])
            if declared.name in groups
            else copy.deepcopy(self.values[declared.name])
            for declared in dataclasses.fields(cls)  # type: ignore[arg-type]
            if declared.init
        }
        try:
            return cls(**arguments)
        except ValueError as error:  # a check in __post_init__
            raise ConfigError(f"{cls.__qualname__}: {' '.join(str(error).split())}") from error

    def explicit(self, name: str) -> bool:
        """Whether the user set the field: with a flag, or in a file to a value other than its default."""
        return self.sources[name] in ("file", "flag")

    def with_values(self, source: str, /, **changes: Any) -> Resolved:
        """Returns a copy with `changes` applied; `source` is recorded as the source of these values."""
        return self._layer(source, _assignments(changes, self.fields, source))

    def to_json(self) -> dict[str, Any]:
        """Returns values and sources in types that JSON supports."""
        return {"values": {name: jsonable(value) for name, value in self.values.items()}, "sources": dict(self.sources)}

    @classmethod
    def from_json(cls, classes: Sequence[type], data: Mapping[str, Any]) -> Resolved:
        """Reads the result of `to_json`. A field that did not exist when it was written has its default."""
        values, sources = data.get("values"), data.get("sources")
        if not isinstance(values, Mapping) or not isinstance(sources, Mapping):
            raise ConfigError("not a stored configuration: `values` or `sources` is missing")
        resolved = _defaults(classes)
        for assignment in _assignments(values, resolved.fields, "the stored configuration"):
            resolved = resolved._layer(str(sources.get(assignment.name, "default")), [assignment])
        return resolved._complete()

    def _layer(self, source: str, assignments: Iterable[_Assignment], aliases: Mapping[str, str] = _EMPTY) -> Resolved:
        """Returns a copy with these assignments applied. The last assignment to a field takes precedence."""
        values, sources = dict(self.values), dict(self.sources)
        applied: dict[str, tuple[_Assignment, Any]] = {}
        for new in assignments:
            field = aliases.get(new.name, new.name)
            # Error messages show the name that the user wrote, which may be an alias.
            value = _coerced(dataclasses.replace(self.fields[field], name=new.name), new.value, new.origin)
            old, old_value = applied.get(field, (new, value))
            if old.order == new.order and old.name != new.name and old_value != value:
                raise ConfigError(
                    f"{old.name} ({shown(jsonable(old_value))}, from {old.origin}) and {new.name} "
                    f"({shown(jsonable(value))}, from {new.origin}) are names of the same setting; remove one"
                )
            if old.order <= new.order:
                applied[field] = new, value
                values[field], sources[field] = value, source
        return dataclasses.replace(self, values=values, sources=sources)

    def _complete(self) -> Resolved:
        for name, field in self.fields.items():
            if name not in self.values:
                expected = describe(field.annotation)
                raise ConfigError(f"{name} is required: {expected}; set it with --{name} or in a config file")
        order = list(self.fields)
        values = {name: self.values[name] for name in order}
        return dataclasses.replace(self, values=values, sources={name: self.sources[name] for name in order})


def resolve(
    classes: Sequence[type],
    *,
    recipe_defaults: Mapping[str, Any] = _EMPTY,
    file: Path | Sequence[Path] | None = None,
    flags: Sequence[str] = (),
    overrides: Mapping[str, Any] | None = None,
    aliases: Mapping[str, str] = _EMPTY,
    translate: Translate | None = None,
    file_keys: Mapping[str, Any] = _EMPTY,
    explain: Explain | None = None,
) -> Resolved:
    """Resolves every field of the dataclasses: defaults < recipe_defaults < file < flags < overrides.

    Later files override earlier ones. `overrides` are the settings that a Python caller passes in place of flags.
    `aliases` maps further names to fields; they are valid in all sources. `translate` converts the keys of a file to
    fields. `file_keys` maps the keys that only `translate` understands to their types; they are valid as flags too.
    `explain` returns the end of the error message for an unknown name.
    """
    resolved = with_recipe_defaults(classes, recipe_defaults)
    names = with_aliases(resolved.fields, aliases)
    flag_names = {**_as_fields(file_keys), **names}
    if INCLUDE in names:
        raise RecipeError(f"{INCLUDE} cannot be a setting: in a config file it names other files; rename it")
    for path in [file] if isinstance(file, Path) else file or ():
        before, in_file = resolved, list(_from_file(path, names, translate, explain))
        resolved = resolved._layer("file", in_file, aliases)
        # A default value in a file does not count as set by the user, because a printed config contains all defaults.
        changed = {aliases.get(each.name, each.name) for each in in_file}
        unchanged = {n for n in changed & before.values.keys() if before.values[n] == resolved.values[n]}
        sources = resolved.sources | {name: before.sources[name] for name in unchanged}
        resolved = dataclasses.replace(resolved, sources=sources)
    typed = [_Assignment(name, value, f"--{name}") for name, value in parse_flags(flags, flag_names, explain)]
    resolved = resolved._layer("flag", _translated(typed, names, translate, "the command line"), aliases)
    place = "the settings passed in Python"
    passed = _assignments(overrides or _EMPTY, flag_names, place, explain)
    return resolved._layer("flag", _translated(passed, names, translate, place), aliases)._complete()


def with_recipe_defaults(classes: Sequence[type], recipe_defaults: Mapping[str, Any]) -> Resolved:
    """Resolves only the defaults. Required fields have no value yet."""
    resolved = _defaults(classes)
    try:
        return resolved._layer("recipe", _assignments(recipe_defaults, resolved.fields, "the recipe's defaults"))
    except ConfigError as error:
        raise RecipeError(str(error)) from None


def _defaults(classes: Sequence[type]) -> Resolved:
    fields = fields_by_name(classes)
    values = {name: field.default for name, field in fields.items() if not field.required}
    return Resolved(values, dict.fromkeys(values, "default"), fields)


def _from_file(
    path: Path, names: Mapping[str, Field], translate: Translate | None, explain: Explain | None
) -> Iterator[_Assignment]:
    """Yields the assignments of a file and of the files it includes, translated to fields."""
    entries = read_with_includes(path)
    if translate is not None:
        new = Entry(None, None, str(path), max((entry.order for entry in entries.values()), default=0))
        translated = translate({name: entry.value for name, entry in entries.items()}, str(path))
        entries = {name: dataclasses.replace(entries.get(name, new), value=value) for name, value in translated.items()}
    for name, entry in entries.items():
        _check_known(name if entry.key is None else entry.key, entry.value, names, entry.place, explain)
        yield _Assignment(name, entry.value, entry.place, entry.order)


def _as_fields(keys: Mapping[str, Any]) -> dict[str, Field]:
    return {name: Field(name, annotation, None, "", "", "") for name, annotation in keys.items()}


def _translated(
    assignments: list[_Assignment], names: Mapping[str, Field], translate: Translate | None, place: str
) -> list[_Assignment]:
    """Translates keys that are not fields. An assignment to the field itself takes precedence over a translated one."""
    foreign = {each.name: each.value for each in assignments if each.name not in names}
    if not foreign or translate is None:
        return assignments
    direct = [each for each in assignments if each.name in names]
    direct_names = {each.name for each in direct}
    translated = _assignments(translate(foreign, place), names, place)
    return [*(each for each in translated if each.name not in direct_names), *direct]


def _assignments(
    values: Mapping[Any, Any], names: Mapping[str, Field], place: str, explain: Explain | None = None
) -> list[_Assignment]:
    """Returns the assignments in a mapping; raises ConfigError for an unknown name."""
    assignments: dict[str, _Assignment] = {}
    for key, value in values.items():
        name = _check_known(key, value, names, place, explain)
        if name in assignments:
            raise ConfigError(f"{name} is set twice in {place}, with a hyphen and with an underscore")
        assignments[name] = _Assignment(name, value, place)
    return list(assignments.values())


def _check_known(key: Any, value: Any, names: Mapping[str, Field], place: str, explain: Explain | None) -> str:
    name = str(key).replace("-", "_")
    if name not in names:
        hint = (explain and explain(name, names, "")) or did_you_mean(name, list(names), similarity=SIMILAR)
        if isinstance(value, Mapping):
            hint = "; fields are not nested, write them at the top level"
        raise ConfigError(f"unknown field {key if str(key).isprintable() else shown(key)} in {place}{hint}")
    return name


def _coerced(field: Field, value: Any, origin: str) -> Any:
    try:
        return coerce(field.annotation, value)
    except Mismatch as error:
        raise ConfigError(f"{field.name}: {error} (from {origin}){error.hint}") from None
    except RecursionError:
        raise ConfigError(f"{field.name}: the value contains itself (from {origin})") from None
