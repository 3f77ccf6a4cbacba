"""LoRA: few new weights beside those of a model, which stay as they are."""

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
"""The folder in an exported model that has the LoRA by itself."""


def add_lora(model: Any, config: Config, trained: Sequence[str] = ()) -> Any:
    """The model with a LoRA, all else frozen but the modules named `trained` (a new head); itself if rank is 0."""
    if not config.lora_rank:
        return model
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise ConfigError('lora_rank needs the package peft: pip install "unisono[seo]"') from None

    there = sorted({name.rpartition(".")[2] for name in _linear_in_blocks(model)})
    asked = [word.strip() for word in config.lora_targets.split(",") if word.strip()]
    unknown = [word for word in asked if not any(_ends(name, word) for name in _linear_in_blocks(model))]
    if unknown or not there:
        has = f"this model's blocks have {', '.join(there)}" if there else "this model has no blocks of linear layers"
        raise ConfigError(f"lora_targets: no layer is called {unknown[0] if unknown else '…'!r}; {has}")
    wanted = "|".join(map(re.escape, asked or there))
    alpha: Any = config.lora_alpha if config.lora_alpha is not None else 2 * config.lora_rank
    told = LoraConfig(
        r=config.lora_rank,
        lora_alpha=alpha,
        lora_dropout=config.lora_dropout,
        # Blocks are numbered; poolers and heads, whose layers often have the same names, are not.
        target_modules=rf"(?:.*\.)?\d+\.(?:.*\.)?(?:{wanted})",
        modules_to_save=list(trained) or None,
    )
    with warnings.catch_warnings():  # about layers of GPT-2 that are stored the other way round: it sees to that itself
        warnings.simplefilter("ignore")
        return get_peft_model(model, told)


def is_lora(model: nn.Module) -> bool:
    """Whether a model has a LoRA of add_lora()."""
    return hasattr(model, "merge_and_unload")


def merged(model: Any) -> Any:
    """A copy of the model with its LoRA worked in, as if all weights had been trained; itself if it has none."""
    return copy.deepcopy(model).merge_and_unload() if is_lora(model) else model


def write_adapter(model: Any, folder: Path, base: str) -> None:
    """Writes the LoRA by itself, as peft loads it on top of `base`; nothing if there is none."""
    if not is_lora(model):
        return
    told = model.peft_config["default"]
    before, told.base_model_name_or_path = told.base_model_name_or_path, base
    try:
        model.save_pretrained(str(folder / ADAPTER), safe_serialization=True, save_embedding_layers=False)
    finally:
        told.base_model_name_or_path = before


def _linear_in_blocks(model: nn.Module) -> Iterable[str]:
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | Conv1D) and any(part.isdigit() for part in name.split(".")[:-1]):
            yield name


def _ends(name: str, with_: str) -> bool:
    return name == with_ or name.endswith(f".{with_}")
