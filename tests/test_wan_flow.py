"""The recipe wan-flow from end to end: small real Wan models, real images and videos, real ranks."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanPipeline, WanTransformer3DModel
from safetensors.torch import load_file

import unisono
from command_line import environment
from command_line import unisono as command
from many_runs import Outcome, Run, identical, many_runs
from unisono.engine.export import export_run
from unisono.errors import UnisonoError
from wan_models import save_data, save_pipelines

COMMON: dict[str, Any] = {
    **{"mixed_precision": "no", "compile": False, "num_workers": 0, "log_every": 1, "warmup_steps": 0},
    **{"learning_rate": 1e-3, "fps": 8.0, "num_frames": 9, "tensorboard": False, "ema_decay": 0.9},
    **{"global_batch_size": 8, "batch_size": 8, "preview_steps": 3, "num_previews": 3, "eval_levels": 4},
}
RUN = {**COMMON, "max_steps": 6, "save_every": 3, "num_eval": 2, "eval_every": 3, "preview_every": 6}
SHORT = {"max_steps": 3}
FSDP = {"strategy": "fsdp", "batch_size": 4}
LORA = {"lora_rank": 4, "lora_alpha": 8.0, "learning_rate": 1e-2}
# name -> model, ranks, settings
RUNS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "one": ("2.1", 1, {}),
    "2 ranks ddp": ("2.1", 2, {"strategy": "ddp", "batch_size": 2}),
    "2 ranks fsdp": ("2.1", 2, FSDP),
    "uncached": ("2.1", 1, {"no_cache": True}),
    "recomputed": ("2.1", 1, {"activation_checkpointing": True, "recompute_every": 2}),
    "experts": ("a14b", 2, FSDP | SHORT),
    "experts, one device": ("a14b", 1, SHORT),
    "high": ("a14b", 1, {"expert": "high"}),
    "low": ("a14b", 1, {"expert": "low"}),
    "ti2v": ("5b", 1, {"first_frame": 0.5} | SHORT),
    "ti2v, 2 ranks": ("5b", 2, {"first_frame": 0.5, "strategy": "ddp", "batch_size": 4} | SHORT),
    "lora": ("2.1", 1, LORA),
    "lora, 2 ranks": ("2.1", 2, FSDP | LORA),
    "experts, lora": ("a14b", 1, LORA | SHORT),
    "experts, lora, on the host": ("a14b", 1, LORA | SHORT | {"blocks_on_host": 4}),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models and data."""
    root = tmp_path_factory.mktemp("wan")
    save_pipelines(root)
    save_data(root / "data")
    return root


@pytest.fixture(scope="module")
def runs(root: Path) -> dict[str, Outcome]:
    """All runs of this module, by name."""

    def settings(model: str, **changes: Any) -> dict[str, Any]:
        paths = {"model_path": str(root / model), "dataset_path": str(root / "data"), "cache_dir": str(root / "cache")}
        return {**RUN, **paths, **changes}

    planned = [
        Run(name, f"runs/{name}", world, settings(model, **changes), recipe="wan-flow")
        for name, (model, world, changes) in RUNS.items()
    ]
    planned.append(Run("moved, before", "runs/moved", 2, settings("2.1", **FSDP, **SHORT), recipe="wan-flow"))
    planned.append(Run("moved", "runs/moved", 1, settings("2.1"), recipe="wan-flow"))
    outcomes = many_runs(planned, root)
    for name, outcome in outcomes.items():
        assert "error" not in outcome.main, (name, outcome.main)
    return outcomes


def close(some: Outcome, other: Outcome, rtol: float = 2e-5) -> None:
    torch.testing.assert_close(some.losses(), other.losses(), rtol=rtol, atol=0)


@pytest.mark.parametrize("name", ["2 ranks ddp", "2 ranks fsdp"])
def test_two_ranks_train_like_one(name: str, runs: dict[str, Outcome]) -> None:
    one, two = runs["one"], runs[name]
    close(two, one)
    mine, theirs = two.weights(6, "ema."), one.weights(6, "ema.")
    for weight, tensor in theirs.items():
        torch.testing.assert_close(mine[weight], tensor, rtol=1e-3, atol=1e-5, msg=weight)


