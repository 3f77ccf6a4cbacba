"""From all the places a setting can come from to one value each, with its source."""

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
from unisono.config.values import Mismatch, coerce, describe, did_you_mean, plain, shown
from unisono.errors import ConfigError, RecipeError

T = TypeVar("T")
Translate = Callable[[dict[str, Any], str], Mapping[str, Any]]
_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class _Given:
    """A value that was given for a field, under one of its names."""

    name: str
    value: Any
    origin: str
    order: int = 0


@dataclass(frozen=True)
class Resolved:
    """The value of every field, and where it came from."""

    values: dict[str, Any]
    sources: dict[str, str]
    """"default", "recipe", "file" or "flag"; with_values may add others."""
    fields: Mapping[str, Field] = dataclasses.field(repr=False, compare=False)

    def build(self, cls: type[T]) -> T:
        """An instance of one of the dataclasses that were resolved."""
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
        """Whether the user set the field, by flag or to another value than its default by file."""
        return self.sources[name] in ("file", "flag")

    def says(self, name: str, value: Any) -> bool:
        """Whether the field has this value."""
        return name in self.values and bool(self.values[name] == value)

    def with_values(self, source: str, /, **changes: Any) -> Resolved:
        """A copy in which these fields have other values, from this source."""
        return self._layer(source, _named(changes, self.fields, source))

    def to_json(self) -> dict[str, Any]:
        """Values and sources in JSON's types."""
        return {"values": {name: plain(value) for name, value in self.values.items()}, "sources": dict(self.sources)}

    @classmethod
    def from_json(cls, classes: Sequence[type], data: Mapping[str, Any]) -> Resolved:
        """What to_json wrote; fields that did not exist then have their default."""
        values, sources = data.get("values"), data.get("sources")
        if not isinstance(values, Mapping) or not isinstance(sources, Mapping):
            raise ConfigError("not a stored configuration: `values` or `sources` is missing")
        resolved = _defaults(classes)
        for given in _named(values, resolved.fields, "the stored configuration"):
            resolved = resolved._layer(str(sources.get(given.name, "default")), [given])
        return resolved._complete()

    def _layer(self, source: str, given: Iterable[_Given], aliases: Mapping[str, str] = _NOTHING) -> Resolved:
        """A copy in which this has been said too; of what was said twice, the later counts."""
        values, sources = dict(self.values), dict(self.sources)
        said: dict[str, tuple[_Given, Any]] = {}
        for each in given:
            ours = aliases.get(each.name, each.name)
            # Under the name that was written: an error must say what the user can find.
            value = _checked(dataclasses.replace(self.fields[ours], name=each.name), each.value, each.origin)
            before, its_value = said.get(ours, (each, value))
            if before.order == each.order and before.name != each.name and its_value != value:
                raise ConfigError(
                    f"{before.name} ({shown(plain(its_value))}, from {before.origin}) and {each.name} "
                    f"({shown(plain(value))}, from {each.origin}) are two names of one setting; leave one of them out"
                )
            if before.order <= each.order:
                said[ours] = each, value
                values[ours], sources[ours] = value, source
        return dataclasses.replace(self, values=values, sources=sources)

    def _complete(self) -> Resolved:
        for name, field in self.fields.items():
            if name not in self.values:
                expected = describe(field.annotation)
                raise ConfigError(f"{name} must be given: {expected}, by --{name} or in a config file")
        order = list(self.fields)
        values = {name: self.values[name] for name in order}
        return dataclasses.replace(self, values=values, sources={name: self.sources[name] for name in order})


