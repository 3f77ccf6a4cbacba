"""Traverses batches: tensors in nested dicts, lists, tuples and dataclasses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

from torch import Tensor


def mapped(data: Any, function: Callable[[Any], Any]) -> Any:
    """Returns a copy of nested containers with each leaf replaced by function(leaf).

    A leaf is a tensor, or anything else that is not a container.
    """
    if isinstance(data, Tensor):
        return function(data)
    if isinstance(data, dict):
        return {key: mapped(value, function) for key, value in data.items()}
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(mapped(value, function) for value in data))
    if isinstance(data, list | tuple):
        return type(data)(mapped(value, function) for value in data)
    if is_dataclass(data) and not isinstance(data, type):
        return replace(data, **{f.name: mapped(getattr(data, f.name), function) for f in fields(data)})
    return function(data)


def leaves(data: Any) -> Iterator[Any]:
    """Yields the leaves in the order in which `mapped` visits them."""
    if isinstance(data, Tensor):
        yield data
    elif isinstance(data, dict):
        for value in data.values():
            yield from leaves(value)
    elif isinstance(data, list | tuple):
        for value in data:
            yield from leaves(value)
    elif is_dataclass(data) and not isinstance(data, type):
        for f in fields(data):
            yield from leaves(getattr(data, f.name))
    else:
        yield data
