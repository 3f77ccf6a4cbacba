"""Unexpected files in a run folder (FIFOs, deeply nested JSON) end a start with one line, and never block it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import unisono
from command_line import TESTS
from unisono.checkpoint.commit import read_best, write_best
from unisono.engine.previews import write_previews
from unisono.errors import UserError
from unisono.observe.folder import RunFolder
from unisono.plain_files import NotRegular, open_regular, parse_json, read_json

DEEP = "[" * 100_000
DEEP_BUT_PARSED = "[" * 500 + "]" * 500


@pytest.fixture(autouse=True)
def no_test_waits_for_ever() -> Iterator[None]:
    def give_up(number: int, frame: object) -> None:
        raise AssertionError("waited for a file that never answers")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(100)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    train(folder)
    return folder


def train(folder: Path, **settings: object) -> None:
    unisono.train(f"{TESTS / 'tiny_recipe.py'}:Tiny", output_dir=str(folder), gpus="0", **{"max_steps": 2, **settings})


def as_socket(path: Path) -> None:
    before = os.getcwd()
    os.chdir(path.parent)  # the path of a socket must be short
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)
    os.chdir(before)


KINDS: dict[str, Callable[[Path], None]] = {"FIFO": lambda path: os.mkfifo(path), "socket": as_socket}
FILES = ["run.json", "metrics.jsonl", "events.jsonl", "memory.json", "checkpoints/best.json"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FILES)
def test_a_start_refuses_files_that_are_not_regular(name: str, kind: str, finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    (run / name).unlink(missing_ok=True)
    KINDS[kind](run / name)
    with pytest.raises(UserError, match=f"it is a {kind}, not a regular file") as told:
        train(run)
    assert "\n" not in str(told.value) and name in str(told.value)
    assert (run / name).exists() and not (run / name).is_file(), "it is left as it was"


@pytest.mark.parametrize(
    "text", [DEEP, DEEP_BUT_PARSED, '{"a":' * 500 + "1" + "}" * 500], ids=["deep", "500", "objects"]
)
def test_deeply_nested_json_gives_one_line_and_never_a_traceback(text: str, finished: Path, tmp_path: Path) -> None:
    for name in FILES:
        run = tmp_path / name.replace("/", "_") / "run"
        shutil.copytree(finished, run)
        (run / name).write_text(text + "\n")
        if name in ("run.json", "checkpoints/best.json"):
            with pytest.raises(UserError, match=f"{name}.*nested too deeply"):
                train(run)
        else:  # only log lines or a hint are lost; the run is the same
            train(run)


def test_reading_json_raises_only_two_kinds_of_error(tmp_path: Path) -> None:
    for text in (b"", b"{", b"\xff\xfe\xff", b"1" * 10_000, DEEP.encode(), DEEP_BUT_PARSED.encode()):
        with pytest.raises(ValueError):
            parse_json(text)
    assert parse_json("[" * 90 + "]" * 90) and parse_json(str([[0]] * 1000))
    for path in (tmp_path, Path("/dev/null"), Path("/dev/zero")):
        with pytest.raises(NotRegular):
            read_json(path)
    (tmp_path / "huge").touch()
    os.truncate(tmp_path / "huge", 65 << 20)
    with pytest.raises(ValueError, match="larger than 64 MiB"):
        read_json(tmp_path / "huge")


def test_a_log_file_may_be_created_but_a_pipe_is_not_written_to(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(NotRegular):
        open_regular(tmp_path / "pipe", os.O_RDWR | os.O_APPEND | os.O_CREAT)
    with open_regular(tmp_path / "new", os.O_RDWR | os.O_APPEND | os.O_CREAT) as file:
        file.write(b"line\n")
    assert (tmp_path / "new").read_text() == "line\n"


@pytest.mark.parametrize("kind", [*KINDS, "link"])
def test_a_temporary_file_replaces_any_file_with_its_name(kind: str, finished: Path, tmp_path: Path) -> None:
    run, precious = tmp_path / "run", tmp_path / "precious"
    shutil.copytree(finished, run)
    precious.write_text("mine")
    make = {**KINDS, "link": lambda path: path.symlink_to(precious)}[kind]
    make(run / ".run.json.new")
    make(run / "checkpoints" / ".best.json.new")
    train(run, max_steps=3)
    write_best(run / "checkpoints", step=3, metric="eval/loss", value=1.0)
    assert precious.read_text() == "mine"
    for name in ("run.json", "checkpoints/best.json"):
        assert (run / name).is_file() and not (run / name).is_symlink()
    assert read_best(run / "checkpoints") == {"step": 3, "metric": "eval/loss", "value": 1.0}


@pytest.mark.parametrize("kind", KINDS)
def test_a_preview_replaces_any_file_with_its_name(kind: str, tmp_path: Path) -> None:
    KINDS[kind](tmp_path / "step_00000001_hello.txt")
    (path,) = write_previews({"hello.txt": "hello"}, tmp_path, 1)
    assert path.read_text() == "hello"


def test_a_text_preview_may_contain_an_incomplete_character(tmp_path: Path) -> None:
    (path,) = write_previews({"text.txt": "half \ud83d"}, tmp_path, 1)
    assert path.read_text(encoding="utf-8") == "half \\ud83d"


@pytest.mark.parametrize("leave", [shutil.rmtree, lambda run: run.rename(run.with_name("moved"))], ids=["rm", "mv"])
def test_a_run_whose_folder_was_deleted_creates_it_again(leave: Callable[[Path], None], tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.open({"id": "1", "recipe": "Tiny"})
    folder.metrics({"step": 1})
    leave(folder.path)
    folder.metrics({"step": 2})  # the record waits, because the folder does not exist yet
    (folder.path / "checkpoints").mkdir(parents=True)  # recreates the folder, as a save does
    folder.event("save", step=2)
    folder.metrics({"step": 3})
    folder.close()
    record = RunFolder.read(folder.path)
    assert record is not None and record["id"] == "1"
    assert [parse_json(line)["step"] for line in (folder.path / "metrics.jsonl").read_text().splitlines()] == [2, 3]


def test_impossible_numbers_in_run_json_count_as_damage(finished: Path, tmp_path: Path) -> None:
    for number, (name, value) in enumerate([("global_batch", -5), ("global_batch", 2**70), ("config", [1])]):
        run = tmp_path / str(number)
        shutil.copytree(finished, run)
        shutil.rmtree(run / "checkpoints")
        (run / "run.json").write_text(json.dumps({**read_json(run / "run.json"), name: value}))
        with pytest.raises(UserError, match=r"run\.json (is damaged|cannot be used)"):
            train(run)
