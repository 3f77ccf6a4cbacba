"""Only one run per folder, from the first read of the folder to the last write, even if it does not exist yet."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import unisono
from command_line import TESTS, TINY, end, environment, lines, start, wait_until
from tiny_recipe import HOLD
from unisono.errors import UserError
from unisono.observe import lock as locks
from unisono.observe.lock import FolderLock, is_held

HOLDER = """
import sys
from pathlib import Path
from unisono.errors import UserError
from unisono.observe.lock import FolderLock
lock = FolderLock(Path(sys.argv[1]))
try:
    getattr(lock, sys.argv[2])(float(sys.argv[3]))
except UserError:
    print("refused", flush=True)
else:
    print("held", flush=True)
    sys.stdin.readline()
    lock.release()
"""


def holder(path: Path, how: str = "take", patience_s: float = 0.0) -> subprocess.Popen[str]:
    """A process that holds the lock until it reads a line, or is killed."""
    return subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path), how, str(patience_s)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    )


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def let_go(process: subprocess.Popen[str]) -> None:
    process.communicate("\n")
    assert process.returncode == 0


def test_only_one_of_many_starts_gets_a_new_folder(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "new"
    for _ in range(3):
        starts = [holder(path) for _ in range(6)]
        answers = [said(each) for each in starts]
        for each in starts:
            let_go(each)
        assert sorted(answers) == ["held"] + 5 * ["refused"]


def test_folders_created_for_the_lock_are_removed_and_a_users_folder_is_not(tmp_path: Path) -> None:
    for path, stays in ((tmp_path / "a" / "b" / "c", False), (tmp_path / "mine", True)):
        if stays:
            path.mkdir()
        lock = FolderLock(path)
        lock.take()
        assert path.is_dir() and is_held(path)
        lock.release()
        assert path.exists() == stays and not is_held(path)
    assert os.listdir(tmp_path) == ["mine"] and os.listdir(tmp_path / "mine") == []
    lock.take()
    (tmp_path / "mine" / "run.json").touch()
    lock.release()
    assert os.listdir(tmp_path / "mine") == ["run.json"]


def test_a_killed_launcher_does_not_block_the_folder_but_its_rank_does(tmp_path: Path) -> None:
    launcher = holder(tmp_path)
    assert said(launcher) == "held"
    rank = holder(tmp_path, "share", 30.0)
    assert said(rank) == "held"
    launcher.kill()
    launcher.wait()
    with pytest.raises(UserError, match="another run is writing to"):
        FolderLock(tmp_path).take(0.0)
    rank.kill()
    rank.wait()
    lock = FolderLock(tmp_path)
    lock.take(5.0)
    lock.release()
    assert os.listdir(tmp_path) == []


def test_a_forked_process_neither_holds_the_lock_nor_releases_it(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path / "run")
    lock.take()
    pipe_end, answer = os.pipe()
    child = os.fork()
    if child == 0:  # like a recipe's process pool, or code that unwinds the stack after a fork
        lock.release()
        os.close(answer)
        os._exit(0)
    os.waitpid(child, 0)
    assert is_held(lock.path) and (lock.path / ".lock").exists()
    sleeper = os.fork()
    if sleeper == 0:
        os.close(answer)
        os.read(pipe_end, 1)  # stays alive until the end of the test
        os._exit(0)
    lock.release()
    try:
        FolderLock(tmp_path / "run").take(0.0)
    finally:
        os.close(answer)
        os.waitpid(sleeper, 0)


def test_folders_of_a_start_without_a_name_are_never_shared(tmp_path: Path) -> None:
    made = [FolderLock.of_new_folder(tmp_path / "runs" / "tiny-1") for _ in range(3)]
    assert [lock.path.name for lock in made] == ["tiny-1", "tiny-1-2", "tiny-1-3"]
    for lock in reversed(made):  # the first lock created runs/, and removes it when it is empty
        lock.release()
    assert os.listdir(tmp_path) == []


def test_a_run_waits_for_a_lock_that_another_machine_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On NFS, folder locks work only within one machine, and the locks of a crashed machine stay for 90 s."""
    elsewhere = os.open(tmp_path / ".lock", os.O_RDWR | os.O_CREAT)
    locks.fcntl.flock(elsewhere, locks.fcntl.LOCK_SH)
    monkeypatch.setattr(locks, "_WAIT_S", 0.1)
    monkeypatch.setattr(locks, "_OTHER_MACHINE_WAIT_S", 1.0)
    assert is_held(tmp_path)
    with pytest.raises(UserError, match="another run is writing to"):
        FolderLock(tmp_path).take(0.1)
    assert "is locked by another machine; waiting up to 1 s" in capsys.readouterr().err
    os.close(elsewhere)
    lock = FolderLock(tmp_path)
    lock.take(0.1)
    lock.release()


