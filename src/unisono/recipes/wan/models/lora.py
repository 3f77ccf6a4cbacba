"""LoRA on a Wan transformer: adds small trainable matrices to frozen weights, and reads and writes LoRA files.

A LoRA adds scale · B A to a weight, with scale = alpha / rank. In the files that we write, the scale is multiplied into
B: ComfyUI and older versions of diffusers do not read alpha from where diffusers stores it, and would use a different
scale.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unisono.checkpoint.tensor_file import TensorFile
from unisono.errors import ConfigError, UserError
from unisono.recipes.wan.models.adapter_files import (
    PEFT_FILE,
    comfy_names,
    is_special,
    put,
    read_special,
    special_state,
    write_peft_lokr,
)
from unisono.recipes.wan.models.adapters import (
    ADAPTER,
    LOKR_PARTS,
    adapter_layers,
    config_for,
    draw,
    kind_of,
    use_own_forward,
)
from unisono.recipes.wan.models.weight_names import MAGNITUDE
from unisono.recipes.wan.models.weights import reading_safetensors, refuse_pickle
from unisono.recipes.wan.settings import Kind

TARGETS = ("to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2")
"""Name endings of the layers that get a LoRA: all projections of both attentions, and the feed-forward layers."""
IMAGE_TARGETS = ("add_k_proj", "add_v_proj")
"""Name endings of the layers for attention to image embeddings, in models that have it."""
FILE = "pytorch_lora_weights.safetensors"
SECOND = "transformer_2"  # folder with the low-noise expert's FILE, next to the high-noise expert's FILE
COMFY_FILE = {"transformer": "comfyui_lora.safetensors", SECOND: "comfyui_lora_low_noise.safetensors"}
"""The file names for ComfyUI, which expects the files of both experts in one folder."""
SPECIAL_PARTS = (*LOKR_PARTS, MAGNITUDE)
_MARKS = (".lora_", ".lokr_")
_LARGEST_RANK = 2**14


def add_lora(
    transformer: Any,
    rank: int,
    alpha: float | None = None,
    targets: Sequence[str] = TARGETS,
    *,
    initialise: bool = True,
    kind: Kind = "lora",
    lokr_factor: int = -1,
    adapter: str = ADAPTER,
) -> None:
    """Adds a LoRA, initially without effect, to the layers whose names end in one of `targets`; freezes all else.

    The LoRA's weights are allocated and initialised even if the model is on the meta device (unless `initialise` is
    False). Their random values depend on the seed and the layers' names, not on how the model was built. `kind` selects
    LoRA, DoRA or LoKr. A transformer can have several plain LoRAs with different names (`adapter`), of which only the
    last one added is active.
    """
    if not 0 < rank <= _LARGEST_RANK:
        raise ConfigError(f"lora_rank: expected a whole number from 1 to {_LARGEST_RANK}, got {rank}")
    alpha = rank if alpha is None else alpha
    if not 0 < alpha < math.inf:
        raise ConfigError(f"lora_alpha: expected a number above 0, got {alpha}")
    layers = targeted(transformer, targets)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Already found a `peft_config`")  # adding a second LoRA is intended
        transformer.add_adapter(config_for(kind, rank, alpha, layers, lokr_factor), adapter_name=adapter)
    for name, layer in adapter_layers(transformer, adapter).items():
        use_own_forward(layer)
        if initialise:
            draw(layer, name, adapter)


def targeted(transformer: nn.Module, targets: Sequence[str]) -> list[str]:
    """Returns the full names of the layers whose names end in one of the targets."""
    linear = list(_linear_layers(transformer))
    layers: list[str] = []
    for target in targets:
        ends = [name for name in linear if name == target or name.endswith(f".{target}")]
        if not ends:
            raise ConfigError(
                f"lora_targets: no linear layer's name ends in {target}; the default is {', '.join(TARGETS)}"
            )
        layers += ends
    if not layers:
        raise ConfigError(f"lora_targets is empty; the default is {', '.join(TARGETS)}")
    return sorted(set(layers))


def _linear_layers(transformer: nn.Module) -> dict[str, nn.Linear]:
    """Returns the transformer's own linear layers by name, whether or not they have LoRAs."""
    modules = transformer.named_modules()
    return {
        f"{name}.".replace(".base_layer.", ".")[:-1]: module
        for name, module in modules
        if isinstance(module, nn.Linear) and ".lora_" not in name
    }


def lora_state(transformer: nn.Module, adapter: str = ADAPTER) -> dict[str, Tensor]:
    """Returns the adapter's weights on the CPU, by their names in files, with the scale multiplied in."""
    state = {}
    for name, layer in adapter_layers(transformer, adapter).items():
        if kind_of(layer) != "lokr":
            first, second = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
            state[f"{name}.lora_A.weight"] = first.detach().cpu().contiguous()
            state[f"{name}.lora_B.weight"] = (second.detach() * layer.scaling[adapter]).cpu().contiguous()
        if kind_of(layer) != "lora":
            state |= {f"{name}.{part}": tensor for part, tensor in special_state(layer).items()}
    return state


