"""Reads and writes learning histories as HDF5, in the layout of other public implementations: one group per task.

    "0".."80"                  one group per task, named by the task's number
      states       (steps, streams, 2)    x and y before the action
      actions      (steps, streams)
      rewards      (steps, streams)
      next_states  (steps, streams, 2)    the true next cell, even at the end of an episode
      dones        (steps, streams)       the last step of an episode

Files from other implementations work too. They have wider integers and more columns, and at the end of an episode their
`next_states` is the start of the next episode; this module never reads that column. Every history is replayed in the
environment when it is read, so a file for another environment, horizon or task order is rejected.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from unisono.atomic_files import atomic_file
from unisono.config.values import shown
from unisono.errors import UserError
from unisono.recipes.darkroom.data.history_file import FORMAT, HistoryFile, Origin
from unisono.recipes.darkroom.rooms import NUM_ACTIONS, Room
from unisono.recipes.darkroom.sources.source import Histories

SUFFIXES = (".hdf5", ".h5")
_CHUNK = (1000, 128, 2)  # steps, streams, coordinates


def write_histories(
    path: Path,
    histories: Histories,
    room: Room,
    *,
    source: str,
    seed: int,
    settings: Mapping[str, Any] | None = None,
) -> None:
    """Writes histories to a new file, which appears only when it is complete; never overwrites a file."""
    origin = Origin.of(room, source, settings, seed, *histories.actions.shape[1:])
    try:
        if os.path.lexists(path.parent) and not path.parent.is_dir():
            raise UserError(f"{path.parent} is not a folder; move it away, or use another folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(path):
            raise FileExistsError
        with atomic_file(path, overwrite=False, durable=True) as temporary:
            temporary.write_bytes(_as_hdf5(histories, room, origin))
    except FileExistsError:
        raise UserError(f"{path} already exists and is not overwritten; move it away, or use another name") from None
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}); free some space or use another folder") from None


def _as_hdf5(histories: Histories, room: Room, origin: Origin) -> bytes:
    """Returns the file's content; builds it in memory, because HDF5 crashes if the disk fills up while it writes."""
    import h5py  # type: ignore[import-untyped]

    with h5py.File("histories", "w", driver="core", backing_store=False) as file:
        for name, value in {"format": FORMAT, **asdict(origin)}.items():
            file.attrs[name] = np.bytes_(value.encode()) if isinstance(value, str) else value
        for index, task in enumerate(histories.tasks.tolist()):
            for name, values in _columns(histories, index, room).items():
                chunks = tuple(map(min, values.shape, _CHUNK))
                # When measured, gzip level 1 reduced the file to a tenth and took a third more time.
                file.create_dataset(
                    f"{task}/{name}", data=values, chunks=chunks, compression="gzip", compression_opts=1
                )
        file.flush()
        content: bytes = file.id.get_file_image()
        return content


