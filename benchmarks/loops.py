"""Trains the same model in four ways: a hand-written loop, unisono, Accelerate and Lightning Fabric.

`overhead.py` starts this file once per variant and rank. Each loop is written as a good user of that framework would
write it: fused AdamW, gradients in DDP's buckets, clipping (to a norm that is always exceeded here). Rank 0 logs the
loss every 10 steps.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # imported here, because variants would import it (70 MiB) at different times
import torch.distributed as dist
from gate import Gate, Rounds
from gpt import GPT, SIZES, RandomTokens
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, DistributedSampler

from unisono import Loss, Recipe

LEARNING_RATE, CLIP, LOG_EVERY = 3e-4, 0.5, 10


@dataclass(frozen=True)
class Job:
    """Settings of the benchmark, which are the same for every variant."""

    size: str
    device: str
    ddp: bool
    workers: int
    tensorboard: bool
    rounds: Rounds
    folder: Path

    @property
    def rank(self) -> int:
        return int(os.environ.get("RANK", "0"))

    @property
    def world(self) -> int:
        return int(os.environ.get("WORLD_SIZE", "1"))

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    def model(self) -> GPT:
        GATE.model_starts()
        return GPT(SIZES[self.size])

    def data(self) -> RandomTokens:
        return RandomTokens(SIZES[self.size], self.rounds.total_steps * SIZES[self.size].batch * self.world)

    def loader(self, *, distributed: bool) -> DataLoader[Any]:
        data = self.data()
        sampler = DistributedSampler(data, shuffle=False) if distributed else None
        batch = SIZES[self.size].batch
        return DataLoader(data, batch, sampler=sampler, num_workers=self.workers, pin_memory=self.on_gpu)

    def log(self, step: int, loss: Tensor) -> None:
        if step % LOG_EVERY == 0 and self.rank == 0:
            print(f"step {step}  loss {loss.item():.4f}", flush=True)


GATE: Gate
JOB: Job


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)


def by_hand(job: Job) -> nn.Module:
    """Trains in plain PyTorch."""
    device = torch.device(job.device, int(os.environ.get("LOCAL_RANK", "0"))) if job.on_gpu else torch.device("cpu")
    if job.on_gpu:
        torch.cuda.set_device(device)
    if job.ddp:
        dist.init_process_group("nccl" if job.on_gpu else "gloo", device_id=device if job.on_gpu else None)
    torch.manual_seed(0)
    model = job.model().to(device)
    wrapped: nn.Module = model
    if job.ddp:
        ids = [device.index] if job.on_gpu else None
        wrapped = DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
    optimizer = adamw(model)

    def precision() -> AbstractContextManager[Any]:
        return torch.autocast("cuda", torch.bfloat16) if job.on_gpu else nullcontext()

    for step, (tokens, targets) in enumerate(job.loader(distributed=job.ddp), 1):
        tokens, targets = tokens.to(device, non_blocking=True), targets.to(device, non_blocking=True)
        GATE.step_starts()
        with precision():
            loss = wrapped(tokens, targets)
        loss.backward()
        clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        job.log(step, loss)
    return model


class Benchmark(Recipe):
    """The benchmark's model as a recipe; session, loop and step are unisono's own."""

    trained: nn.Module

    def model(self) -> nn.Module:
        Benchmark.trained = JOB.model()
        return Benchmark.trained

    def dataset(self, split: str) -> RandomTokens | None:
        return JOB.data() if split == "train" else None

    def loss(self, model: nn.Module, batch: list[Tensor], noise: object) -> Loss:
        GATE.step_starts()
        tokens, targets = batch
        return Loss(model(tokens, targets, reduction="sum"), count=targets.numel())


def in_unisono(job: Job, **more: Any) -> nn.Module:
    """Trains with unisono's real loop in this process, with the run folder, metrics and progress that users get."""
    import unisono

    unisono.train(
        Benchmark,
        output_dir=str(job.folder / "run"),
        max_steps=job.rounds.total_steps,
        gpus="0," if job.on_gpu else "0",
        strategy="ddp" if job.ddp else "single",
        batch_size=SIZES[job.size].batch,
        mixed_precision="bf16" if job.on_gpu else "no",
        learning_rate=LEARNING_RATE,
        grad_clip=CLIP,
        num_workers=job.workers,
        shuffle=False,
        log_every=LOG_EVERY,
        save_every=0,  # only the checkpoint at the end, after the last timed step
        tensorboard=job.tensorboard,
        **more,
    )
    return Benchmark.trained


