"""Histories on disk: HDF5 in the layout that people have, one group per task.

    "0".."80"                  a group per task, named by its number
      states       (steps, streams, 2)    x and y before the action
      actions      (steps, streams)
      rewards      (steps, streams)
      next_states  (steps, streams, 2)    where the action led, also at the end of an episode
      dones        (steps, streams)       the last step of an episode

Files of the known repositories are read as well. Theirs have wider numbers, further columns, and at the end of an
episode the start of the next one in `next_states`; nothing here reads that. Whatever a file holds is played again in
the room before it is believed: histories of another room, another horizon or another order of tasks do not pass.
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
_FAST = {"compression_opts": 1}  # a tenth of the bytes, for a third more time


def write_histories(
    path: Path,
    histories: Histories,
    room: Room,
    *,
    source: str,
    seed: int,
    settings: Mapping[str, Any] | None = None,
) -> None:
    """Writes histories to a new file, which appears complete or not at all. A file that is there stays as it is."""
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
        raise UserError(f"{path} is there already and is not overwritten; move it away, or use another name") from None
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}); make room, or use another folder") from None


def _as_hdf5(histories: Histories, room: Room, origin: Origin) -> bytes:
    """The content of the file. Made in memory: HDF5 does not survive a disk that is full while it writes."""
    import h5py  # type: ignore[import-untyped]

    with h5py.File("histories", "w", driver="core", backing_store=False) as file:
        for name, value in {"format": FORMAT, **asdict(origin)}.items():
            file.attrs[name] = np.bytes_(value.encode()) if isinstance(value, str) else value
        for index, task in enumerate(histories.tasks.tolist()):
            for name, values in _columns(histories, index, room).items():
                chunks = tuple(map(min, values.shape, _CHUNK))
                file.create_dataset(f"{task}/{name}", data=values, chunks=chunks, compression="gzip", **_FAST)
        file.flush()
        content: bytes = file.id.get_file_image()
        return content


def _columns(histories: Histories, index: int, room: Room) -> dict[str, NDArray[Any]]:
    """The datasets of one task, time first."""
    task, cells, actions, rewards = (
        column[index].cpu() for column in (histories.tasks, histories.cells, histories.actions, histories.rewards)
    )
    after = room.move(task, cells.long(), actions.long()).to(torch.uint8)
    ends = (torch.arange(cells.shape[1]) + 1) % room.horizon == 0
    columns = {
        "states": torch.stack([cells // room.size, cells % room.size], dim=-1),
        "actions": actions,
        "rewards": rewards,
        "next_states": torch.stack([after // room.size, after % room.size], dim=-1),
        "dones": ends.expand(cells.shape),
    }
    return {name: column.transpose(0, 1).contiguous().numpy() for name, column in columns.items()}


def read_histories(
    where: str | Path | Iterable[Path], room: Room, tasks: Sequence[int], num_streams: int, num_steps: int
) -> Histories:
    """The first `num_streams` histories of each task, their first `num_steps` steps.

    `where` is a file, a folder of files, or the files themselves.
    """
    found = _find(_files(where), room, tasks)
    shape = (len(tasks), num_streams, num_steps)
    cells, actions, rewards = (torch.empty(shape, dtype=torch.uint8) for _ in range(3))
    for path in dict.fromkeys(found.values()):
        with HistoryFile(path) as file:
            for index, task in enumerate(tasks):
                if found[task] == path:
                    x, y = file.read(task, "states", *shape[1:], room.size, 2).unbind(dim=-1)
                    cells[index] = x * room.size + y
                    actions[index] = file.read(task, "actions", *shape[1:], NUM_ACTIONS)
                    rewards[index] = file.read(task, "rewards", *shape[1:], 2)
    histories = Histories(torch.tensor(tasks, dtype=torch.int64), cells, actions, rewards)
    _check_by_playing(histories, room, found)
    return histories


def histories_in(where: Path, name: str) -> list[Path]:
    """What `traj_dir` holds already: itself, or a file called `name` (in any capitals); none, and it is collected."""
    try:
        odd = where.exists() and not where.is_file() and not where.is_dir()
        known = [where] if where.is_file() else [p for p in where.glob("*.hdf5") if p.stem.lower() == name.lower()]
    except OSError as error:
        raise UserError(f"traj_dir {shown(str(where))} cannot be read ({error.strerror}); use another") from None
    if odd:
        raise UserError(f"traj_dir {where} is neither a folder nor a file; use another")
    if not known and where.suffix in SUFFIXES and not where.is_dir():
        raise UserError(f"traj_dir {where}: there is no such file; name one, or a folder to collect histories into")
    for path in known:
        with HistoryFile(path):  # what cannot be read is said before anything is made
            pass
    return known


def _files(where: str | Path | Iterable[Path]) -> list[Path]:
    if not isinstance(where, str | Path):
        return list(where)
    path = Path(where)
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES and not file.name.startswith("."))
    if not files:
        raise UserError(f"{path} has no histories: no file there ends in {' or '.join(SUFFIXES)}")
    return files


def _find(files: list[Path], room: Room, tasks: Sequence[int]) -> dict[int, Path]:
    """The file in which each task is."""
    found: dict[int, Path] = {}
    origins: dict[Path, Origin | None] = {}
    for path in files:
        with HistoryFile(path) as file:
            here = [task for task in tasks if file.has(task)]
            if not here:
                continue
            origin = origins[path] = file.origin()
        if origin is not None:
            _check_room(path, origin, room)
        first = next(iter(origins))
        if origin != origins[first]:
            raise UserError(f"{first} and {path} hold histories of different learners; name one file, or part them")
        for task in here:
            if task in found and origin is None:
                raise UserError(f"task {task} is in {found[task]} and in {path}; name one of the files")
            found.setdefault(task, path)
    if missing := [task for task in tasks if task not in found]:
        names = ", ".join(map(str, missing[:5])) + (", …" if len(missing) > 5 else "")
        place = files[0] if len(files) == 1 else f"the {len(files)} files given"
        raise UserError(
            f"{place}: no histories of {len(missing)} of {len(tasks)} tasks ({names}); collect them as well"
        )
    return found


def _check_room(path: Path, origin: Origin, room: Room) -> None:
    made, wanted = (
        f"{where.room if isinstance(where, Origin) else where.name} of size {where.size} and horizon {where.horizon}"
        for where in (origin, room)
    )
    if made != wanted:
        raise UserError(f"{path} holds histories of {made}, expected {wanted}; use other histories or other settings")


def _check_by_playing(histories: Histories, room: Room, found: Mapping[int, Path]) -> None:
    """Plays all actions again and compares what is seen and earned with what was read."""
    num_streams, num_steps = histories.actions.shape[1:]
    rows = histories.tasks.repeat_interleave(num_streams)
    episode = room.begin(rows)
    for step in range(num_steps):
        if step % room.horizon == 0:
            episode = room.begin(rows)
        cells, actions, rewards = (
            column[:, :, step].flatten().long() for column in (histories.cells, histories.actions, histories.rewards)
        )
        seen = episode.cells
        episode, earned = room.step(episode, actions)
        wrong = (cells != seen) | (rewards != earned)
        if bool(wrong.any()):
            index, stream = divmod(int(wrong.nonzero()[0]), num_streams)
            task = int(histories.tasks[index])
            raise UserError(
                f"{found[task]}: step {step} of stream {stream} of task {task} cannot happen in {room.name} of size "
                f"{room.size} and horizon {room.horizon}; it comes from another room, or its tasks are in another order"
            )
