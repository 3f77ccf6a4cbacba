"""Converts between the names of Wan's weights in diffusers, in the Wan repository ("native"), and in ComfyUI.

ComfyUI's names are native names with a prefix. Wrappers (DDP, FSDP, a compiler) may have added parts to any name. This
module also derives a transformer's configuration from the shapes of its weights.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from unisono.errors import ConfigError
from unisono.recipes.wan.models.unsupported import refuse_weights

Shapes = Mapping[str, tuple[int, ...]]

MAGNITUDE = "lora_magnitude_vector"  # peft's name of a DoRA's magnitudes
_WRAPPERS = ("module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")
_WRAPPER = re.compile(rf"(?:^|(?<=\.))(?:{'|'.join(_WRAPPERS)})\.")
COMFY = "diffusion_model."  # the prefix that ComfyUI adds to native names
_PREFIXES = (f"model.{COMFY}", COMFY)
_BLOCK = re.compile(r"blocks\.(\d+)\.(.+)")
_EMBEDDER = "condition_embedder"
_OUTSIDE = {
    "patch_embedding": "patch_embedding",
    "time_embedding.0": f"{_EMBEDDER}.time_embedder.linear_1",
    "time_embedding.2": f"{_EMBEDDER}.time_embedder.linear_2",
    "time_projection.1": f"{_EMBEDDER}.time_proj",
    "text_embedding.0": f"{_EMBEDDER}.text_embedder.linear_1",
    "text_embedding.2": f"{_EMBEDDER}.text_embedder.linear_2",
    "img_emb.proj.0": f"{_EMBEDDER}.image_embedder.norm1",
    "img_emb.proj.1": f"{_EMBEDDER}.image_embedder.ff.net.0.proj",
    "img_emb.proj.3": f"{_EMBEDDER}.image_embedder.ff.net.2",
    "img_emb.proj.4": f"{_EMBEDDER}.image_embedder.norm2",
    "head.head": "proj_out",
}
_ALONE = {"head.modulation": "scale_shift_table", "img_emb.emb_pos": f"{_EMBEDDER}.image_embedder.pos_embed"}
_PROJECTIONS = {"q": "to_q", "k": "to_k", "v": "to_v", "o": "to_out.0", "norm_q": "norm_q", "norm_k": "norm_k"}
_INSIDE = {
    **{f"self_attn.{theirs}": f"attn1.{ours}" for theirs, ours in _PROJECTIONS.items()},
    **{f"cross_attn.{theirs}": f"attn2.{ours}" for theirs, ours in _PROJECTIONS.items()},
    **{"cross_attn.k_img": "attn2.add_k_proj", "cross_attn.v_img": "attn2.add_v_proj"},
    "cross_attn.norm_k_img": "attn2.norm_added_k",
    # The norm before cross-attention is norm3 in the Wan repository and norm2 in diffusers.
    **{"norm1": "norm1", "norm2": "norm3", "norm3": "norm2"},
    **{"ffn.0": "ffn.net.0.proj", "ffn.2": "ffn.net.2"},
}
_TO_OUTSIDE, _TO_INSIDE, _TO_ALONE = (
    {ours: theirs for theirs, ours in names.items()} for names in (_OUTSIDE, _INSIDE, _ALONE)
)
HEAD_WIDTH = 128  # width of an attention head in all published models
_UNUSED = ".norm_added_q."  # part of weight names in published image-to-video files that no model uses


def plain_name(name: str) -> str:
    """Removes the parts of a name that wrappers (DDP, FSDP, checkpointing, a compiler) added."""
    return _WRAPPER.sub("", name)


def is_adapter(name: str) -> bool:
    """Whether a weight belongs to a LoRA, DoRA or LoKr."""
    return ".lora_" in name or ".lokr_" in name


def base_name(name: str) -> str | None:
    """Returns the name that a weight has in a model without a LoRA; None for a weight of the LoRA itself."""
    plain = plain_name(name)
    return None if is_adapter(plain) else plain.replace(".base_layer.", ".")


def diffusers_names(names: Iterable[str], label: str = "the file") -> dict[str, str]:
    """Maps the diffusers name of each transformer weight to its name in the file."""
    names = list(names)
    plain = {plain_name(name): name for name in names}
    if len(plain) < len(names):
        raise ConfigError(
            f"{label} contains the same weights twice, once wrapped and once not; pass a file with a single model"
        )
    for prefix in _PREFIXES:
        if any(name.startswith(prefix) for name in plain):  # names without the prefix are a VAE or a text encoder
            plain = {name.removeprefix(prefix): theirs for name, theirs in plain.items() if name.startswith(prefix)}
            break
    plain = {name: theirs for name, theirs in plain.items() if _UNUSED not in name}
    if any(map(is_adapter, plain)):
        raise ConfigError(f"{label} is a LoRA, not a model; pass the model that it was trained for")
    refuse_weights(plain, label)
    if any(name.startswith(_EMBEDDER) for name in plain):
        return plain
    mapping: dict[str, str] = {}
    unknown: list[str] = []
    for name, theirs in plain.items():
        if (ours := _from_native(name)) is None:
            unknown.append(name)
        else:
            mapping[ours] = theirs
    if unknown or not mapping:
        some = f" ({', '.join(unknown[:3])}{f' and {len(unknown) - 3} more' if len(unknown) > 3 else ''})"
        raise ConfigError(
            f"{label} is not a Wan transformer{some if unknown else ''}; expected the weights of one, by "
            "diffusers', the Wan repository's or ComfyUI's names"
        )
    return mapping


def _from_native(name: str) -> str | None:
    if name in _ALONE:
        return _ALONE[name]
    layer, _, kind = name.rpartition(".")
    if (inside := _BLOCK.fullmatch(name)) is None:
        return f"{_OUTSIDE[layer]}.{kind}" if layer in _OUTSIDE else None
    number, rest = inside.groups()
    if rest == "modulation":
        return f"blocks.{number}.scale_shift_table"
    layer, _, kind = rest.rpartition(".")
    return f"blocks.{number}.{_INSIDE[layer]}.{kind}" if layer in _INSIDE else None


def native_name(layer: str) -> str | None:
    """Returns the Wan repository's name for a layer of diffusers' transformer; None if it has no such layer."""
    if (inside := _BLOCK.fullmatch(layer)) is None:
        return _TO_OUTSIDE.get(layer)
    number, rest = inside.groups()
    return f"blocks.{number}.{_TO_INSIDE[rest]}" if rest in _TO_INSIDE else None


def native_weight_name(name: str) -> str | None:
    """Returns the Wan repository's name for a weight of diffusers' transformer; None if it has no such weight."""
    if name in _TO_ALONE:
        return _TO_ALONE[name]
    layer, _, kind = name.rpartition(".")
    if kind == "scale_shift_table":
        return f"{layer}.modulation"
    theirs = native_name(layer)
    return None if theirs is None else f"{theirs}.{kind}"


def config_of(shapes: Shapes, label: str = "the file", num_heads: int = 0) -> dict[str, Any]:
    """Derives a transformer's configuration, as diffusers' arguments, from the shapes of its weights.

    The shapes do not show the number of heads, because queries are normalised over all heads. If `num_heads` is 0,
    heads are assumed to have the same width as in all published models.
    """
    try:
        width, in_channels, *patch = shapes["patch_embedding.weight"]
        _, text_dim = shapes[f"{_EMBEDDER}.text_embedder.linear_1.weight"]
        _, freq_dim = shapes[f"{_EMBEDDER}.time_embedder.linear_1.weight"]
        ffn_dim, _ = shapes["blocks.0.ffn.net.0.proj.weight"]
        out, _ = shapes["proj_out.weight"]
    except (KeyError, ValueError) as error:
        raise ConfigError(f"{label} is not a complete Wan transformer ({error}); copy or download it again") from None
    if width % (num_heads or HEAD_WIDTH):
        raise ConfigError(
            f"{label}: width {width} is not a multiple of {num_heads or HEAD_WIDTH}; set model_config, which gives the "
            "number of heads"
        )
    num_heads = num_heads or width // HEAD_WIDTH
    image = shapes.get(f"{_EMBEDDER}.image_embedder.norm1.weight")
    added = shapes.get("blocks.0.attn2.add_k_proj.weight")
    positions = shapes.get(f"{_EMBEDDER}.image_embedder.pos_embed")
    return {
        "patch_size": tuple(patch),
        "num_attention_heads": num_heads,
        "attention_head_dim": width // num_heads,
        "in_channels": in_channels,
        "out_channels": out // max(1, math.prod(patch)),
        "text_dim": text_dim,
        "freq_dim": freq_dim,
        "ffn_dim": ffn_dim,
        "num_layers": num_layers(shapes),
        "cross_attn_norm": "blocks.0.norm2.weight" in shapes,
        "image_dim": image[0] if image else None,
        "added_kv_proj_dim": added[-1] if added else None,
        "pos_embed_seq_len": positions[-2] if positions and len(positions) == 3 else None,
    }


def num_layers(names: Iterable[str]) -> int:
    """Returns the number of transformer blocks that these weights belong to."""
    return len({block.group(1) for name in names if (block := _BLOCK.fullmatch(name))})
