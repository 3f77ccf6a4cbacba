"""Hostile or careless input to darkroom, its config files and its report gives one clear line and does no harm."""

from __future__ import annotations

import json
import os
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch

import unisono
from command_line import TESTS, end, start
from unisono.cli.main import main
from unisono.engine.recipe import Work
from unisono.errors import UnisonoError, UserError
from unisono.observe.report.previews import read_previews
from unisono.observe.report.series import Series
from unisono.recipes.darkroom.data import collect as collecting
from unisono.recipes.darkroom.data.collect import block_file, blocks_of, collect
from unisono.recipes.darkroom.data.histories import read_histories, write_histories
from unisono.recipes.darkroom.recipe import Darkroom
from unisono.recipes.darkroom.rooms import Darkroom as Room

SMALL: dict[str, Any] = {
    **{"grid_size": 3, "horizon": 4, "num_validation": 1, "n_stream": 2, "total_source_timesteps": 80},
    **{"train_source_timesteps": 40, "n_transit": 16, "tf_n_embd": 8, "tf_n_layer": 1, "tf_n_head": 2},
    **{"tf_n_inner": 8, "eval_episodes": 2, "eval_repeats": 1, "eval_train_tasks": 0, "batch_size": 4},
    **{"max_steps": 1, "warmup_steps": 0, "tensorboard": False, "preview_every": -1},
}
EVALUATE = TESTS.parent / "examples/darkroom/evaluate.py"


