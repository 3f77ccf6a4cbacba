"""The teacher: a frozen Wan model with classifier-free guidance, whose weights may be offloaded or sharded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from unisono.parallel.blocks.repeated import compile_blocks
from unisono.parallel.materialize import fill as fill_quantized
from unisono.quantize.formats import FORMATS
from unisono.quantize.layers import frozen_linears, quantize
from unisono.quantize.products import has_fp8_products
from unisono.quantize.weights import QuantizedWeights
from unisono.recipes.wan.models.experts import Experts
from unisono.recipes.wan.models.load import WanFolder, build_meta, transformer_config
from unisono.recipes.wan.models.lora import load_lora
from unisono.recipes.wan.models.weights import check_fit, fill, open_weights

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float8": torch.bfloat16}
_ROOM = 0.6  # fraction of a device's memory that the weights may use; the rest is for activations


class Guidance(NamedTuple):
    """The teacher's guidance scales, in the order in which the sampler expects them."""

    high: float
    low: float
    """Scale of the low-noise expert; equal to `high` unless there are two experts."""

    def at(self, sigma: Tensor, boundary: float | None) -> Tensor:
        """Returns the scale at each noise level, [batch]."""
        low = self.high if boundary is None else self.low
        return torch.where(sigma >= (boundary or 0.0), self.high, low).to(sigma.dtype)

    def is_off(self, boundary: float | None) -> bool:
        """Whether no noise level is guided; compares Python numbers, because reading a tensor waits for the GPU."""
        return self.high == 1 and (boundary is None or self.low == 1)


def guided_velocity(
    model: Callable[[Tensor, Tensor, Tensor], Tensor],
    guidance: Guidance,
    boundary: float | None,
    noisy: Tensor,
    sigma: Tensor,
    text: Tensor,
    empty: Tensor,
) -> Tensor:
    """Computes a model's guided velocity Tʷ = u + w (c − u) from its velocities with (c) and without (u) the prompt."""
    if guidance.is_off(boundary):
        return model(noisy, sigma, text).to(noisy.dtype)
    scale = guidance.at(sigma, boundary).view(-1, *[1] * (noisy.dim() - 1))
    both = model(torch.cat([noisy, noisy]), torch.cat([sigma, sigma]), torch.cat([text, empty.to(text)]))
    with_prompt, without = both.to(noisy.dtype).chunk(2)
    return without + scale * (with_prompt - without)


class Teacher:
    """A Wan model that computes the guided velocity Tʷ = u + w (c − u)."""

    def __init__(self, experts: Experts, guidance: Guidance, dtype: torch.dtype, *, is_sharded: bool = False) -> None:
        """`is_sharded`: whether each rank holds only a shard of the weights, so all ranks must compute together."""
        self.experts, self.guidance, self.dtype, self.is_sharded = experts, guidance, dtype, is_sharded
        self.places_itself = False  # True if offloaded: each block moves to the device when it is needed

    def to(self, device: str | torch.device) -> Teacher:
        """Moves the teacher to a device; returns itself."""
        if not self.places_itself:
            self.experts.to(device)
        return self

    @torch.no_grad()
    def velocity(self, noisy: Tensor, sigma: Tensor, text: Tensor, empty: Tensor) -> Tensor:
        """Computes the guided velocity at [batch, ...] points; `text` and `empty` are [batch, length, width]."""
        with torch.autocast(noisy.device.type, enabled=False):
            return guided_velocity(self._velocity, self.guidance, self.experts.boundary, noisy, sigma, text, empty)

    def _velocity(self, noisy: Tensor, sigma: Tensor, text: Tensor) -> Tensor:
        velocity: Tensor = self.experts(noisy.to(self.dtype), sigma, text.to(self.dtype))
        return velocity


def dtype_of(name: str, device: str) -> torch.dtype:
    """Returns the dtype that the teacher computes in."""
    if name == "auto":
        return torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32
    return _DTYPES[name]


def float32_names(transformer: nn.Module) -> list[str]:
    """Returns the names of the weights that diffusers keeps in float32."""
    exact = set(transformer._keep_in_fp32_modules)  # type: ignore[arg-type]
    return [name for name, _ in transformer.named_parameters() if exact & set(name.split("."))]


