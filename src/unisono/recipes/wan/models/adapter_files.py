"""Reads and writes DoRA and LoKr files with the weight names of diffusers, peft, ComfyUI, kohya and LyCORIS.

Each program names the same weights in its own way. A layer has diffusers' or the Wan repository's name, either with
dots, or with underscores after the prefix `lora_unet_` or `lycoris_`. A magnitude is called `lora_magnitude_vector` or
`dora_scale`. This module converts all of them to the names lora_A.weight, lora_B.weight, lora_magnitude_vector,
lokr_w1, …, and multiplies the scale alpha / rank into the weights.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unisono.errors import ConfigError
from unisono.recipes.wan.models.adapters import ADAPTER, LOKR_PARTS, config_for, kind_of
from unisono.recipes.wan.models.weight_names import COMFY, MAGNITUDE, native_name
from unisono.recipes.wan.settings import Kind

_SUFFIXES = {
    **{f".{part}": part for part in LOKR_PARTS},
    **{".lora_A.weight": "lora_A.weight", ".lora_B.weight": "lora_B.weight"},
    **{".lora_down.weight": "lora_A.weight", ".lora_up.weight": "lora_B.weight"},
    **{f".{MAGNITUDE}": MAGNITUDE, f".{MAGNITUDE}.weight": MAGNITUDE, ".dora_scale": MAGNITUDE},
    ".alpha": "alpha",
}
_PREFIXES = ("base_model.model.", f"model.{COMFY}", COMFY)
_WITH_UNDERSCORES = ("lora_unet_", "lycoris_", "lora_transformer_")
PEFT_FILE = "adapter_model.safetensors"
_ONLY = "only LoRA, DoRA and LoKr of linear layers can be continued"


def is_special(names: Collection[str]) -> bool:
    """Whether a file with these weight names is a DoRA or a LoKr, not a plain LoRA."""
    return any(".lokr_" in name or name.endswith(".dora_scale") or MAGNITUDE in name for name in names)


def read_special(
    raw: Mapping[str, Tensor], transformer: nn.Module, part: str, file: Path
) -> tuple[Kind, dict[str, Tensor]]:
    """Returns the kind of the adapter in a file, and its weights by the transformer's names, scale multiplied in."""
    layers = _layers_by_name(transformer)
    by_layer: dict[str, dict[str, Tensor]] = {}
    prefixes = (f"{part}.",) if any(name.startswith(f"{part}.") for name in raw) else ("transformer.",)
    for name, tensor in raw.items():
        plain = next((name.removeprefix(prefix) for prefix in (*prefixes, *_PREFIXES) if name.startswith(prefix)), name)
        if plain.startswith("transformer_2."):  # belongs to the other expert
            continue
        suffix = next((suffix for suffix in _SUFFIXES if plain.endswith(suffix)), None)
        layer = layers.get(plain.removesuffix(suffix)) if suffix else None
        if suffix is None:
            raise ConfigError(f"{file}: {_ONLY}, not {name}")
        if layer is None:
            raise ConfigError(f"{file} was trained for another architecture: the model has no layer for {name}")
        by_layer.setdefault(layer, {})[_SUFFIXES[suffix]] = tensor.float()
    kinds = {_check(transformer.get_submodule(layer), layer, parts, file) for layer, parts in by_layer.items()}
    if len(kinds) != 1:
        raise ConfigError(f"{file} mixes adapters of several kinds ({', '.join(sorted(kinds)) or 'none'}); {_ONLY}")
    state: dict[str, Tensor] = {}
    for layer, parts in by_layer.items():
        scaled = _with_scale(parts)
        state |= {f"{layer}.{name}": tensor for name, tensor in scaled.items()}
    return kinds.pop(), state


def _layers_by_name(transformer: nn.Module) -> dict[str, str]:
    named = {}
    for layer, module in transformer.named_modules():
        if isinstance(module, nn.Linear):
            for theirs in {layer, native_name(layer) or layer}:
                named[theirs] = layer
                named |= {prefix + theirs.replace(".", "_"): layer for prefix in _WITH_UNDERSCORES}
    return named


