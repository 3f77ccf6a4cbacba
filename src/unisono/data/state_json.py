"""Turns the state of a stream of samples into JSON and back.

The state_dict of a dataset is a Python value of any shape: numbers, tuples of random generators, tensors, bytes. A
checkpoint must not contain pickles, so these values become JSON objects with one key that starts with "$".
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from unisono.errors import RecipeError

_DEEPEST = 60  # levels; JSON files of unisono may have 100
_PLAIN = (str, bool, int, type(None))
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32)
} | {str(dtype).removeprefix("torch."): dtype for dtype in (torch.int64, torch.bool, torch.float32, torch.float64)}


def to_json(value: Any, where: str = "state", depth: int = 0) -> Any:
    """Returns a JSON value from which `from_json` creates an equal value; raises RecipeError for other types."""
    if depth > _DEEPEST:
        raise RecipeError(f"state_dict() is nested too deeply at {where[:80]}; return a flatter value")
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, np.generic):
        return to_json(value.item(), where, depth)
    if isinstance(value, bytes | bytearray):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return {"$array": [value.dtype.str, list(value.shape), base64.b64encode(value.tobytes()).decode()]}
    if isinstance(value, torch.Tensor) and (dtype := str(value.dtype).removeprefix("torch.")) in _DTYPES:
        content = base64.b64encode(value.detach().cpu().contiguous().numpy().tobytes()).decode()
        return {"$tensor": [dtype, list(value.shape), content]}
    if isinstance(value, list):
        return [to_json(each, f"{where}[{number}]", depth + 1) for number, each in enumerate(value)]
    if type(value) is tuple:
        return {"$tuple": [to_json(each, f"{where}[{number}]", depth + 1) for number, each in enumerate(value)]}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: to_json(each, f"{where}.{key}", depth + 1) for key, each in value.items()}
        pairs = [[to_json(key, where, depth + 1), to_json(each, where, depth + 1)] for key, each in value.items()]
        return {"$dict": pairs}
    raise RecipeError(
        f"state_dict() of the stream has a {type(value).__name__} at {where[:80]}; return numbers, strings, bytes, "
        "tensors, and lists, tuples and dicts of them"
    )


def from_json(value: Any) -> Any:
    """Returns the value that `to_json` converted; raises ValueError if `to_json` did not write the JSON value."""
    if isinstance(value, list):
        return [from_json(each) for each in value]
    if not isinstance(value, dict):
        return value
    kind = next((key for key in value if key.startswith("$")), None)
    if kind is None:
        return {key: from_json(each) for key, each in value.items()}
    if len(value) != 1:
        raise ValueError("it has an object with unknown keys")
    return _decoded(kind, value[kind])


def _decoded(kind: str, content: Any) -> Any:
    try:
        if kind == "$float":
            return float(content)
        if kind == "$bytes":
            return base64.b64decode(content, validate=True)
        if kind == "$tuple":
            return tuple(from_json(content))
        if kind == "$dict":
            return {from_json(key): from_json(each) for key, each in content}
        if kind in ("$array", "$tensor"):
            name, shape, data = content
            dtype = np.dtype(name)
            if dtype.kind not in "biuf":
                raise ValueError("it has an array of objects")
            array = np.frombuffer(base64.b64decode(data, validate=True), dtype).reshape(shape).copy()
            return array if kind == "$array" else torch.from_numpy(array)
    except (TypeError, ValueError, binascii.Error) as error:
        raise ValueError(f"it has a damaged {kind[1:]} ({error})") from None
    raise ValueError(f"it has an unknown {kind[:20]}")
