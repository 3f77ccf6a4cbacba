"""The base class of config dataclasses that users create in Python, and functions that check single fields."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, fields
from inspect import Signature, signature
from pathlib import Path
from typing import Any, Self

from unisono.config.values import did_you_mean
from unisono.errors import ConfigError


class _InitSignature:
    """Makes `help` and notebooks show the signature of __init__ instead of the generic __new__."""

    def __get__(self, instance: object, owner: type[Any]) -> Signature:
        full = signature(owner.__init__)
        return full.replace(parameters=list(full.parameters.values())[1:])


class ConfigClass:
    """Base class of config dataclasses in the Python API. Reads dictionaries and files, and checks the field names."""

    __signature__ = _InitSignature()

    def __new__(cls, *arguments: Any, **values: Any) -> Self:
        # Check before the dataclass's own __init__, whose TypeError suggests no valid name.
        cls._check_names(values)
        return super().__new__(cls)

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields as a dictionary, in types that JSON and YAML support."""
        return asdict(self)  # type: ignore[call-overload,no-any-return]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Creates a config from a mapping of field names to values."""
        cls._check_names(values)
        return cls(**values)

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """Creates a config from a YAML or JSON file."""
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
        field_names = [field.name for field in fields(cls)]  # type: ignore[arg-type]
        for name in names:
            if name not in field_names:
                raise ConfigError(f"unknown field {name} of {cls.__name__}{did_you_mean(str(name), field_names)}")


def check_one_of(name: str, value: Any, choices: Collection[str]) -> None:
    """Raises ConfigError if the value is not one of the choices."""
    if value not in choices:
        hint = did_you_mean(str(value), list(choices))
        raise ConfigError(f"{name}: expected {', '.join(choices)}; got {value!r}{hint}")


def check_whole(name: str, value: Any, *, at_least: int) -> None:
    """Raises ConfigError if the value is neither None nor a whole number of at least `at_least`."""
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < at_least):
        raise ConfigError(f"{name}: expected a whole number of at least {at_least}, got {value!r}")
