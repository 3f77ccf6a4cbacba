"""Seeds the global random generators, for code that draws from them: datasets, dropout, previews, initial weights."""

from __future__ import annotations

import random
from collections.abc import Iterable

import numpy as np
import torch


def seed_everything(key: int, devices: Iterable[torch.device] = ()) -> None:
    """Seeds python, numpy and torch, on the CPU and on `devices`."""
    seed = key & 0x7FFFFFFFFFFFFFFF
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed every device, which is 100 times slower
    for device in devices:
        if device.type == "cuda":
            torch.cuda.default_generators[device.index].manual_seed(seed)