def _check(linear: Any, layer: str, parts: Mapping[str, Tensor], file: Path) -> Kind:
    """Returns the kind of a layer's adapter; raises ConfigError if weights are missing or have the wrong shape."""
    names, shape = parts.keys() - {"alpha"}, (linear.out_features, linear.in_features)
    kind: Kind = "lokr" if any(name in LOKR_PARTS for name in names) else "dora" if MAGNITUDE in names else "lora"
    if kind == "lokr":
        ways = [{half} | other for half in ("lokr_w1",) for other in ({"lokr_w2"}, {"lokr_w2_a", "lokr_w2_b"})]
        ways += [{"lokr_w1_a", "lokr_w1_b"} | other for other in ({"lokr_w2"}, {"lokr_w2_a", "lokr_w2_b"})]
        if names not in ways:
            raise ConfigError(f"{file}: {layer} has {', '.join(sorted(names))}; {_ONLY}")
        halves = [_product(parts, half) for half in ("lokr_w1", "lokr_w2")]
        found: Any = halves[0] and halves[1] and tuple(a * b for a, b in zip(*halves, strict=True))
    else:
        if names - {MAGNITUDE} != {"lora_A.weight", "lora_B.weight"}:
            raise ConfigError(f"{file}: {layer} has {', '.join(sorted(names))}; {_ONLY}")
        first, second = parts["lora_A.weight"], parts["lora_B.weight"]
        fits = first.ndim == second.ndim == 2 and len(first) == second.shape[1]
        found = (len(second), first.shape[1]) if fits else None
        if MAGNITUDE in names and tuple(parts[MAGNITUDE].squeeze().shape) != shape[:1]:
            raise ConfigError(
                f"{file}: the magnitude of {layer} has shape {tuple(parts[MAGNITUDE].shape)}; only one per output can "
                "be continued"
            )
    if found != shape:
        raise ConfigError(
            f"{file} was trained for another architecture: the shape of {layer} is {found or 'inconsistent'} in "
            f"the file and {shape} in the model"
        )
    return kind


def _product(parts: Mapping[str, Tensor], half: str) -> tuple[int, int] | None:
    """Returns the shape of w1 or w2; None if it is not a matrix."""
    tensors = [parts[half]] if half in parts else [parts[f"{half}_a"], parts[f"{half}_b"]]
    if any(tensor.ndim != 2 for tensor in tensors) or (len(tensors) > 1 and tensors[0].shape[1] != len(tensors[1])):
        return None
    return len(tensors[0]), tensors[-1].shape[1]


