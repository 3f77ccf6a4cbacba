"""History files survive a round trip, damaged or hostile ones are rejected, and existing ones are never overwritten."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from unisono.engine.recipe import Work
from unisono.errors import ConfigError, UserError
from unisono.recipes.darkroom.data import collect as collecting
from unisono.recipes.darkroom.data.collect import block_file, blocks_of, collect
from unisono.recipes.darkroom.data.histories import read_histories, write_histories
from unisono.recipes.darkroom.rooms import ROOMS, Darkroom, DarkroomPermuted, Room
from unisono.recipes.darkroom.sources import SOURCES
from unisono.recipes.darkroom.sources.source import Histories, run_learners

COLUMNS = ("tasks", "cells", "actions", "rewards")
ROOM = Darkroom(5, 10)
TASKS = [3, 12, 24]


def lived(room: Room = ROOM, tasks: list[int] = TASKS, num_streams: int = 4, num_steps: int = 50) -> Histories:
    return run_learners(SOURCES["explorer"], room, torch.tensor(tasks), num_streams, num_steps, seed=1)


def equal(first: Histories, second: Histories) -> bool:
    return all(torch.equal(getattr(first, name), getattr(second, name)) for name in COLUMNS)


def write(path: Path, histories: Histories | None = None, room: Room = ROOM, seed: int = 1) -> Path:
    write_histories(path, histories or lived(), room, source="explorer", seed=seed)
    return path


def known_file(path: Path, room: Room = ROOM, tasks: list[int] = TASKS) -> Path:
    """A file as other implementations write it: wide integers, one more column, the reset state at episode ends."""
    histories = lived(room, tasks)
    with h5py.File(path, "w") as file:
        for index, task in enumerate(tasks):
            cells = histories.cells[index].T.numpy().astype(np.int32)
            states = np.stack([cells // room.size, cells % room.size], axis=-1)
            group = file.create_group(str(task))
            group["states"] = states
            group["actions"] = histories.actions[index].T.numpy().astype(np.int32)
            group["rewards"] = histories.rewards[index].T.numpy().astype(np.int32)
            group["next_states"] = np.concatenate([states[1:], states[:1]])
            group["dones"] = np.tile(((np.arange(len(cells)) + 1) % room.horizon == 0)[:, None], (1, cells.shape[1]))
            group["compress_markers"] = np.zeros_like(cells)
    return path


@pytest.mark.parametrize("name", ROOMS)
def test_histories_survive_a_round_trip(name: str, tmp_path: Path) -> None:
    room = ROOMS[name](5, 10)
    histories = lived(room)
    path = write(tmp_path / "histories.hdf5", histories, room)
    assert equal(read_histories(path, room, TASKS, 4, 50), histories)
    part = read_histories(str(path), room, [24, 3], 2, 37)
    assert torch.equal(part.actions, histories.actions[[2, 0], :2, :37])
    assert os.listdir(tmp_path) == ["histories.hdf5"]


def test_the_layout_is_the_usual_one_with_true_next_states(tmp_path: Path) -> None:
    histories = lived()
    with h5py.File(write(tmp_path / "histories.hdf5", histories)) as file:
        assert set(file) == {"3", "12", "24"}
        assert {name: (file["3"][name].shape, file["3"][name].dtype.name) for name in file["3"]} == {
            "states": ((50, 4, 2), "uint8"),
            "actions": ((50, 4), "uint8"),
            "rewards": ((50, 4), "uint8"),
            "next_states": ((50, 4, 2), "uint8"),
            "dones": ((50, 4), "bool"),
        }
        states, after, actions = (file["3"][name][:].astype(int) for name in ("states", "next_states", "actions"))
        dones, rewards = file["3"]["dones"][:], file["3"]["rewards"][:]
    assert np.flatnonzero(dones[:, 0]).tolist() == [9, 19, 29, 39, 49]
    assert np.array_equal(after[:-1][~dones[:-1]], states[1:][~dones[:-1]])
    moves = np.array([(1, 0), (-1, 0), (0, 1), (0, -1), (0, 0)])
    assert np.array_equal(after, (states + moves[actions]).clip(0, 4))
    assert np.array_equal(rewards, (after == [0, 3]).all(axis=-1))  # task 3; the goal's reward at episode ends included


def test_files_of_other_implementations_are_read(tmp_path: Path) -> None:
    path = known_file(tmp_path / "history_darkroom_PPO_alg-seed42.hdf5")
    assert equal(read_histories(path, ROOM, TASKS, 4, 50), lived())
    assert equal(read_histories(tmp_path, ROOM, TASKS, 4, 50), lived())


def test_a_file_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "mine.hdf5"
    path.write_text("precious")
    with pytest.raises(UserError, match="already exists"):
        write(path)
    assert path.read_text() == "precious" and os.listdir(tmp_path) == ["mine.hdf5"]


def test_a_file_that_appears_during_the_write_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "mine.hdf5"
    sync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda number: (path.write_text("precious"), sync(number)))
    with pytest.raises(UserError, match="already exists"):
        write(path)
    assert path.read_text() == "precious" and os.listdir(tmp_path) == ["mine.hdf5"]


def test_a_failed_write_leaves_no_file(tmp_path: Path) -> None:
    broken = replace(lived(), tasks=torch.tensor([3, 12, 12]))  # creating the third group fails
    with pytest.raises(Exception, match="exist"):
        write(tmp_path / "histories.hdf5", broken)
    assert os.listdir(tmp_path) == []


def change(name: str, values: object) -> Callable[[h5py.File], None]:
    def edit(file: h5py.File) -> None:
        old = file[name][:]
        del file[name]
        file[name] = values(old) if callable(values) else values

    return edit


def put(index: tuple[int, ...], value: int) -> Callable[[np.ndarray], np.ndarray]:
    def edit(values: np.ndarray) -> np.ndarray:
        values = values.astype(np.int64)
        values[index] = value
        return values

    return edit


def remove(name: str) -> Callable[[h5py.File], None]:
    return lambda file: file.__delitem__(name)


def link(name: str, target: object) -> Callable[[h5py.File], None]:
    def edit(file: h5py.File) -> None:
        del file[name]
        file[name] = target

    return edit


def outside(file: h5py.File) -> None:
    shape = file["3/actions"].shape
    del file["3/actions"]
    file["3"].create_dataset("actions", shape, np.uint8, external=[("/etc/hostname", 0, h5py.h5f.UNLIMITED)])


def virtual(file: h5py.File) -> None:
    shape = file["3/actions"].shape
    del file["3/actions"]
    layout = h5py.VirtualLayout(shape, np.uint8)
    layout[:] = h5py.VirtualSource("/etc/other.hdf5", "actions", shape)
    file["3"].create_virtual_dataset("actions", layout)


def huge_chunk(file: h5py.File) -> None:
    del file["3/actions"]
    file["3"].create_dataset("actions", (2**31, 4), np.uint8, chunks=(2**29, 4), compression="gzip")


def huge_and_empty(file: h5py.File) -> None:
    for name, width in (("actions", ()), ("rewards", ()), ("states", (2,))):
        del file[f"3/{name}"]
        file["3"].create_dataset(name, (2**40, 2**20, *width), np.int64, chunks=(10, 10, *width))


@pytest.mark.parametrize(
    "edit, words",
    [
        (remove("12"), r"no histories of 1 of 3 tasks \(12\)"),
        (remove("3/actions"), "actions of task 3 is missing"),
        (change("3/actions", lambda old: old[:20]), "has 20 steps of 4 streams, expected at least 50 of 4"),
        (change("3/rewards", lambda old: old[:, :3]), "has 50 steps of 3 streams, expected at least 50 of 4"),
        (change("3/states", lambda old: old[:, :, :1]), r"shape \(50, 4, 1\), expected \(steps, streams, 2\)"),
        (change("3/actions", lambda old: old[0]), r"shape \(4,\), expected \(steps, streams\)"),
        (change("3/actions", lambda old: old.astype(np.float32)), "type float32, expected integers"),
        (change("3/actions", [[b"x"] * 4] * 50), "type .*, expected integers"),
        (change("3/actions", put((7, 1), 5)), "values from 0 to 5, expected 0 to 4"),
        (change("3/actions", put((7, 1), 256)), "values from 0 to 256, expected 0 to 4"),
        (change("3/states", put((7, 1, 0), 5)), "values from 0 to 5, expected 0 to 4"),
        (change("3/rewards", put((7, 1), -1)), "values from -1 to 1, expected 0 to 1"),
        (change("3/rewards", put((7, 1), 2)), "expected 0 to 1"),
        (change("24/rewards", lambda old: 1 - old), "of task 24 is impossible in darkroom"),
        (link("3", h5py.ExternalLink("/etc/passwd", "/")), r"no histories of 1 of 3 tasks \(3\)"),
        (link("3", h5py.SoftLink("/12")), r"no histories of 1 of 3 tasks \(3\)"),
        (link("3/actions", h5py.ExternalLink("/etc/passwd", "/")), "actions of task 3 is missing"),
        (link("3", [1, 2]), "states of task 3 is missing"),
        (outside, "refers to other files"),
        (virtual, "refers to other files"),
        (huge_chunk, "chunks"),
        (huge_and_empty, "step 0 of stream 0 of task 3 is impossible"),
        (lambda file: file.attrs.update(format=99), "format 99"),
        (lambda file: file.attrs.update(size=[1, 2]), "cannot read"),
        (
            lambda file: file.attrs.update(horizon=20),
            "horizon 20, expected darkroom of size 5 and horizon 10",
        ),
    ],
)
def test_the_error_names_what_is_wrong_with_a_file(
    edit: Callable[[h5py.File], None], words: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "histories.hdf5")
    with h5py.File(path, "r+") as file:
        edit(file)
    with pytest.raises(UserError, match=words) as caught:
        read_histories(path, ROOM, TASKS, 4, 50)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_truncated_file_or_another_kind_of_file_is_rejected(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole.hdf5").read_bytes()
    cut = tmp_path / "cut.hdf5"
    for size in (0, 5, 100, len(whole) // 2, len(whole) - 1):
        cut.write_bytes(whole[:size])
        with pytest.raises(UserError, match="cannot be read as HDF5"):
            read_histories(cut, ROOM, TASKS, 4, 50)
    cut.write_bytes(b"PK\3\4" * 1000)
    with pytest.raises(UserError, match="cannot be read as HDF5"):
        read_histories(cut, ROOM, TASKS, 4, 50)
    with pytest.raises(UserError, match="is not a file"):
        read_histories(tmp_path / "nowhere.hdf5", ROOM, TASKS, 4, 50)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="contains no histories"):
        read_histories(tmp_path / "empty", ROOM, TASKS, 4, 50)


def test_corrupted_bytes_never_cause_a_traceback(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole.hdf5").read_bytes()
    damaged, dice = tmp_path / "damaged.hdf5", np.random.default_rng(0)
    refused = 0
    for _ in range(60):
        broken = bytearray(whole)
        for place in dice.integers(len(whole), size=20):
            broken[place] ^= int(dice.integers(1, 256))
        damaged.write_bytes(broken)
        try:
            assert equal(read_histories(damaged, ROOM, TASKS, 4, 50), lived())
        except UserError:
            refused += 1
    assert refused > 20


def test_histories_of_another_environment_are_rejected(tmp_path: Path) -> None:
    known = known_file(tmp_path / "known.hdf5")  # a file that does not record its environment
    for room in (Darkroom(5, 20), Darkroom(6, 10), DarkroomPermuted(5, 10)):
        with pytest.raises(UserError, match="is impossible"):
            read_histories(known, room, TASKS, 4, 50)
    with h5py.File(known, "r+") as file:  # tasks in the order of another implementation
        file.move("3", "x")
        file.move("12", "3")
        file.move("x", "12")
    with pytest.raises(UserError, match="another environment or task order"):
        read_histories(known, ROOM, TASKS, 4, 50)
    own = write(tmp_path / "own.hdf5")
    with pytest.raises(UserError, match="contains histories of darkroom of size 5 and horizon 10, expected dark"):
        read_histories(own, DarkroomPermuted(5, 10), TASKS, 4, 50)


def test_files_of_different_learners_are_not_mixed(tmp_path: Path) -> None:
    write(tmp_path / "a.hdf5", lived(tasks=[1, 2]))
    write(tmp_path / "b.hdf5", lived(tasks=[3]), seed=2)
    with pytest.raises(UserError, match="different learners"):
        read_histories(tmp_path, ROOM, [1, 2, 3], 4, 50)
    assert len(read_histories(tmp_path, ROOM, [1, 2], 4, 50).tasks) == 2
    for name in "cd":
        (tmp_path / "known").mkdir(exist_ok=True)
        known_file(tmp_path / "known" / f"{name}.hdf5")
    with pytest.raises(UserError, match="task 3 is in both"):
        read_histories(tmp_path / "known", ROOM, TASKS, 4, 50)


def test_blocks_contain_every_task_once() -> None:
    for count in (1, 2, 7, 16, 65, 73, 81, 500):
        tasks = torch.randperm(count, generator=torch.Generator().manual_seed(count)).tolist()
        blocks = blocks_of(tasks)
        assert [task for block in blocks for task in block] == list(range(count))
        assert max(map(len, blocks)) <= 9
        assert len(blocks) >= min(count, 8)
        assert len({block_file(Path(), block) for block in blocks}) == len(blocks)
    assert block_file(Path(), blocks_of(range(73))[0]).name == "tasks_0000-0008.hdf5"


def test_two_ranks_collect_the_same_histories_as_one(tmp_path: Path) -> None:
    tasks = list(range(25))[::-1]
    for rank in range(2):
        files = collect(ROOM, "q_learning", tasks, 3, 40, 7, tmp_path / "two", work=Work(tmp_path, rank, 2))
    alone = collect(ROOM, "q_learning", tasks, 3, 40, 7, tmp_path / "one")
    assert [file.name for file in files] == [file.name for file in alone] == sorted(os.listdir(tmp_path / "two"))
    together = read_histories(files, ROOM, tasks, 3, 40)
    assert equal(together, read_histories(tmp_path / "one", ROOM, tasks, 3, 40))
    assert equal(together, run_learners(SOURCES["q_learning"], ROOM, torch.tensor(tasks), 3, 40, 7))


def test_collecting_several_blocks_at_once_gives_the_same_histories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = list(range(25))
    one_by_one = collect(ROOM, "explorer", tasks, 3, 40, 7, tmp_path / "a")
    monkeypatch.setattr(collecting, "_groups", lambda blocks, *_: [blocks[:2], blocks[2:]])
    at_once = collect(ROOM, "explorer", tasks, 3, 40, 7, tmp_path / "b")
    assert equal(*(read_histories(files, ROOM, tasks, 3, 40) for files in (one_by_one, at_once)))


def test_existing_blocks_are_not_collected_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = collect(ROOM, "explorer", range(25), 3, 40, 7, tmp_path)
    times = [file.stat().st_mtime_ns for file in files]
    files[2].unlink()
    calls: list[int] = []
    monkeypatch.setattr(collecting, "run_learners", lambda *a: calls.append(len(a[2])) or run_learners(*a))
    assert collect(ROOM, "explorer", range(25), 3, 40, 7, tmp_path) == files
    assert calls == [3]
    assert [file.stat().st_mtime_ns == time for file, time in zip(files, times, strict=True)].count(False) == 1


def test_a_stop_request_ends_collection_after_the_block_and_the_next_start_continues(tmp_path: Path) -> None:
    work = Work(tmp_path, _asked_to_stop=lambda: len(list(tmp_path.glob("tasks_*"))) >= 2)
    files = collect(ROOM, "noise", range(25), 3, 40, 7, tmp_path, work=work)
    assert [file.exists() for file in files].count(True) == 2
    collect(ROOM, "noise", range(25), 3, 40, 7, tmp_path)
    assert equal(
        read_histories(tmp_path, ROOM, range(25), 3, 40),
        run_learners(SOURCES["noise"], ROOM, torch.arange(25), 3, 40, 7),
    )


@pytest.mark.parametrize(
    "change, words",
    [
        ({"seed": 8}, "with seed 7, not 8"),
        ({"source": "noise"}, "with source explorer, not noise"),
        ({"num_steps": 50}, "with num_steps 40, not 50"),
        ({"num_streams": 2}, "with num_streams 3, not 2"),
        ({"settings": {"noise": 0.5}}, 'with settings {}, not {"noise": 0.5}'),
        ({"room": Darkroom(5, 20)}, "with horizon 10, not 20"),
        ({"tasks": [0, 2]}, "of other tasks"),
    ],
)
def test_histories_of_other_settings_are_neither_used_nor_replaced(
    change: dict[str, object], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collecting, "_MIN_BLOCKS", 1)
    was = {"room": ROOM, "source": "explorer", "tasks": [0, 1, 2], "num_streams": 3, "num_steps": 40, "seed": 7}
    [file] = collect(**was, folder=tmp_path)  # type: ignore[arg-type]
    before = file.read_bytes()
    with pytest.raises(UserError, match=words):
        collect(**{**was, **change}, folder=tmp_path)  # type: ignore[arg-type]
    assert file.read_bytes() == before and os.listdir(tmp_path) == [file.name]


def test_settings_reach_the_source(tmp_path: Path) -> None:
    wild = collect(ROOM, "explorer", [3], 3, 40, 7, tmp_path / "wild", settings={"noise": 1.0})
    calm = collect(ROOM, "explorer", [3], 3, 40, 7, tmp_path / "calm", settings={"noise": 0.0})
    wild_rewards, calm_rewards = (read_histories(f, ROOM, [3], 3, 40).rewards.sum() for f in (wild, calm))
    assert calm_rewards > wild_rewards + 10


def test_invalid_arguments_of_a_collection_are_rejected(tmp_path: Path) -> None:
    for arguments, words in [
        ((ROOM, "sarsa", [0], 3, 40), "source: expected one of explorer, .*, got 'sarsa'"),
        ((ROOM, "noise", [25], 3, 40), "task 25: darkroom of size 5 has tasks 0 to 24"),
        ((ROOM, "noise", [0], 0, 40), "at least 1"),
    ]:
        with pytest.raises(ConfigError, match=words):
            collect(*arguments, 7, tmp_path)
    (tmp_path / "tasks_0000-0000.hdf5").write_bytes(b"what is this")
    with pytest.raises(UserError, match="cannot be read as HDF5"):
        collect(ROOM, "noise", [0], 3, 40, 7, tmp_path)


def test_a_kill_during_collection_loses_at_most_one_block(tmp_path: Path) -> None:
    folder = tmp_path / "histories"
    code = (
        "import sys, time, torch; from pathlib import Path; torch.set_num_threads(1)\n"
        "from unisono.recipes.darkroom.rooms import Darkroom; from unisono.recipes.darkroom.data import collect\n"
        "write = collect.write_histories\n"
        "collect.write_histories = lambda *given, **named: (write(*given, **named), time.sleep(1))\n"
        "collect.collect(Darkroom(), 'explorer', range(24), 30, 400, 7, Path(sys.argv[1]))"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(folder)])
    try:
        deadline = time.monotonic() + 60
        while len(list(folder.glob("tasks_*"))) < 2:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    done = sorted(folder.glob("tasks_*.hdf5"))
    assert 2 <= len(done) < 8
    for file in done:  # each block is complete
        with h5py.File(file) as content:
            tasks = sorted(map(int, content))
        read_histories(file, Darkroom(), tasks, 30, 400)
    leftover = folder / ".tasks_0000-0002.hdf5.0a0b0c0d.part"
    shutil.copy(done[0], leftover)
    os.utime(leftover, (0, 0))
    young = folder / ".tasks_0000-0002.hdf5.0a0b0c0e.part"
    shutil.copy(done[0], young)
    times = [file.stat().st_mtime_ns for file in done]
    files = collect(Darkroom(), "explorer", range(24), 30, 400, 7, folder)
    assert [file.stat().st_mtime_ns for file in done] == times and all(file.exists() for file in files)
    assert not leftover.exists() and young.exists()


def test_collecting_shows_progress_and_is_silent_when_nothing_is_missing(tmp_path: Path) -> None:
    lines: list[str] = []
    arguments = (ROOM, "noise", range(25), 3, 40, 7, tmp_path)
    work = Work(tmp_path, _say=lines.append)
    collect(*arguments, work=work)
    assert lines[0] == "collecting noise histories: 25 tasks"
    assert re.fullmatch(r"collecting noise histories: 25 tasks in \d+s", lines[-1])
    num_lines = len(lines)
    collect(*arguments, work=work)
    assert len(lines) == num_lines, "nothing is missing: nothing is collected, and nothing is announced"
