"""Collects learning histories in blocks of tasks, one file per block. An interruption costs at most one block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from unisono.engine.recipe import Work
from unisono.errors import ConfigError, UserError
from unisono.recipes.common.cache_files import remove_leftovers
from unisono.recipes.darkroom.data.histories import write_histories
from unisono.recipes.darkroom.data.history_file import HistoryFile, Origin
from unisono.recipes.darkroom.rooms import Room
from unisono.recipes.darkroom.sources import SOURCES
from unisono.recipes.darkroom.sources.source import Histories, run_learners

_MAX_BLOCK = 9  # maximum number of tasks per block
_MIN_BLOCKS = 8  # with few tasks, blocks are smaller, so that there are about this many to divide between ranks
_MAX_GPU_ROWS = 2**15  # number of learners that a GPU runs at once, limited by the memory for their histories

Block = tuple[int, ...]


def blocks_of(tasks: Sequence[int]) -> list[Block]:
    """Divides tasks into blocks, which depend only on the tasks: every rank and every restart gets the same blocks."""
    ordered = sorted(set(tasks))
    size = max(1, min(_MAX_BLOCK, len(ordered) // _MIN_BLOCKS))
    return [tuple(ordered[start : start + size]) for start in range(0, len(ordered), size)]


def block_file(folder: Path, block: Block) -> Path:
    """Returns the path of a block's file."""
    return folder / f"tasks_{block[0]:04d}-{block[-1]:04d}.hdf5"


def collect(
    room: Room,
    source: str,
    tasks: Sequence[int],
    num_streams: int,
    num_steps: int,
    seed: int,
    folder: Path,
    settings: Mapping[str, Any] | None = None,
    work: Work | None = None,
) -> list[Path]:
    """Collects the missing blocks of this process's share, and returns the files of all blocks.

    `settings` are those of the source learner. `work` provides the share, the device, the progress bar and stop
    requests (which take effect between blocks); the default is a single CPU process.
    """
    work = work or Work(folder)
    _check(room, source, tasks, num_streams, num_steps)
    origin, device = Origin.of(room, source, settings, seed, num_streams, num_steps), torch.device(work.device)
    blocks = blocks_of(tasks)
    remove_leftovers(folder)
    share = work.share(blocks)
    missing = [block for block in share if not _exists(block_file(folder, block), block, origin)]
    num_tasks, num_all = sum(map(len, missing)), sum(map(len, blocks)) if len(share) < len(blocks) else None
    with work.progress(f"collecting {source} histories", num_tasks, "tasks", of=num_all) as advance:
        for group in _groups(missing, num_streams, device):
            if work.stopping:
                break
            histories = run_learners(
                lambda *arguments: SOURCES[source](*arguments, **(settings or {})),
                room,
                torch.tensor([task for block in group for task in block], device=device),
                num_streams,
                num_steps,
                seed,
            )
            start = 0
            for block in group:
                part, path = slice(start, start := start + len(block)), block_file(folder, block)
                columns = (histories.tasks, histories.cells, histories.actions, histories.rewards)
                # Another run may collect into the same folder and finish this block first.
                if not _exists(path, block, origin):
                    try:
                        block_histories = Histories(*(column[part] for column in columns))
                        write_histories(path, block_histories, room, source=source, seed=seed, settings=settings)
                    except UserError:
                        if not _exists(path, block, origin):
                            raise
                advance(len(block))
    return [block_file(folder, block) for block in blocks]


def _groups(blocks: list[Block], num_streams: int, device: torch.device) -> list[list[Block]]:
    """Groups the blocks to collect at the same time: many on a GPU, one on the CPU."""
    size = 1 if device.type == "cpu" else max(1, _MAX_GPU_ROWS // (_MAX_BLOCK * num_streams))
    return [blocks[start : start + size] for start in range(0, len(blocks), size)]


def _exists(path: Path, block: Block, origin: Origin) -> bool:
    if not path.exists():
        return False
    with HistoryFile(path) as file:
        stored_origin, tasks = file.origin(), file.tasks()
    if stored_origin is None:
        raise UserError(f"{path} was not written by unisono and is not overwritten; use another folder")
    if difference := origin.difference(stored_origin):
        raise UserError(f"{path} contains histories with {difference}; use another folder for these settings")
    if tasks != {str(task) for task in block}:
        raise UserError(f"{path} contains histories of other tasks; use another folder for these settings")
    return True


def _check(room: Room, source: str, tasks: Sequence[int], num_streams: int, num_steps: int) -> None:
    if source not in SOURCES:
        raise ConfigError(f"source: expected one of {', '.join(SOURCES)}, got {source!r}")
    if num_streams < 1 or num_steps < 1:
        raise ConfigError(f"expected at least 1 history per task with at least 1 step, got {num_streams}, {num_steps}")
    if invalid := [task for task in tasks if not 0 <= task < room.num_tasks]:
        raise ConfigError(f"task {invalid[0]}: {room.name} of size {room.size} has tasks 0 to {room.num_tasks - 1}")
