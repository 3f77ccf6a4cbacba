"""The recipe as a whole: the same run on any number of ranks, through kills and stops; and it learns."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import unisono
from command_line import end, lines, losses, start, wait_until
from command_line import unisono as command
from many_runs import Copy, Outcome, Run, largest_difference
from ranks import run_ranks
from unisono.cli.main import main
from unisono.errors import UnisonoError
from unisono.recipes.darkroom.data.histories import read_histories, write_histories
from unisono.recipes.darkroom.previews import _figure, best
from unisono.recipes.darkroom.recipe import Darkroom
from unisono.recipes.darkroom.rooms import Darkroom as Room
from unisono.recipes.darkroom.rooms import split_tasks
from unisono.recipes.darkroom.sources import SOURCES
from unisono.recipes.darkroom.sources.source import run_learners

STEPS = 5
TINY: dict[str, Any] = {
    **{"grid_size": 3, "horizon": 4, "num_validation": 2, "train_env_ratio": 0.7},
    **{"n_stream": 2, "total_source_timesteps": 80, "train_source_timesteps": 40, "n_transit": 16},
    **{"tf_n_embd": 8, "tf_n_layer": 1, "tf_n_head": 2, "tf_n_inner": 8, "eval_episodes": 4, "eval_repeats": 2},
    **{"eval_batch_size": 2, "eval_train_tasks": 2, "log_every": 1, "tensorboard": False, "preview_every": -1},
    **{"global_batch_size": 7, "batch_size": 7, "max_steps": STEPS, "warmup_steps": 2, "dtype": "float64"},
    **{"eval_every": 0, "save_every": 0},
}
RESUMED = {"eval_every": 2, "save_every": 1, "keep_last": 0}
COMPRESSED = {"use_compressed_context": True, "compress_interval": 6}
KINDS: dict[str, dict[str, Any]] = {
    "plain": RESUMED,
    "last": {"loss_positions": "last"},
    "compressed": COMPRESSED,
    "compressed last": COMPRESSED | {"loss_positions": "last"},
}


class Recorded(Darkroom):
    """The unchanged recipe, recorded for comparison."""

    @dataclass
    class Config(Darkroom.Config):
        record: str | None = None
        """Not used here."""


def train_rooms(runs: list[dict[str, Any]], root: str) -> dict[str, Any]:
    """Runs in each rank: trains the runs."""
    import many_runs
    import recipes_for_tests

    recipes_for_tests.Recorded = Recorded  # type: ignore[attr-defined]
    return many_runs.train_all(runs, root)


def run(name: str, world: int, settings: Mapping[str, Any], copy: Copy | None = None) -> Run:
    strategy = {"strategy": "single" if world == 1 else "ddp"}
    return Run(name, name, world, {**settings, **strategy}, copy, "Recorded")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    root = tmp_path_factory.mktemp("darkroom")
    run_list = [run(f"{kind} on {world}", world, TINY | KINDS[kind]) for kind in KINDS for world in (1, 2)]
    run_list += [
        run("in pieces", 1, TINY | KINDS["plain"] | {"batch_size": 2}),
        run("on from 3", 1, {}, Copy("plain on 1", 3)),
        run("on from 2 on 2", 2, {}, Copy("plain on 1", 2)),
        run("on from 1 on 1", 1, {}, Copy("plain on 2", 1)),
    ]
    args = {"runs": [asdict(each) for each in run_list], "root": str(root)}
    results = run_ranks("train_rooms", __file__, 2, args)
    actual = {
        each.name: Outcome(root / each.folder, root / each.name, [results[r][each.name] for r in range(each.world)])
        for each in run_list
    }
    for name, outcome in actual.items():
        assert all(result.get("status") == "done" for result in outcome.by_rank), (name, outcome.by_rank)
    return actual


def evaluated(outcome: Outcome) -> list[dict[str, Any]]:
    return [
        {k: v for k, v in line.items() if k in ("step", "samples") or "eval/" in k} for line in outcome.evaluations()
    ]


def same(one: Outcome, other: Outcome) -> None:
    """Checks that losses and weights agree up to rounding, and that the played episodes are identical."""
    torch.testing.assert_close(one.losses(), other.losses(), rtol=0, atol=1e-12)
    assert len(one.losses()) == STEPS
    assert largest_difference(one.weights(prefix=""), other.weights(prefix="")) < 1e-10
    for key in ("lr", "count", "samples", "accuracy"):
        assert [line[key] for line in one.steps()] == [line[key] for line in other.steps()], key
    # Random numbers belong to the task, not to the rank; sums of halves and quarters are exact in any order.
    assert evaluated(one)[-1]["step"] == STEPS
    for mine, theirs in zip(evaluated(one), evaluated(other), strict=True):
        assert mine == {name: pytest.approx(value, abs=1e-15) for name, value in theirs.items()}
        for name in (name for name in mine if name.endswith(("return", "by_episode"))):
            assert [mine[name]] == [theirs[name]], name


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_train_and_play_like_one(kind: str, runs: dict[str, Outcome]) -> None:
    same(runs[f"{kind} on 1"], runs[f"{kind} on 2"])


def test_accumulation_changes_neither_the_run_nor_its_length(runs: dict[str, Outcome]) -> None:
    same(runs["in pieces"], runs["plain on 1"])


@pytest.mark.parametrize("name", ["on from 3", "on from 2 on 2", "on from 1 on 1"])
def test_a_resumed_run_equals_an_uninterrupted_one(name: str, runs: dict[str, Outcome]) -> None:
    same(runs[name], runs["plain on 1"])


def test_the_loss_counts_every_position_or_one_per_context(runs: dict[str, Outcome]) -> None:
    counts = {"plain": 7 * 16, "last": 7, "compressed": 7 * 6, "compressed last": 7}
    for kind, count in counts.items():
        assert {line["count"] for line in runs[f"{kind} on 2"].steps()} == {count}, kind


def test_the_schedule_ends_with_the_run_on_any_number_of_ranks(runs: dict[str, Outcome]) -> None:
    """In other implementations, the schedule runs too fast by a factor of the number of ranks, and rises again."""
    cosine = [0.5 * (1 + math.cos(math.pi * step / 3)) for step in range(3)]
    for world in (1, 2):
        rates = [line["lr"] for line in runs[f"plain on {world}"].steps()]
        assert rates == pytest.approx([0.5e-3, *(1e-3 * factor for factor in (1.0, *cosine))], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_verify_finds_the_same_run(kind: str, tmp_path: Path) -> None:
    inputs = {name: value for name, value in (TINY | KINDS[kind]).items() if name not in (*RESUMED, "dtype")}
    words = [f"--{name}={value}" for name, value in inputs.items() if name != "max_steps"]
    ended = command("verify", "darkroom", "--ranks", "1,2", "--steps", 3, *words, cwd=tmp_path, seconds=240)
    assert ended.code == 0, ended.out
    assert "Same run" in ended.out and "DIFFERS" not in ended.out


def test_contexts_come_only_from_training_tasks(runs: dict[str, Outcome]) -> None:
    folder = runs["plain on 2"].folder
    recipe = Darkroom(Darkroom.Config(**{name: TINY[name] for name in TINY if name in vars(Darkroom.Config)}))
    recipe._histories = sorted((folder / "prepared/histories").glob("*.hdf5"))
    split = recipe.split
    groups = [set(split.train), set(split.validation), set(split.unseen)]
    assert len(set.union(*groups)) == sum(map(len, groups)) == 9 and list(map(len, groups)) == [4, 2, 3]
    expected = read_histories(recipe._histories, recipe.room, split.train, 2, 40)
    data = recipe.dataset("train")
    assert torch.equal(data.cells, expected.cells.view(8, 40)) and torch.equal(
        data.actions, expected.actions.view(8, 40)
    )
    assert recipe.dataset("eval") == [
        *((task, 0) for task in split.train[:2]),
        *((task, 1) for task in split.validation),
        *((task, 2) for task in split.unseen),
    ]


# --- collection


# Long enough to be interrupted: 81 tasks in 9 blocks.
COLLECT: dict[str, Any] = {
    **{"n_stream": 10, "total_source_timesteps": 10 * 600, "train_n_stream": 2, "train_source_timesteps": 100},
    **{"n_transit": 40, "tf_n_embd": 8, "tf_n_layer": 1, "tf_n_head": 2, "batch_size": 8, "max_steps": 2},
    **{"eval_every": -1, "log_every": 1, "tensorboard": False, "nproc": 1, "preview_every": -1},
}
TRAIN = ["-m", "unisono", "train", "darkroom", *(f"--{name}={value}" for name, value in COLLECT.items())]


def blocks(folder: Path) -> dict[str, int]:
    """The finished blocks with their modification times."""
    return {path.name: path.stat().st_mtime_ns for path in (folder / "prepared/histories").glob("tasks_*.hdf5")}


def interrupted(cwd: Path, number: int, more: int) -> tuple[subprocess.Popen[str], dict[str, int]]:
    """Starts the run and sends a signal once this many more blocks exist."""
    before = len(blocks(cwd / "run"))
    process = start([*TRAIN, "--output_dir", "run"], cwd=cwd)
    wait_until(lambda: len(blocks(cwd / "run")) >= before + more or process.poll() is not None, "a block")
    os.killpg(process.pid, number)
    return process, blocks(cwd / "run")


@pytest.mark.slow
def test_stopping_or_killing_a_collection_loses_no_finished_block(tmp_path: Path) -> None:
    process, _ = interrupted(tmp_path, signal.SIGTERM, 1)
    stopped = end(process)
    assert stopped.code == 75 and "prepared files are kept" in stopped.err, stopped
    first = blocks(tmp_path / "run")
    assert 1 <= len(first) < 9 and not (tmp_path / "run/metrics.jsonl").exists()

    process, _ = interrupted(tmp_path, signal.SIGKILL, 1)
    assert end(process).code == -signal.SIGKILL
    second = blocks(tmp_path / "run")
    assert len(first) + 1 <= len(second) < 9 and {name: second[name] for name in first} == first

    done, whole = (unisono.train(Darkroom, **COLLECT, output_dir=str(tmp_path / name)) for name in ("run", "whole"))
    third = blocks(tmp_path / "run")
    assert len(third) == 9 and {name: third[name] for name in second} == second, "none is collected anew"

    assert losses(done.folder) == losses(whole.folder) and len(losses(whole.folder)) == 2
    for name in third:
        mine, other = (tmp_path / run / "prepared/histories" / name for run in ("run", "whole"))
        assert mine.read_bytes() == other.read_bytes(), name


# --- learning


LEARN: dict[str, Any] = {
    **{"grid_size": 5, "horizon": 10, "train_env_ratio": 0.8, "num_validation": 3, "n_stream": 20},
    **{"total_source_timesteps": 2000, "train_source_timesteps": 100, "n_transit": 60, "tf_n_embd": 32},
    **{"tf_n_layer": 2, "tf_n_head": 2, "tf_n_inner": 64, "batch_size": 32, "max_steps": 240, "learning_rate": 3e-3},
    **{"warmup_steps": 30, "eval_episodes": 20, "eval_repeats": 4, "eval_train_tasks": 4, "eval_every": 120},
    **{"tensorboard": False, "log_every": 100, "save_every": 0},
}


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("learned") / "run"
    result = unisono.train(Darkroom, **LEARN, output_dir=str(folder))
    assert result.status == "done"
    evaluations = [line for line in lines(folder) if "eval/unseen_return" in line]
    assert [line["step"] for line in evaluations] == [120, 240]
    return folder, max(evaluations, key=lambda line: line["eval/validation_of_optimum"])


def chance_of(tasks: list[int]) -> float:
    """The mean return of acting at random, played in plain Python."""
    generator, total = random.Random(0), 0
    games = [(task // 5, task % 5) for task in tasks for _ in range(400)]
    for goal in games:
        x = y = 2
        for _ in range(10):
            dx, dy = generator.choice([(1, 0), (-1, 0), (0, 1), (0, -1), (0, 0)])
            x, y = min(4, max(0, x + dx)), min(4, max(0, y + dy))
            total += (x, y) == goal
    return total / len(games)


def test_the_model_learns_unseen_tasks(learned: tuple[Path, dict[str, Any]]) -> None:
    _, actual = learned
    unseen = split_tasks(25, 0, 0.8, 3).unseen
    chance = chance_of(unseen)
    curve = actual["eval/unseen_return_by_episode"]
    assert len(curve) == 20 and len(unseen) == 5
    assert actual["eval/unseen_return"] == pytest.approx(sum(curve[-10:]) / 10)
    assert actual["eval/unseen_return"] > 4 * chance, "far more than chance"
    assert actual["eval/unseen_return"] > curve[0] + 1, "and more than in its first episode"
    optimum = sum(min(10, 11 - abs(task // 5 - 2) - abs(task % 5 - 2)) for task in unseen) / 5
    assert actual["eval/unseen_of_optimum"] == pytest.approx(actual["eval/unseen_return"] / optimum)
    assert len(actual["eval/unseen_of_optimum_by_task"]) == 5
    assert 0 <= min(actual["eval/unseen_of_optimum_by_task"]) <= max(actual["eval/unseen_of_optimum_by_task"]) <= 1


def test_the_figure_and_the_table_show_the_metrics(learned: tuple[Path, dict[str, Any]]) -> None:
    folder, actual = learned
    (picture,) = (folder / "previews").glob("*240_in_context.png")
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n") and picture.stat().st_size > 20_000
    (table,) = (folder / "previews").glob("*240_in_context.txt")
    title, _, head, _, *rows = table.read_text().splitlines()
    assert f"step {actual['step']} " in title
    assert " ".join(head.split()) == "episode 1 5 10 last 10 of optimum solved"
    by_name = {row[:28].strip(): row[28:].split() for row in rows}
    for name in ("unseen", "validation", "train"):
        curve = actual[f"eval/{name}_return_by_episode"]
        assert by_name[f"{name} tasks"] == [
            *(f"{curve[episode]:.2f}" for episode in (0, 4, 9)),
            f"{actual[f'eval/{name}_return']:.2f}",
            f"{actual[f'eval/{name}_of_optimum']:.1%}",
            f"{actual[f'eval/{name}_solved']:.0%}",
        ]
    unseen = split_tasks(25, 0, 0.8, 3).unseen
    assert float(by_name["chance, unseen tasks"][0]) == pytest.approx(chance_of(unseen), abs=0.15)
    optimum = sum(min(10, 11 - abs(task // 5 - 2) - abs(task % 5 - 2)) for task in unseen) / 5
    assert by_name["optimum, unseen tasks"] == [f"{optimum:.2f}", "100.0%"]
    rewards = read_histories(sorted(folder.glob("prepared/histories/*.hdf5")), Room(5, 10), unseen, 20, 100).rewards
    source = rewards.view(-1, 10, 10).double().sum(-1).mean(0)
    reported = [float(word) for word in by_name["source learner, unseen tasks"][:4]]
    assert reported == pytest.approx(
        [float(source[episode]) for episode in (0, 4, 9)] + [float(source.mean())], abs=0.006
    )


def test_the_best_model_is_chosen_by_validation_tasks(learned: tuple[Path, dict[str, Any]]) -> None:
    folder, actual = learned
    best = json.loads((folder / "checkpoints/best.json").read_text())
    assert best["step"] == actual["step"] and best["metric"] == "eval/validation_of_optimum"


def test_the_figure_shows_the_best_checkpoint_and_never_step_0() -> None:
    evaluations = [{"step": step, "eval/x": value} for step, value in ((0, 0.9), (4, 0.5), (8, 0.7), (9, 0.7))]
    assert best(evaluations, "eval/x")["step"] == 8
    assert best(evaluations[:1], "eval/x")["step"] == 0  # stopped before the first checkpoint


def test_tasks_that_are_not_played_are_not_in_the_table(tmp_path: Path) -> None:
    settings = TINY | {"max_steps": 1, "eval_train_tasks": 0, "preview_every": 0, "dtype": "float32"}
    result = unisono.train(Darkroom, **settings, output_dir=str(tmp_path / "run"))
    assert "eval/unseen_return" in result.last and "eval/train_return" not in result.last
    (table,) = (tmp_path / "run/previews").glob("*.txt")
    assert "unseen tasks" in table.read_text() and "train tasks" not in table.read_text()


# --- invalid settings

BAD: list[tuple[dict[str, Any], str]] = [
    ({"n_transit": 7}, "n_transit: expected at least 8, got 7"),
    ({"n_transit": 41}, "train_source_timesteps: expected at least 41, got 40"),
    ({"history_skip": 4}, "n_transit 16: history_skip 4 leaves 12 steps of 10 episodes"),
    ({"total_source_timesteps": 20}, "total_source_timesteps 20 / n_stream 2 = 10 steps per learner"),
    (
        COMPRESSED | {"n_transit": 13},
        "n_transit 13: two regions of compress_interval 6 and two separators need 14 tokens; "
        "use --n_transit 14 or --compress_interval 5",
    ),
    (COMPRESSED | {"compress_interval": 3}, "compress_interval: expected at least 4, got 3"),
    ({"tf_n_head": 3}, "tf_n_embd 8 must be a multiple of tf_n_head 3"),
    ({"num_validation": 6}, "num_validation 6 leaves no tasks to train on"),
    ({"num_validation": 0}, "num_validation: expected at least 1, got 0"),
    ({"train_env_ratio": 1.0}, "train_env_ratio: expected more than 0 and less than 1"),
    ({"train_env_ratio": -0.5}, "train_env_ratio: expected more than 0 and less than 1"),
    ({"train_env_ratio": math.nan}, "train_env_ratio: expected more than 0 and less than 1"),
    ({"train_env_ratio": 0.99}, "leave 7 of 9 tasks to train on and 0 unseen"),
    ({"num_tasks": 10}, "num_tasks: expected 3 to 9, got 10"),
    ({"grid_size": 17}, "grid_size: expected 2 to 16, got 17"),
    ({"tf_dropout": 1.5}, "tf_dropout: expected at least 0 and less than 1, got 1.5"),
]


@pytest.mark.parametrize(("bad", "words"), BAD, ids=[words for _, words in BAD])
def test_invalid_settings_are_rejected_in_one_line_and_nothing_is_written(
    bad: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(UnisonoError) as caught:
        unisono.train(Darkroom, **TINY | bad, output_dir=str(tmp_path / "run"))
    assert words in str(caught.value) and len(str(caught.value).splitlines()) == 1
    assert caught.value.exit_code == 2 and not list(tmp_path.iterdir())


def test_missing_histories_and_those_of_another_environment_are_rejected(tmp_path: Path) -> None:
    lived = run_learners(SOURCES["noise"], Room(4, 4), torch.arange(9), 2, 40, seed=0)
    write_histories(tmp_path / "other.hdf5", lived, Room(4, 4), source="noise", seed=0)
    (tmp_path / "text.hdf5").write_text("mine")
    before = {path.name for path in tmp_path.iterdir()}
    for name, words in (
        ("missing.hdf5", "missing.hdf5 does not exist; use an existing file, or a folder to collect into"),
        ("other.hdf5", "contains histories of darkroom of size 4 and horizon 4, expected darkroom of size 3"),
        ("text.hdf5", "cannot be read as HDF5"),
    ):
        with pytest.raises(UnisonoError) as caught:
            unisono.train(Darkroom, **TINY, traj_dir=str(tmp_path / name), output_dir=str(tmp_path / "run"))
        assert words in str(caught.value) and len(str(caught.value).splitlines()) == 1
        assert caught.value.exit_code == 2 and not (tmp_path / "run/run.json").exists()
    assert {path.name for path in tmp_path.iterdir()} - {"run"} == before


def test_a_user_error_is_one_line_with_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "darkroom", "--gpus", "0", "--tf_n_embd", "10", "--output_dir", str(tmp_path / "run")]
    assert main(words) == 2
    assert capsys.readouterr().err == "unisono: tf_n_embd 10 must be a multiple of tf_n_head 4\n"
    assert not list(tmp_path.iterdir())


def test_the_figure_has_an_optimum_for_each_group(monkeypatch: pytest.MonkeyPatch) -> None:
    figure = pytest.importorskip("matplotlib.figure")
    drawn: list[Any] = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, *_, **__: drawn.append(self))
    recipe = Darkroom(Darkroom.Config(grid_size=5, eval_train_tasks=3))
    recipe.source_curve = [0.0, 1.0]  # type: ignore[misc]
    chosen: dict[str, Any] = {"step": 5}
    for group in ("train", "validation", "unseen"):
        chosen |= {f"eval/{group}_of_optimum": 0.5, f"eval/{group}_return_by_episode": [1.0, 2.0]}
    _figure(recipe, chosen)
    [axes] = drawn[0].axes
    levels = sorted(line.get_ydata()[0] for line in axes.lines if len(set(line.get_ydata())) == 1)

    def optimum(tasks: Sequence[int]) -> float:
        return sum(min(20, 21 - abs(task // 5 - 2) - abs(task % 5 - 2)) for task in tasks) / len(tasks)

    split = recipe.split
    optima = [optimum(tasks) for tasks in (split.train[:3], split.validation, split.unseen)]
    assert len(set(optima)) > 1, "groups of different optima"
    assert levels == pytest.approx(sorted([recipe.chance("unseen"), *optima]))
    assert recipe.labels["unseen_of_optimum_by_task"][0] == f"goal ({split.unseen[0] // 5}, {split.unseen[0] % 5})"
