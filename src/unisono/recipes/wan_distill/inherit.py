"""The weights a student begins with: parts of its teacher's, or fresh ones.

A student with fewer layers takes some of the teacher's. A narrower one takes some of the channels, heads and neurons in
them: whole units, because norms, heads and nonlinearities act on these and on no mixture of them. All layers read and
write one stream of channels, so the same ones are taken everywhere; text has a stream of its own.
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
from unisono.recipes.wan_distill.fresh import fresh_rows
from unisono.recipes.wan_distill.student import whole_config

_EMBEDDER = "condition_embedder"
_BLOCK = re.compile(r"blocks\.(\d+)\.(.+)")
_Units = tuple[str | None, ...]
# What the rows and the columns of each layer are; None: as many in every student.
_OUTSIDE: dict[str, _Units] = {
    "patch_embedding": ("channels", None),
    f"{_EMBEDDER}.time_embedder.linear_1": ("time", None),
    f"{_EMBEDDER}.time_embedder.linear_2": ("channels", "time"),  # what it gives is added to the stream's last scale
    f"{_EMBEDDER}.time_proj": ("modulation", "channels"),
    f"{_EMBEDDER}.text_embedder.linear_1": ("words", None),
    f"{_EMBEDDER}.text_embedder.linear_2": ("text", "words"),
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
_TABLE = "scale_shift_table"
_MODULATIONS = 6  # of a block: shift, scale and gate of attention, then of the feed-forward layer
_SCALES = (1, 4)  # those of them that are scales
_MAY_DIFFER = (
    *("num_layers", "num_attention_heads", "attention_head_dim", "ffn_dim", "rope_max_seq_len", "eps", "qk_norm"),
)


@dataclass(frozen=True)
class Inheritance:
    """Which of the teacher's weights a student takes; plain lists and numbers, so that a run can keep it as JSON."""

    layers: list[int]
    """The teacher's layer that each of the student's is."""
    kept: dict[str, list[int]]
    """Units that are taken, where not all of them are: channels, text, words and time (the hidden layers of both
    embeddings), and for each of the teacher's layers `5.ffn` (neurons), `5.attn1` and `5.attn2` (places in heads)."""
    gain: float = 1.0
    """What the stream is multiplied with after each of its norms, which go over fewer channels."""
    gains: dict[str, float] = field(default_factory=dict)
    """The same for norms of queries and keys, by the teacher's names."""
    factor: float = 1.0
    """What the user wants all of them to be multiplied with."""
    fresh_attention: int = 0
    """The student's width, if its heads are not the teacher's; attention then begins fresh."""
    seed: int = 0
    """Of what begins fresh."""
    told: str = ""
    """For the user: what is taken."""


def plan(
    weights: Weights,
    teacher: Mapping[str, Any],
    student: Mapping[str, Any],
    layers: str = "even",
    importance: Sequence[float] | None = None,
    factor: float = 1.0,
    seed: int = 0,
) -> Inheritance:
    """Chooses what a student takes from its teacher; reads the teacher's weights one by one, if it is narrower.

    `layers` is even, importance (with the importance that was measured of each of the teacher's layers), or the numbers
    of the teacher's layers, separated by commas.
    """
    teacher, student = whole_config(teacher), whole_config(student)
    _check(teacher, student)
    chosen = _layers(layers, teacher["num_layers"], student["num_layers"], importance)
    sizes = _sizes(teacher, student)
    heads_alike = teacher["attention_head_dim"] == student["attention_head_dim"]
    narrower = {unit for unit, (there, here) in sizes.items() if here < there}
    if not heads_alike:
        narrower -= {"attn1", "attn2"}
    into, out, normed = _energies(weights, chosen, narrower)
    kept: dict[str, list[int]] = {}
    for unit in sorted(into):
        kind = unit.rpartition(".")[2]
        group = teacher["attention_head_dim"] if kind.startswith("attn") else 1
        # What passes through a unit: what is written into it, times what is read of it.
        kept[unit] = _strongest(into[unit] * out[unit], sizes[kind][1], group)
    return Inheritance(
        layers=chosen,
        kept=kept,
        gain=_gain(into["channels"], kept["channels"]) if "channels" in kept else 1.0,
        gains={name: _gain(energy, kept[unit]) for name, (unit, energy) in normed.items()},
        factor=factor,
        fresh_attention=0 if heads_alike else _width(student),
        seed=seed,
        told=_told(chosen, sizes, teacher, student),
    )