def in_accelerate(job: Job) -> nn.Module:
    """Trains with Hugging Face Accelerate."""
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs

    accelerator = Accelerator(
        cpu=not job.on_gpu,
        mixed_precision="bf16" if job.on_gpu else "no",
        kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
    )
    torch.manual_seed(0)
    plain = job.model()
    model, optimizer, loader = accelerator.prepare(plain, adamw(plain), job.loader(distributed=False))
    _check_wrapped(model, job)
    for step, (tokens, targets) in enumerate(loader, 1):
        GATE.step_starts()
        with accelerator.accumulate(model):
            loss = model(tokens, targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
        job.log(step, loss)
    return plain


def in_fabric(job: Job) -> nn.Module:
    """Trains with Lightning Fabric."""
    try:
        from lightning.fabric import Fabric
        from lightning.fabric.plugins.environments import LightningEnvironment
        from lightning.fabric.strategies import DDPStrategy
    except ImportError:
        from lightning_fabric import Fabric
        from lightning_fabric.plugins.environments import LightningEnvironment
        from lightning_fabric.strategies import DDPStrategy

    fabric = Fabric(
        accelerator=job.device,
        devices=job.world,
        strategy=DDPStrategy(gradient_as_bucket_view=True) if job.ddp else "auto",
        precision="bf16-mixed" if job.on_gpu else "32-true",
        # Set explicitly, because detection starts MPI, which aborts if no MPI daemon can be started.
        plugins=[LightningEnvironment()] if job.world == 1 else None,
    )
    fabric.launch()
    torch.manual_seed(0)
    plain = job.model()
    model, optimizer = fabric.setup(plain, adamw(plain))
    _check_wrapped(model._forward_module, job)
    loader = fabric.setup_dataloaders(job.loader(distributed=False))
    for step, (tokens, targets) in enumerate(loader, 1):
        GATE.step_starts()
        loss = model(tokens, targets)
        fabric.backward(loss)
        # error_if_nonfinite is on by default and would synchronize with the device, which no other variant does.
        fabric.clip_gradients(model, optimizer, max_norm=CLIP, error_if_nonfinite=False)
        optimizer.step()
        optimizer.zero_grad()
        job.log(step, loss)
    return plain


def _check_wrapped(model: nn.Module, job: Job) -> None:
    is_wrapped = any(isinstance(module, DistributedDataParallel) for module in model.modules())
    if is_wrapped != job.ddp:
        raise RuntimeError(f"the framework {'wrapped' if is_wrapped else 'did not wrap'} the model in DDP")


LOOPS: dict[str, Callable[[Job], nn.Module]] = {
    "hand": by_hand,
    "hand again": by_hand,
    "unisono": in_unisono,
    "never guarded": partial(in_unisono, guard_steps=0),
    "always guarded": partial(in_unisono, guard_steps=-1),
    "accelerate": in_accelerate,
    "fabric": in_fabric,
}


def _weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return ((name, parameter.detach().float().cpu().contiguous()) for name, parameter in model.named_parameters())


def main() -> None:
    """Trains one variant on one rank and writes its weights to the folder."""
    global GATE, JOB
    parser = argparse.ArgumentParser()
    parser.add_argument("variant", choices=LOOPS)
    parser.add_argument("pipe", type=int)
    parser.add_argument("job")
    options = parser.parse_args()
    job = json.loads(options.job)
    job |= {"rounds": Rounds(**job["rounds"]), "folder": Path(job["folder"])}
    threads = job.pop("threads")
    JOB = Job(**job)
    torch.set_num_threads(threads)
    GATE = Gate(Connection(options.pipe), JOB.rounds, torch.device(JOB.device))
    model = LOOPS[options.variant](JOB)
    if torch.get_num_threads() != threads:
        raise RuntimeError(f"{options.variant} changed the number of threads to {torch.get_num_threads()}")
    if JOB.rank == 0:
        save_file(dict(_weights(model)), JOB.folder / "weights.safetensors")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
