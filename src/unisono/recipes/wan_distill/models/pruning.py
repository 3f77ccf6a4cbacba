"""Structured pruning: chooses which of the teacher's weights a smaller student starts from.

A student with fewer layers takes some of the teacher's layers. A narrower student takes some of the channels, heads and
neurons in each layer. It takes whole units, because norms, heads and nonlinearities act on units and not on mixtures of
units. All layers read and write one residual stream, so they take the same channels; the text has its own stream.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from unisono.errors import ConfigError
from unisono.recipes.wan.models.weights import Weights
from unisono.recipes.wan_distill.models.student import complete_config

EMBEDDER = "condition_embedder"
_BLOCK = re.compile(r"blocks\.(\d+)\.(.+)")
_Units = tuple[str | None, ...]
# The units of each layer's rows and columns; None: a dimension that is not pruned.
_OUTSIDE: dict[str, _Units] = {
    "patch_embedding": ("channels", None),
    f"{EMBEDDER}.time_embedder.linear_1": ("time", None),
    f"{EMBEDDER}.time_embedder.linear_2": ("channels", "time"),  # the output is added to the scale of the last norm
    f"{EMBEDDER}.time_proj": ("modulation", "channels"),
    f"{EMBEDDER}.text_embedder.linear_1": ("words", None),
    f"{EMBEDDER}.text_embedder.linear_2": ("text", "words"),
    "proj_out": (None, "channels"),
}
_INSIDE: dict[str, _Units] = {
    **{f"{kind}.{norm}": (kind,) for kind in ("attn1", "attn2") for norm in ("norm_q", "norm_k")},
    **{f"attn1.{to}": ("attn1", "channels") for to in ("to_q", "to_k", "to_v")},
    **{"attn2.to_q": ("attn2", "channels"), "attn2.to_k": ("attn2", "text"), "attn2.to_v": ("attn2", "text")},
    **{f"{kind}.to_out.0": ("channels", kind) for kind in ("attn1", "attn2")},
    "norm2": ("channels",),
    **{"ffn.net.0.proj": ("ffn", "channels"), "ffn.net.2": ("channels", "ffn")},
}
TABLE = "scale_shift_table"
MODULATIONS = 6  # per block: shift, scale and gate of attention, then those of the feed-forward layer
SCALES = (1, 4)  # indices of the scales among the modulations
_MAY_DIFFER = (
    *("num_layers", "num_attention_heads", "attention_head_dim", "ffn_dim", "rope_max_seq_len", "eps", "qk_norm"),
)


@dataclass(frozen=True)
class PruningPlan:
    """Which of the teacher's weights a student starts from: lists and numbers, stored as JSON in the run folder."""

    layers: list[int]
    """For each of the student's layers, the index of the teacher's layer that it is taken from."""
    kept: dict[str, list[int]]
    """Indices of the units that the student takes, by kind. A kind is missing if the student takes all of its units.

    The kinds are channels, text, words and time (the last two are the hidden layers of the embeddings). Each of the
    teacher's layers has further kinds: for example, layer 5 has `5.ffn` (neurons), `5.attn1` and `5.attn2` (positions
    in heads).
    """
    gain: float = 1.0
    """Factor on the output of each norm of the residual stream, to compensate for the average over fewer channels."""
    gains: dict[str, float] = field(default_factory=dict)
    """Compensating factors for the norms of queries and keys, by the teacher's weight names."""
    factor: float = 1.0
    """Factor on all weights that the student takes (`projection_factor` in student_config)."""
    random_attention: int = 0
    """The student's width if its heads are not as wide as the teacher's; attention then starts from random weights."""
    seed: int = 0
    """Seed of the random weights."""
    summary: str = ""
    """A line for the user that describes the plan."""


