"""Tests of this example: python -m pytest test_multigpu.py (needs pytest, but no GPU and no download)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from flow_matching_trainer import FlowMatchingTrainer
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from train_flow_matching import cleanup_distributed, is_main_process, parse_args, setup_distributed

from unisono.errors import ConfigError
from unisono.recipes.wan.models.load import build, transformer_config
from unisono.recipes.wan.models.vae import WanVae
from unisono.recipes.wan.tiny.models import tiny_vae

BATCH, STEPS = 4, 3  # global batch


def samples() -> TensorDataset:
    torch.manual_seed(1)
    return TensorDataset(torch.randn(STEPS * BATCH, 8, 1, 4, 4), torch.randn(STEPS * BATCH, 6, 64))


def small_trainer(**more: object) -> FlowMatchingTrainer:
    """Creates a trainer for a small Wan transformer."""
    torch.manual_seed(0)
    model = build({**transformer_config(None, "tiny"), "num_layers": 1})
    settings = {"device": "cpu", "dtype": torch.float64, "learning_rate": 1e-3, "ema_decay": 0.9, **more}
    return FlowMatchingTrainer(model, **settings)  # type: ignore[arg-type]


def train(folder: Path) -> list[float]:
    """Trains one epoch, in a single process or as one of a launcher's processes."""
    rank, world_size, _ = setup_distributed()
    data = samples()
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(data, world_size, rank, shuffle=True, seed=5)
    trainer = small_trainer(rank=rank, world_size=world_size)
    loader = DataLoader(data, BATCH // world_size, sampler=sampler)
    losses = [trainer.train_step(*batch)["loss"] for batch in loader]
    trainer.save_checkpoint(folder / f"on_{world_size}")
    cleanup_distributed()
    return losses


def latents_and_text() -> tuple[Tensor, Tensor]:
    latents, text = samples().tensors
    return latents[:BATCH].double(), text[:BATCH].double()


def test_two_processes_train_like_one(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    losses = train(tmp_path)
    subprocess.run([*torchrun, __file__, tmp_path], check=True, cwd=Path(__file__).parent)
    on_two = load_file(tmp_path / "losses.safetensors")["losses"]
    assert len(set(losses)) == STEPS
    torch.testing.assert_close(on_two, torch.tensor(losses), rtol=1e-6, atol=0)
    for name in ("model", "ema"):
        one, two = (load_file(tmp_path / f"on_{number}/{name}.safetensors") for number in (1, 2))
        for key, weight in one.items():
            torch.testing.assert_close(two[key], weight, rtol=0, atol=1e-6, msg=f"{name} {key}")


def test_t_0_is_data_and_t_1_is_noise() -> None:
    trainer, (latents, _) = small_trainer(), latents_and_text()
    x_t, noise = trainer.get_noisy_latent(latents, torch.tensor([0.0, 0.25, 0.5, 1.0]))
    torch.testing.assert_close(x_t[0], latents[0])
    torch.testing.assert_close(x_t[1], 0.75 * latents[1] + 0.25 * noise[1])
    torch.testing.assert_close(x_t[3], noise[3])


def test_the_model_gets_the_timestep_1000_t() -> None:
    trainer, (latents, text) = small_trainer(), latents_and_text()
    t = torch.tensor([0.1, 0.2, 0.7, 0.9])
    x_t, noise = trainer.get_noisy_latent(latents, t)
    calls = []

    def true_velocity(noisy: Tensor, times: Tensor, rows: Tensor, return_dict: bool) -> tuple[Tensor]:
        calls.append((noisy, times))
        return (noise - latents,)

    trainer.model = true_velocity
    metrics = trainer.compute_flow_matching_loss(latents, t, text, x_t, noise)
    assert metrics["loss"] == 0 and metrics["velocity_cos_sim"] > 0.999
    assert calls[0][0] is x_t
    torch.testing.assert_close(calls[0][1], 1000 * t)


def test_noise_levels_differ_from_draw_to_draw_and_lie_in_0_to_1() -> None:
    trainer = small_trainer()
    first, second = trainer.sample_timesteps(1000), trainer.sample_timesteps(1000)
    assert first.min() >= 0 and first.max() <= 1 and not torch.equal(first, second)


def test_training_overfits_one_sample() -> None:
    trainer, (latents, text) = small_trainer(learning_rate=3e-3, dtype=torch.bfloat16), latents_and_text()
    losses = [trainer.train_step(latents[:1], text[:1])["loss"] for _ in range(40)]
    assert sum(losses[-10:]) < 0.7 * sum(losses[:10])


def test_frames_are_trained_on_as_normalised_latents() -> None:
    vae, text = tiny_vae(), latents_and_text()[1][:2]
    frames = torch.rand(2, 3, 1, 16, 16, generator=torch.Generator().manual_seed(2)) * 2 - 1
    latents = WanVae(vae).encode(frames)
    assert small_trainer(vae=vae).train_step(frames, text) == small_trainer().train_step(latents, text)


def test_a_checkpoint_resumes_exactly(tmp_path: Path) -> None:
    latents, text = latents_and_text()
    first = small_trainer()
    first.train_step(latents, text)
    first.save_checkpoint(tmp_path / "saved")
    again = small_trainer(seed=7)
    again.load_checkpoint(tmp_path / "saved")
    assert again.train_step(latents, text) == first.train_step(latents, text)
    assert again.global_step == 2
    assert again.ema is not None and first.ema is not None
    for ours, theirs in zip(again.ema.tensors().values(), first.ema.tensors().values(), strict=True):
        assert torch.equal(ours, theirs)
    with pytest.raises(ConfigError, match="not overwritten"):
        first.save_checkpoint(tmp_path / "saved")
    (tmp_path / "old.pt").write_bytes(b"\x80")
    with pytest.raises(ConfigError, match="not supported"):
        again.load_checkpoint(tmp_path / "old.pt")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["old.pt", "saved"], "nothing half-written is left"


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    trainer, (latents, text) = small_trainer(), latents_and_text()
    before = {name: weight.clone() for name, weight in trainer.transformer.state_dict().items()}
    trainer.train_step(latents * float("inf"), text)
    for name, weight in trainer.transformer.state_dict().items():
        assert torch.equal(weight, before[name]), name


def test_without_a_launcher_there_is_one_process() -> None:
    assert setup_distributed() == (0, 1, 0) and is_main_process()
    cleanup_distributed()


def test_the_flags_of_the_original_script_are_accepted() -> None:
    flags = ["--batch_size", "2", "--num_epochs", "50", "--learning_rate", "1e-4", "--checkpoint_dir", "there"]
    args = parse_args([*flags, "--gradient_checkpointing", "--torch_compile", "--local_rank", "0"])
    assert (args.batch_size, args.num_epochs, args.learning_rate, args.checkpoint_dir) == (2, 50, 1e-4, "there")
    assert args.gradient_checkpointing and args.torch_compile and args.local_rank == -1


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    is_main = is_main_process()
    losses = torch.tensor(train(folder))
    if is_main:
        save_file({"losses": losses}, folder / "losses.safetensors")
