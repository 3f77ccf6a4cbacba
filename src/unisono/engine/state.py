"""The part of the training state that is not tensors; every checkpoint stores it as JSON."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from unisono.checkpoint.manifest import CheckpointError

# Fields that a run needs to resume where it stopped. Fields that later versions added may be missing.
_ESSENTIAL = ("global_batch", "step", "samples", "skipped", "skipped_in_a_row", "expected_count", "num_samples")
_COUNTS = (*_ESSENTIAL, "bad_samples", "micro_batch", "memory_failures", "memory_step")
_LIMITS = {"global_batch": 2**32, "micro_batch": 2**32}  # planning a larger global batch would take minutes
_OF_GROUP = ("steps", "skipped", "skipped_in_a_row", "expected_count")
_MEMBERS = {"loss_scale": {"value", "good_steps"}, "best": {"metric", "value", "step"}}


@dataclass
class GroupState:
    """The state of one of several groups of weights that are trained in turn."""

    steps: int  # consecutive steps per turn; a resumed run must use the same number
    skipped: int = 0  # like TrainState.skipped, for this group's steps
    skipped_in_a_row: int = 0
    expected_count: float = 0.0
    loss_scale: dict[str, float] | None = None
    latest: dict[str, float] = field(default_factory=dict)  # finite loss and metrics of its last step


@dataclass
class TrainState:
    """The state of a run; everything else follows from this state, the config and the tensors."""

    global_batch: int
    step: int = 0  # optimizer steps taken, including skipped ones
    samples: int = 0  # samples consumed: the position in the sample stream
    skipped: int = 0  # steps skipped for a non-finite loss or gradient
    skipped_in_a_row: int = 0
    expected_count: float = 0.0  # power of two near the last step's count over all ranks; 0 before the first
    num_samples: int = 0  # size of the dataset; the sample order depends on it
    blocks: int = 0  # checksum of the dataset's blocks, on which the order with shuffle_window depends; 0: no blocks
    bad_samples: int = 0  # samples skipped because they could not be read
    micro_batch: int = 0  # micro-batch per device, if running out of memory changed it; 0: as in the settings
    memory_failures: int = 0  # number of times that micro_batch was lowered
    memory_step: int = 0  # step at which micro_batch last changed
    owes_evaluation: bool = False  # a signal interrupted the evaluation of this step
    loss_scale: dict[str, float] | None = None
    best: dict[str, Any] | None = None
    last_metrics: dict[str, Any] = field(default_factory=dict)
    groups: dict[str, GroupState] = field(default_factory=dict)  # by name; empty if the recipe has no groups

    def to_json(self) -> dict[str, Any]:
        """Returns the state as a JSON value."""
        data = asdict(self)
        for name in ("groups", "blocks"):  # omitted if empty, as in checkpoints of earlier versions
            if not data[name]:
                del data[name]
        return data

    @classmethod
    def from_json(cls, data: Any) -> TrainState:
        """Reads a state from an untrusted JSON value; raises CheckpointError if it is not a state of this version."""
        if not isinstance(data, dict):
            raise CheckpointError("the state is not an object")
        unknown = sorted(data.keys() - {f.name for f in fields(cls)})
        if unknown:
            raise CheckpointError(f"the state has {unknown[0]!r}, which this version of unisono does not know")
        for name in _ESSENTIAL:
            if name not in data:
                raise CheckpointError(f"the state lacks {name!r}")
        hints = get_type_hints(cls)
        if not isinstance(data.get("groups", {}), dict):
            raise CheckpointError(f"the state's 'groups' cannot be {_short(data['groups'])}")
        for name, value in data.items():
            if name == "groups":
                continue
            lacks = isinstance(value, dict) and not _MEMBERS.get(name, set()) <= value.keys()
            if lacks or not _is_a(value, hints[name]):
                raise CheckpointError(f"the state's {name!r} cannot be {_short(value)}")
        groups = {name: _group_from_json(name, value) for name, value in data.get("groups", {}).items()}
        state = cls(**{**data, "groups": groups})
        for name in _COUNTS:
            if not (name == "global_batch") <= getattr(state, name) <= _LIMITS.get(name, 2**62):
                raise CheckpointError(f"the state's {name!r} cannot be {getattr(state, name)}")
        if state.loss_scale is not None and state.loss_scale["value"] <= 0:
            raise CheckpointError(f"the state's loss scale cannot be {state.loss_scale['value']}")
        if state.best is not None and not _is_best(state.best):
            raise CheckpointError("the state's 'best' is not the record of a best checkpoint")
        return state


def _group_from_json(name: str, data: Any) -> GroupState:
    hints = get_type_hints(GroupState)
    if not isinstance(data, dict) or data.keys() != hints.keys():
        raise CheckpointError(f"the state of the group {_short(name)} does not match this version of unisono")
    for member, value in data.items():
        lacks = isinstance(value, dict) and not _MEMBERS.get(member, set()) <= value.keys()
        if lacks or not _is_a(value, hints[member]) or (member in _OF_GROUP and value < (member == "steps")):
            raise CheckpointError(f"{member!r} of the group {_short(name)} cannot be {_short(value)}")
    state = GroupState(**data)
    if state.loss_scale is not None and state.loss_scale["value"] <= 0:
        raise CheckpointError(f"the loss scale of the group {_short(name)} cannot be {state.loss_scale['value']}")
    return state


def _is_best(best: dict[str, Any]) -> bool:
    step_is_fine = type(best["step"]) is int and best["step"] >= 0
    return step_is_fine and isinstance(best["metric"], str) and type(best["value"]) in (int, float)


def _is_a(value: Any, hint: Any) -> bool:
    """Whether a JSON value has the type of a field. `Any` accepts only scalars, which rules out deep nesting."""
    origin, inside = get_origin(hint), get_args(hint)
    if hint is Any:
        return not isinstance(value, dict | list)
    if origin in (Union, UnionType):
        return any(_is_a(value, one) for one in inside)
    if origin is dict:
        return isinstance(value, dict) and all(_is_a(item, inside[1]) for item in value.values())
    if origin is list:
        return isinstance(value, list) and all(_is_a(item, inside[0]) for item in value)
    if hint is int:
        return type(value) is int and abs(value) < 2**63
    if hint is float:
        return type(value) in (int, float) and abs(value) < math.inf
    return isinstance(value, hint)


def _short(value: Any) -> str:
    if isinstance(value, dict | list):
        return f"this {type(value).__name__}"
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}…"