def plan(
    weights: Weights,
    teacher: Mapping[str, Any],
    student: Mapping[str, Any],
    layers: str = "even",
    importance: Sequence[float] | None = None,
    factor: float = 1.0,
    seed: int = 0,
) -> PruningPlan:
    """Chooses the teacher's weights that a student takes; reads the weights, one by one, if the student is narrower.

    `layers` is even, importance (with the measured importance of each of the teacher's layers), or the numbers of the
    teacher's layers, comma-separated.
    """
    teacher, student = complete_config(teacher), complete_config(student)
    _check(teacher, student)
    chosen = _layers(layers, teacher["num_layers"], student["num_layers"], importance)
    sizes = _sizes(teacher, student)
    heads_alike = teacher["attention_head_dim"] == student["attention_head_dim"]
    narrower = {unit for unit, (teacher_size, student_size) in sizes.items() if student_size < teacher_size}
    if not heads_alike:
        narrower -= {"attn1", "attn2"}
    into, out, normed = _energies(weights, chosen, narrower)
    kept: dict[str, list[int]] = {}
    for unit in sorted(into):
        kind = unit.rpartition(".")[2]
        group = teacher["attention_head_dim"] if kind.startswith("attn") else 1
        # A unit's importance is the energy of its incoming weights times the energy of its outgoing weights.
        kept[unit] = _strongest(into[unit] * out[unit], sizes[kind][1], group)
    return PruningPlan(
        layers=chosen,
        kept=kept,
        gain=_gain(into["channels"], kept["channels"]) if "channels" in kept else 1.0,
        gains={name: _gain(energy, kept[unit]) for name, (unit, energy) in normed.items()},
        factor=factor,
        random_attention=0 if heads_alike else _width(student),
        seed=seed,
        summary=_summary(chosen, sizes, teacher, student),
    )


_Energy = dict[str, Tensor]


def is_valid(plan: PruningPlan, teacher: Mapping[str, Any], student: Mapping[str, Any]) -> bool:
    """Whether a plan that was read from a file fits these models."""
    lists = [plan.layers, *plan.kept.values()]
    numbers = [*plan.gains.values(), plan.gain, plan.factor]
    return (
        len(plan.layers) == student["num_layers"]
        and all(type(index) is int and index >= 0 for indices in lists for index in indices)
        and all(layer < teacher["num_layers"] for layer in plan.layers)
        and all(isinstance(number, int | float) and math.isfinite(number) for number in numbers)
        and plan.random_attention in (0, _width(student))
        and isinstance(plan.summary, str)
    )


def check_plan(teacher: Mapping[str, Any], student: Mapping[str, Any], layers: str) -> None:
    """Raises ConfigError if plan() would reject the student; runs before anything is measured or read."""
    _check(teacher, student)
    _layers(layers, teacher["num_layers"], student["num_layers"], [0.0] * teacher["num_layers"])


def _energies(
    weights: Weights, layers: Sequence[int], narrower: set[str]
) -> tuple[_Energy, _Energy, dict[str, tuple[str, Tensor]]]:
    """Returns two sums of squared weights per unit: of the weights that write into it, and of those that read from it.

    Also returns, for each norm of queries or keys, the first of these sums and its key.
    """
    into: _Energy = {}
    out: _Energy = {}
    normed: dict[str, tuple[str, Tensor]] = {}
    for name in weights.names():
        layer, units = units_of(name)
        if len(units) != 2 or not narrower.intersection(units) or (layer is not None and layer not in layers):
            continue
        squares = weights.tensor(name, torch.float32).flatten(1).square()
        for side, unit, sums in zip((1, 0), units, (into, out), strict=True):
            # Skips the time embedding's output, which has the width of the residual stream but is not part of it.
            if unit not in narrower or (unit == "channels" and name.startswith(EMBEDDER)):
                continue
            energy, key = squares.sum(side, dtype=torch.float64), unit_key(layer, unit)
            sums[key] = sums.get(key, 0) + energy
            if side == 1 and name.endswith((".to_q.weight", ".to_k.weight")):
                normed[name.replace(".to_", ".norm_")] = key, energy
    return into, out, normed


def _gain(energy: Tensor, kept: Sequence[int]) -> float:
    """Returns the factor on a norm's output that compensates for computing the norm over the kept units only.

    Sums over fewer units are deliberately not compensated. Two factors were tried: √(all / kept) preserves the size of
    such sums, and all / kept preserves their mean. Both gave students that were further from a trained teacher than
    without a factor: errors of 0.92 and 1.63 instead of 0.75 at the start, and of 0.20 and 0.25 instead of 0.17 after
    100 steps (0.39 with random weights).
    """
    root = float((energy[kept].mean() / energy.mean()).sqrt()) if energy.any() else 1.0
    return root or 1.0