def build_on_meta(folder: WanFolder, dtype: torch.dtype, *, is_sharded: bool = False) -> Experts:
    """Builds the teacher on the meta device, with each parameter in its final dtype."""
    transformers = {}
    for name, path in folder.transformers.items():
        transformer = build_meta(transformer_config(folder, part=name))
        check_fit(transformer, open_weights(path))
        in_float32 = set(float32_names(transformer))
        for inside, parameter in transformer.named_parameters():
            parameter.data = parameter.data.to(torch.float32 if inside in in_float32 else dtype)
        transformers[name] = transformer.requires_grad_(False).eval()
    boundary = folder.boundary_ratio if len(transformers) > 1 else None
    return Experts(transformers, boundary, shared_by_ranks=is_sharded)


def is_offloaded(folder: WanFolder, dtype_name: str, strategy: str, device: str, base_precision: str) -> bool:
    """Whether the weights stay in host memory. Does not depend on the free memory, so all ranks decide the same."""
    if torch.device(device).type != "cuda" or strategy in ("gpu", "gpu0"):
        return False
    if strategy == "cpu":
        return True
    num_bytes: float = 1 if dtype_name == "float8" else dtype_of(dtype_name, device).itemsize
    if base_precision != "auto":
        num_bytes = FORMATS[base_precision].bits / 8
    num_weights = sum(open_weights(path).num_weights() for path in folder.transformers.values())
    return num_weights * num_bytes > _ROOM * torch.cuda.get_device_properties(device).total_memory


def load_teacher(
    folder: WanFolder,
    guidance: Guidance,
    dtype_name: str,
    strategy: str,
    device: str,
    *,
    compiled: bool,
    base_precision: str = "auto",
    lora: Path | None = None,
) -> tuple[Teacher, str]:
    """Loads the teacher, with a LoRA if given; also returns a line that states its weights' size and location."""
    dtype, offloaded = dtype_of(dtype_name, device), is_offloaded(folder, dtype_name, strategy, device, base_precision)
    teacher = Teacher(build_on_meta(folder, dtype), guidance, dtype)
    number = sum(it.numel() for it in teacher.experts.parameters())
    for name, transformer in teacher.experts.named_children():
        path = folder.transformers[name]
        if lora is not None:
            load_lora(transformer, lora, part=name)
            transformer.requires_grad_(False)
        if base_precision == "auto":
            fill(transformer, path, device="cpu" if offloaded else device, own_dtypes=True)
        else:
            _fill_quantized(transformer, path, base_precision, device)
        if dtype_name == "float8":  # diffusers does not cast norms and embeddings
            transformer.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=dtype)  # type: ignore[operator]
        if not offloaded:
            transformer.to(device)
    size = sum(it.numel() * it.element_size() for it in teacher.experts.parameters())
    if offloaded:
        _offload(teacher.experts, torch.device(device))
        teacher.places_itself = True
    elif compiled and torch.device(device).type == "cuda" and dtype_name != "float8":
        # The student's blocks have the same class but other sizes, so torch.compile would mark the sizes as dynamic.
        blocks = [block for one in teacher.experts.children() for block in one.blocks]  # type: ignore[union-attr]
        compile_blocks(teacher.experts, blocks, dynamic=False)
    kind = "float8, computing in bfloat16" if dtype_name == "float8" else str(dtype).removeprefix("torch.")
    if base_precision != "auto":
        kind = f"{base_precision}, computing in {kind}"
    where = f"on the {torch.device(device).type} of each rank"
    if offloaded:
        where = "of host memory per rank, one block at a time on its device"
    return teacher, f"teacher: {number:,} weights in {kind}, {size / 2**30:.2f} GiB {where}"


def _fill_quantized(transformer: nn.Module, path: Path, base_precision: str, device: str) -> None:
    """Fills a transformer that is on the meta device; quantises the weights of its blocks while reading them."""
    names = frozen_linears(transformer, transformer.blocks)  # type: ignore[arg-type]
    converted = quantize(transformer, names, base_precision, fp8_products=has_fp8_products(torch.device(device)))
    fill_quantized(transformer, QuantizedWeights(open_weights(path), converted.layers, base_precision))


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