def _with_scale(parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns a layer's weights without alpha, after multiplying alpha / rank into B (LoRA, DoRA) or w1 (LoKr)."""
    tensors = {name: tensor for name, tensor in parts.items() if name != "alpha"}
    rank = rank_of(tensors)
    scale = float(parts["alpha"]) / rank if "alpha" in parts and rank else 1.0
    into = next(name for name in ("lora_B.weight", "lokr_w1", "lokr_w1_a") if name in tensors)
    tensors[into] = tensors[into] * scale
    if MAGNITUDE in tensors:
        tensors[MAGNITUDE] = tensors[MAGNITUDE].reshape(-1)
    return tensors


def rank_of(parts: Mapping[str, Tensor]) -> int:
    """Returns the rank of a layer's adapter; 0 for a LoKr of two whole matrices, whose alpha has no meaning."""
    ranks = [len(parts[name]) for name in ("lora_A.weight", "lokr_w2_b", "lokr_w1_b") if name in parts]
    return ranks[0] if ranks else 0


def special_state(layer: Any) -> dict[str, Tensor]:
    """Returns a layer's LoKr weights with the scale multiplied in, or its DoRA magnitude, on the CPU."""
    if kind_of(layer) == "lokr":
        parts = {part: values[ADAPTER] for part in LOKR_PARTS if ADAPTER in (values := getattr(layer, part))}
        into = "lokr_w1" if "lokr_w1" in parts else "lokr_w1_a"
        parts[into] = parts[into].detach() * layer.scaling[ADAPTER]
    else:
        parts = {MAGNITUDE: getattr(layer, MAGNITUDE)[ADAPTER].weight}
    return {name: tensor.detach().cpu().contiguous() for name, tensor in parts.items()}


def put(layer: Any, parts: Mapping[str, Tensor]) -> None:
    """Copies a file's LoKr weights or DoRA magnitude into a layer; a LoKr may have other factors than peft's."""
    if kind_of(layer) == "dora":
        getattr(layer, MAGNITUDE)[ADAPTER].weight = nn.Parameter(parts[MAGNITUDE].clone())
        return
    for part in LOKR_PARTS:
        values = getattr(layer, part)
        if ADAPTER in values:
            del values[ADAPTER]
        if part in parts:
            factor = layer.scaling[ADAPTER] if part in ("lokr_w1", "lokr_w1_a") else 1.0
            values[ADAPTER] = nn.Parameter(parts[part] / factor)


def comfy_names(layer: str, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Renames a layer's weights for ComfyUI; a LoKr gets an alpha equal to its rank, as its scale is multiplied in."""
    native = native_name(layer)
    if native is None:
        raise RuntimeError(f"{layer} has an adapter, but no name in the Wan repository")
    named = {f"{COMFY}{native}.{name}": tensor for name, tensor in parts.items() if name != MAGNITUDE}
    if MAGNITUDE in parts:
        named[f"{COMFY}{native}.dora_scale"] = parts[MAGNITUDE][:, None].contiguous()
    if rank_of(parts) and "lora_A.weight" not in parts:
        named[f"{COMFY}{native}.alpha"] = torch.tensor(float(rank_of(parts)))
    return named


def write_peft_lokr(folder: Path, state: Mapping[str, Tensor]) -> list[str]:
    """Writes a LoKr as a peft adapter folder; returns the call that loads it, or nothing if peft cannot load it.

    diffusers does not load LoKrs for Wan. peft can load only those whose w1 and w2 have the sizes that peft derives
    from its configuration.
    """
    from safetensors.torch import save_file

    layers = sorted({name[: name.index(".lokr_")] for name in state})
    parts = {
        layer: {part: state[f"{layer}.{part}"] for part in LOKR_PARTS if f"{layer}.{part}" in state} for layer in layers
    }
    rank = max((rank_of(each) for each in parts.values()), default=0) or max(
        map(max, (it.shape for it in state.values()))
    )
    factors = [-1, *sorted({side for each in parts.values() for side in _product(each, "lokr_w1") or ()})]
    for factor in factors:
        if all(_is_pefts(each, rank, factor) for each in parts.values()):
            config_for("lokr", rank, rank, layers, factor).save_pretrained(str(folder))
            named = {f"base_model.model.{name}": tensor for name, tensor in state.items()}
            save_file(named, str(folder / PEFT_FILE), {"format": "pt"})
            return [f"peft.PeftModel.from_pretrained(pipeline.transformer, {str(folder)!r})"]
    return []


def _is_pefts(parts: Mapping[str, Tensor], rank: int, factor: int) -> bool:
    """Whether peft would choose these sizes for a layer's w1 and w2."""
    from peft.tuners.lokr.layer import factorization

    small, large = _product(parts, "lokr_w1"), _product(parts, "lokr_w2")
    if small is None or large is None or "lokr_w1" not in parts:
        return False
    sides = [factorization(a * b, factor) for a, b in zip(small, large, strict=True)]
    is_whole = rank >= max(large) / 2
    return [*zip(small, large, strict=True)] == sides and ("lokr_w2" in parts if is_whole else rank_of(parts) == rank)