_Energy = dict[str, Tensor]


def is_whole(plan: Inheritance, teacher: Mapping[str, Any], student: Mapping[str, Any]) -> bool:
    """Whether a plan that was read from a file is one for these models."""
    lists = [plan.layers, *plan.kept.values()]
    numbers = [*plan.gains.values(), plan.gain, plan.factor]
    return (
        len(plan.layers) == student["num_layers"]
        and all(type(place) is int and place >= 0 for places in lists for place in places)
        and all(layer < teacher["num_layers"] for layer in plan.layers)
        and all(isinstance(number, int | float) and math.isfinite(number) for number in numbers)
        and plan.fresh_attention in (0, _width(student))
        and isinstance(plan.told, str)
    )


def check_plan(teacher: Mapping[str, Any], student: Mapping[str, Any], layers: str) -> None:
    """Says (ConfigError) what plan() would refuse, before anything is measured or read."""
    _check(teacher, student)
    _layers(layers, teacher["num_layers"], student["num_layers"], [0.0] * teacher["num_layers"])


def _energies(
    weights: Weights, layers: Sequence[int], narrower: set[str]
) -> tuple[_Energy, _Energy, dict[str, tuple[str, Tensor]]]:
    """How much is written into each unit and how much is read of it, by squares of weights; the former also for each
    norm of queries or keys."""
    into: _Energy = {}
    out: _Energy = {}
    normed: dict[str, tuple[str, Tensor]] = {}
    for name in weights.names():
        layer, units = _units(name)
        if len(units) != 2 or not narrower.intersection(units) or (layer is not None and layer not in layers):
            continue
        squares = weights.tensor(name, torch.float32).flatten(1).square()
        for side, unit, sums in zip((1, 0), units, (into, out), strict=True):
            # What the time embedding gives is no part of the stream, it only lies beside it.
            if unit not in narrower or (unit == "channels" and name.startswith(_EMBEDDER)):
                continue
            energy, key = squares.sum(side, dtype=torch.float64), _unit(layer, unit)
            sums[key] = sums.get(key, 0) + energy
            if side == 1 and name.endswith((".to_q.weight", ".to_k.weight")):
                normed[name.replace(".to_", ".norm_")] = key, energy
    return into, out, normed


def _gain(energy: Tensor, kept: Sequence[int]) -> float:
    """What makes up for a norm that goes over the kept units only: it divides by their size instead of that of all.

    Nothing makes up for sums over fewer units, on purpose: weights made larger by √(all / kept), which keeps the size
    of such sums, or by all / kept, which keeps their mean, gave students further from a trained teacher, at the
    beginning (error 0.92 and 1.63; as they are 0.75) and after 100 steps (0.20 and 0.25; 0.17; a fresh student 0.39).
    """
    root = float((energy[kept].mean() / energy.mean()).sqrt()) if energy.any() else 1.0
    return root or 1.0


