"""The recipe seo without a GPU: a short run by default, with a small micro-batch to save memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import unisono
from seo_models import encoder_folder
from unisono.devices import Gpu
from unisono.engine.start.run import configure
from unisono.recipes.seo import recipe
from unisono.recipes.seo.recipe import Seo

GPU = Gpu(0, "GPU-1", "A GPU", 2**36, 2**36)


def lengths(*flags: str) -> dict[str, Any]:
    values = configure(Seo, flags=["--data_path", "pairs.csv", *flags]).values
    return {name: values[name] for name in ("max_steps", "num_epochs", "micro_batch")}


@pytest.mark.parametrize(
    "flags, expected",
    [
        ((), {"max_steps": 120, "num_epochs": 3, "micro_batch": 16}),
        (("--num_epochs", "5"), {"max_steps": None, "num_epochs": 5, "micro_batch": 16}),
        (("--num_epochs", "3"), {"max_steps": None, "num_epochs": 3, "micro_batch": 16}),
        (("--max_steps", "900"), {"max_steps": 900, "num_epochs": None, "micro_batch": 16}),
        (("--model_name", "tiny"), {"max_steps": None, "num_epochs": 3, "micro_batch": None}),
        (("--batch_size", "4"), {"max_steps": 120, "num_epochs": 3, "micro_batch": 4}),
        (("--micro_batch", "64"), {"max_steps": 120, "num_epochs": 3, "micro_batch": 64}),
    ],
)
def test_without_a_gpu_runs_are_shorter_and_micro_batches_smaller(
    monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], expected: dict[str, Any]
) -> None:
    monkeypatch.setattr("unisono.devices.visible_gpus", list)
    assert lengths(*flags) == expected


def test_with_a_gpu_the_default_is_three_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unisono.devices.visible_gpus", lambda: [GPU])
    on_gpu = {"max_steps": None, "num_epochs": 3, "micro_batch": None}
    assert lengths() == on_gpu and lengths("--gpus", "1") == on_gpu
    assert lengths("--gpus", "0")["max_steps"] == lengths("--nproc", "2")["max_steps"] == 120


def test_a_run_reports_that_it_is_shortened_unless_the_user_sets_its_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = [f"question {number},the answer to it is number {number}" for number in range(12)]
    (tmp_path / "pairs.csv").write_text("\n".join(["query,positive", *rows]))
    model = encoder_folder(tmp_path / "model")  # replaces minilm, which takes far longer to load
    settings: dict[str, Any] = {
        "data_path": str(tmp_path / "pairs.csv"),
        "gpus": "0",
        "num_workers": 0,
        "batch_size": 4,
    }
    settings |= {
        "model_name": str(model),
        "tensorboard": False,
        "preview_every": -1,
        "max_length": 16,
        "warmup_steps": 0,
        "num_eval": 2,
    }
    for steps in (1, 500):
        monkeypatch.setattr(recipe, "CPU_STEPS", steps)
        result = unisono.train(Seo, **settings, output_dir=str(tmp_path / f"run{steps}"))
        stderr = capfd.readouterr().err
        assert result.step == min(steps, 8) and f"without a GPU the run ends after {steps} steps or 3 epochs" in stderr
        assert "is not reached" not in stderr
