"""Regression tests of wan-flow: previews that would have ended a run, and silent mistakes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import unisono
from unisono.engine.recipe import Work
from unisono.errors import ConfigError
from unisono.parallel.blocks.repeated import compile_blocks
from unisono.recipes.wan.models.experts import Experts
from unisono.recipes.wan.models.kernels.attention import can_compute
from unisono.recipes.wan.sample import euler, sample
from unisono.recipes.wan_flow.recipe import WanFlow
from wan_models import parts, save_data, save_pipelines

COMMON: dict[str, Any] = {
    **{"mixed_precision": "no", "compile": False, "num_workers": 0, "log_every": 1, "warmup_steps": 0},
    **{"learning_rate": 1e-3, "fps": 8.0, "num_frames": 9, "tensorboard": False, "max_steps": 1},
    **{"global_batch_size": 4, "batch_size": 4, "preview_steps": 2, "num_previews": 2, "preview_every": 1},
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models and data."""
    root = tmp_path_factory.mktemp("wan")
    save_pipelines(root)
    save_data(root / "data")
    return root


def test_previews_are_computed_in_the_training_dtype(root: Path, tmp_path: Path) -> None:
    """The frozen weights of a LoRA run are 16 bit and rejected 32-bit inputs."""
    values = {"model_path": str(root / "2.1"), "dataset_path": str(root / "data"), "lora_rank": 2}
    unisono.train("wan-flow", nproc=1, output_dir=str(tmp_path), **{**COMMON, **values, "mixed_precision": "bf16"})
    assert (tmp_path / "previews" / "step_00000001_samples.png").exists()


@pytest.fixture
def precomputed(tmp_path: Path) -> Path:
    """Precomputed latents and embeddings."""
    folder = tmp_path / "precomputed"
    folder.mkdir()
    for number in range(4):
        save_file({"latent": torch.randn(16, 1, 4, 4)}, folder / f"{number}.latent.safetensors")
        save_file({"embeddings": torch.randn(5, 32)}, folder / f"{number}.safetensors")
        (folder / f"{number}.txt").write_text("a ball")
    return folder


def test_without_a_vae_there_are_no_previews_and_training_continues(
    root: Path, precomputed: Path, tmp_path: Path
) -> None:
    values = {"model_path": str(root / "2.1" / "transformer"), "dataset_path": str(precomputed)}
    with pytest.raises(ConfigError, match="--caption_dropout 0 and --guidance 1"):
        unisono.train("wan-flow", nproc=1, output_dir=str(tmp_path / "refused"), **COMMON, **values)
    advised = {"caption_dropout": 0.0, "guidance": 1.0}
    result = unisono.train("wan-flow", nproc=1, output_dir=str(tmp_path / "run"), **COMMON, **values, **advised)
    assert result.last["loss"] > 0
    assert not (tmp_path / "run" / "previews").exists()


def recipe(root: Path, model: Path | str, **changes: Any) -> WanFlow:
    values = {"model_path": str(model), "dataset_path": str(root / "data"), "num_frames": 9, "fps": 8.0}
    return WanFlow(WanFlow.Config(**{**values, **changes}))


def test_the_empty_captions_embedding_keeps_its_address(root: Path, tmp_path: Path) -> None:
    """A recorded step reads from this address, while previews need the embedding on another device in between."""
    made = recipe(root, root / "2.1")
    made.prepare(Work(tmp_path))
    first = made.without_caption(torch.zeros(24, 32))
    assert made.without_caption(torch.zeros(24, 32, device="meta")).device.type == "meta"
    assert made.without_caption(torch.zeros(24, 32)).data_ptr() == first.data_ptr()


def test_single_frames_and_loras_on_random_weights_are_reported(root: Path, tmp_path: Path) -> None:
    data = {"dataset_path": str(root / "data"), "height": 32, "width": 32}
    made = WanFlow(WanFlow.Config(model_config="tiny", num_frames=1, lora_rank=2, **data))
    made.prepare(Work(tmp_path))
    made.dataset("train")
    videos = len([file for file in (root / "data").iterdir() if file.suffix == ".mp4"])
    text = f"uses a single frame of each video ({videos} videos)"
    assert videos > 1 and sum(text in remark for remark in made.remarks) == 1
    assert sum("training a LoRA on random weights" in remark for remark in made.remarks) == 1
    made = recipe(root, root / "2.1", lora_rank=2)
    made.prepare(Work(tmp_path / "other"))
    made.dataset("train")
    assert not any("single frame" in remark or "LoRA" in remark for remark in made.remarks)