def resolve(
    classes: Sequence[type],
    *,
    recipe_defaults: Mapping[str, Any] = _NOTHING,
    file: Path | Sequence[Path] | None = None,
    flags: Sequence[str] = (),
    overrides: Mapping[str, Any] | None = None,
    aliases: Mapping[str, str] = _NOTHING,
    translate: Translate | None = None,
    file_keys: Mapping[str, Any] = _NOTHING,
    explain: Explain | None = None,
) -> Resolved:
    """One value for every field of the dataclasses: defaults < recipe_defaults < file < flags < overrides.

    Of several files the later ones win. `overrides` are what flags are on the command line, for callers in Python.
    `aliases` are other names of fields, for all of these; `translate` turns what stands in a file into our words.
    `file_keys` are names and types of keys that only `translate` knows: they are flags as well.
    `explain` says what to write instead of a name that no field has.
    """
    resolved = with_recipe_defaults(classes, recipe_defaults)
    names = with_aliases(resolved.fields, aliases)
    flag_names = {**_as_fields(file_keys), **names}
    if INCLUDE in names:
        raise RecipeError(f"{INCLUDE} cannot be a setting: in a config file it names other files; rename it")
    for path in [file] if isinstance(file, Path) else file or ():
        before, given = resolved, list(_in_file(path, names, translate, explain))
        resolved = resolved._layer("file", given, aliases)
        # A file that spells out a default (a printed config has them all) does not thereby insist on it.
        ours = {aliases.get(each.name, each.name) for each in given}
        same = {name: before.sources[name] for name in ours if before.says(name, resolved.values[name])}
        resolved = dataclasses.replace(resolved, sources=resolved.sources | same)
    typed = [_Given(name, value, f"--{name}") for name, value in parse_flags(flags, flag_names, explain)]
    resolved = resolved._layer("flag", _translated(typed, names, translate, "the command line"), aliases)
    place = "the given settings"
    called = _named(overrides or _NOTHING, flag_names, place, explain)
    return resolved._layer("flag", _translated(called, names, translate, place), aliases)._complete()


def with_recipe_defaults(classes: Sequence[type], recipe_defaults: Mapping[str, Any]) -> Resolved:
    """Before the user has said anything; fields that must be given are still missing."""
    resolved = _defaults(classes)
    try:
        return resolved._layer("recipe", _named(recipe_defaults, resolved.fields, "the recipe's defaults"))
    except ConfigError as error:
        raise RecipeError(str(error)) from None


def _defaults(classes: Sequence[type]) -> Resolved:
    fields = fields_by_name(classes)
    values = {name: field.default for name, field in fields.items() if not field.required}
    return Resolved(values, dict.fromkeys(values, "default"), fields)


def _in_file(
    path: Path, names: Mapping[str, Field], translate: Translate | None, explain: Explain | None
) -> Iterator[_Given]:
    """What a file and those it includes say, in our words."""
    entries = read_with_includes(path)
    if translate is not None:
        new = Entry(None, None, str(path), max((entry.order for entry in entries.values()), default=0))
        said = translate({name: entry.value for name, entry in entries.items()}, str(path))
        entries = {name: dataclasses.replace(entries.get(name, new), value=value) for name, value in said.items()}
    for name, entry in entries.items():
        _known(name if entry.key is None else entry.key, entry.value, names, entry.place, explain)
        yield _Given(name, entry.value, entry.place, entry.order)


def _as_fields(keys: Mapping[str, Any]) -> dict[str, Field]:
    return {name: Field(name, annotation, None, "", "", "") for name, annotation in keys.items()}


def _translated(
    given: list[_Given], names: Mapping[str, Field], translate: Translate | None, place: str
) -> list[_Given]:
    """Flags, with those that only config files know in our words; a flag of the same name wins over a translation."""
    foreign = {each.name: each.value for each in given if each.name not in names}
    if not foreign or translate is None:
        return given
    own = [each for each in given if each.name in names]
    said = _named(translate(foreign, place), names, place)
    return [*(each for each in said if each.name not in {every.name for every in own}), *own]


def _named(
    given: Mapping[Any, Any], names: Mapping[str, Field], place: str, explain: Explain | None = None
) -> list[_Given]:
    """What a mapping says; unknown names are refused."""
    named: dict[str, _Given] = {}
    for key, value in given.items():
        name = _known(key, value, names, place, explain)
        if name in named:
            raise ConfigError(f"{name} is given twice in {place}, with a hyphen and with an underscore")
        named[name] = _Given(name, value, place)
    return list(named.values())


def _known(key: Any, value: Any, names: Mapping[str, Field], place: str, explain: Explain | None) -> str:
    name = str(key).replace("-", "_")
    if name not in names:
        hint = (explain and explain(name, names, "")) or did_you_mean(name, list(names), similarity=SIMILAR)
        if isinstance(value, Mapping):
            hint = "; fields are not nested, write them at the top level"
        raise ConfigError(f"unknown field {key if str(key).isprintable() else shown(key)} in {place}{hint}")
    return name


def _checked(field: Field, value: Any, origin: str) -> Any:
    try:
        return coerce(field.annotation, value)
    except Mismatch as error:
        raise ConfigError(f"{field.name}: {error} (from {origin}){error.hint}") from None
    except RecursionError:
        raise ConfigError(f"{field.name}: the value holds itself (from {origin})") from None