def save_lora(
    folder: Path,
    high: Mapping[str, Tensor] | None,
    low: Mapping[str, Tensor] | None = None,
    file_format: str | None = None,
) -> str:
    """Writes LoRAs for WanPipeline.load_lora_weights and for ComfyUI; returns a line that says how to load them.

    `high` belongs to `transformer` (the only one, or the high-noise expert), `low` to `transformer_2`. `file_format` is
    diffusers or comfyui; None writes both.
    """
    if file_format == "native":
        raise ConfigError("--format native is for whole models; a LoRA has the formats diffusers and comfyui")
    from diffusers import WanPipeline
    from safetensors.torch import save_file

    parts = {"transformer": (folder, high), SECOND: (folder / SECOND, low)}
    states = {part: (place, state) for part, (place, state) in parts.items() if state is not None}
    for part, (place, _) in states.items():
        for file in (place / FILE, place / COMFY_FILE[part], place / PEFT_FILE):
            if file.exists():
                raise UserError(f"{file} already exists and is not overwritten; choose another folder")
    how, comfy = [], []
    for part, (place, state) in states.items():
        place.mkdir(parents=True, exist_ok=True)
        if file_format != "comfyui" and any(".lokr_" in name for name in state):
            how += write_peft_lokr(place, state)
        elif file_format != "comfyui":
            # One file per transformer. load_into_transformer_2 expects the prefix "transformer" in both files.
            WanPipeline.save_lora_weights(str(place), transformer_lora_layers=dict(state))
            into = ", load_into_transformer_2=True" if part == SECOND else ""
            how.append(f"pipeline.load_lora_weights({str(place)!r}{into})")
        if file_format != "diffusers":
            save_file(_for_comfy(state), str(place / COMFY_FILE[part]), {"format": "pt"})
            comfy.append(str(place / COMFY_FILE[part]))
    uses = [f"load it with {' and '.join(how)}"] if how else []
    uses += [f"for ComfyUI: {' and '.join(comfy)}"] if comfy else []
    return f"LoRA: {'; '.join(uses)}"


