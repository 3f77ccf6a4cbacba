"""Details of wan-flow: mistakes reported before anything is encoded, LoRAs for every program, caches that last."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanPipeline
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import unisono
from command_line import TINY, lines
from unisono.cli import verify as verify_command
from unisono.engine.export import export_run
from unisono.engine.recipe import Work
from unisono.engine.verification.verify import Verdict, VerifyPlan
from unisono.errors import ConfigError, UserError
from unisono.recipes.common.packs import Packs
from unisono.recipes.wan.data.decode import is_still
from unisono.recipes.wan.models.kernels import attention
from unisono.recipes.wan.models.lora import COMFY_FILE, FILE, SECOND, add_lora, lora_state, save_lora
from unisono.recipes.wan.models.vae import WanVae
from unisono.recipes.wan.models.weight_names import diffusers_names, native_name
from unisono.recipes.wan_distill.recipe import WanDistill
from unisono.recipes.wan_distill.settings import TINY as DISTILL_TINY
from unisono.recipes.wan_flow.recipe import WanFlow
from unisono.settings import PrecisionSettings, Settings
from wan_models import SMALL, model, save_data, save_pipelines

COMMON: dict[str, Any] = {
    **{"mixed_precision": "no", "compile": False, "num_workers": 0, "log_every": 1, "warmup_steps": 0, "nproc": 1},
    **{"learning_rate": 1e-3, "fps": 8.0, "num_frames": 9, "tensorboard": False, "max_steps": 1, "preview_every": -1},
    **{"global_batch_size": 4, "batch_size": 4},
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models, data and a LoRA of rank 3."""
    root = tmp_path_factory.mktemp("wan")
    save_pipelines(root)
    save_data(root / "data")
    save_lora(root / "lora", random_lora(model()))
    return root


def random_lora(transformer: Any, rank: int = 3, targets: tuple[str, ...] = ("to_q", "ffn.net.2")) -> dict[str, Tensor]:
    add_lora(transformer, rank, targets=targets)
    with torch.no_grad():
        for name, parameter in transformer.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=0.1)
    return lora_state(transformer)


def recipe(root: Path, model: Path | str, **changes: Any) -> WanFlow:
    values = {"model_path": str(model), "dataset_path": str(root / "data"), "num_frames": 9, "fps": 8.0}
    return WanFlow(WanFlow.Config(**{**values, **changes}))


# ---- before the first file is encoded ----

EARLY: dict[str, tuple[dict[str, Any], str]] = {
    "too many held out": ({"num_eval": 8}, "num_eval 8: the dataset has 8 samples"),
    "another architecture": ({"model_path": "broken"}, "another architecture"),
    "no such LoRA": ({"lora_path": "nowhere"}, "no such LoRA"),
    "a LoRA of another model": ({"lora_path": "other"}, "trained for another architecture"),
    "a LoRA of another rank": ({"lora_path": "lora", "lora_rank": 4}, "has rank 3, which cannot change"),
    "layers beside those of a LoRA": ({"lora_path": "lora", "lora_targets": "to_k"}, "remove one of them"),
    "no such layers": ({"lora_rank": 2, "lora_targets": "to_x"}, "no linear layer's name ends in to_x"),
    "too large": ({"height": 528, "width": 32}, "too large for this model's rotary embedding"),
    "odd sizes": ({"height": 520, "width": 32}, "height 520: this model needs a multiple of 16"),
    "too few pixels": ({"max_pixels": 100}, "max_pixels 100"),
    "a first frame for a model without": ({"first_frame": 0.5}, "only TI2V models"),
    "raw latents without a VAE": ({"model_path": "2.1/transformer", "latents": "raw"}, "there is no VAE"),
}


