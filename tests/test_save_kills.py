"""After a kill at any point of a save, the last good checkpoint exists and the run ends with the same bits."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from command_line import TINY, environment, lines, unisono
from ranks import run_ranks
from unisono.checkpoint.find import leftovers, list_steps, newest_valid, read_extra, validate
from unisono.checkpoint.load import load_whole
from unisono.checkpoint.save import Saver
from unisono.faults import SAVE_PHASES, Injector, parse

IDENTITY = {"recipe": "Tiny"}


def make_saver(folder: Path, rank: int = 0, world: int = 1, **options: Any) -> Saver:
    group = dist.new_group(backend="gloo") if world > 1 else None
    options = {"keep_last": 2, "asynchronous": True, "identity": IDENTITY, **options}
    return Saver(folder, rank=rank, world=world, group=group, **options)


# --- at every file operation and at random instants, one process after another in the same folder --------------------

RANDOM_KILLS = 15
SIZE = 300_000  # numbers in each of two tensors
OPERATIONS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.scandir", "os.listdir", "shutil.rmtree"}


def die_at_operation(number: int) -> None:
    """Kills this process just before its n-th file operation from now."""
    left = iter(range(number))

    def hook(event: str, arguments: object) -> None:
        if event in OPERATIONS and next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def save_until_killed(folder: Path, told: int, operation: int | None) -> None:
    """Saves one step after another, each filled with its number, and reports each completed save."""
    newest, _ = newest_valid(folder, IDENTITY)
    step = 0 if newest is None else int(read_extra(newest)["step"])
    saver = make_saver(folder)
    weights = {name: torch.zeros(SIZE) for name in ("model.a", "model.b")}
    for turn in range(10_000 if operation is None else 2):
        step += 1
        if turn == 1 and operation is not None:
            die_at_operation(operation)
        for weight in weights.values():
            weight.fill_(step)
        saver.save(step, weights, {"step": step})
        for weight in weights.values():
            weight.fill_(-1.0)  # training goes on
        (result,) = saver.wait()
        assert result.error is None, result.error
        os.write(told, step.to_bytes(8, "little"))


def kill_one(folder: Path, operation: int | None, rng: random.Random) -> bool:
    """Forks a saving process, kills it, and checks its files; returns False if it ended before the kill."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            save_until_killed(folder, theirs, operation)
            os._exit(0)
        finally:
            os._exit(1)
    os.close(theirs)
    first = os.read(ours, 8)  # one save is complete: the kill will hit a later one
    if operation is None:
        time.sleep(rng.uniform(0, 0.06))
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    assert first and status in (0, signal.SIGKILL), f"the saving process ended by itself: {status}"
    safe = int.from_bytes((first + os.read(ours, 1 << 20))[-8:], "little")
    os.close(ours)
    newest, skipped = newest_valid(folder, IDENTITY)
    assert newest is not None, f"{operation}: nothing is left of step {safe}: {skipped}"
    step = int(read_extra(newest)["step"])
    assert step >= safe, f"{operation}: step {safe} was safe, now the newest is {step}"
    for name, tensor in load_whole(newest, "model.").items():
        assert torch.equal(tensor, torch.full((SIZE,), float(step))), f"{operation}: {name} of step {step}"
    bad = [path for path, _ in skipped if path not in leftovers(folder)]
    assert not bad, f"{operation}: a checkpoint has its name and is not complete: {skipped}"
    assert len(list_steps(folder)) <= 3 and len(leftovers(folder)) <= 1, f"leftovers pile up: {os.listdir(folder)}"
    return status == signal.SIGKILL


def kill_again_and_again(folder: Path) -> None:
    torch.set_num_threads(1)
    rng = random.Random(7)
    operation = 0
    while kill_one(folder, operation, rng):
        operation += 1
    assert operation > 15, f"a save has only {operation} operations"
    for _ in range(RANDOM_KILLS):
        assert kill_one(folder, None, rng)


def test_a_kill_at_any_instant_leaves_a_complete_and_correct_checkpoint(tmp_path: Path) -> None:
    script = f"import sys; sys.path[:0] = [{str(Path(__file__).parent)!r}]; import test_save_kills as t; "
    script += f"from pathlib import Path; t.kill_again_and_again(Path({str(tmp_path)!r}))"
    # Runs in a separate process, because it forks and this one may have threads.
    ended = subprocess.run(
        [sys.executable, "-c", script], env=environment(), capture_output=True, text=True, timeout=240, check=False
    )
    assert ended.returncode == 0, ended.stderr[-4000:]