def _columns(histories: Histories, index: int, room: Room) -> dict[str, NDArray[Any]]:
    """Returns the columns of one task's group; the first dimension is the step."""
    task, cells, actions, rewards = (
        column[index].cpu() for column in (histories.tasks, histories.cells, histories.actions, histories.rewards)
    )
    next_cells = room.move(task, cells.long(), actions.long()).to(torch.uint8)
    ends = (torch.arange(cells.shape[1]) + 1) % room.horizon == 0
    columns = {
        "states": torch.stack([cells // room.size, cells % room.size], dim=-1),
        "actions": actions,
        "rewards": rewards,
        "next_states": torch.stack([next_cells // room.size, next_cells % room.size], dim=-1),
        "dones": ends.expand(cells.shape),
    }
    return {name: column.transpose(0, 1).contiguous().numpy() for name, column in columns.items()}


def read_histories(
    where: str | Path | Iterable[Path], room: Room, tasks: Sequence[int], num_streams: int, num_steps: int
) -> Histories:
    """Reads the first `num_steps` steps of the first `num_streams` histories of each task.

    `where` is a file, a folder of files, or a list of files.
    """
    file_of = _locate(_files(where), room, tasks)
    shape = (len(tasks), num_streams, num_steps)
    cells, actions, rewards = (torch.empty(shape, dtype=torch.uint8) for _ in range(3))
    for path in dict.fromkeys(file_of.values()):
        with HistoryFile(path) as file:
            for index, task in enumerate(tasks):
                if file_of[task] == path:
                    x, y = file.read(task, "states", *shape[1:], room.size, 2).unbind(dim=-1)
                    cells[index] = x * room.size + y
                    actions[index] = file.read(task, "actions", *shape[1:], NUM_ACTIONS)
                    rewards[index] = file.read(task, "rewards", *shape[1:], 2)
    histories = Histories(torch.tensor(tasks, dtype=torch.int64), cells, actions, rewards)
    _check_by_replay(histories, room, file_of)
    return histories


def find_histories(traj_dir: Path, name: str) -> list[Path]:
    """Returns the existing files: `traj_dir` itself, or files called `name` in it (case-insensitive)."""
    try:
        is_special = traj_dir.exists() and not traj_dir.is_file() and not traj_dir.is_dir()
        is_file = traj_dir.is_file()
        paths = [traj_dir] if is_file else [p for p in traj_dir.glob("*.hdf5") if p.stem.lower() == name.lower()]
    except OSError as error:
        raise UserError(f"traj_dir: cannot read {shown(str(traj_dir))} ({error.strerror}); use another") from None
    if is_special:
        raise UserError(f"traj_dir: {traj_dir} is neither a folder nor a file; use another")
    if not paths and traj_dir.suffix in SUFFIXES and not traj_dir.is_dir():
        raise UserError(f"traj_dir: {traj_dir} does not exist; use an existing file, or a folder to collect into")
    for path in paths:
        with HistoryFile(path):  # raises an error for an unreadable file before anything is written
            pass
    return paths


def _files(where: str | Path | Iterable[Path]) -> list[Path]:
    if not isinstance(where, str | Path):
        return list(where)
    path = Path(where)
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES and not file.name.startswith("."))
    if not files:
        raise UserError(f"{path} contains no histories (no {' or '.join(SUFFIXES)} file)")
    return files


def _locate(files: list[Path], room: Room, tasks: Sequence[int]) -> dict[int, Path]:
    """Returns the file that contains each task."""
    file_of: dict[int, Path] = {}
    origins: dict[Path, Origin | None] = {}
    for path in files:
        with HistoryFile(path) as file:
            present = [task for task in tasks if file.has(task)]
            if not present:
                continue
            origin = origins[path] = file.origin()
        if origin is not None:
            _check_room(path, origin, room)
        first = next(iter(origins))
        if origin != origins[first]:
            raise UserError(f"{first} and {path} contain histories of different learners; use one of them")
        for task in present:
            if task in file_of and origin is None:
                raise UserError(f"task {task} is in both {file_of[task]} and {path}; use one of them")
            file_of.setdefault(task, path)
    if missing := [task for task in tasks if task not in file_of]:
        names = ", ".join(map(str, missing[:5])) + (", …" if len(missing) > 5 else "")
        location = files[0] if len(files) == 1 else f"the {len(files)} history files"
        raise UserError(f"{location}: no histories of {len(missing)} of {len(tasks)} tasks ({names}); collect them too")
    return file_of


def _check_room(path: Path, origin: Origin, room: Room) -> None:
    stored, expected = (
        f"{name} of size {size} and horizon {horizon}"
        for name, size, horizon in ((origin.room, origin.size, origin.horizon), (room.name, room.size, room.horizon))
    )
    if stored != expected:
        raise UserError(f"{path} contains histories of {stored}, expected {expected}; change the settings or the file")


def _check_by_replay(histories: Histories, room: Room, file_of: Mapping[int, Path]) -> None:
    """Replays all actions, and compares the resulting observations and rewards with those in the files."""
    num_streams, num_steps = histories.actions.shape[1:]
    rows = histories.tasks.repeat_interleave(num_streams)
    episode = room.begin(rows)
    for step in range(num_steps):
        if step % room.horizon == 0:
            episode = room.begin(rows)
        cells, actions, rewards = (
            column[:, :, step].flatten().long() for column in (histories.cells, histories.actions, histories.rewards)
        )
        expected_cells = episode.cells
        episode, expected_rewards = room.step(episode, actions)
        wrong = (cells != expected_cells) | (rewards != expected_rewards)
        if bool(wrong.any()):
            index, stream = divmod(int(wrong.nonzero()[0]), num_streams)
            task = int(histories.tasks[index])
            raise UserError(
                f"{file_of[task]}: step {step} of stream {stream} of task {task} is impossible in {room.name} of size "
                f"{room.size} and horizon {room.horizon}; the file has another environment or task order"
            )
