"""Collecting histories, block by block: each block is a file, so whatever stops the work costs one block at most."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import torch

from unisono.errors import ConfigError, UserError
from unisono.observe.progress import Advance, unseen
from unisono.recipes.darkroom.data.histories import write_histories
from unisono.recipes.darkroom.data.history_file import HistoryFile, Origin
from unisono.recipes.darkroom.rooms import Room
from unisono.recipes.darkroom.sources import SOURCES
from unisono.recipes.darkroom.sources.source import Histories, live

_BLOCK = 9  # tasks of a block, at most
_LEAST_BLOCKS = 8  # with fewer tasks the blocks are smaller, so that there is one for every rank
_LEFT_BEHIND_S = 3600
_GPU_ROWS = 2**15  # learners that a GPU takes at once, at most: what they remember has to fit

Block = tuple[int, ...]


def blocks_of(tasks: Sequence[int]) -> list[Block]:
    """The tasks in blocks: a function of the tasks alone, so every rank and every later start has the same ones."""
    ordered = sorted(set(tasks))
    size = max(1, min(_BLOCK, len(ordered) // _LEAST_BLOCKS))
    return [tuple(ordered[start : start + size]) for start in range(0, len(ordered), size)]


def block_file(folder: Path, block: Block) -> Path:
    """Where a block is kept."""
    return folder / f"tasks_{block[0]:04d}-{block[-1]:04d}.hdf5"


def collect(
    room: Room,
    source: str,
    tasks: Sequence[int],
    num_streams: int,
    num_steps: int,
    seed: int,
    folder: Path,
    work_share: Callable[[Sequence[Any]], Sequence[Any]] = lambda blocks: blocks,
    device: torch.device | str = "cpu",
    stopping: Callable[[], bool] = lambda: False,
    settings: Mapping[str, Any] | None = None,
    progress: Callable[..., AbstractContextManager[Advance]] = unseen,
) -> list[Path]:
    """Collects what is not there yet of this process's share, and returns the files of all blocks.

    `work_share` picks the blocks to collect here (see Work.share), `stopping` is asked between blocks. `settings` are
    those of the source. `progress` (see Work.progress) shows how many tasks are done; nothing where none is missing.
    """
    _check(room, source, tasks, num_streams, num_steps)
    origin, device = Origin.of(room, source, settings, seed, num_streams, num_steps), torch.device(device)
    blocks = blocks_of(tasks)
    _remove_leftovers(folder)
    mine = work_share(blocks)
    missing = [block for block in mine if not _is_there(block_file(folder, block), block, origin)]
    num_tasks, num_all = sum(map(len, missing)), sum(map(len, blocks)) if len(mine) < len(blocks) else None
    with progress(f"collecting {source} histories", num_tasks, "tasks", of=num_all) as advance:
        for group in _groups(missing, num_streams, device):
            if stopping():
                break
            together = torch.tensor([task for block in group for task in block], device=device)
            lived = live(
                lambda *arguments: SOURCES[source](*arguments, **(settings or {})),
                room,
                together,
                num_streams,
                num_steps,
                seed,
            )
            start = 0
            for block in group:
                part, path = slice(start, start := start + len(block)), block_file(folder, block)
                histories = Histories(lived.tasks[part], lived.cells[part], lived.actions[part], lived.rewards[part])
                # Another run may collect into the same folder, and may finish this block while it is written here.
                if not _is_there(path, block, origin):
                    try:
                        write_histories(path, histories, room, source=source, seed=seed, settings=settings)
                    except UserError:
                        if not _is_there(path, block, origin):
                            raise
                advance(len(block))
    return [block_file(folder, block) for block in blocks]


def _groups(blocks: list[Block], num_streams: int, device: torch.device) -> list[list[Block]]:
    """Blocks that are collected at once: on a GPU many, on the CPU one after the other."""
    if device.type == "cpu":
        return [[block] for block in blocks]
    at_once = max(1, _GPU_ROWS // (_BLOCK * num_streams))
    return [blocks[start : start + at_once] for start in range(0, len(blocks), at_once)]


def _is_there(path: Path, block: Block, origin: Origin) -> bool:
    if not path.exists():
        return False
    with HistoryFile(path) as file:
        told, tasks = file.origin(), file.tasks()
    if told is None:
        raise UserError(f"{path} is not a file of ours and would be in the way; use another folder")
    if difference := origin.difference(told):
        raise UserError(f"{path} holds histories with {difference}; use another folder for these settings")
    if tasks != {str(task) for task in block}:
        raise UserError(f"{path} holds histories of other tasks; use another folder for these")
    return True


def _remove_leftovers(folder: Path) -> None:
    """Removes half-written blocks of a killed collection; what is young may still be written by somebody."""
    for partial in folder.glob(".tasks_*.part"):
        with suppress(FileNotFoundError):  # another rank was faster
            if time.time() - partial.stat().st_mtime > _LEFT_BEHIND_S:
                partial.unlink()


def _check(room: Room, source: str, tasks: Sequence[int], num_streams: int, num_steps: int) -> None:
    if source not in SOURCES:
        raise ConfigError(f"there is no source learner {source!r}; use one of {', '.join(SOURCES)}")
    if num_streams < 1 or num_steps < 1:
        raise ConfigError(f"histories of {num_steps} steps, {num_streams} per task: expected at least 1 of each")
    if beyond := [task for task in tasks if not 0 <= task < room.num_tasks]:
        raise ConfigError(f"task {beyond[0]}: {room.name} of size {room.size} has tasks 0 to {room.num_tasks - 1}")
