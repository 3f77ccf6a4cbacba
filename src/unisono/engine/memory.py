"""Out of memory: how it is told, what is tried next, and what is said when nothing is left to try."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unisono.engine.build import Parts
from unisono.planning.choose import Demand, in_words

_OUT_OF_MEMORY = re.compile(r"out of memory|can't allocate memory|not enough memory|ALLOC_FAILED", re.IGNORECASE)
_AMOUNT = r"([\d.]+) (GiB|MiB|KiB|bytes)"
_UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "bytes": 1}
_OTHERS = re.compile(
    r"(Process \d+ has|Including non-PyTorch memory, this process has) [^.]*\.\d+ \w+ memory in use\. "
)
_FILE = "memory.json"


class OutOfMemoryTogether(Exception):
    """Some rank ran out of memory, all know it, and nothing of the step has happened: it can be done again."""

    def __init__(self, here: str | None) -> None:
        super().__init__(here or "another rank ran out of memory")
        self.here = here  # what this rank met; None if it was another one


class OutOfMemoryHere(Exception):
    """This rank ran out of memory where the others cannot be told: all must start again from the last checkpoint."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out, on a GPU or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)) is not None


def in_one_line(error: BaseException) -> str:
    """What the allocator said, without its advice."""
    text = _OTHERS.sub("", " ".join(str(error).split()))
    return text.partition(" If reserved but unallocated")[0].partition(" See documentation")[0] or type(error).__name__


def smaller(micro_batch: int, share: int) -> int | None:
    """The next size to try after `micro_batch` did not fit a rank's `share` of the batch; None if there is none."""
    tried = min(micro_batch, share)
    return None if tried <= 1 else -(-tried // 2)


def remember(run_folder: Path, micro_batch: int) -> None:
    """Leaves the size to try next for the attempt after this one, whoever starts it."""
    run_folder.mkdir(parents=True, exist_ok=True)
    draft = run_folder / f".{_FILE}.{os.getpid()}"
    draft.write_text(json.dumps({"micro_batch": micro_batch}))
    draft.replace(run_folder / _FILE)


def remembered(run_folder: Path) -> int | None:
    """The largest micro-batch that is known not to have failed in this run; None if nothing is known."""
    try:
        size = json.loads((run_folder / _FILE).read_text())["micro_batch"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return size if isinstance(size, int) and size >= 1 else None


def advice(rank: int, message: str, parts: Parts, *, recomputes: bool) -> str:
    """By how much one sample does not fit, and what would help, in numbers."""
    place, strategy = parts.strategy.place, parts.strategy
    demand = Demand(
        weights=_bytes(strategy.model.parameters()),
        gradients=_bytes(parameter for _, parameter in strategy.parameters),
        optimizer=_bytes(parts.updater.tensors().values()),
        average=0 if parts.ema is None else _bytes(parts.ema.tensors().values()),
    )
    where = f" on rank {rank}" if place.world > 1 else ""
    begin = f"even one sample does not fit{where}: {message}"
    wanted, free = _amount(rf"allocate {_AMOUNT}", message), _free(message)
    if wanted is not None and free is not None:
        begin = f"even one sample does not fit{where}: {in_words(wanted)} more were wanted, {in_words(free)} were free"
        missing = wanted - free
        begin += f", so at least {in_words(missing)} are missing" if missing > 0 else ", but in pieces"
    kept = f"weights, gradients, optimizer state and average take {in_words(demand.total)} on each device"
    helps = []
    if place.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(place.device)
        activations = max(0, peak - demand.total)
        kept += f", activations and the rest {in_words(activations)} before it failed"
        if not recomputes:
            helps.append(f"activation_checkpointing (frees most of the activations' {in_words(activations)})")
    elif not recomputes:
        helps.append("activation_checkpointing")
    if not strategy.sharded:
        num = max(place.world, 2)
        each = in_words(demand.total // num)
        helps.append(f"strategy fsdp on {num} GPUs ({each} each instead of {in_words(demand.total)})")
    if not strategy.settings.fsdp_cpu_offload:
        helps.append(f"fsdp with fsdp_cpu_offload (takes {in_words(demand.total)} off the GPUs together)")
    if parts.ema is not None:
        helps.append(f"ema_decay 0 (saves {in_words(demand.average)})")
    return f"{begin}; {kept}. What would help: {', '.join(helps)}"


def _free(message: str) -> int | None:
    """What was left, of the device or of what this process may take of it."""
    free, allowed = _amount(rf"{_AMOUNT} is free", message), _amount(rf"{_AMOUNT} allowed", message)
    if free is None or allowed is None:
        return free
    taken = _amount(rf"memory {_AMOUNT} is allocated by PyTorch", message) or 0
    return min(free, max(0, allowed - taken))


def _amount(pattern: str, text: str) -> int | None:
    match = re.search(pattern, text)
    return None if match is None else int(float(match[1]) * _UNITS[match[2]])


def _bytes(tensors: Any) -> int:
    return sum(_local(tensor).numel() * tensor.element_size() for tensor in tensors)


def _local(tensor: Tensor) -> Tensor:
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()