@pytest.mark.parametrize(
    "bad, words",
    [
        ({"alg_seed": 10**30}, "alg_seed: expected a 64-bit integer"),
        ({"tf_n_layer": 10**12}, "tf_n_layer: expected at most 1000"),
        ({"tf_n_embd": 65536}, "make a model of 17,"),
        ({"tf_n_inner": 10**30}, "tf_n_inner: expected at most"),
        ({"total_source_timesteps": 10**12}, "total_source_timesteps: expected at most"),
        ({"total_source_timesteps": 2 * 10**9 // 2, "grid_size": 9}, "GiB for histories; the maximum is 32 GiB"),
        ({"eval_episodes": 10**30}, "eval_episodes: expected at most"),
        ({"eval_episodes": 10**5, "eval_repeats": 10**4}, "steps of each task per evaluation"),
        ({"source_lr": float("nan")}, "source_lr: expected a number above 0, got nan"),
        ({"source_batch_size": 0}, "source_batch_size: expected at least 1, got 0"),
        ({"n_epochs": 0}, "n_epochs: expected at least 1, got 0"),
        ({"source": "ppo", "n_steps": 41}, "n_steps 41: a rollout does not fit into a history of 40 steps"),
        ({"compress_interval": 0}, "compress_interval: expected at least 1, got 0"),
        ({"tf_dropout": 1.0}, "tf_dropout: expected at least 0 and less than 1, got 1.0"),
        ({"traj_dir": "a\0b"}, "is not a valid path"),
        ({"traj_dir": "\ud800"}, "is not a valid path"),
        ({"traj_dir": "/dev/null"}, "traj_dir: /dev/null is neither a folder nor a file"),
        ({"traj_dir": "a" * 5000}, "is not a valid path"),
    ],
)
def test_extreme_values_are_rejected_before_anything_is_written(
    bad: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(UnisonoError) as caught:
        unisono.train(Darkroom, **SMALL | bad, output_dir=str(tmp_path / "run"))
    assert words in str(caught.value) and len(str(caught.value).splitlines()) == 1
    assert caught.value.exit_code == 2
    assert not list(tmp_path.glob("**/*.hdf5"))


def test_a_fifo_in_place_of_histories_is_rejected_without_blocking(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "history_darkroom_explorer_alg-seed42.hdf5")
    recipe = Darkroom(Darkroom.Config(traj_dir=str(tmp_path)))
    with pytest.raises(UserError, match="is not a file"):
        recipe.prepare(Work(tmp_path / "work"))


# Writing histories


ROOM = Room(3, 4)


def lived(tasks: list[int]) -> Any:
    from unisono.recipes.darkroom.sources import SOURCES
    from unisono.recipes.darkroom.sources.source import run_learners

    return run_learners(SOURCES["explorer"], ROOM, torch.tensor(tasks), 2, 8, 1)


def test_two_runs_that_finish_a_block_at_the_same_time_both_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def after_somebody_else(path: Path, *rest: Any, **more: Any) -> None:
        write_histories(path, *rest, **more)
        write_histories(path, *rest, **more)

    monkeypatch.setattr(collecting, "write_histories", after_somebody_else)
    files = collect(ROOM, "explorer", range(9), 2, 8, 1, tmp_path)
    assert read_histories(files, ROOM, list(range(9)), 2, 8).actions.shape == (9, 2, 8)


def test_a_block_that_another_run_wrote_meanwhile_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def after_somebody_else(path: Path, *rest: Any, **more: Any) -> None:
        write_histories(path, *rest, **more | {"seed": 2})
        write_histories(path, *rest, **more)

    monkeypatch.setattr(collecting, "write_histories", after_somebody_else)
    with pytest.raises(UserError, match="contains histories with seed 2, not 1"):
        collect(ROOM, "explorer", range(9), 2, 8, 1, tmp_path)


def test_a_full_disk_is_an_error_of_one_line_and_leaves_no_file(tmp_path: Path) -> None:
    # A file size limit fails like a full disk, inside write().
    program = (
        "import resource, signal, sys; from pathlib import Path; sys.path.insert(0, sys.argv[1])\n"
        "import test_darkroom_attacks as t; from unisono.errors import UserError\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))\n"
        "try: t.write_histories(Path('x.hdf5'), t.lived([0, 1]), t.ROOM, source='explorer', seed=1)\n"
        "except UserError as error: print(error)\n"
    )
    ended = end(start(["-c", program, TESTS], cwd=tmp_path, program=(sys.executable,)))
    assert (ended.code, ended.err) == (0, ""), ended.err
    assert ended.out == "x.hdf5 cannot be written (File too large); free some space or use another folder\n"
    assert not list(tmp_path.iterdir())


def test_a_file_in_place_of_the_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "folder").write_text("precious")
    with pytest.raises(UserError, match="folder is not a folder"):
        write_histories(tmp_path / "folder/x.hdf5", lived([0]), ROOM, source="explorer", seed=1)
    assert (tmp_path / "folder").read_text() == "precious"


def test_attributes_of_a_file_cannot_send_escape_sequences_to_the_terminal(tmp_path: Path) -> None:
    path = block_file(tmp_path, blocks_of([0, 1])[0])
    write_histories(path, lived([0]), ROOM, source="explorer", seed=1)
    with h5py.File(path, "r+") as file:
        file.attrs["room"] = b"\x1b[31m\ntwo lines"
    with pytest.raises(UserError) as caught:
        read_histories(path, ROOM, [0], 2, 8)
    assert str(caught.value).isprintable()


# Config files


BOMB = [
    "&a [x, x, x, x, x, x, x, x, x]",
    *(f"&{b} [{', '.join([f'*{a}'] * 9)}]" for a, b in pairwise("abcdefghi")),
]


@pytest.mark.parametrize(
    "text, words",
    [
        ("env:\n" + "".join(f"  - {line}\n" for line in BOMB), "more than 100,000 values with all aliases"),
        ("alg:\n" + "".join(f"  - {line}\n" for line in BOMB), "more than 100,000 values with all aliases"),
        ("include:\n" + "".join(f"  - {line}\n" for line in BOMB), "more than 100,000 values with all aliases"),
        (
            "a: &a {k: 1}\n"
            + "".join(f"{b}: &{b} {{<<: [{', '.join([f'*{a}'] * 9)}]}}\n" for a, b in pairwise("abcdefghi")),
            "more than 100,000 values with all aliases",
        ),
        ("&a\n<<: *a\nseed: 1\n", "line 1: a value contains itself"),
        ("seed: !!bool maybe\n", "a value does not fit the tag"),
        ('seed: !!int ""\n', "a value does not fit the tag"),
        ("seed: !!timestamp x\n", "a value does not fit the tag"),
        ("# " + "x" * 2**20, "is larger than 1 MiB"),
    ],
    ids=["aliases", "aliases in alg", "aliases in include", "merges", "itself", "bool", "int", "time", "large"],
)
def test_a_config_file_that_expands_without_end_is_rejected_at_once(
    text: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.yaml").write_text(text)
    assert main(["train", "darkroom", "--print_config", "--config", "bad.yaml"]) == 2
    stderr = capsys.readouterr().err
    assert words in stderr and len(stderr.splitlines()) == 1


def test_ordinary_yaml_anchors_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.yaml").write_text("seed: &seed 7\r\nenv_split_seed: *seed\r\n")
    assert main(["train", "darkroom", "--print_config", "--config", "good.yaml"]) == 0
    stdout = capsys.readouterr().out
    assert "\nseed: 7  # file\n" in stdout and "\nenv_split_seed: 7  # file\n" in stdout


def test_a_fifo_is_rejected_as_a_config_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    assert main(["train", "darkroom", "--config", str(tmp_path / "pipe.yaml")]) == 2
    assert capsys.readouterr().err == f"unisono: config file {tmp_path}/pipe.yaml is not a regular file\n"


# The report, and playing


@pytest.mark.parametrize("value", [5e-324, -5e-324, 1e-310])
def test_denormal_numbers_are_drawn_as_zero(value: float, tmp_path: Path) -> None:
    series = Series()
    series.take(1, value)
    assert series.last == (1, 0.0)
    (tmp_path / "run.json").write_text('{"recipe": "x"}')
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"step": s, "loss": value}) + "\n" for s in (1, 2)))
    assert main(["report", str(tmp_path)]) == 0


def test_a_folder_and_a_fifo_among_the_previews_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "previews/step_00000001_a.png").mkdir(parents=True)
    os.mkfifo(tmp_path / "previews/step_00000001_b.txt")
    gallery = read_previews(tmp_path)
    assert not gallery.shown
    assert gallery.omitted == [f"step_00000001_{name}: not a regular file" for name in ("a.png", "b.txt")]


def test_a_report_name_with_a_null_character_is_a_user_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.json").write_text('{"recipe": "x"}')
    assert main(["report", str(tmp_path), "--output", "a\0b"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_evaluate_py_works_without_train_tasks_and_rejects_invalid_numbers(tmp_path: Path) -> None:
    unisono.train(Darkroom, **SMALL, output_dir=str(tmp_path / "run"))
    ended = end(start([EVALUATE, "run", "--episodes", 2], cwd=tmp_path))
    assert ended.code == 0, ended.err
    assert [line.split()[0] for line in ended.out.splitlines()[1:-1]] == ["goals", "validation", "unseen"]
    ended = end(start([EVALUATE, "run", "--episodes", 0], cwd=tmp_path))
    assert (ended.code, ended.err) == (2, "evaluate.py: eval_episodes: expected at least 1, got 0\n")
