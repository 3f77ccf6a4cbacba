"""DoRA and LoKr on a Wan transformer: uses peft's layers and weights, but replaces two of peft's computations.

DoRA scales each row of weight + B A to a trained magnitude, initially the norm of the weight's row. LoKr adds a
Kronecker product kron(w1, w2) to the weight, where w2 may be a product of two matrices of the adapter's rank. The two
computations are replaced because peft's DoRA cannot read quantized weights and multiplies by an identity matrix to get
B A, and because peft's LoKr draws a random number in each forward pass, even without dropout, and could therefore skip
a layer on one rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.nn import functional

from unisono.data.bits import Purpose, key_of
from unisono.quantize.formats import FORMATS
from unisono.quantize.layers import FrozenLinear
from unisono.recipes.wan.models.weight_names import MAGNITUDE, plain_name
from unisono.recipes.wan.settings import Kind

ADAPTER = "default"
"""peft's name for a transformer's only adapter."""
LOKR_PARTS = ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b")
_ZERO_AT_FIRST = ("lokr_w2", "lokr_w2_b")  # as LyCORIS initialises them


def config_for(kind: Kind, rank: int, alpha: float, layers: Sequence[str], lokr_factor: int = -1) -> Any:
    """Returns peft's configuration of an adapter."""
    from peft import LoKrConfig, LoraConfig

    if kind == "lokr":
        config: Any = LoKrConfig(r=rank, alpha=alpha, target_modules=list(layers), decompose_factor=lokr_factor)  # type: ignore[arg-type]
        return config
    return LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(layers), use_dora=kind == "dora")  # type: ignore[arg-type]


def adapter_layers(transformer: nn.Module, adapter: str = ADAPTER) -> dict[str, Any]:
    """Returns the layers with an adapter of this name, keyed by the layer's name without prefixes from wrappers."""
    from peft.tuners.lokr import LoKrLayer
    from peft.tuners.lora import LoraLayer

    modules = ((plain_name(f"{name}.")[:-1], module) for name, module in transformer.named_modules())
    layers = {name: module for name, module in modules if isinstance(module, LoraLayer | LoKrLayer)}
    return {name: layer for name, layer in layers.items() if adapter in layer.r}


def activate(model: nn.Module, adapters: Sequence[str]) -> None:
    """Makes the forward pass use exactly these LoRAs. Unlike peft's functions, does not change requires_grad.

    A block that recomputes its activations uses the LoRAs that are active at the time of the backward pass.
    """
    from peft.tuners.lora import LoraLayer

    for module in model.modules():
        if isinstance(module, LoraLayer):
            module._active_adapter, module._disable_adapters = list(adapters), not adapters


def kind_of(layer: Any) -> Kind:
    """Returns the kind of a layer's adapter."""
    if hasattr(layer, "lokr_w1"):
        return "lokr"
    return "dora" if layer.lora_variant else "lora"


def use_own_forward(layer: Any) -> None:
    """Replaces the computation of a layer's DoRA or LoKr (see the module's docstring); the weights keep their names."""
    if kind_of(layer) == "lokr":
        plain: Any = type(layer)
        layer.__class__ = _exact_lokr(plain)
    elif kind_of(layer) == "dora":
        magnitude = getattr(layer, MAGNITUDE)[ADAPTER]
        plain = type(magnitude)
        magnitude.__class__ = _exact_dora(plain)