@pytest.mark.parametrize("name", EARLY)
def test_a_mistake_is_reported_before_the_first_file_is_encoded(
    name: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root)
    if name == "another architecture":
        shutil.copytree("2.1", "broken")
        config = Path("broken", "transformer", "config.json")
        config.write_text(json.dumps({**json.loads(config.read_text()), "num_layers": 3}))
    if name == "a LoRA of another model":
        save_lora(Path("other"), random_lora(model({**SMALL, "num_attention_heads": 3})))
    if name == "raw latents without a VAE":
        shutil.copytree("data", tmp_path / "data")
        save_file({"latent": torch.zeros(16, 1, 4, 4)}, tmp_path / "data" / "p0.latent.safetensors")
        monkeypatch.setitem(EARLY, name, ({**EARLY[name][0], "dataset_path": str(tmp_path / "data")}, EARLY[name][1]))
    monkeypatch.setattr(Packs, "write", lambda self, tensors: pytest.fail("something was encoded"))
    monkeypatch.setattr(WanFlow, "model", lambda self: pytest.fail("the model was built"))
    changes, words = EARLY[name]
    values = {"model_path": "2.1", "dataset_path": "data", "num_frames": 9, **changes}
    with pytest.raises(ConfigError) as refused:
        WanFlow(WanFlow.Config(**values)).prepare(Work(tmp_path / "work"))
    assert words in str(refused.value) and "\n" not in str(refused.value)


def test_models_that_take_a_first_frame_get_one(root: Path) -> None:
    takes = {name: recipe(root, root / name).setup.has_token_times for name in ("2.1", "a14b", "5b")}
    assert takes == {"2.1": False, "a14b": False, "5b": True}
    named = {
        name: WanFlow(WanFlow.Config(model_config=name, dataset_path="x")).setup.has_token_times
        for name in ("tiny", "1.3b", "ti2v-5b")
    }
    assert named == {"tiny": False, "1.3b": False, "ti2v-5b": True}


def test_steps_of_two_experts_are_not_recorded(root: Path, tmp_path: Path) -> None:
    values = {"model_path": str(root / "a14b"), "dataset_path": str(root / "data"), "cuda_graph": True}
    with pytest.raises(ConfigError, match="cuda_graph replays one recorded step, but with two experts"):
        unisono.train("wan-flow", output_dir=str(tmp_path / "run"), **COMMON, **values)
    assert not (tmp_path / "run" / "prepared").exists()
    recorded = Settings(precision=PrecisionSettings(cuda_graph=True))
    recipe(root, root / "a14b", expert="high").check_settings(recorded)
    recipe(root, root / "2.1").check_settings(recorded)


# ---- LoRA ----


def test_a_lora_loaded_from_a_file_keeps_its_rank(root: Path, tmp_path: Path) -> None:
    values = {"model_path": str(root / "2.1"), "dataset_path": str(root / "data"), "lora_path": str(root / "lora")}
    result = unisono.train("wan-flow", output_dir=str(tmp_path / "run"), **{**COMMON, **values})
    export_run(result.folder, tmp_path / "exported")
    trained = load_file(tmp_path / "exported" / FILE)
    assert trained.keys() == load_file(root / "lora" / FILE).keys()
    assert {len(tensor) for name, tensor in trained.items() if ".lora_A." in name} == {3}


def test_defaults_depend_on_the_model_and_never_override_the_users_settings() -> None:
    values = {"model_config": None, "num_epochs": None, "lora_rank": 0, "lora_path": None}
    assert WanFlow.presets({**values, "lora_path": "x"}) == WanFlow.presets({**values, "lora_rank": 8}) != {}
    assert WanFlow.presets(values) == {}
    tiny = {**values, "model_config": "tiny", "num_epochs": None, "dataset_path": "./dataset"}
    assert WanFlow.presets(tiny)["num_previews"] == 24 and "max_steps" in WanFlow.presets(tiny)
    assert "num_previews" not in WanFlow.presets({**tiny, "dataset_path": "mine"})
    assert "max_steps" not in WanFlow.presets({**tiny, "num_epochs": 3})
    distill = {"teacher_path": "Tiny", "num_epochs": None, "feature_weight": 0.0}
    distill |= {"objective": "regression", "lora_rank": 64}
    assert WanDistill.presets(distill) == DISTILL_TINY
    by_epochs = WanDistill.presets({**distill, "num_epochs": 3})
    assert by_epochs == {name: value for name, value in DISTILL_TINY.items() if name != "max_steps"}
    assert WanDistill.presets({**distill, "teacher_path": "mine"}) == {}
    fast = {**distill, "objective": "dmd2", "teacher_path": "mine"}
    assert WanDistill.presets(fast)["learning_rate"] > WanDistill.presets({**fast, "lora_rank": 0})["learning_rate"]
    assert WanDistill.presets({**fast, "teacher_path": "tiny"})["lora_rank"] == 16
    assert WanDistill.presets({**distill, "teacher_path": "mine", "feature_weight": 0.1}) == {"compile": False}