def _strongest(strength: Tensor, count: int, group: int) -> list[int]:
    whole = strength.view(-1, group).sum(1)
    order = torch.sort(whole, descending=True, stable=True).indices[: count // group]
    return [int(first) * group + offset for first in sorted(order.tolist()) for offset in range(group)]


def unit_key(layer: int | None, unit: str) -> str:
    """Returns the key of a kind of unit in `PruningPlan.kept`."""
    return unit if layer is None or unit in ("channels", "text") else f"{layer}.{unit}"


def units_of(name: str) -> tuple[int | None, _Units]:
    """Returns the block that a weight belongs to, and the units of its dimensions."""
    layer: int | None = None
    if inside := _BLOCK.fullmatch(name):
        layer, name = int(inside.group(1)), inside.group(2)
    if name == TABLE:
        return layer, (None, None, "channels")
    module, _, kind = name.rpartition(".")
    units = (_OUTSIDE if layer is None else _INSIDE)[module]
    return layer, units[:1] if kind == "bias" else units


def _width(config: Mapping[str, Any]) -> int:
    return int(config["num_attention_heads"] * config["attention_head_dim"])


def _sizes(teacher: Mapping[str, Any], student: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Returns the number of units of each kind in the teacher and in the student."""
    widths = _width(teacher), _width(student)
    of_width = ("channels", "text", "words", "time", "attn1", "attn2")
    return {**dict.fromkeys(of_width, widths), "ffn": (teacher["ffn_dim"], student["ffn_dim"])}


def _check(teacher: Mapping[str, Any], student: Mapping[str, Any]) -> None:
    """Raises ConfigError if the student cannot take weights from the teacher."""
    depths = teacher["num_layers"], student["num_layers"]
    for what, (teacher_size, student_size) in {"layers": depths, **_sizes(teacher, student)}.items():
        if student_size > teacher_size:
            name = {"layers": "layers", "ffn": "neurons in a feed-forward layer"}.get(what, "channels")
            raise ConfigError(
                f"the student has {student_size} {name} and its teacher only {teacher_size}; use --init fresh, or a "
                "smaller student"
            )
    for name in sorted(teacher.keys() - {*_MAY_DIFFER}):
        ours, theirs = (tuple(it) if isinstance(it := config[name], list) else it for config in (student, teacher))
        if ours != theirs:
            raise ConfigError(
                f"the student has {name} {ours} and its teacher {theirs}, so their weights are not compatible; use "
                f"--init fresh, or the teacher's {name}"
            )
    if teacher.get("image_dim") is not None:
        raise ConfigError("the teacher is an image-to-video model (image_dim), which wan-distill does not support")


def _layers(setting: str, available: int, count: int, importance: Sequence[float] | None) -> list[int]:
    if setting == "even":
        if count == 1:
            return [0]
        return [(2 * layer * (available - 1) + count - 1) // (2 * (count - 1)) for layer in range(count)]
    if setting == "importance":
        if importance is None or len(importance) != available or not all(map(math.isfinite, importance)):
            raise ConfigError(f"layers importance needs a finite number for each of the teacher's {available} layers")
        return sorted(sorted(range(available), key=lambda layer: -importance[layer])[:count])
    try:
        chosen = [int(number) for number in setting.split(",")]
    except ValueError:
        raise ConfigError(f"layers {setting}: expected even, importance, or numbers such as 0,3,5") from None
    if len(chosen) != count or sorted({*chosen}) != chosen or chosen[0] < 0 or chosen[-1] >= available:
        raise ConfigError(
            f"layers {setting}: the student has {count} layers; expected {count} distinct numbers from 0 to "
            f"{available - 1}, in ascending order"
        )
    return chosen


def _summary(
    layers: list[int], sizes: Mapping[str, tuple[int, int]], teacher: Mapping[str, Any], student: Mapping[str, Any]
) -> str:
    parts = [f"the student's layers are the teacher's {', '.join(map(str, layers))}"]
    if len(layers) == teacher["num_layers"]:
        parts = [f"the student has all {len(layers)} layers of the teacher"]
    heads = teacher["num_attention_heads"], student["num_attention_heads"]
    alike = teacher["attention_head_dim"] == student["attention_head_dim"]
    counts = {"channels": sizes["channels"], "heads": heads if alike else (0, 0), "neurons": sizes["ffn"]}
    parts += [f"{kept} of {available} {name}" for name, (available, kept) in counts.items() if kept < available]
    if not alike:
        parts.append(
            f"attention starts from random weights, since the heads are {student['attention_head_dim']} wide and the "
            f"teacher's {teacher['attention_head_dim']}"
        )
    return "; ".join(parts)


@torch.no_grad()
def measured_importance(transformer: nn.Module, latents: Tensor, times: Tensor, text: Tensor) -> list[float]:
    """Measures how much each block changes its input: 1 - cosine of input and output, averaged over all tokens."""
    importance: list[float] = []

    def measure(block: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        cosine = nn.functional.cosine_similarity(inputs[0].float(), output.float(), dim=-1)
        importance.append(float(1 - cosine.double().mean()))

    hooks = [block.register_forward_hook(measure) for block in transformer.blocks]  # type: ignore[union-attr]
    try:
        transformer(latents, times, text, return_dict=False)
    finally:
        for hook in hooks:
            hook.remove()
    return importance