def _for_comfy(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    by_layer: dict[str, dict[str, Tensor]] = {}
    for name, tensor in state.items():
        layer = next(name[: name.index(mark)] for mark in _MARKS if mark in name)
        by_layer.setdefault(layer, {})[name[len(layer) + 1 :]] = tensor
    named: dict[str, Tensor] = {}
    for layer, parts in by_layer.items():
        named |= comfy_names(layer, parts)
    return named


@dataclass(frozen=True)
class LoraFile:
    """A LoRA file's content, checked to fit a transformer."""

    state: Mapping[str, Tensor]
    """The weights, keyed by the transformer's layer names, with the scale multiplied into B."""
    layers: Sequence[str]
    rank: int
    """The largest rank among the layers."""
    kind: Kind = "lora"


def open_lora(transformer: nn.Module, path: Path, rank: int = 0, part: str = "transformer") -> LoraFile:
    """Reads a LoRA from a file or from a folder that `save_lora` wrote; raises ConfigError if it does not fit.

    Supports files from diffusers, ComfyUI and musubi. `rank` is the setting lora_rank, or 0.
    """
    file = _file(path, part)
    raw, metadata = _raw(file)
    if is_special(raw):
        kind, state = read_special(raw, transformer, part, file)
        return _special_file(file, kind, state, rank)
    state = _read(file, part, raw, metadata)
    pairs = {name.removesuffix(".lora_A.weight") for name in state if name.endswith(".lora_A.weight")}
    if not pairs or {f"{name}.lora_{half}.weight" for name in pairs for half in "AB"} != state.keys():
        odd = next(
            (name for name in state if not name.endswith((".lora_A.weight", ".lora_B.weight"))), "an unpaired half"
        )
        raise ConfigError(f"{file}: only LoRAs of plain A and B matrices can be continued, not {odd}")
    own = _linear_layers(transformer)
    for name in sorted(pairs):
        first, second = state[f"{name}.lora_A.weight"], state[f"{name}.lora_B.weight"]
        linear = own.get(name)
        shape = linear and (linear.out_features, linear.in_features)
        if (
            first.ndim != 2
            or second.ndim != 2
            or (second.shape[0], first.shape[1]) != shape
            or len(first) != second.shape[1]
        ):
            raise ConfigError(
                f"{file} was trained for another architecture: the shape of {name} is {tuple(second.shape)} · "
                f"{tuple(first.shape)} in the file and {shape or 'missing'} in the model"
            )
    rank_in_file = max(len(state[f"{name}.lora_A.weight"]) for name in pairs)
    if rank not in (0, rank_in_file):
        raise ConfigError(
            f"lora_rank {rank}: the LoRA in {file} has rank {rank_in_file}, which cannot change; remove lora_rank"
        )
    return LoraFile(state, sorted(pairs), rank_in_file)


def _special_file(file: Path, kind: Kind, state: Mapping[str, Tensor], rank: int) -> LoraFile:
    ranks = [len(state[name]) for name in state if name.endswith((".lora_A.weight", ".lokr_w2_b", ".lokr_w1_b"))]
    rank_in_file = max(ranks, default=rank or 1)  # a LoKr of whole matrices has no rank
    if rank not in (0, rank_in_file):
        raise ConfigError(
            f"lora_rank {rank}: the adapter in {file} has rank {rank_in_file}, which cannot change; remove lora_rank"
        )
    layers = sorted({name[: name.index(mark)] for name in state for mark in _MARKS if mark in name})
    return LoraFile(state, layers, rank_in_file, kind)


def load_lora(
    transformer: Any, path: Path, alpha: float | None = None, part: str = "transformer", adapter: str = ADAPTER
) -> None:
    """Adds the LoRA in a file (see `open_lora`), with the file's rank, to continue training it.

    `alpha` (default: the rank) changes how fast the LoRA learns from now on, not its output.
    """
    lora = open_lora(transformer, path, part=part)
    state = lora.state
    # Layers of smaller rank are extended to the largest rank; the added rows and columns have no initial effect.
    add_lora(transformer, lora.rank, alpha, lora.layers, kind=lora.kind, adapter=adapter)
    with torch.no_grad():
        for name, layer in adapter_layers(transformer, adapter).items():
            if lora.kind != "lora":
                put(layer, {part: state[f"{name}.{part}"] for part in SPECIAL_PARTS if f"{name}.{part}" in state})
            if lora.kind == "lokr":
                continue
            first, second = state[f"{name}.lora_A.weight"], state[f"{name}.lora_B.weight"]
            layer.lora_A[adapter].weight[: len(first)] = first
            layer.lora_B[adapter].weight[:, : len(first)] = second / layer.scaling[adapter]


def _file(path: Path, part: str) -> Path:
    if not path.exists():
        raise ConfigError(f"{path}: no such LoRA; expected a .safetensors file, or a folder with {FILE}")
    if path.is_dir():
        folder = path / SECOND if part == SECOND and (path / SECOND).is_dir() else path
        path = folder / (PEFT_FILE if (folder / PEFT_FILE).is_file() else FILE)
        if not path.is_file():
            raise ConfigError(f"{path.parent} has no {FILE}; pass the LoRA's .safetensors file")
    refuse_pickle(path)
    return path


def _raw(file: Path) -> tuple[dict[str, Tensor], str]:
    """Reads the tensors and diffusers' metadata from a file."""
    with reading_safetensors(file):
        opened = TensorFile(file)
        metadata = opened.metadata.get("lora_adapter_metadata", "{}")
        return {name: opened.tensor(name) for name in opened.entries}, metadata


def _read(file: Path, part: str, raw: Mapping[str, Tensor], metadata: str) -> dict[str, Tensor]:
    """Returns the LoRA's weights by the names of the transformer's layers, with the scale multiplied into B."""
    from diffusers import WanPipeline

    names = {name.removeprefix("base_model.model."): name for name in raw}
    if any(name.startswith("blocks.") for name in names):
        names = {f"transformer.{name}": theirs for name, theirs in names.items()}
    try:
        state = WanPipeline.lora_state_dict({name: raw[theirs] for name, theirs in names.items()})
    except Exception as error:  # diffusers' converters raise many kinds of exceptions for unknown formats
        why = " ".join(str(error).split())[:200] or type(error).__name__
        raise ConfigError(f"{file} is not a LoRA of a Wan transformer ({why})") from None
    # A file may contain both experts under their own names, or a single one (of either kind) as "transformer".
    prefix = f"{part}." if any(name.startswith(f"{part}.") for name in state) else "transformer."
    scale = _scale(metadata, prefix, file)
    mine = {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
    return {name: tensor.float() * scale if ".lora_B." in name else tensor for name, tensor in mine.items()}


def _scale(metadata: str, prefix: str, file: Path) -> float:
    """Returns the scale in diffusers' metadata. Uses only numbers, because other entries can name code to import."""
    try:
        values = {name.removeprefix(prefix): value for name, value in json.loads(metadata).items()}
    except (ValueError, AttributeError, RecursionError):
        raise ConfigError(f"{file}: the LoRA's metadata is damaged; copy or download it again") from None
    rank, alpha = values.get("r"), values.get("lora_alpha")
    if rank is None or alpha is None:
        return 1.0
    numbers = all(isinstance(value, int | float) and 0 < value < math.inf for value in (rank, alpha))
    if not numbers or values.get("rank_pattern") or values.get("alpha_pattern") or values.get("use_dora"):
        raise ConfigError(f"{file}: a LoRA with an alpha per layer, or with DoRA, cannot be continued")
    return float(alpha / (math.sqrt(rank) if values.get("use_rslora") else rank))