def draw(layer: Any, name: str, adapter: str = ADAPTER) -> None:
    """Initialises an adapter so that it has no effect at first; its random values depend on the layer's name.

    A DoRA's magnitude stays on the device of the layer's weight; if that is the meta device, both are filled later.
    """
    seed = key_of(Purpose.WEIGHTS, torch.initial_seed(), crc32(name.encode()))
    if adapter != ADAPTER:
        seed = key_of(seed, crc32(adapter.encode()))
    generator = torch.Generator().manual_seed(seed & (2**63 - 1))
    if kind_of(layer) == "lokr":
        for part in LOKR_PARTS:
            values = getattr(layer, part)
            if ADAPTER in values:
                initial = torch.zeros(values[ADAPTER].shape)
                if part not in _ZERO_AT_FIRST:
                    nn.init.kaiming_uniform_(initial, a=math.sqrt(5), generator=generator)
                values[ADAPTER] = nn.Parameter(_placed(initial, values[ADAPTER]))
        return
    first, second = layer.lora_A[adapter], layer.lora_B[adapter]
    initial = torch.empty(first.weight.shape)
    nn.init.kaiming_uniform_(initial, a=math.sqrt(5), generator=generator)
    first.weight = nn.Parameter(_placed(initial, first.weight))
    second.weight = nn.Parameter(_placed(torch.zeros(second.weight.shape), second.weight))
    if kind_of(layer) == "dora":
        magnitude = getattr(layer, MAGNITUDE)[ADAPTER]
        if not magnitude.weight.is_meta:
            norms = torch.linalg.norm(layer.base_layer.weight.detach().to(_wide(magnitude.weight)), dim=1)
            magnitude.weight = nn.Parameter(norms)
        elif magnitude.weight.dtype.itemsize < 4:
            magnitude.weight = nn.Parameter(magnitude.weight.detach().float())


def _placed(values: Tensor, like: Tensor) -> Tensor:
    # peft uses the device and dtype of the frozen weight, which may be meta, or too imprecise for training.
    return values.to("cpu" if like.is_meta else like.device, _wide(like))


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float32 if tensor.dtype.itemsize < 4 else tensor.dtype


@cache  # one class for all layers, because torch.compile recompiles for each class
def _exact_lokr(plain: Any) -> Any:
    def forward(self: Any, x: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        result: Tensor = self.base_layer(x, *arguments, **keywords)
        if self.disable_adapters:
            return result
        base = self.base_layer
        delta = lokr_delta(self).view(base.out_features, base.in_features) * self.scaling[ADAPTER]
        return result + functional.linear(x.to(delta.dtype), delta).to(result.dtype)

    return type(plain.__name__, (plain,), {"forward": forward, "__module__": plain.__module__})


def lokr_delta(layer: Any) -> Tensor:
    """Returns kron(w1, w2) of a LoKr layer, without the scale."""
    parts = {part: values[ADAPTER] for part in LOKR_PARTS if ADAPTER in (values := getattr(layer, part))}
    w1 = parts["lokr_w1"] if "lokr_w1" in parts else parts["lokr_w1_a"] @ parts["lokr_w1_b"]
    w2 = parts["lokr_w2"] if "lokr_w2" in parts else parts["lokr_w2_a"] @ parts["lokr_w2_b"]
    return torch.kron(w1, w2.to(w1.dtype))


@cache
def _exact_dora(plain: Any) -> Any:
    def forward(
        self: Any,
        x: Tensor,
        *,
        lora_A: Any,
        lora_B: Any,
        scaling: float,
        base_layer: Any,
        base_result: Tensor | None = None,
        adapter_name: str = ADAPTER,
    ) -> Tensor:
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            weight = _decoded(base_layer, _wide(self.weight))
            low_rank = lora_B.weight.to(weight.dtype) @ lora_A.weight.to(weight.dtype)
            # Avoids weight.add(low_rank, alpha=scaling), which rounds differently when torch 2.13 compiles it.
            norms = torch.linalg.norm(weight + scaling * low_rank, dim=1)
        factor = self.weight / norms
        assert base_result is not None  # peft passes None only with dropout
        without_bias = base_result if base_layer.bias is None else base_result - base_layer.bias
        change: Tensor = (factor - 1) * without_bias + factor * scaling * lora_B(lora_A(x))
        return change

    return type(plain.__name__, (plain,), {"forward": forward, "__module__": plain.__module__})


def _decoded(base: Any, dtype: torch.dtype) -> Tensor:
    if type(base) is FrozenLinear:
        return FORMATS[base.format_name].decode(base.weight, base.weight_scales, base.in_features, dtype)
    weight: Tensor = base.weight
    return weight.to(dtype)