@pytest.mark.parametrize("name", ["uncached", "recomputed"])
def test_neither_the_cache_nor_recomputing_every_second_block_changes_a_run(
    name: str, runs: dict[str, Outcome]
) -> None:
    close(runs[name], runs["one"], rtol=1e-6)


def test_frozen_blocks_of_two_experts_can_be_stored_in_host_memory(runs: dict[str, Outcome]) -> None:
    plain, swapped = runs["experts, lora"], runs["experts, lora, on the host"]
    assert swapped.losses().tolist() == plain.losses().tolist()
    assert identical(swapped.weights(), plain.weights())
    assert swapped.evaluations()[0]["eval/loss"] == plain.evaluations()[0]["eval/loss"]


def test_a_run_resumes_with_another_number_of_ranks(runs: dict[str, Outcome]) -> None:
    assert runs["moved, before"].main["step"] == 3
    close(runs["moved"], runs["one"])


def test_held_out_samples_are_evaluated_at_fixed_levels(runs: dict[str, Outcome]) -> None:
    evaluations = runs["one"].evaluations()
    assert [line["step"] for line in evaluations] == [3, 6]
    assert evaluations[0]["eval/sigma_by_level"] == evaluations[1]["eval/sigma_by_level"]
    levels = evaluations[1]["eval/loss_by_level"]
    assert len(levels) == 4 and sum(levels) / 4 == pytest.approx(evaluations[1]["eval/loss"])
    assert evaluations[1]["eval/loss"] < evaluations[0]["eval/loss"]


def test_previews_are_images_and_videos_with_their_captions(runs: dict[str, Outcome]) -> None:
    from PIL import Image

    from unisono.recipes.wan.data.media import probe

    one = runs["one"].folder
    names = {path.name for path in (one / "previews").iterdir()}
    assert {"step_00000006_samples.png", "step_00000006_captions.txt"} <= names
    with Image.open(one / "previews" / "step_00000006_samples.png") as image:
        assert image.width > 30 and len(image.convert("RGB").getcolors(2**20)) > 10
    videos = [path for path in (one / "previews").iterdir() if path.suffix == ".mp4"]
    assert videos and all(probe(video).frames > 1 for video in videos)


def test_exported_weights_equal_the_trained_ones_and_diffusers_samples_from_them(
    runs: dict[str, Outcome], root: Path, tmp_path: Path
) -> None:
    export_run(runs["one"].folder, tmp_path / "exported")
    pipelines = [WanPipeline.from_pretrained(tmp_path / "exported") for _ in range(2)]
    trained = runs["one"].weights(6, "ema.")
    own = pipelines[0].transformer.state_dict()
    assert {f"transformer.{name}" for name in own} == set(trained)
    for name, weight in own.items():
        torch.testing.assert_close(weight, trained[f"transformer.{name}"], rtol=0, atol=1e-6, msg=name)
    pipelines[1].transformer = WanTransformer3DModel.from_pretrained(tmp_path / "exported" / "transformer")
    frames = [drawn(pipeline) for pipeline in pipelines]
    assert torch.equal(frames[0], frames[1])
    assert not torch.equal(frames[0], drawn(WanPipeline.from_pretrained(root / "2.1")))


def drawn(pipeline: Any) -> torch.Tensor:
    pipeline.set_progress_bar_config(disable=True)
    noise = torch.Generator().manual_seed(0)
    made = pipeline(
        **{"prompt": "a red ball", "height": 16, "width": 16, "num_frames": 5, "num_inference_steps": 3},
        **{"max_sequence_length": 24, "generator": noise, "output_type": "pt", "guidance_scale": 2.0},
    )
    return made.frames


def test_both_experts_are_trained_and_exported(runs: dict[str, Outcome], root: Path, tmp_path: Path) -> None:
    close(runs["experts"], runs["experts, one device"])
    export_run(runs["experts"].folder, tmp_path / "exported")
    before, after = WanPipeline.from_pretrained(root / "a14b"), WanPipeline.from_pretrained(tmp_path / "exported")
    assert after.config.boundary_ratio == 0.875
    assert not any(same(before, after, part) for part in ("transformer", "transformer_2"))


