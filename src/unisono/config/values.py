"""Converts a value to the type of its field.

YAML guesses the type of an unquoted scalar (`no` is False, `1e-4` is text, `12:30:45` is a number, `1.10` is 1.1), and
a shell passes only text. Here the field's type decides instead: it parses unquoted scalars and command-line arguments,
which arrive as `RawText`. Values that already have a type are only checked. `coerce` inverts `jsonable`.
"""

from __future__ import annotations

import math
import operator
import os
import re
import types
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
_NONE = ("none", "null")
_SIMPLE = {int: "a whole number", float: "a number", str: "text", bool: "true or false", Path: "a path"}
# The types of a union try to parse a text in this order, the strictest first; `str` accepts everything and comes last.
_STRICTNESS: dict[Any, int] = {Literal: 0, Enum: 0, types.NoneType: 1, int: 3, float: 4, bool: 5, Path: 7, str: 8}


class RawText(str):
    """Text that the field's type parses: a command-line argument or an unquoted scalar of a config file."""


class Mismatch(ValueError):
    """A value that does not fit a type; the message is "expected ..., got ..."."""

    def __init__(self, annotation: Any, value: Any) -> None:
        super().__init__(f"expected {describe(annotation)}, got {shown(value)}")
        self.hint = did_you_mean(str(value), choices_of(annotation))


def coerce(annotation: Any, value: Any) -> Any:
    """Converts a value to the annotated type; raises Mismatch if it does not fit."""
    kind = _kind(annotation)
    if kind is Union:
        return _coerce_union(annotation, value)
    if kind is Any:
        return _coerce_any(value)
    if kind is Literal:
        return _coerce_literal(annotation, value)
    if kind is Enum:
        return _coerce_enum(annotation, value)
    if kind in (list, tuple):
        return _coerce_sequence(annotation, value)
    if kind is dict:
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise Mismatch(annotation, value)
        item = (get_args(annotation) or (str, Any))[1]
        return {str(key): coerce(item, entry) for key, entry in value.items()}
    try:
        return _READERS[kind](value)
    except (ValueError, TypeError, ArithmeticError):
        raise Mismatch(annotation, value) from None


def jsonable(value: Any) -> Any:
    """Converts a value to types that JSON and YAML share; infinity and NaN, which strict JSON lacks, become text."""
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if isinstance(value, dict):
        return {key: jsonable(item) for key, item in value.items()}
    return value


def supported(annotation: Any) -> bool:
    """Whether a field may have this type."""
    kind = _kind(annotation)
    args = [arg for arg in get_args(annotation) if arg is not Ellipsis]
    if kind is dict:
        return not args or (args[0] is str and supported(args[1]))
    if kind in (Union, list, tuple):
        return all(supported(arg) for arg in args)
    return kind in (Any, Literal, Enum, types.NoneType) or kind in _READERS


def members(annotation: Any) -> tuple[Any, ...]:
    """Returns the types that a value may have: the members of a union, or the type itself."""
    return get_args(annotation) if _kind(annotation) is Union else (annotation,)


def takes(annotation: Any, *kinds: Any) -> bool:
    """Whether a field with this annotation accepts values of one of these types (bool, list, ...)."""
    return any(_kind(member) in kinds for member in members(annotation))


def text_is_ambiguous(annotation: Any) -> bool:
    """Whether quotes change the meaning of a scalar, as in `none` for `str | None`."""
    kind = _kind(annotation)
    if kind in (list, tuple, dict):
        return not get_args(annotation) or any(text_is_ambiguous(arg) for arg in get_args(annotation))
    return kind in (Union, Any)


def choices_of(annotation: Any) -> list[str]:
    """Returns the texts that a Literal or Enum accepts; empty for other types."""
    choices: list[str] = []
    for member in members(annotation):
        if _kind(member) is Literal:
            choices += [_spelled(choice) for choice in get_args(member)]
        elif _kind(member) is Enum:
            choices += [choice.name for choice in member]
    return choices


def describe(annotation: Any) -> str:
    """Describes the type, as in "expected a whole number or none"."""
    kind, args = _kind(annotation), get_args(annotation)
    if kind is Union:
        return " or ".join(describe(member) for member in sorted(args, key=lambda member: member is types.NoneType))
    if kind in (Literal, Enum):
        choices = choices_of(annotation)
        return f"one of {', '.join(choices)}" if len(choices) > 1 else choices[0]
    if kind is tuple and args and args[-1] is not Ellipsis:
        return f"{len(args)} values ({', '.join(describe(arg) for arg in args)})"
    if kind in (list, tuple):
        return f"a list, each item {describe(args[0])}" if args else "a list"
    if kind is dict:
        return "a mapping"
    if kind is types.NoneType:
        return "none"
    return _SIMPLE.get(kind, "finite numbers, text, true, false, none, or lists and mappings of these")


