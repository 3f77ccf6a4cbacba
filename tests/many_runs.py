"""Many runs in one set of rank processes: starting a process takes seconds, a small run tenths of a second.

    runs = many_runs([
        Run("one", "one", world=1, max_steps=10),
        Run("two", "two", world=2, max_steps=10, strategy="fsdp"),
        Run("went on", "two", world=1, max_steps=12),         # the same folder: resumes
    ], tmp_path)
    runs["two"].weights(), runs["two"].losses()

There are as many processes as the largest run has ranks; a smaller run does not use the last ones. Each run is a real
session of the engine: its ranks create a process group, train, save and destroy the group.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ranks import run_ranks


@dataclass(frozen=True)
class Copy:
    """A copy of a run's folder as it was at `step`, with only the checkpoint of that step."""

    source: str
    step: int


@dataclass
class Run:
    """A run to train; `settings` are arguments of `unisono.train`."""

    name: str
    folder: str
    world: int
    settings: dict[str, Any] = field(default_factory=dict)
    copy: Copy | None = None
    recipe: str = "Sentences"  # a recipe of recipes_for_tests, or one that ships with unisono


@dataclass(frozen=True)
class Outcome:
    """The result of a run: its folder, and what each rank returned or raised."""

    folder: Path
    record: Path
    by_rank: list[dict[str, Any]]

    @property
    def main(self) -> dict[str, Any]:
        return self.by_rank[0]

    def lines(self) -> list[dict[str, Any]]:
        """All records of metrics.jsonl."""
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    def steps(self) -> list[dict[str, Any]]:
        """The lines of training steps."""
        return [line for line in self.lines() if "loss" in line]

    def evaluations(self) -> list[dict[str, Any]]:
        """The lines of evaluations."""
        return [line for line in self.lines() if any(key.startswith("eval/") for key in line)]

    def losses(self) -> Tensor:
        return torch.tensor([float(line["loss"]) for line in self.steps()], dtype=torch.float64)

    def events(self, kind: str) -> list[dict[str, Any]]:
        records = [json.loads(line) for line in (self.folder / "events.jsonl").read_text().splitlines()]
        return [event for event in records if kind in event.values()]

    def saved_steps(self) -> list[int]:
        return sorted(int(path.name.removeprefix("step_")) for path in (self.folder / "checkpoints").glob("step_*"))

    def checkpoint(self, step: int | None = None) -> Path:
        return self.folder / "checkpoints" / f"step_{self.saved_steps()[-1] if step is None else step:08d}"

    def weights(self, step: int | None = None, prefix: str = "model.") -> dict[str, Tensor]:
        from unisono.checkpoint.load import load_whole

        return load_whole(self.checkpoint(step), prefix)

    def state(self, step: int | None = None) -> dict[str, Any]:
        from unisono.checkpoint.find import read_extra

        return read_extra(self.checkpoint(step))["state"]

    def read_ids(self, micro_batches: int = 1, split: str = "train") -> list[list[int]]:
        """For each step of this session, the ids of its samples in rank order, including dummies of idle ranks."""
        by_rank = []
        for rank in range(len(self.by_rank)):
            file = self.record / f"{split}.{rank}"
            by_rank.append([json.loads(line) for line in file.read_text().splitlines()])
        num_steps = len(by_rank[0]) // micro_batches
        assert all(len(calls) == num_steps * micro_batches for calls in by_rank)
        return [
            [i for calls in by_rank for ids in calls[step * micro_batches : (step + 1) * micro_batches] for i in ids]
            for step in range(num_steps)
        ]


def many_runs(runs: Sequence[Run], root: Path, timeout_s: float = 280.0) -> dict[str, Outcome]:
    """Trains all runs in order and returns their outcomes by name."""
    assert len({run.name for run in runs}) == len(runs)
    args = {"runs": [asdict(run) for run in runs], "root": str(root)}
    nproc = max(run.world for run in runs)
    results = run_ranks("train_all", __file__, nproc, args, timeout_s=timeout_s)
    return {
        run.name: Outcome(
            root / run.folder, root / "records" / run.name, [results[r][run.name] for r in range(run.world)]
        )
        for run in runs
    }


def train_all(runs: list[dict[str, Any]], root: str) -> dict[str, dict[str, Any]]:
    """Runs in each rank: one session after the other."""
    rank = int(os.environ["RANK"])
    results = {}
    for number, run in enumerate(runs):
        if rank >= run["world"]:
            continue
        os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = os.environ["ROLE_WORLD_SIZE"] = str(run["world"])
        os.environ["UNISONO_ATTEMPT"] = f"run{number}"  # each run has its own namespace in the store
        folder = Path(root, run["folder"])
        if run["copy"] is not None and rank == 0:  # the other ranks wait for rank 0 before they read a folder
            _copy(Path(root, run["copy"]["source"]), folder, run["copy"]["step"])
        results[run["name"]] = _train(run["recipe"], folder, Path(root, "records", run["name"]), run["settings"])
    return results


def _train(recipe: str, folder: Path, record: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    import recipes_for_tests
    import unisono
    from unisono.cluster.process_group import leave_process_group
    from unisono.engine.start.registry import load_recipe
    from unisono.errors import UnisonoError

    try:
        kind = getattr(recipes_for_tests, recipe, None) or load_recipe(recipe)
        noted = {"record": str(record)} if hasattr(kind.Config, "record") else {}
        result = unisono.train(kind, **{"output_dir": str(folder), **noted, **settings})
    except UnisonoError as error:
        leave_process_group()  # a failed session does not leave by itself, because a peer may be gone
        return {"error": str(error), "exit_code": error.exit_code}
    return {"status": result.status, "step": result.step, "metrics": result.last}


def _copy(source: Path, target: Path, step: int) -> None:
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("checkpoints"))
    name = f"step_{step:08d}"
    shutil.copytree(source / "checkpoints" / name, target / "checkpoints" / name)


def slow_unless(values: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """Marks all but the `quick` ones of these values of pytest parameters as slow: only `make test-slow` runs them."""
    return [
        value if value in quick else pytest.param(*(value if type(value) is tuple else [value]), marks=pytest.mark.slow)
        for value in values
    ]


def selected(request: pytest.FixtureRequest, *names: str) -> set[Any]:
    """The values of these parameters in all tests of the requesting module that pytest runs; tuples for several names.

    A fixture trains only the runs that these tests need.
    """
    tests = [test for test in request.session.items if test.path == request.path]
    calls = [test.callspec.params for test in tests if hasattr(test, "callspec")]
    values = [tuple(call[name] for name in names) for call in calls if all(name in call for name in names)]
    return {value if len(names) > 1 else value[0] for value in values}


def largest_difference(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """The largest absolute difference between tensors of the same names."""
    assert a.keys() == b.keys()
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)


def identical(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """Whether every bit is the same."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