def test_a_dataset_is_opened_once_for_all_previews(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from unisono.recipes.common.packs import Packs

    made = recipe(root, root / "2.1", num_eval=2, preview_prompts="a ball|a red ball")
    made.prepare(Work(tmp_path))
    opened = {split: len(made.dataset(split)) for split in ("train", "eval")}
    for prompt in ("", "a ball"):
        made.text(prompt)
    monkeypatch.setattr(Packs, "find", lambda self: pytest.fail("the packs were looked through again"))
    assert opened == {split: len(made.dataset(split)) for split in ("train", "eval")} == {"train": 6, "eval": 2}
    assert len(made.text("a red ball")) == 24


@pytest.mark.parametrize("kind", ["euler", "unipc"])
def test_previews_of_the_low_noise_expert_start_at_its_first_level(kind: str) -> None:
    data = torch.randn(2, 4, 1, 4, 4)

    class Perfect(nn.Module):
        def forward(self, noisy: Tensor, times: Tensor, text: Tensor, return_dict: bool) -> tuple[Tensor]:
            level = scheduler.sigmas[scheduler.timesteps.tolist().index(times[0].item())]
            return ((noisy - data) / level,)

    scheduler = euler(3.0) if kind == "euler" else parts().scheduler
    model, text = Experts({"transformer": Perfect()}, None), (torch.zeros(2, 3, 4), torch.zeros(2, 3, 4))
    noise = torch.randn_like(data)
    velocities = []

    def keep(velocity: Tensor, time: Tensor, latents: Tensor, **_: Any) -> tuple[Tensor]:
        velocities.append(velocity)
        return plain(velocity, time, latents, return_dict=False)

    plain, scheduler.step = scheduler.step, keep
    arrived = sample(model, noise, text, scheduler, steps=6, guidance=1.0, high=0.875, like=data)
    torch.testing.assert_close(velocities[0], noise - data, rtol=0, atol=1e-5)
    torch.testing.assert_close(arrived, data, rtol=0, atol=1e-2)


def test_an_expert_from_a_single_file_is_trained_on_its_own_noise_levels(root: Path, tmp_path: Path) -> None:
    alone = root / "a14b" / "transformer_2"
    ranges = {
        expert: (it.setup.flow.low, it.setup.flow.high)
        for expert in ("high", "low", "both")
        for it in [recipe(root, alone, parts_path=str(root / "2.1"), expert=expert)]
    }
    assert ranges == {"high": (0.875, 1.0), "low": (0.0, 0.875), "both": (0.0, 1.0)}
    for model in ("2.1", "5b"):
        with pytest.raises(ConfigError, match="one transformer for all noise levels"):
            assert recipe(root, root / model, expert="low").setup.flow


def test_an_unsupported_attention_kernel_is_refused_or_replaced(root: Path, tmp_path: Path) -> None:
    assert can_compute("flash", "cuda", torch.bfloat16) and can_compute("efficient", "cuda", torch.float32)
    assert not can_compute("cudnn", "cuda", torch.float32) and not can_compute("flash", "cpu", torch.bfloat16)
    values = {"model_path": str(root / "2.1"), "dataset_path": str(root / "data"), "attention": "cudnn"}
    with pytest.raises(ConfigError, match="attention cudnn does not support float32"):
        unisono.train("wan-flow", nproc=1, output_dir=str(tmp_path / "refused"), **COMMON, **values)
    made = recipe(root, root / "2.1")
    made.kernel._file = tmp_path / "attention.json"
    made.kernel._file.write_text('{"kernel": "flash"}')
    model = made.model()
    made.kernel.check_support(model, "cuda", torch.float32)
    processors = [module.processor for module in model.modules() if hasattr(module, "processor")]
    assert processors and all(processor._attention_backend is None for processor in processors)


def test_data_of_many_shapes_does_not_disable_compilation() -> None:
    with torch._dynamo.config.patch(recompile_limit=8):
        compile_blocks(nn.Linear(1, 1), [])
        assert torch._dynamo.config.recompile_limit >= 64