@pytest.mark.parametrize(("expert", "low", "high"), [("high", 0.875, 1.0), ("low", 0.0, 0.875)])
def test_a_single_expert_is_trained_on_its_own_noise_levels(
    expert: str, low: float, high: float, runs: dict[str, Outcome], root: Path, tmp_path: Path
) -> None:
    run = runs[expert]
    assert all(low <= line["sigma"] <= high for line in run.steps())
    levels = run.evaluations()[0]["eval/sigma_by_level"]
    assert low <= min(levels) < max(levels) <= high
    assert (run.folder / "previews" / "step_00000006_samples.png").exists()
    export_run(run.folder, tmp_path / "exported")
    before, after = WanPipeline.from_pretrained(root / "a14b"), WanPipeline.from_pretrained(tmp_path / "exported")
    changed = {part for part in ("transformer", "transformer_2") if not same(before, after, part)}
    assert changed == {{"high": "transformer", "low": "transformer_2"}[expert]}


def same(some: Any, other: Any, part: str) -> bool:
    a, b = (getattr(pipeline, part).state_dict() for pipeline in (some, other))
    return all(torch.equal(a[name], b[name]) for name in a)


def test_ti2v_trains_on_videos_conditioned_on_their_first_frame(runs: dict[str, Outcome]) -> None:
    close(runs["ti2v, 2 ranks"], runs["ti2v"])


def test_a_loras_checkpoints_are_small_and_it_works_in_a_diffusers_pipeline(
    runs: dict[str, Outcome], root: Path, tmp_path: Path
) -> None:
    close(runs["lora, 2 ranks"], runs["lora"])
    saved = runs["lora"].weights(6)
    assert saved and all(".lora_" in name for name in saved)
    export_run(runs["lora"].folder, tmp_path / "exported")
    weights = load_file(tmp_path / "exported" / "pytorch_lora_weights.safetensors")
    assert weights and all(".lora_" in name for name in weights)
    pipeline = WanPipeline.from_pretrained(root / "2.1")
    before = drawn(pipeline)
    pipeline.load_lora_weights(tmp_path / "exported")
    assert not torch.allclose(drawn(pipeline), before, atol=1e-4)
    paths = {"model_path": str(root / "2.1"), "dataset_path": str(root / "data"), "cache_dir": str(root / "cache")}
    further = {**COMMON, **paths, **LORA, "max_steps": 1, "num_eval": 2, "lora_path": str(tmp_path / "exported")}
    result = unisono.train("wan-flow", nproc=1, output_dir=str(tmp_path / "further"), **further)
    assert result.last["loss"] < runs["lora"].losses()[0]