# ---- runs ----


@pytest.mark.slow
def test_a_second_start_cannot_take_over_a_run_that_has_no_step_yet(tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    hold.write_text("100")
    words = ["-m", "unisono", "train", TINY, "--nproc", "2", "--output_dir", "run"]
    first = start(words, cwd=tmp_path, **{HOLD: str(hold)})
    try:
        wait_until((tmp_path / "run").is_dir, "the first start has its folder")
        second = end(start([*words, "--seed", "7"], cwd=tmp_path))
        assert (second.code, second.out) == (2, "")
        assert second.err == "unisono: another run is writing to run; wait for it, or choose another output_dir\n"
    finally:
        hold.unlink()
        ended = end(first)
    assert ended.code == 0, ended.err
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (record["seed"], len(record["starts"])) == (0, 1) and len(lines(tmp_path / "run")) == 4
    assert not (tmp_path / "run" / ".lock").exists()
    late = end(start([*words, "--seed", "7"], cwd=tmp_path))
    assert late.code == 2 and "seed 7 differs from this run's 0" in late.err


def test_a_run_whose_run_json_is_lost_keeps_its_seed(tmp_path: Path) -> None:
    def train(**settings: object) -> unisono.engine.length.Result:  # type: ignore[name-defined]
        return unisono.train(TINY, output_dir=str(tmp_path / "run"), gpus="0", **settings)

    train(max_steps=2, seed=5)
    checkpoints = tmp_path / "run" / "checkpoints"
    kept = tmp_path / "kept"
    shutil.copytree(checkpoints, kept)
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "run").mkdir()
    shutil.copytree(kept, checkpoints)
    with pytest.raises(UserError, match="seed 7 differs from this run's 5"):
        train(max_steps=3, seed=7)
    assert os.listdir(tmp_path / "run") == ["checkpoints"]
    assert train(max_steps=3).step == 3
    assert json.loads((tmp_path / "run" / "run.json").read_text())["seed"] == 5


WANDERS = """
import os
from pathlib import Path
from tiny_recipe import Tiny

os.chdir(Path(__file__).parent / "data")

class Wanders(Tiny):
    def model(self):
        os.chdir("deeper")
        return super().model()
"""


@pytest.mark.slow
def test_a_recipe_may_change_the_current_folder(tmp_path: Path) -> None:
    (tmp_path / "data" / "deeper").mkdir(parents=True)
    (tmp_path / "wanders.py").write_text(WANDERS)
    words = [
        "-m",
        "unisono",
        "train",
        "wanders.py:Wanders",
        "--nproc",
        "2",
        "--output_dir",
        "runs/r",
        "--save_every",
        "1",
    ]
    path = os.pathsep.join([str(TESTS), environment()["PYTHONPATH"]])
    ended = end(start([*words, "--inject", "kill@rank1:step3"], cwd=tmp_path, PYTHONPATH=path))
    assert ended.code == 0, ended.err
    assert "restarting all ranks from the last checkpoint" in ended.err
    assert str(tmp_path) not in ended.err and "runs/r (resumed from" in ended.err, "what is printed stays short"
    again = end(start([*words[:4], *words[6:], "--max_steps", "6"], cwd=tmp_path, PYTHONPATH=path))
    assert again.code == 0, again.err
    assert [line["step"] for line in lines(tmp_path / "runs" / "r")] == [1, 2, 3, 4, 5, 6]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "runs", "wanders.py"]
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["deeper"]
    assert not any((tmp_path / "data" / "deeper").iterdir())
