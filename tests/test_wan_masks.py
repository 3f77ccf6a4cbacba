"""Masks beside samples: which part of a sample counts in the loss, the same on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

import unisono
from command_line import unisono as command
from many_runs import Outcome, Run, many_runs
from unisono.data.noise import Noise
from unisono.errors import ConfigError, UnisonoError
from unisono.recipes.common.bad_files import BadMedia
from unisono.recipes.wan.data.crop import Crop
from unisono.recipes.wan.data.masks import on_latent_grid, read_mask
from unisono.recipes.wan.data.render import write_video
from unisono.recipes.wan.data.sources import Source, read_sources
from unisono.recipes.wan.models.vae import Geometry
from unisono.recipes.wan.objective import NoiseLevels
from unisono.recipes.wan_flow.loss import FlowLoss
from wan_models import save_data, save_pipelines

GEOMETRY = Geometry(16, 4, 8)
SETTINGS: dict[str, Any] = {
    **{"mixed_precision": "no", "compile": False, "num_workers": 0, "log_every": 1, "warmup_steps": 0},
    **{"learning_rate": 1e-3, "fps": 8.0, "num_frames": 9, "tensorboard": False, "ema_decay": 0.0},
    **{"global_batch_size": 8, "batch_size": 8, "preview_every": -1, "eval_levels": 4, "num_eval": 2},
    **{"eval_every": 4, "max_steps": 4, "masked_loss": True},
}


def save_image(path: Path, pixels: Tensor) -> None:
    Image.fromarray(pixels.contiguous().numpy()).save(path)


def halves(height: int, width: int, frames: int = 1) -> Tensor:
    """White on the left, black on the right; in a video, the last frames are black."""
    pixels = torch.zeros(frames, height, width, 3, dtype=torch.uint8)
    pixels[: max(1, frames - 4), :, : width // 2] = 255
    return pixels


def save_masks(data: Path) -> None:
    """Masks for three of the five images and two of the three videos of `save_data`."""
    for number in range(3):
        width = Image.open(data / f"p{number}.png").width
        save_image(data / f"p{number}.mask.png", halves(32, width)[0])
    write_video(halves(32, 32, 9), data / "f1.mask.mp4", 8.0)
    save_image(data / "f0.mask.png", halves(32, 32)[0])


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("masks")
    save_pipelines(root)
    save_masks(save_data(root / "data"))
    return root


@pytest.fixture(scope="module")
def runs(root: Path) -> dict[str, Outcome]:
    paths = {"model_path": str(root / "2.1"), "dataset_path": str(root / "data")}
    planned = {
        "one": (1, {}),
        "small micro-batches": (1, {"batch_size": 1}),
        "2 ranks": (2, {"strategy": "ddp", "batch_size": 2}),
        "3 ranks": (3, {"strategy": "fsdp", "batch_size": 4}),
        "uncached": (1, {"no_cache": True}),
        "everything counts": (1, {"unmasked_weight": 1.0}),
        "no masks": (1, {"masked_loss": False}),
    }
    runs = [
        Run(name, f"runs/{name}", world, {**SETTINGS, **paths, **changes}, recipe="wan-flow")
        for name, (world, changes) in planned.items()
    ]
    outcomes = many_runs(runs, root)
    for name, outcome in outcomes.items():
        assert "error" not in outcome.main, (name, outcome.main)
    return outcomes


@pytest.mark.parametrize("name", ["small micro-batches", "2 ranks", "3 ranks", "uncached"])
def test_a_masked_run_does_not_depend_on_ranks_micro_batches_or_the_cache(name: str, runs: dict[str, Outcome]) -> None:
    torch.testing.assert_close(runs[name].losses(), runs["one"].losses(), rtol=2e-5, atol=0)
    held_out = [runs[run].evaluations()[-1]["eval/loss"] for run in (name, "one")]
    assert held_out[0] == pytest.approx(held_out[1], rel=1e-4)


def test_masks_change_the_loss_unless_everything_counts(runs: dict[str, Outcome]) -> None:
    torch.testing.assert_close(runs["everything counts"].losses(), runs["no masks"].losses(), rtol=1e-6, atol=0)
    assert not torch.allclose(runs["one"].losses(), runs["no masks"].losses(), rtol=1e-3)


@pytest.mark.slow
def test_verify_calls_masked_runs_on_1_2_and_3_ranks_the_same(root: Path) -> None:
    words = ["--model_path", "2.1", "--dataset_path", "data", "--masked_loss", "--fps", 8, "--num_frames", 9]
    words += ["--no_compile", "--mixed_precision", "no", "--global_batch_size", 6, "--preview_every", -1]
    ended = command("verify", "wan-flow", *words, "--ranks", "1,2,3", "--steps", 3, cwd=root)
    assert ended.code == 0 and "same" in ended.out, ended


class Answers(torch.nn.Module):
    """Predicts a weight that is trained, so that the gradient of each element can be seen."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.answer = torch.nn.Parameter(torch.zeros(shape))

    def forward(
        self, noisy: Tensor, sigma: Tensor, text: Tensor, times: Tensor | None = None, condition: Any = None
    ) -> Tensor:
        return self.answer[: len(noisy)]