def _strongest(strength: Tensor, count: int, group: int) -> list[int]:
    whole = strength.view(-1, group).sum(1)
    order = torch.sort(whole, descending=True, stable=True).indices[: count // group]
    return [int(first) * group + place for first in sorted(order.tolist()) for place in range(group)]


def _unit(layer: int | None, unit: str) -> str:
    return unit if layer is None or unit in ("channels", "text") else f"{layer}.{unit}"


def _units(name: str) -> tuple[int | None, _Units]:
    """The block that a weight is in, and what its dimensions are."""
    layer: int | None = None
    if inside := _BLOCK.fullmatch(name):
        layer, name = int(inside.group(1)), inside.group(2)
    if name == _TABLE:
        return layer, (None, None, "channels")
    place, _, kind = name.rpartition(".")
    units = (_OUTSIDE if layer is None else _INSIDE)[place]
    return layer, units[:1] if kind == "bias" else units


def _width(config: Mapping[str, Any]) -> int:
    return int(config["num_attention_heads"] * config["attention_head_dim"])


def _sizes(teacher: Mapping[str, Any], student: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """How many units of each kind the teacher has and the student."""
    widths = _width(teacher), _width(student)
    of_width = ("channels", "text", "words", "time", "attn1", "attn2")
    return {**dict.fromkeys(of_width, widths), "ffn": (teacher["ffn_dim"], student["ffn_dim"])}


def _check(teacher: Mapping[str, Any], student: Mapping[str, Any]) -> None:
    """Says (ConfigError) why a student cannot take weights of a teacher."""
    depths = teacher["num_layers"], student["num_layers"]
    for what, (there, here) in {"layers": depths, **_sizes(teacher, student)}.items():
        if here > there:
            name = {"layers": "layers", "ffn": "neurons in a feed-forward layer"}.get(what, "channels")
            raise ConfigError(
                f"the student has {here} {name} and its teacher {there}: there is nothing to take the others from; use "
                "--init fresh, or a smaller student"
            )
    for name in sorted(teacher.keys() - {*_MAY_DIFFER}):
        ours, theirs = (tuple(it) if isinstance(it := config[name], list) else it for config in (student, teacher))
        if ours != theirs:
            raise ConfigError(
                f"the student has {name} {ours} and its teacher {theirs}: their weights do not mean the same; use "
                "--init fresh, or leave it as it is in the teacher"
            )
    if teacher.get("image_dim") is not None:
        raise ConfigError("the teacher goes on from an image (image_dim), and such models are not distilled here")


def _layers(told: str, there: int, here: int, importance: Sequence[float] | None) -> list[int]:
    if told == "even":
        if here == 1:
            return [0]
        return [(2 * place * (there - 1) + here - 1) // (2 * (here - 1)) for place in range(here)]
    if told == "importance":
        if importance is None or len(importance) != there or not all(map(math.isfinite, importance)):
            raise ConfigError(f"layers importance needs a finite number for each of the teacher's {there} layers")
        return sorted(sorted(range(there), key=lambda layer: -importance[layer])[:here])
    try:
        chosen = [int(number) for number in told.split(",")]
    except ValueError:
        raise ConfigError(f"layers {told}: expected even, importance, or numbers such as 0,3,5") from None
    if len(chosen) != here or sorted({*chosen}) != chosen or chosen[0] < 0 or chosen[-1] >= there:
        raise ConfigError(
            f"layers {told}: the student has {here} layers; expected {here} different numbers from 0 to {there - 1}, "
            "in the teacher's order"
        )
    return chosen


def _told(
    layers: list[int], sizes: Mapping[str, tuple[int, int]], teacher: Mapping[str, Any], student: Mapping[str, Any]
) -> str:
    parts = [f"student layers are the teacher's {', '.join(map(str, layers))}"]
    if len(layers) == teacher["num_layers"]:
        parts = [f"the student has all {len(layers)} layers of the teacher"]
    heads = teacher["num_attention_heads"], student["num_attention_heads"]
    alike = teacher["attention_head_dim"] == student["attention_head_dim"]
    counts = {"channels": sizes["channels"], "heads": heads if alike else (0, 0), "neurons": sizes["ffn"]}
    parts += [f"{here} of {there} {name}" for name, (there, here) in counts.items() if here < there]
    if not alike:
        parts.append(
            f"attention begins fresh, since its heads are {student['attention_head_dim']} wide and the teacher's "
            f"{teacher['attention_head_dim']}"
        )
    return "; ".join(parts)


class FromTeacher:
    """The weights of a student's transformers, taken from those of its teacher, as the engine asks for them."""

    def __init__(self, files: Mapping[str, Weights], plans: Mapping[str, Inheritance]) -> None:
        self._files, self._plans = files, plans

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """The rows of a weight; of the teacher's file only those are read that lie between them."""
        transformer, _, inside = name.partition(".")
        plan, weights = self._plans[transformer], self._files[transformer]
        if plan.fresh_attention and ".attn" in inside:
            return _fresh_attention(inside, start, stop, plan)
        layer, units = _units(inside)
        if layer is not None:
            layer = plan.layers[layer]
            inside = f"blocks.{layer}.{inside.split('.', 2)[2]}"
        places = [plan.kept.get(_unit(layer, unit)) if unit else None for unit in units]
        if units[0] == "modulation" and (channels := plan.kept.get("channels")):
            wide = weights.shape(inside)[0] // _MODULATIONS
            places[0] = [part * wide + channel for part in range(_MODULATIONS) for channel in channels]
        return _adjusted(inside, _taken(weights, inside, places, start, stop), start, plan)


def _taken(weights: Weights, name: str, places: Sequence[list[int] | None], start: int, stop: int) -> Tensor:
    first, *others = places
    wanted = range(start, stop) if first is None else first[start:stop]
    begin, end = wanted[0], wanted[-1] + 1
    found = weights.slice(name, begin, end)
    if end - begin > len(wanted):
        found = found[torch.tensor(wanted) - begin]
    for dimension, kept in enumerate(others, 1):
        if kept is not None:
            found = found.index_select(dimension, torch.tensor(kept))
    return found


def _adjusted(name: str, found: Tensor, start: int, plan: Inheritance) -> Tensor:
    """With the gains: a norm's own weight, or the scale that comes after it, which is given as its difference to 1."""
    gain, factor = plan.gain, plan.gains.get(name, 1.0) * plan.factor
    if gain != 1.0 and name.endswith(".norm2.weight"):
        factor *= gain
    elif gain != 1.0 and name.endswith(_TABLE):
        # The last norm's scale has the time added to it, as its shift has: that part cannot be made up for.
        scales = list(_SCALES if name.startswith("blocks.") else _SCALES[:1])
        found = found.float()
        found[:, scales] = (1 + found[:, scales]) * gain - 1
    elif gain != 1.0 and name.startswith(f"{_EMBEDDER}.time_proj."):
        part = torch.arange(start, start + len(found)) // len(plan.kept["channels"])
        found = found.float()
        found[torch.isin(part, torch.tensor(_SCALES))] *= gain
    return found if factor == 1.0 else found.float() * factor


@torch.no_grad()
def measured_importance(transformer: nn.Module, latents: Tensor, times: Tensor, text: Tensor) -> list[float]:
    """How much each block turns what it is given: 1 - cosine of its input and output, mean over tokens and samples."""
    found: list[float] = []

    def note(block: nn.Module, given: tuple[Tensor, ...], said: Tensor) -> None:
        alike = nn.functional.cosine_similarity(given[0].float(), said.float(), dim=-1)
        found.append(float(1 - alike.double().mean()))

    hooks = [block.register_forward_hook(note) for block in transformer.blocks]  # type: ignore[union-attr]
    try:
        transformer(latents, times, text, return_dict=False)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _fresh_attention(name: str, start: int, stop: int, plan: Inheritance) -> Tensor:
    # It begins by saying nothing, so that it does not disturb what was inherited around it.
    shape = (plan.fresh_attention,) * (2 if ".to_" in name and name.endswith(".weight") else 1)
    if ".to_out." in name:
        return torch.zeros(stop - start, *shape[1:])
    return fresh_rows(name, shape, start, stop, plan.seed)