def test_a_lora_is_also_exported_with_comfyuis_names(root: Path, tmp_path: Path) -> None:
    usual = ("to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2")
    low = random_lora(model(seed=1), targets=usual)
    description = save_lora(tmp_path, random_lora(model(), targets=usual), low)
    for place, part in ((tmp_path, "transformer"), (tmp_path / SECOND, SECOND)):
        file = place / COMFY_FILE[part]
        assert str(file) in description
        native, ours = load_file(file), WanPipeline.lora_state_dict(place / FILE)
        assert "diffusion_model.blocks.0.self_attn.q.lora_A.weight" in native
        assert "diffusion_model.blocks.1.cross_attn.o.lora_B.weight" in native
        assert "diffusion_model.blocks.1.ffn.0.lora_B.weight" in native
        back = WanPipeline.lora_state_dict(file)  # by diffusers' own converter
        assert back.keys() == ours.keys()
        assert all(torch.equal(back[name], ours[name]) for name in ours)
    pipeline = WanPipeline.from_pretrained(root / "a14b")
    pipeline.load_lora_weights(tmp_path)  # the file that is meant for it
    assert pipeline.get_list_adapters() == {"transformer": ["default_0"]}


def test_every_layer_that_can_have_a_lora_has_a_native_name() -> None:
    layers = [name for name, module in model().named_modules() if isinstance(module, nn.Linear)]
    natives = [f"{native_name(layer)}.weight" for layer in layers]
    assert list(diffusers_names(natives)) == [f"{layer}.weight" for layer in layers]
    assert native_name("blocks.0.something") is None