def test_the_loss_is_the_weighted_mean_over_the_global_batch_however_it_is_divided() -> None:
    flow = FlowLoss(NoiseLevels(), 0.0, 1.0)
    latent = torch.randn(4, 3, 2, 4, 4)
    mask = (torch.rand(4, 1, 2, 4, 4) > 0.5).float()
    mask[0] = 0
    mask[0, 0, 1, 2, 2] = 1  # a sample of which hardly anything counts
    text, empty = torch.zeros(4, 2, 3), torch.zeros(2, 3)

    def loss_of(rows: list[int], model: Answers) -> Any:
        return flow.loss(model, latent[rows], text[rows], empty, Noise(0, torch.tensor(rows)), mask[rows])

    whole = loss_of([0, 1, 2, 3], Answers((4, 3, 2, 4, 4)))
    parts = [loss_of(rows, Answers((4, 3, 2, 4, 4))) for rows in ([0], [1, 2], [3])]
    torch.testing.assert_close(sum(part.total for part in parts), whole.total)
    torch.testing.assert_close(sum(part.count for part in parts), whole.count)
    noise = Noise(0, torch.arange(4))
    noise.uniform(3, dtype=torch.float64)
    squares = (noise.normal(3, 2, 4, 4) - latent).square()
    expected = (squares * mask).sum() / (mask.sum() * 3)
    torch.testing.assert_close(whole.total / whole.count, expected)


def test_what_is_black_gets_no_gradient_and_part_of_it_with_a_weight() -> None:
    latent, text = torch.randn(2, 3, 1, 4, 4), torch.zeros(2, 2, 3)
    mask = torch.zeros(2, 1, 1, 4, 4)
    mask[..., :2] = 1
    gradients = []
    for weight in (0.0, 0.25):
        model = Answers((2, 3, 1, 4, 4))
        flow = FlowLoss(NoiseLevels(), 0.0, 1.0, unmasked_weight=weight)
        loss = flow.loss(model, latent, text, torch.zeros(2, 3), Noise(0, torch.arange(2)), mask)
        loss.total.backward()
        gradients.append(model.answer.grad)
        assert loss.count.item() == pytest.approx(2 * (0.5 + 0.5 * weight))
    assert (gradients[0][..., 2:] == 0).all() and (gradients[0][..., :2] != 0).all()
    torch.testing.assert_close(gradients[1][..., :2], gradients[0][..., :2])
    assert (gradients[1][..., 2:] != 0).all()


