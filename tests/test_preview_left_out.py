"""A preview that runs out of memory or cannot be written is skipped on all ranks, and the run continues."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from command_line import lines, losses, unisono
from ranks import run_ranks

RECIPE = """
from dataclasses import dataclass
import torch
from torch import nn
from unisono import Loss, Recipe

class Drawn(Recipe):
    defaults = {"batch_size": 2, "global_batch_size": 4, "num_workers": 0, "log_every": 1, "tensorboard": False,
                "max_steps": 3, "preview_every": 1, "save_every": 1}

    @dataclass
    class Config:
        fails: str = ""

    def model(self):
        return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))

    def dataset(self, split):
        return [torch.tensor([i / 7, 1 - i / 5]) for i in range(12)] if split == "train" else None

    def loss(self, model, batch, noise):
        return Loss((model(batch) - 1).square().sum(), len(batch))

    def preview(self, model, step):
        def draw(number):
            if self.config.fails == "drawing" and number == 1:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB.")
            return float(model(torch.tensor([0.5, float(number)])))
        if self.config.fails == "format":
            from PIL import Image
            return {"seen.jpg": Image.new("RGBA", (4, 4))}
        return {"seen.txt": " ".join(map(str, self.over_ranks(draw, range(3))))}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    (tmp_path / "drawn.py").write_text(RECIPE)
    return f"{tmp_path / 'drawn.py'}:Drawn"


def test_the_run_continues_without_the_preview(recipe: str, tmp_path: Path) -> None:
    done = unisono("train", recipe, "--nproc", 1, "--fails", "drawing", "--output_dir", "run", cwd=tmp_path)
    assert done.code == 0, done.err
    assert done.err.count("preview skipped, rank 0 ran out of memory: CUDA out of memory. Tried to allocate") == 3
    records = lines(tmp_path / "run", "events.jsonl")
    assert [event["step"] for event in records if event["kind"] == "preview_left_out"] == [1, 2, 3]
    assert not any(event["kind"] == "restart" for event in records)
    assert not (tmp_path / "run" / "previews").exists() and len(losses(tmp_path / "run")) == 3


def test_previews_are_in_tensorboard_too(recipe: str, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert unisono("train", recipe, "--tensorboard", "--output_dir", "run", cwd=tmp_path).code == 0
    events = EventAccumulator(str(tmp_path / "run/tb")).Reload()
    assert [shown.step for shown in events.Tensors("previews/seen")] == [1, 2, 3]


def test_the_run_continues_if_a_preview_cannot_be_written(recipe: str, tmp_path: Path) -> None:
    words = ["train", recipe, "--output_dir", "run", "--preview_every", 2]
    done = unisono(*words, "--max_steps", 1, cwd=tmp_path)
    assert done.code == 0, done.err
    (tmp_path / "run/previews/step_00000002_seen.txt").mkdir(parents=True)  # blocks the path of a file
    done = unisono(*words, "--nproc", 2, "--max_steps", 4, cwd=tmp_path)
    assert done.code == 0 and "Traceback" not in done.err, done.err
    assert done.err.count("step 2: preview skipped, because it cannot be written: [Errno 21] Is a directory") == 1
    records = [(event["kind"], event["step"]) for event in lines(tmp_path / "run", "events.jsonl")]
    assert ("preview_left_out", 2) in records and ("preview", 4) in records
    assert (tmp_path / "run/previews/step_00000004_seen.txt").read_text() and len(losses(tmp_path / "run")) == 4


def test_an_image_that_its_file_format_cannot_store_is_an_error_in_the_recipe(recipe: str, tmp_path: Path) -> None:
    done = unisono("train", recipe, "--fails", "format", "--output_dir", "run", "--max_restarts", 0, cwd=tmp_path)
    assert done.code == 3 and "cannot write mode RGBA as JPEG" in done.err, done.err
    assert "preview skipped" not in done.err


@pytest.mark.slow
def test_a_sharded_run_restarts_once_and_then_skips_previews(recipe: str, tmp_path: Path) -> None:
    """A rank that fails leaves the others in a forward pass, and every further preview would do the same."""
    words = ["train", recipe, "--nproc", 2, "--strategy", "fsdp", "--output_dir", "run"]
    done = unisono(*words, "--fails", "drawing", cwd=tmp_path)
    assert done.code == 0, done.err
    records = lines(tmp_path / "run", "events.jsonl")
    assert sum(event["kind"] == "restart" for event in records) == 1
    assert [event["step"] for event in records if event["kind"] == "preview_left_out"] == [1, 2, 3]
    assert len(losses(tmp_path / "run")) == 3


# ---- run in each rank ----


def draw_together(cases: list[str]) -> list[Any]:
    import torch

    from unisono.cluster.agree import Agreement
    from unisono.cluster.environment import detect
    from unisono.cluster.process_group import join_process_group, leave_process_group
    from unisono.engine.previews import Drawing, PreviewSkipped
    from unisono.parallel.strategy import Placement

    world, cpu = detect(os.environ), torch.device("cpu")
    join_process_group(world, cpu, timeout_s=30)
    agreement, placement, result = Agreement(), Placement(cpu, world.rank, world.size, [cpu], None), []

    def memory(when: bool) -> None:
        if when and world.rank == 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    for case in cases:
        drawing = Drawing(placement, False, agreement, Path("nowhere"))

        def preview(case: str = case, drawing: Drawing = drawing) -> dict[str, Any]:
            def draw(item: int) -> int:
                memory(case == "inside")
                return 10 * item

            memory(case == "before")
            seen = drawing.over_ranks(draw, range(5))
            memory(case == "after")
            return {"seen": seen}

        try:
            result.append(drawing.run(preview))
        except PreviewSkipped as why:
            result.append([why.rank, str(why)])
    leave_process_group()
    return result


def test_no_rank_waits_for_one_that_ran_out_of_memory() -> None:
    drawn, left_out = {"seen": [0, 10, 20, 30, 40]}, [1, "CUDA out of memory."]
    expected = [drawn, left_out, left_out, left_out, drawn]
    cases = ["well", "inside", "before", "after", "well"]
    assert run_ranks("draw_together", __file__, 2, {"cases": cases}, timeout_s=60) == [expected, expected]
