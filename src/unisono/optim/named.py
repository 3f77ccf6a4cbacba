"""Creates the optimizers of this package from their names in the setting `optimizer`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.optim.adafactor import Adafactor
from unisono.optim.combined import CombinedOptimizer
from unisono.optim.low_bit_adamw import LowBitAdamW
from unisono.optim.muon import Muon
from unisono.optim.prodigy import Prodigy
from unisono.optim.schedule_free import ScheduleFreeAdamW
from unisono.parallel.row_shards import RowShards
from unisono.settings import OptimSettings

OPTIMIZERS: dict[str, type[Optimizer]] = {
    "adamw8bit": LowBitAdamW,
    "adamw4bit": LowBitAdamW,
    "adafactor": Adafactor,
    "muon": Muon,
    "prodigy": Prodigy,
    "schedule_free_adamw": ScheduleFreeAdamW,
}


def make(
    parameters: Sequence[tuple[str, nn.Parameter]],
    settings: OptimSettings,
    shards: RowShards,
    not_for_muon: Collection[str] = (),
) -> Optimizer:
    """Creates the optimizer that the settings name. With muon, AdamW trains the matrices named in `not_for_muon`."""
    name = settings.optimizer.lower()
    rates: dict[str, Any] = {"lr": settings.learning_rate, "weight_decay": settings.weight_decay}
    adam: dict[str, Any] = {**rates, "betas": (settings.beta1, settings.beta2), "eps": settings.epsilon}
    if name in ("adamw8bit", "adamw4bit"):
        return LowBitAdamW(list(parameters), bits=8 if name == "adamw8bit" else 4, **adam, shards=shards)
    if name == "adafactor":
        return Adafactor(list(parameters), **rates, shards=shards)
    if name == "prodigy":
        return Prodigy(list(parameters), **adam, shards=shards)
    if name == "schedule_free_adamw":
        return ScheduleFreeAdamW(list(parameters), **adam, shards=shards)
    # The authors of Muon recommend AdamW for everything except the matrices of blocks.
    is_matrix = {name: parameter.dim() == 2 and name not in not_for_muon for name, parameter in parameters}
    matrices = [pair for pair in parameters if is_matrix[pair[0]]]
    others = [pair for pair in parameters if not is_matrix[pair[0]]]
    parts: list[Optimizer] = []
    if matrices:
        parts.append(Muon(matrices, **rates, momentum=settings.beta1, shards=shards))
    if others:
        parts.append(torch.optim.AdamW(others, **adam, fused=True))
    return CombinedOptimizer(parts)
