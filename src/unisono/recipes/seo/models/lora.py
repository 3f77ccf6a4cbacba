"""Adds, merges and saves LoRAs."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

    from unisono.recipes.seo.settings import Config

ADAPTER = "adapter"
"""Subfolder of an exported model that contains the LoRA."""


def add_lora(model: Any, config: Config, trained: Sequence[str] = ()) -> Any:
    """Adds a LoRA and freezes all other weights, except the modules in `trained`, such as a new head.

    Returns the model unchanged if lora_rank is 0.
    """
    if not config.lora_rank:
        return model
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise ConfigError('lora_rank needs the package peft: pip install "unisono[seo]"') from None

    available = sorted({name.rpartition(".")[2] for name in _linear_in_blocks(model)})
    targets = [word.strip() for word in config.lora_targets.split(",") if word.strip()]
    unknown = [word for word in targets if not any(_ends(name, word) for name in _linear_in_blocks(model))]
    if unknown or not available:
        has = (
            f"this model's blocks have {', '.join(available)}"
            if available
            else "this model has no blocks of linear layers"
        )
        raise ConfigError(f"lora_targets: there is no layer {unknown[0] if unknown else '…'!r}; {has}")
    pattern = "|".join(map(re.escape, targets or available))
    alpha: Any = config.lora_alpha if config.lora_alpha is not None else 2 * config.lora_rank
    lora_config = LoraConfig(
        r=config.lora_rank,
        lora_alpha=alpha,
        lora_dropout=config.lora_dropout,
        # Select only layers in numbered blocks, because poolers and heads often have layers of the same names.
        target_modules=rf"(?:.*\.)?\d+\.(?:.*\.)?(?:{pattern})",
        modules_to_save=list(trained) or None,
    )
    with warnings.catch_warnings():  # peft warns about GPT-2's transposed layers, but handles them
        warnings.simplefilter("ignore")
        return get_peft_model(model, lora_config)


def is_lora(model: nn.Module) -> bool:
    """Returns whether a model has a LoRA."""
    return hasattr(model, "merge_and_unload")


def merged(model: Any) -> Any:
    """Returns a copy of the model with its LoRA merged, or the model itself if it has none."""
    return copy.deepcopy(model).merge_and_unload() if is_lora(model) else model


def write_adapter(model: Any, folder: Path, base: str) -> None:
    """Writes the LoRA in peft's format, with `base` as its base model; does nothing if the model has no LoRA."""
    if not is_lora(model):
        return
    lora_config = model.peft_config["default"]
    before, lora_config.base_model_name_or_path = lora_config.base_model_name_or_path, base
    try:
        model.save_pretrained(str(folder / ADAPTER), safe_serialization=True, save_embedding_layers=False)
    finally:
        lora_config.base_model_name_or_path = before


def _linear_in_blocks(model: nn.Module) -> Iterable[str]:
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | Conv1D) and any(part.isdigit() for part in name.split(".")[:-1]):
            yield name


def _ends(name: str, with_: str) -> bool:
    return name == with_ or name.endswith(f".{with_}")