def shown(value: Any) -> str:
    """Formats a value for an error message, on one line of at most 80 characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else text[:77] + "..."


def did_you_mean(name: str, names: list[str], prefix: str = "", similarity: float = 0.6) -> str:
    """Returns "; did you mean X?" with the most similar of the names, or "" if none is similar."""
    from difflib import get_close_matches

    nearest = get_close_matches(name, names, n=1, cutoff=similarity)
    return f"; did you mean {prefix}{nearest[0]}?" if nearest else ""


def _kind(annotation: Any) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return Enum
    origin = get_origin(annotation) or annotation
    return Union if origin is types.UnionType else types.NoneType if origin is None else origin


def _read_int(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if not isinstance(value, str):
        return operator.index(value)
    try:
        return int(value)
    except ValueError:
        from decimal import Decimal

        number = Decimal(value)  # a float would be inexact, and 1e23 must be exactly 10**23
        if number != number.to_integral_value() or number.adjusted() > 30:
            raise
        return int(number)


def _read_float(value: Any) -> float:
    if isinstance(value, bool) or not (isinstance(value, str) or hasattr(value, "__float__")):
        raise TypeError
    if isinstance(value, str) and re.fullmatch(r"[-+]?\.(inf|nan)", value.strip().lower()):
        value = value.replace(".", "")  # YAML's spelling
    number = float(value)
    if isinstance(value, str) and math.isinf(number) and "inf" not in value.lower():
        raise OverflowError  # 1e999 is a typo; infinity is written inf
    return number


def _read_bool(value: Any) -> bool:
    word = value.strip().lower() if isinstance(value, str) else str(value).lower()
    if isinstance(value, str | int) and word in _TRUE + _FALSE:
        return word in _TRUE
    raise TypeError


def _read_str(value: Any) -> str:
    if isinstance(value, str):
        return str.__str__(value)  # str() of an Enum member with a text value would return its name
    # In Python users write `gpus=2` and `output_dir=Path(...)`.
    if isinstance(value, os.PathLike) or (isinstance(value, int) and not isinstance(value, bool)):
        return str(value)
    raise TypeError


def _read_path(value: Any) -> Path:
    if isinstance(value, str | os.PathLike):
        return Path(value)
    raise TypeError


_READERS: dict[Any, Any] = {int: _read_int, float: _read_float, bool: _read_bool, str: _read_str, Path: _read_path}


def _coerce_union(annotation: Any, value: Any) -> Any:
    if value is None and types.NoneType in members(annotation):
        return None
    is_text = isinstance(value, str) and not isinstance(value, RawText)

    def strictness(member: Any) -> int:
        # Quoted text, and text from JSON or Python, stays text: '5' is not a number for `int | str`.
        return 2 if is_text and member in (str, Path) else _STRICTNESS.get(_kind(member), 6)

    options = [member for member in members(annotation) if not (member is Path and str in members(annotation))]
    for member in sorted(options, key=strictness):
        if member is types.NoneType:
            stays_text = is_text and (str in options or Path in options)
            if isinstance(value, str) and value.strip().lower() in _NONE and not stays_text:
                return None
            continue
        try:
            return coerce(member, value)
        except Mismatch:
            continue
    raise Mismatch(annotation, value)


def _coerce_any(value: Any) -> Any:
    if isinstance(value, RawText):
        if value.lower() in ("true", "false"):
            return value.lower() == "true"
        if re.fullmatch(r"[-+]?\d+", value):
            return int(value)
        if re.fullmatch(r"[-+]?(\.\d+|\d+(\.\d*)?)([eE][-+]?\d+)?|[-+]?\.(inf|nan)", value.lower()):
            return _coerce_any(_read_float(value))
        return str(value)
    if value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, list | tuple):
        return [_coerce_any(item) for item in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {str(key): _coerce_any(item) for key, item in value.items()}
    raise Mismatch(Any, value)


def _coerce_literal(annotation: Any, value: Any) -> Any:
    choices = get_args(annotation)
    for choice in choices:
        if choice == value and (type(choice) is type(value) or isinstance(choice, str)):
            return choice
    if isinstance(value, bool):  # `mixed_precision: no` is False to every other YAML reader
        spellings = _TRUE if value else _FALSE
        for choice in choices:
            if choice in spellings:
                return choice
    for choice in choices:
        if isinstance(value, str) and not isinstance(choice, str) and _spelled(choice) == value:
            return choice
    raise Mismatch(annotation, value)


def _coerce_enum(annotation: Any, value: Any) -> Any:
    for member in annotation:
        if value is member or (isinstance(value, str) and value == member.name):
            return member
    for member in annotation:
        if value == member.value or (isinstance(value, str) and value == str(member.value)):
            return member
    raise Mismatch(annotation, value)


def _coerce_sequence(annotation: Any, value: Any) -> Any:
    if isinstance(value, str):
        value = [RawText(part.strip()) for part in value.split(",") if part.strip()]
    if not isinstance(value, list | tuple):
        raise Mismatch(annotation, value)
    args, kind = get_args(annotation) or (Any,), _kind(annotation)
    if kind is list or args[-1] is Ellipsis or not get_args(annotation):
        return kind(coerce(args[0], item) for item in value)
    if len(args) != len(value):
        raise Mismatch(annotation, value)
    return tuple(coerce(arg, item) for arg, item in zip(args, value, strict=True))


def _spelled(choice: Any) -> str:
    if isinstance(choice, Enum):
        return choice.name
    return str(choice).lower() if choice is None or isinstance(choice, bool) else str(choice)
