"""A flow-matching trainer for your own loop: one process, or several under a launcher, with torch's DDP.

    rank, world_size, local_rank = setup_distributed()
    trainer = FlowMatchingTrainer(model, rank=rank, world_size=world_size)
    for epoch in range(num_epochs):
        sampler.set_epoch(epoch)
        trainer.train_epoch(loader)  # batches of latents and text
    trainer.save_checkpoint("checkpoints/last")
    cleanup_distributed()

The objective is the one that Wan was trained with (t = 0 is data, t = 1 is noise):

    x_t = (1 - t) x_0 + t noise          velocity = noise - x_0          the model gets 1000 t

Random numbers belong to samples: with a DistributedSampler, N processes train like a single process with N times the
batch size. For data loading, caching, sharding, fault tolerance, previews and export, use `unisono train wan-flow`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from flow_matching_checkpoint import read_checkpoint, write_checkpoint
from torch import Tensor, distributed
from torch.nn.functional import cosine_similarity
from torch.nn.parallel import DistributedDataParallel

from unisono.data.noise import Noise
from unisono.engine.step.ema import Ema
from unisono.errors import ConfigError
from unisono.recipes.wan.models.float32_weights import keep_time_embedding_in_float32
from unisono.recipes.wan.models.vae import WanVae
from unisono.recipes.wan.objective import TIMESTEPS, NoiseLevels, noised, velocity
from unisono.settings import EmaSettings

LEVELS = NoiseLevels("logit_normal", shift=3.0)


class FlowMatchingTrainer:
    """Trains a `WanTransformer3DModel` on latents (or on frames, with a VAE) and text embeddings."""

    def __init__(
        self,
        model: Any,
        vae: Any = None,
        *,
        learning_rate: float = 1e-4,
        weight_decay: float = 0.01,
        betas: tuple[float, float] = (0.9, 0.999),
        grad_clip: float = 1.0,
        ema_decay: float | None = 0.9999,
        device: str | torch.device | None = None,
        dtype: torch.dtype = torch.bfloat16,
        rank: int = 0,
        world_size: int = 1,
        levels: NoiseLevels = LEVELS,
        seed: int = 0,
    ) -> None:
        if dtype == torch.float16:
            raise ConfigError("dtype float16 needs loss scaling; use bfloat16, or unisono train --mixed_precision fp16")
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.dtype, self.rank, self.world_size = dtype, rank, world_size
        self.grad_clip, self.levels, self.seed = grad_clip, levels, seed
        self.global_step, self.epoch, self.samples = 0, 0, 0
        self._noise: tuple[int, Noise] | None = None
        # Weights stay in 32 bits (64 in tests), because 16 bits would round most updates away.
        self.transformer = model.to(self.device, torch.float64 if dtype == torch.float64 else torch.float32)
        keep_time_embedding_in_float32(self.transformer)
        self.is_distributed = world_size > 1
        self.model = self.transformer
        if self.is_distributed:
            self.model = DistributedDataParallel(self.transformer, broadcast_buffers=False)
        self.vae = None if vae is None else WanVae(vae).to(self.device)
        parameters = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
        self.optimizer = torch.optim.AdamW(
            [weight for _, weight in parameters], lr=learning_rate, betas=betas, weight_decay=weight_decay
        )
        self.ema = Ema(parameters, EmaSettings(ema_decay=ema_decay)) if ema_decay else None

    def sample_timesteps(self, batch_size: int) -> Tensor:
        """Samples noise levels [batch] between 0 and 1."""
        quantile = self._draws(batch_size).uniform(dtype=torch.float64)
        return self.levels.quantile(quantile).to(self._weight_type)

    def get_noisy_latent(self, x_0: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """Returns x_t and its noise."""
        noise = self._draws(len(x_0)).normal(*x_0.shape[1:], dtype=x_0.dtype)
        return noised(x_0, noise, t), noise

    def compute_flow_matching_loss(
        self, x_0: Tensor, t: Tensor, context: Tensor, x_t: Tensor | None = None, noise: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Returns the mean squared error of the velocity, and metrics."""
        if x_t is None or noise is None:
            x_t, noise = self.get_noisy_latent(x_0, t)
        target = velocity(x_0, noise)
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype == torch.bfloat16):
            predicted = self.model(x_t, t * TIMESTEPS, context.to(self.dtype), return_dict=False)[0].to(target.dtype)
        detached = predicted.detach()
        return {
            "loss": (predicted - target).square().mean(),
            "pred_velocity_mag": detached.abs().mean(),
            "target_velocity_mag": target.abs().mean(),
            "velocity_cos_sim": cosine_similarity(detached.flatten(1), target.flatten(1)).mean(),
        }

    def train_step(self, videos: Tensor, texts: Tensor) -> dict[str, float]:
        """Takes one optimizer step; returns metrics averaged over all processes.

        `videos` are latents [batch, C, f, h, w] or frames [batch, 3, F, H, W]; `texts` are [batch, n, width].
        """
        self._noise = None  # so that the step does not depend on random numbers that the user has drawn
        self.model.train()
        videos, texts = (tensor.to(self.device, self._weight_type) for tensor in (videos, texts))
        latents = videos
        if self.vae is not None and videos.shape[1] == 3:
            latents = self.vae.encode(videos).to(self._weight_type)
        metrics = self.compute_flow_matching_loss(latents, self.sample_timesteps(len(latents)), texts)
        self.optimizer.zero_grad()
        metrics["loss"].backward()  # type: ignore[no-untyped-call]
        weights = self.optimizer.param_groups[0]["params"]
        norm = torch.nn.utils.clip_grad_norm_(weights, self.grad_clip or float("inf"))
        if norm.isfinite():  # the norm of the averaged gradient is the same on all ranks
            self.optimizer.step()
            self.update_ema()
        self.global_step += 1
        self.samples += len(latents) * self.world_size
        values = torch.stack([value.detach().float() for value in metrics.values()])
        if self.is_distributed:
            distributed.all_reduce(values)
        means = dict(zip(metrics, (values / self.world_size).tolist(), strict=True))
        return {**means, "grad_norm": norm.item(), "learning_rate": self.optimizer.param_groups[0]["lr"]}

    def train_epoch(self, dataloader: Iterable[Any], scheduler: Any = None) -> dict[str, float]:
        """Trains one epoch on batches of (latents, text) or mappings with `latent` and `text`; returns mean metrics."""
        total: dict[str, float] = {}
        steps = 0
        for batch in dataloader:
            videos, texts = (batch["latent"], batch["text"]) if isinstance(batch, Mapping) else batch[:2]
            metrics = self.train_step(videos, texts)
            total = {name: total.get(name, 0.0) + value for name, value in metrics.items()}
            steps += 1
        if not steps:
            raise ConfigError("the dataset has no batch for this process; use fewer processes or a smaller batch_size")
        self.epoch += 1
        if scheduler is not None:
            scheduler.step()
        means = {name: value / steps for name, value in total.items()}
        if self.rank == 0:
            print(f"epoch {self.epoch}: loss {means['loss']:.4f}, cosine {means['velocity_cos_sim']:.3f}", flush=True)
        return means

    def update_ema(self) -> None:
        """Updates the EMA, whose decay warms up so that early weights are forgotten sooner."""
        if self.ema is not None:
            self.ema.update(self.global_step)

    def save_checkpoint(self, path: str | Path) -> None:
        """Writes a new checkpoint folder, on the main process."""
        if self.rank == 0:
            counts = {"global_step": self.global_step, "epoch": self.epoch, "samples": self.samples, "seed": self.seed}
            averages = {} if self.ema is None else self.ema.tensors()
            write_checkpoint(Path(path), self.transformer.state_dict(), averages, self.optimizer.state_dict(), counts)

    def load_checkpoint(self, path: str | Path) -> None:
        """Resumes from a checkpoint, on any number of processes."""
        saved = read_checkpoint(Path(path), str(self.device))
        averages = {} if self.ema is None else self.ema.tensors()
        try:
            if averages.keys() != saved.averages.keys():
                raise ValueError("only one of checkpoint and trainer has an EMA (ema_decay)")
            self.transformer.load_state_dict(saved.weights)
            self.optimizer.load_state_dict(saved.optimizer)
        except (ValueError, RuntimeError) as error:
            raise ConfigError(f"{path} is a checkpoint of another model ({str(error).splitlines()[0]})") from None
        for name, average in averages.items():
            average.copy_(saved.averages[name])
        for name, value in saved.counts.items():
            setattr(self, name, value)
        self._noise = None

    @property
    def _weight_type(self) -> torch.dtype:
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    def _draws(self, batch_size: int) -> Noise:
        """Returns the random numbers for the samples of this batch.

        They depend on a sample's position among the samples of all processes, to which a DistributedSampler assigns
        samples in turn.
        """
        if self._noise is None or self._noise[0] != batch_size:
            mine = self.samples + self.rank + self.world_size * torch.arange(batch_size, device=self.device)
            self._noise = batch_size, Noise(self.seed, mine)
        return self._noise[1]