@pytest.mark.slow
def test_a_killed_rank_does_not_change_the_result(runs: dict[str, Outcome], root: Path) -> None:
    flags = [word for name, value in RUN.items() for word in (f"--{name}", value)]
    flags += ["--model_path", "2.1", "--dataset_path", "data", "--cache_dir", "cache", "--output_dir", "killed"]
    ended = command(
        "train", "wan-flow", *flags, "--nproc", 2, "--strategy", "fsdp", "--inject", "kill@rank1:step5", cwd=root
    )
    assert ended.code == 0, ended.err
    lines = [json.loads(line) for line in (root / "killed" / "metrics.jsonl").read_text().splitlines()]
    mine = torch.tensor([line["loss"] for line in lines if "loss" in line], dtype=torch.float64)
    torch.testing.assert_close(mine, runs["one"].losses(), rtol=2e-5, atol=0)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no model": ({"model_path": None}, "no model: pass --model_path"),
    "two models": ({"model_config": "tiny"}, "exclude each other"),
    "no such model": ({"model_path": "nowhere"}, "no such file or folder"),
    "no data": ({"dataset_path": "nothing"}, "no such folder"),
    "no media": ({"dataset_path": "empty"}, "empty"),
    "sizes": ({"height": 20, "width": 30}, "multiple of 16"),
    "frames": ({"num_frames": 8}, "use 5 or 9"),
    "channels": ({"parts_path": "5b"}, "channels"),
    "another architecture": ({"model_path": "broken"}, "another architecture"),
    "shift": ({"shift": -1.0}, "shift"),
    "too many held out": ({"num_eval": 8}, "num_eval"),
    "random window": ({"window": "random"}, "no_cache"),
    "shapes for a real model": ({"dataset_path": "shapes"}, "tiny"),
    "no VAE": ({"model_path": "2.1/transformer"}, "parts_path"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_users_mistake_is_refused_in_one_line(
    name: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root)
    Path("empty").mkdir(exist_ok=True)
    if name == "another architecture":
        shutil.copytree("2.1", "broken")
        config = Path("broken", "transformer", "config.json")
        config.write_text(json.dumps({**json.loads(config.read_text()), "num_layers": 3}))
    changes, words = BAD[name]
    values = {**COMMON, "model_path": "2.1", "dataset_path": "data", "max_steps": 1, "nproc": 1, **changes}
    with pytest.raises(UnisonoError) as refused:
        unisono.train("wan-flow", output_dir=str(tmp_path / "run"), **values)
    assert refused.value.exit_code == 2 and words in str(refused.value) and "\n" not in str(refused.value)


def test_a_bad_file_is_reported_and_can_be_skipped(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = save_data(tmp_path / "data")
    (data / "broken.mp4").write_bytes(b"not a video at all")
    (data / "broken.txt").write_text("a ball")
    values = {**COMMON, "model_path": str(root / "2.1"), "dataset_path": str(data), "max_steps": 1, "nproc": 1}
    with pytest.raises(UnisonoError, match="broken"):
        unisono.train("wan-flow", output_dir=str(tmp_path / "run"), **values)
    result = unisono.train("wan-flow", output_dir=str(tmp_path / "run"), **values, leave_out_bad=True)
    assert result.step == 1 and "broken" in capsys.readouterr().err


def test_a_mistake_on_the_command_line_gives_exit_code_2_and_no_traceback(root: Path) -> None:
    ended = command("train", "wan-flow", "--model_path", "2.1", "--dataset_path", "nothing", "--nproc", 1, cwd=root)
    assert ended.code == 2 and "no such folder" in ended.err.strip().splitlines()[-1]
    assert "Traceback" not in ended.err


def test_help_does_not_import_heavy_libraries() -> None:
    heavy = "{'torch', 'diffusers', 'transformers', 'av'}"
    code = f"import sys, unisono.recipes.wan_flow.recipe; print({heavy} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=True)
    assert result.stdout.strip() == "set()"


def test_a_lora_cannot_resume_with_another_alpha(runs: dict[str, Outcome], root: Path, tmp_path: Path) -> None:
    """The weights do not contain the scale, so another alpha would silently change the LoRA."""
    shutil.copytree(runs["lora"].folder, tmp_path / "lora")
    paths = {"model_path": str(root / "2.1"), "dataset_path": str(root / "data"), "cache_dir": str(root / "cache")}
    with pytest.raises(UnisonoError, match="lora_alpha 64"):
        unisono.train(
            "wan-flow", nproc=1, output_dir=str(tmp_path / "lora"), **{**RUN, **paths, **LORA, "lora_alpha": 64.0}
        )


def test_a_transformer_alone_is_exported_with_the_parts_that_were_used(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "2.1" / "transformer", tmp_path / "alone")
    paths = {"model_path": str(tmp_path / "alone"), "parts_path": str(root / "a14b")}
    paths["dataset_path"] = str(root / "data")
    run = tmp_path / "run"
    unisono.train("wan-flow", nproc=1, output_dir=str(run), **{**COMMON, **paths, "max_steps": 1, "preview_every": -1})
    export_run(run, tmp_path / "exported")
    pipeline = WanPipeline.from_pretrained(tmp_path / "exported")
    assert pipeline.transformer_2 is None and pipeline.config.boundary_ratio is None
    assert drawn(pipeline).isfinite().all()
