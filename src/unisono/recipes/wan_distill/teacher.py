"""The teacher: a frozen Wan model with its guidance folded in, in as little memory as one allows it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from unisono.parallel.blocks import compile_blocks
from unisono.recipes.wan.models.experts import Experts
from unisono.recipes.wan.models.load import WanFolder, build_meta, transformer_config
from unisono.recipes.wan.models.native import base_name
from unisono.recipes.wan.models.weights import check_fit, open_weights

_TYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float8": torch.bfloat16}
_ROOM = 0.6  # of a device's memory that weights may take: the rest is for what is computed


@dataclass(frozen=True)
class Guidance:
    """How far the teacher goes beyond what it would draw without a prompt."""

    high: float
    low: float
    """The same as high, unless there are two experts."""

    def at(self, sigma: Tensor, boundary: float | None) -> Tensor:
        """[batch] the scale at each noise level."""
        low = self.high if boundary is None else self.low
        return torch.where(sigma >= (boundary or 0.0), self.high, low).to(sigma.dtype)


class Teacher:
    """Says the guided velocity: Tʷ = u + w (c − u)."""

    def __init__(
        self, experts: Experts, guidance: Guidance, dtype: torch.dtype, *, is_shared_out: bool = False
    ) -> None:
        """`is_shared_out`: each rank has a part of the weights, and all must compute together."""
        self.experts, self.guidance, self.dtype, self.is_shared_out = experts, guidance, dtype, is_shared_out
        self.places_itself = False  # it brings its blocks to the device when it needs them

    def to(self, device: str | torch.device) -> Teacher:
        """Itself, on a device."""
        if not self.places_itself:
            self.experts.to(device)
        return self

    @property
    def _is_plain(self) -> bool:
        """Whether no level is guided; asked of plain numbers, because a tensor would make every step wait."""
        return self.guidance.high == 1 and (self.experts.boundary is None or self.guidance.low == 1)

    @torch.no_grad()
    def velocity(self, noisy: Tensor, sigma: Tensor, text: Tensor, empty: Tensor) -> Tensor:
        """The guided velocity at [batch, ...] points; `text` is [batch, length, width] rows, `empty` those of none."""
        scale = self.guidance.at(sigma, self.experts.boundary).view(-1, *[1] * (noisy.dim() - 1))
        with torch.autocast(noisy.device.type, enabled=False):
            if self._is_plain:
                return self._said(noisy, sigma, text).to(noisy.dtype)
            both = self._said(torch.cat([noisy, noisy]), torch.cat([sigma, sigma]), torch.cat([text, empty.to(text)]))
        with_prompt, without = both.to(noisy.dtype).chunk(2)
        return without + scale * (with_prompt - without)

    def _said(self, noisy: Tensor, sigma: Tensor, text: Tensor) -> Tensor:
        said: Tensor = self.experts(noisy.to(self.dtype), sigma, text.to(self.dtype))
        return said

    @property
    def sampler_guidance(self) -> tuple[float, float]:
        """As the sampler takes it."""
        return self.guidance.high, self.guidance.low


def type_of(told: str, device: str) -> torch.dtype:
    """What the teacher computes in."""
    if told == "auto":
        return torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32
    return _TYPES[told]


def whole_weights(transformer: nn.Module) -> list[str]:
    """The names of the weights that diffusers keeps in 32 bit."""
    exact = set(transformer._keep_in_fp32_modules)  # type: ignore[arg-type]
    return [name for name, _ in transformer.named_parameters() if exact & set(name.split("."))]


def describe_on_meta(found: WanFolder, dtype: torch.dtype, *, is_shared_out: bool = False) -> Experts:
    """The teacher without weights: of the right types, those that must not be rounded in 32 bit."""
    transformers = {}
    for name, place in found.transformers.items():
        transformer = build_meta(transformer_config(found, part=name))
        check_fit(transformer, open_weights(place))
        exact = set(whole_weights(transformer))
        for inside, parameter in transformer.named_parameters():
            parameter.data = parameter.data.to(torch.float32 if inside in exact else dtype)
        transformers[name] = transformer.requires_grad_(False).eval()
    boundary = found.boundary_ratio if len(transformers) > 1 else None
    return Experts(transformers, boundary, meets_others=is_shared_out)


def is_offloaded(found: WanFolder, told_type: str, where: str, device: str) -> bool:
    """Whether its weights stay in the computer's memory: the same on every device of a kind, however full it is."""
    if torch.device(device).type != "cuda" or where in ("gpu", "gpu0"):
        return False
    if where == "cpu":
        return True
    bits = 8 if told_type == "float8" else type_of(told_type, device).itemsize * 8
    numbers = sum(open_weights(place).num_weights() for place in found.transformers.values())
    return numbers * bits / 8 > _ROOM * torch.cuda.get_device_properties(device).total_memory


def load_teacher(
    found: WanFolder, guidance: Guidance, told_type: str, where: str, device: str, *, compiled: bool
) -> tuple[Teacher, str]:
    """The teacher with all its weights, and a line that says where they are and how much they take."""
    dtype, away = type_of(told_type, device), is_offloaded(found, told_type, where, device)
    teacher = Teacher(describe_on_meta(found, dtype), guidance, dtype)
    for name, transformer in teacher.experts.named_children():
        _fill(transformer, found, name, "cpu" if away else device)
        if told_type == "float8":  # keeps norms, embeddings and the like as they are
            transformer.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=dtype)  # type: ignore[operator]
        if not away:
            transformer.to(device)
    size = sum(it.numel() * it.element_size() for it in teacher.experts.parameters())
    if away:
        _offload(teacher.experts, torch.device(device))
        teacher.places_itself = True
    elif compiled and torch.device(device).type == "cuda" and told_type != "float8":
        # The student is of the same class, with other sizes: neither must make the other's sizes unknown.
        blocks = [block for one in teacher.experts.children() for block in one.blocks]  # type: ignore[union-attr]
        compile_blocks(teacher.experts, blocks, dynamic=False)
    number = sum(it.numel() for it in teacher.experts.parameters())
    kind = "8 bit, computing in bfloat16" if told_type == "float8" else str(dtype).removeprefix("torch.")
    place = (
        "of the computer's memory for each process, and one block at a time on its device"
        if away
        else f"on the {torch.device(device).type} of each process"
    )
    return teacher, f"teacher: {number:,} weights in {kind}, {size / 2**30:.2f} GiB {place}"


def _fill(transformer: nn.Module, found: WanFolder, name: str, device: str) -> None:
    """Reads the weights one by one, each in its type, to where it stays: no second copy of the model anywhere."""
    weights = open_weights(found.transformers[name])
    for inside, parameter in list(transformer.named_parameters()):
        owner, _, leaf = inside.rpartition(".")
        theirs = base_name(inside)
        assert theirs is not None
        filled = nn.Parameter(weights.tensor(theirs, parameter.dtype).to(device), requires_grad=False)
        setattr(transformer.get_submodule(owner), leaf, filled)


def _offload(experts: Experts, device: torch.device) -> None:
    for transformer in experts.children():
        transformer.enable_group_offload(  # type: ignore[operator]
            onload_device=device,
            offload_device=torch.device("cpu"),
            offload_type="block_level",
            num_blocks_per_group=1,
            use_stream=True,
            low_cpu_mem_usage=True,
        )