def test_a_lora_run_refuses_to_resume_with_other_base_weights(root: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(root / "2.1", base)
    values = {"model_path": str(base), "dataset_path": str(root / "data"), "cache_dir": str(root / "cache")}
    values |= {"output_dir": str(tmp_path / "run"), "lora_rank": 2}
    first = recipe(
        root, root / "a14b" / "transformer_2", parts_path=str(base), lora_rank=2, cache_dir=values["cache_dir"]
    )
    first.prepare(Work(tmp_path / "run" / "prepared"))  # and stopped: nothing was trained yet
    unisono.train("wan-flow", **{**COMMON, **values})
    shutil.move(base, tmp_path / "moved")
    unisono.train("wan-flow", **{**COMMON, **values, "model_path": str(tmp_path / "moved"), "max_steps": 2})
    model(seed=7).save_pretrained(base / "transformer")
    for part in ("vae", "text_encoder", "tokenizer", "scheduler", "model_index.json"):
        shutil.move(tmp_path / "moved" / part, base / part)
    with pytest.raises(ConfigError, match="this run's LoRA was trained with different base weights"):
        unisono.train("wan-flow", **{**COMMON, **values, "max_steps": 3})
    record = json.loads((tmp_path / "run/run.json").read_text())
    record["config"]["model_path"] = str(base)  # as if other weights had replaced the run's
    (tmp_path / "run/run.json").write_text(json.dumps(record))
    with pytest.raises(ConfigError, match="this run's LoRA was trained with different base weights"):
        export_run(tmp_path / "run", tmp_path / "exported")


# ---- an expert in a separate file ----


def test_the_low_noise_expert_is_exported_as_transformer_2(root: Path, tmp_path: Path) -> None:
    shutil.copy(root / "a14b" / "transformer_2" / "diffusion_pytorch_model.safetensors", tmp_path / "low.safetensors")
    shutil.copytree(root / "a14b" / "transformer_2", tmp_path / "low")
    values = {"model_path": str(tmp_path / "low"), "dataset_path": str(root / "data"), "expert": "low"}
    values |= {"parts_path": str(root / "a14b"), "cache_dir": str(root / "cache")}
    result = unisono.train("wan-flow", output_dir=str(tmp_path / "run"), **{**COMMON, **values})
    export_run(result.folder, tmp_path / "whole")
    whole = WanPipeline.from_pretrained(tmp_path / "whole")
    weight = "blocks.0.attn1.to_q.weight"
    trained, untrained, before = (
        it.state_dict()[weight] for it in (whole.transformer_2, whole.transformer, model(seed=1))
    )
    assert whole.config.boundary_ratio == 0.875 and torch.equal(untrained, model().state_dict()[weight])
    assert 0 < (trained - before).abs().max() < 0.01


def test_exported_with_other_parts_the_low_noise_expert_stays_transformer_2(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = recipe(root, root / "a14b" / "transformer_2", expert="low", parts_path=str(root / "2.1"))
    assert list(dict(made.model().named_children())) == ["transformer_2"]
    experts = nn.Module()
    experts.transformer_2 = model(seed=1)
    made.export(experts, tmp_path / "alone")
    assert "lacks the high-noise expert" in capsys.readouterr().err
    assert not (tmp_path / "alone" / "transformer").exists()
    pipeline = WanPipeline.from_pretrained(tmp_path / "alone", transformer=model())
    frames = pipeline("a ball", height=32, width=32, num_frames=1, num_inference_steps=4, output_type="latent").frames
    assert frames.isfinite().all() and pipeline.config.boundary_ratio == 0.875
    lora = recipe(root, root / "a14b" / "transformer_2", expert="low", parts_path=str(root / "2.1"), lora_rank=1)
    add_lora(experts.transformer_2, 1)
    lora.export(experts, tmp_path / "lora")
    assert [
        str(path.relative_to(tmp_path / "lora")) for path in sorted((tmp_path / "lora").rglob("*.safetensors"))
    ] == [
        f"{SECOND}/{COMFY_FILE[SECOND]}",
        f"{SECOND}/{FILE}",
    ]


# ---- latents and their cache ----


def test_raw_latents_are_normalised_when_they_are_read(root: Path, tmp_path: Path) -> None:
    raw = torch.randn(16, 1, 4, 4)
    for number in range(2):
        save_file({"latent": raw + number}, tmp_path / f"{number}.latent.safetensors")
        (tmp_path / f"{number}.txt").write_text("a ball")
    by_kind = {}
    for kind in ("raw", "normalised"):  # with one cache: an entry of the other kind must not be found
        made = recipe(root, root / "2.1", dataset_path=str(tmp_path), latents=kind, cache_dir=str(tmp_path / "cache"))
        made.prepare(Work(tmp_path / "work"))
        by_kind[kind] = made.dataset("train")[0]["latent"]
    vae = WanPipeline.from_pretrained(root / "2.1").vae.config
    mean, std = (torch.tensor(values).view(16, 1, 1, 1) for values in (vae.latents_mean, vae.latents_std))
    torch.testing.assert_close(by_kind["raw"], (raw - mean) / std)
    assert torch.equal(by_kind["normalised"], raw)


def test_changing_the_video_window_does_not_re_encode_images(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[int] = []
    plain = WanVae.encode_frames

    def counted(self: WanVae, frames: Tensor) -> Tensor:
        encoded.append(frames.shape[1])
        return plain(self, frames)

    monkeypatch.setattr(WanVae, "encode_frames", counted)
    for changes in ({}, {"num_frames": 5}, {"fps": 4.0, "num_frames": 1}, {"window": "middle", "num_frames": 5}):
        recipe(root, root / "2.1", cache_dir=str(tmp_path / "cache"), **changes).prepare(Work(tmp_path / "work"))
    assert encoded[:5].count(1) + encoded[5:8].count(1) == 5  # five images and three videos
    assert sorted(encoded[8:]) == [1, 1, 1, *[5] * 6]  # the videos only


def test_an_animation_is_never_read_as_a_still_image(tmp_path: Path) -> None:
    one, other = (Image.new("RGB", (16, 16), colour) for colour in ("red", "blue"))
    moving: dict[str, Any] = {"save_all": True, "append_images": [other], "duration": 100}
    for name in ("a.png", "a.jpg", "a.bmp", "a.webp"):
        one.save(tmp_path / name)
        assert is_still(tmp_path / name), name
    one.save(tmp_path / "lossless.webp", lossless=True)
    one.convert("RGBA").save(tmp_path / "extended.webp", exif=b"Exif\0\0")
    assert is_still(tmp_path / "lossless.webp") and is_still(tmp_path / "extended.webp")
    one.save(tmp_path / "b.webp", **moving)
    one.save(tmp_path / "b.gif", **moving)
    shutil.copy(tmp_path / "b.gif", tmp_path / "c.jpg")
    shutil.copy(tmp_path / "b.webp", tmp_path / "c.png")
    shutil.copy(tmp_path / "a.png", tmp_path / "a.mp4")
    (tmp_path / "empty.webp").write_bytes(b"")
    (tmp_path / "short.webp").write_bytes(b"RIFF____WEBPVP8X")
    os.mkfifo(tmp_path / "pipe.png")
    for name in ("b.webp", "b.gif", "c.jpg", "c.png", "a.mp4", "empty.webp", "pipe.png", "nothing.png"):
        assert not is_still(tmp_path / name), name
    assert is_still(tmp_path / "short.webp") in (True, False)  # its reader reports the damage


# ---- files of a run ----


def test_the_choice_of_a_kernel_is_written_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, file, work = attention.Kernel("auto"), tmp_path / "attention_gpu.json", Work(tmp_path, device="cuda")
    sizes = {"num_attention_heads": 2, "attention_head_dim": 12}
    monkeypatch.setattr(attention, "measure", lambda *_: {"auto": 2.0, "flash": 1.0})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "gpu")

    def broken(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(os, "replace", broken)
        with pytest.raises(UserError, match="No space left"):
            kernel.measure(work, sizes, 8)
    assert not list(tmp_path.iterdir())
    kernel.measure(work, sizes, 8)
    assert json.loads(file.read_text())["kernel"] == "flash"
    kernel._file = file  # which another kind of GPU would have named differently
    assert kernel.name_for(1) == "flash" and kernel.name_for(2) == "auto"
    assert attention.Kernel("flash").name_for(2) == "flash"


@pytest.mark.parametrize("name", ["dataset_path", "eval_dataset_path"])
def test_a_missing_folder_is_reported_before_a_model_is_downloaded(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def fetch(*_: Any, **__: Any) -> None:
        raise AssertionError("fetches a model")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    values = {"model_path": "Wan-AI/Wan2.1-T2V-1.3B-Diffusers", "dataset_path": str(root / "data")}
    values |= {name: str(tmp_path / "nowhere"), "output_dir": str(tmp_path / "run")}
    with pytest.raises(ConfigError, match=f"{name} .*nowhere: no such folder"):
        unisono.train("wan-flow", **{**COMMON, **values})


@pytest.mark.parametrize("changed", [{"num_frames": 9}, {"num_frames": 1}, {"num_frames": 9, "no_cache": True}])
def test_attention_is_measured_at_the_largest_sample(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any]
) -> None:
    measured: list[int] = []
    monkeypatch.setattr(attention.Kernel, "measure", lambda self, work, transformer, tokens: measured.append(tokens))
    values = {"model_path": str(root / "2.1"), "dataset_path": str(root / "data"), "cache_dir": str(tmp_path / "cache")}
    unisono.train("wan-flow", output_dir=str(tmp_path / "run"), **{**COMMON, **values, "max_steps": 1, **changed})
    # Three times 2 x 2, of nine frames of 32 x 32; or once 2 x 4, of an image of 32 x 64.
    assert measured == [12 if changed["num_frames"] == 9 else 8]


def test_losses_by_noise_level_are_in_tensorboard(root: Path, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    values = {"model_path": str(root / "2.1"), "dataset_path": str(root / "data"), "cache_dir": str(root / "cache")}
    values |= {"num_eval": 2, "eval_levels": 3, "tensorboard": True}
    unisono.train("wan-flow", output_dir=str(tmp_path / "run"), **{**COMMON, **values})
    board = EventAccumulator(str(tmp_path / "run" / "tb"))
    board.Reload()
    (actual,) = [line for line in lines(tmp_path / "run") if "eval/loss" in line]
    for name in ("eval/loss_by_level", "eval/sigma_by_level"):
        first, middle, last = actual[name]
        drawn = [board.Scalars(f"{name}/{which}")[0].value for which in ("first", "mean", "last")]
        assert drawn == pytest.approx([first, (first + middle + last) / 3, last])


def test_verify_uses_the_precision_of_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Diffusers computes Wan's norms in float32, so equal runs would differ by float32 rounding in float64."""
    precisions: list[str] = []

    def answers(recipe: str, resolved: Any, plan: VerifyPlan, *rest: Any) -> Verdict:
        precisions.append(plan.precision)
        return Verdict([], 0.0)

    monkeypatch.setattr("unisono.engine.verification.verify.verify", answers)
    wan = ["wan-flow", "--model_config", "tiny"]
    for words in (wan, [*wan, "--precision", "float64"], [TINY]):
        assert verify_command.main(words) == 0
    assert precisions == ["float32", "float64", "float64"]
