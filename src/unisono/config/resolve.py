"""From all the places a setting can come from to one value each, with its source."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from unisono.config.fields import Field, fields_by_name, groups_in
from unisono.config.file import read_file
from unisono.config.flags import parse_flags
from unisono.config.values import Mismatch, coerce, describe, did_you_mean, plain, shown
from unisono.errors import ConfigError, RecipeError

T = TypeVar("T")
_NOTHING: Mapping[str, Any] = MappingProxyType({})


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

    def with_values(self, source: str, **changes: Any) -> Resolved:
        """A copy in which these fields have other values, from this source."""
        named = _named(changes, self.fields, source)
        return self._layer(source, ((name, value, source) for name, value in named.items()))

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
        for name, value in _named(values, resolved.fields, "the stored configuration").items():
            resolved = resolved._layer(str(sources.get(name, "default")), [(name, value, "the stored configuration")])
        return resolved._complete()

    def _layer(self, source: str, given: Iterable[tuple[str, Any, str]]) -> Resolved:
        values, sources = dict(self.values), dict(self.sources)
        for name, value, origin in given:
            values[name], sources[name] = _checked(self.fields[name], value, origin), source
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
    file: Path | None = None,
    flags: Sequence[str] = (),
    overrides: Mapping[str, Any] | None = None,
) -> Resolved:
    """One value for every field of the dataclasses: defaults < recipe_defaults < file < flags < overrides.

    `overrides` are what flags are on the command line, for callers in Python.
    """
    resolved = with_recipe_defaults(classes, recipe_defaults)
    fields = resolved.fields
    if file is not None:
        given = _named(read_file(file), fields, str(file))
        before, resolved = resolved, resolved._layer("file", ((name, given[name], str(file)) for name in given))
        # A file that spells out a default (a printed config has them all) does not thereby insist on it.
        same = {name: before.sources[name] for name in given if before.says(name, resolved.values[name])}
        resolved = dataclasses.replace(resolved, sources=resolved.sources | same)
    resolved = resolved._layer("flag", ((name, value, f"--{name}") for name, value in parse_flags(flags, fields)))
    called = _named(overrides or _NOTHING, fields, "the given settings")
    resolved = resolved._layer("flag", ((name, value, "the given settings") for name, value in called.items()))
    return resolved._complete()


def with_recipe_defaults(classes: Sequence[type], recipe_defaults: Mapping[str, Any]) -> Resolved:
    """Before the user has said anything; fields that must be given are still missing."""
    origin, resolved = "the recipe's defaults", _defaults(classes)
    try:
        given = _named(recipe_defaults, resolved.fields, origin)
        return resolved._layer("recipe", ((name, value, origin) for name, value in given.items()))
    except ConfigError as error:
        raise RecipeError(str(error)) from None


def _defaults(classes: Sequence[type]) -> Resolved:
    fields = fields_by_name(classes)
    values = {name: field.default for name, field in fields.items() if not field.required}
    return Resolved(values, dict.fromkeys(values, "default"), fields)


def _named(given: Mapping[Any, Any], fields: Mapping[str, Field], place: str) -> dict[str, Any]:
    """The same mapping by field name; unknown names are refused."""
    named: dict[str, Any] = {}
    for key, value in given.items():
        name = str(key).replace("-", "_")
        if name not in fields:
            hint = did_you_mean(name, list(fields))
            if isinstance(value, Mapping):
                hint = "; fields are not nested, write them at the top level"
            raise ConfigError(f"unknown field {key if str(key).isprintable() else shown(key)} in {place}{hint}")
        if name in named:
            raise ConfigError(f"{name} is given twice in {place}, with a hyphen and with an underscore")
        named[name] = value
    return named


def _checked(field: Field, value: Any, origin: str) -> Any:
    try:
        return coerce(field.annotation, value)
    except Mismatch as error:
        raise ConfigError(f"{field.name}: {error} (from {origin}){error.hint}") from None
    except RecursionError:
        raise ConfigError(f"{field.name}: the value holds itself (from {origin})") from None
