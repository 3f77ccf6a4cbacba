"""Config classes that people fill in Python: from and to plain values, and checks of single fields."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, fields
from inspect import Signature, signature
from pathlib import Path
from typing import Any, Self

from unisono.config.values import did_you_mean
from unisono.errors import ConfigError


class _OfInit:
    """What `help` and notebooks show of a class: the arguments of __init__, not those of a general __new__."""

    def __get__(self, instance: object, owner: type[Any]) -> Signature:
        made = signature(owner.__init__)
        return made.replace(parameters=list(made.parameters.values())[1:])


class Plain:
    """What a dataclass of settings can do besides."""

    __signature__ = _OfInit()

    def __new__(cls, *given: Any, **values: Any) -> Self:
        # Before the dataclass's own __init__, whose TypeError names no field that there is.
        cls._check_names(values)
        return super().__new__(cls)

    def to_dict(self) -> dict[str, Any]:
        """All fields, in types that JSON and YAML know."""
        return asdict(self)  # type: ignore[call-overload,no-any-return]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """From fields by name."""
        cls._check_names(values)
        return cls(**values)

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """From a YAML or JSON file of fields."""
        import yaml

        try:
            values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise ConfigError(f"{path} cannot be read as a config file: {' '.join(str(error).split())}") from None
        if not isinstance(values, dict):
            raise ConfigError(f"{path} is not a config file: expected fields such as batch_size: 32")
        return cls.from_dict(values)

    @classmethod
    def _check_names(cls, names: Iterable[object]) -> None:
        known = [field.name for field in fields(cls)]  # type: ignore[arg-type]
        for name in names:
            if name not in known:
                raise ConfigError(f"unknown field {name} of {cls.__name__}{did_you_mean(str(name), known)}")


def check_one_of(name: str, value: Any, known: Collection[str]) -> None:
    """Refuses a value that is none of those."""
    if value not in known:
        raise ConfigError(f"{name}: expected {', '.join(known)}; got {value!r}{did_you_mean(str(value), list(known))}")


def check_whole(name: str, value: Any, *, at_least: int) -> None:
    """Refuses what is no whole number of that size; None is nothing said."""
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < at_least):
        raise ConfigError(f"{name}: expected a whole number of at least {at_least}, got {value!r}")