def test_a_mask_is_cropped_scaled_and_sampled_like_its_video(tmp_path: Path) -> None:
    """A video as its own mask gives its own brightness on the latent's grid."""
    pixels = torch.randint(256, (14, 48, 80, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    for name in ("a.mp4", "a.mask.mp4"):
        write_video(pixels, tmp_path / name, 12.0)
    source = Source("a", tmp_path / "a.mp4", "", mask=tmp_path / "a.mask.mp4")
    for start in ("head", "middle"):
        crop = Crop(num_frames=5, height=32, width=32, fps=6.0, start=start)
        frames = crop.read(source.media, crop.fit(source.media, GEOMETRY.multiple))
        mask = read_mask(source, crop, GEOMETRY)
        assert mask.shape == (1, 2, 4, 4)
        torch.testing.assert_close(mask, on_latent_grid(frames, GEOMETRY))


def test_the_first_latent_frame_is_one_frame_and_each_other_one_four(tmp_path: Path) -> None:
    frames = torch.zeros(9, 8, 16, 3, dtype=torch.uint8)
    frames[0, :, :8], frames[3, :, 8:], frames[5:] = 255, 255, 255
    expected = [[1, 0], [0, 0.25], [1, 1]]
    torch.testing.assert_close(on_latent_grid(frames, GEOMETRY)[0, :, 0], torch.tensor(expected))


def test_an_image_is_the_mask_of_every_frame_and_of_a_latent(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    write_video(halves(32, 48, 9), tmp_path / "a.mp4", 8.0)
    save_image(tmp_path / "a.mask.png", halves(32, 48)[0])
    mask = read_mask(Source("a", tmp_path / "a.mp4", "", mask=tmp_path / "a.mask.png"), Crop(9), GEOMETRY)
    assert mask.shape == (1, 3, 4, 6) and (mask[..., :3] == 1).all() and (mask[..., 3:] == 0).all()
    save_file({"latent": torch.randn(16, 3, 4, 6)}, tmp_path / "b.latent.safetensors")
    alone = Source("b", None, "", tmp_path / "b.latent.safetensors", mask=tmp_path / "a.mask.png")
    assert read_mask(alone, Crop(5, 16, 16, fps=4.0), GEOMETRY).equal(mask)


def test_masks_belong_to_samples_and_are_none(tmp_path: Path) -> None:
    for name in ("a.png", "a.mask.png", "other.mask.png"):
        save_image(tmp_path / name, halves(16, 16)[0])
    for name in ("a.txt", "other.mask.txt"):
        (tmp_path / name).write_text("a ball")
    sources = {source.name: source for source in read_sources(tmp_path)}
    assert sources.keys() == {"a", "other.mask"}  # nothing is called `other`
    assert sources["a"].mask == tmp_path / "a.mask.png" and sources["other.mask"].mask is None
    (tmp_path / "metadata.csv").write_text("file_name,text\na.png,a ball\n")
    assert read_sources(tmp_path)[0].mask == tmp_path / "a.mask.png"
    (tmp_path / "a.mask.mp4").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"two masks, a\.mask\.png and a\.mask\.mp4"):
        read_sources(tmp_path)


@pytest.mark.parametrize(
    ("frames", "height", "fps", "words"),
    [
        (9, 16, 8.0, "16×48 pixels, but its sample has 32×48"),
        (5, 32, 8.0, "5 frames, but its sample has 9"),
        (9, 32, 24.0, "24 frames per second, but its sample has 8"),
    ],
)
def test_a_mask_that_does_not_fit_is_refused(frames: int, height: int, fps: float, words: str, tmp_path: Path) -> None:
    write_video(halves(32, 48, 9), tmp_path / "a.mp4", 8.0)
    write_video(halves(height, 48, frames), tmp_path / "a.mask.mp4", fps)
    with pytest.raises(BadMedia, match=words) as refused:
        read_mask(Source("a", tmp_path / "a.mp4", "", mask=tmp_path / "a.mask.mp4"), Crop(9), GEOMETRY)
    assert "\n" not in str(refused.value) and "a.mask.mp4" in str(refused.value)


@pytest.mark.parametrize("no_cache", [False, True])
def test_a_run_with_a_bad_mask_stops_in_one_line_or_skips_it(no_cache: bool, root: Path, tmp_path: Path) -> None:
    data = save_data(tmp_path / "data")
    save_masks(data)
    save_image(data / "p0.mask.png", halves(16, 16)[0])
    values = {**SETTINGS, "model_path": str(root / "2.1"), "dataset_path": str(data), "max_steps": 1, "nproc": 1}
    values |= {"num_eval": 0, "no_cache": no_cache, "output_dir": str(tmp_path / "run")}
    with pytest.raises(UnisonoError, match=r"p0\.mask\.png.*16×16 pixels") as refused:
        unisono.train("wan-flow", **values)
    assert "\n" not in str(refused.value)
    assert unisono.train("wan-flow", **values, leave_out_bad=True).step == 1


def test_black_masks_and_settings_without_an_effect_are_refused(root: Path, tmp_path: Path) -> None:
    data = save_data(tmp_path / "data")
    values = {**SETTINGS, "model_path": str(root / "2.1"), "dataset_path": str(data), "max_steps": 1, "nproc": 1}
    values["output_dir"] = str(tmp_path / "run")
    with pytest.raises(UnisonoError, match="has no masks; add a mask for each sample"):
        unisono.train("wan-flow", **values)
    save_image(data / "p1.mask.png", torch.zeros(32, 32, 3, dtype=torch.uint8))
    with pytest.raises(UnisonoError, match="is black wherever the sample is used"):
        unisono.train("wan-flow", **values)
    with pytest.raises(UnisonoError, match="unmasked_weight has no effect"):
        unisono.train("wan-flow", **{**values, "masked_loss": False, "unmasked_weight": 0.5})
    with pytest.raises(UnisonoError, match="the built-in shapes have no masks"):
        unisono.train("wan-flow", model_config="tiny", masked_loss=True, output_dir=str(tmp_path / "run"))
