"""Detects whether a dataset or a loss draws random numbers, because the hand-written loop then has to set seeds.

Otherwise the loop sets no seeds: this takes time that a loop without augmentation or dropout would not spend.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch


def draws_random_numbers(work: Callable[[], Any], device: torch.device) -> bool:
    """Calls `work`; returns whether it changed the state of a global random generator."""
    before = _states(device)
    work()
    return any(
        bool((one != other).any()) if isinstance(one, torch.Tensor) else one != other
        for one, other in zip(before, _states(device), strict=True)
    )


def _states(device: torch.device) -> list[Any]:
    _, keys, position, *_ = np.random.get_state()
    states = [random.getstate(), torch.default_generator.get_state(), torch.as_tensor(np.append(keys, position))]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states