# --- one rank of two cannot save --------------------------------------------------------------------------------------


def fail_in_each_phase(folder: str) -> list[list[Any]]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, top = dist.get_rank(), Path(folder)
    actual: list[list[Any]] = []
    for who in (0, 1):
        for phase in SAVE_PHASES:
            name = f"{phase}-{who}"
            injector = Injector(parse(f"disk-full@rank{who}:step2:{phase}"), rank, top / f"{name}.injected")
            saver = make_saver(top / name, rank, 2, injector=injector, keep_last=0)
            results = []
            for step in (1, 2, 3):
                saver.save(step, {"model.a": torch.full((4,), float(step)), "model.b": torch.ones(3)}, {})
                results += saver.wait()
            dist.barrier()  # rank 0 cleans up after the other ranks know the outcome
            actual.append([name, [(r.step, r.path is not None, r.error) for r in results]])
    return actual


def test_a_full_disk_on_one_rank_in_any_phase_fails_the_save_on_all_and_hangs_none(tmp_path: Path) -> None:
    by_rank = run_ranks("fail_in_each_phase", __file__, 2, {"folder": str(tmp_path)})
    assert by_rank[0] == by_rank[1] and len(by_rank[0]) == 10
    for name, ((_, _, before), (_, there, error), (_, _, after)) in by_rank[0]:
        assert before is None and after is None and f"rank {name[-1]}" in error and "No space left" in error, name
        assert there == name.startswith("saved"), name
        kept = [1, 2, 3] if there else [1, 3]
        assert sorted(os.listdir(tmp_path / name)) == [f"step_{step:08d}" for step in kept], name
        assert all(validate(path) is None for _, path in list_steps(tmp_path / name)), name


# --- through the command ---------------------------------------------------------------------------------------------


def train(folder: Path, output: str, nproc: int, faults: list[str]) -> Path:
    words = ["--nproc", nproc, "--max_steps", 8, "--save_every", 2, "--deterministic", "--output_dir", output]
    if faults:
        words += ["--max_restarts", len(faults), "--inject", ",".join(faults)]
    ended = unisono("train", TINY, *words, cwd=folder, seconds=280)
    assert ended.code == 0, ended.err[-4000:]
    run = folder / output
    happened = [line["fault"] for line in lines(run, "events.jsonl") if line["kind"] == "injected"]
    assert sorted(happened) == sorted(faults)
    return run


def check_end(run: Path, whole: Path) -> None:
    checkpoints = run / "checkpoints"
    assert [line["loss"] for line in lines(run)] == [line["loss"] for line in lines(whole)]
    names, expected = set(os.listdir(checkpoints)), set(os.listdir(whole / "checkpoints"))
    # After a kill between the last commit and the deletion of the oldest checkpoint, that checkpoint still exists.
    assert expected <= names and len(names - expected) <= 1, names
    assert len(list_steps(checkpoints)) == len(names), "something was left behind"
    for _, path in list_steps(whole / "checkpoints"):
        path = checkpoints / path.name
        assert validate(path) is None
        ours, theirs = load_whole(path, ""), load_whole(whole / "checkpoints" / path.name, "")
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours), path


def kill(rank: int, step: int, phase: str) -> str:
    return f"kill-during-save@rank{rank}:step{step}:{phase}"


@pytest.mark.slow
def test_ranks_killed_while_saving_end_with_the_same_bits(tmp_path: Path) -> None:
    # Rank 1 dies in the last save, while the others only wait for it.
    faults = [kill(0, 4, "save-commit"), kill(1, 8, "save-write")]
    check_end(train(tmp_path, "killed", 2, faults), train(tmp_path, "whole", 2, []))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("rank", "nproc"), [(0, 1), (0, 2), (1, 2)])
def test_a_rank_killed_in_every_phase_of_a_save_ends_with_the_same_bits(tmp_path: Path, rank: int, nproc: int) -> None:
    whole = train(tmp_path, "whole", nproc, [])
    faults = [kill(rank, step, phase) for step, phase in zip((2, 2, 4, 6, 8), SAVE_PHASES, strict=True)]
    check_end(train(tmp_path, "killed", nproc, faults), whole)
    faults = [kill(rank, 8, phase) for phase in SAVE_PHASES]  # again, each phase in the last save
    check_end(train(tmp_path, "killed at last", nproc, faults), whole)
