"""Trains clips in two ways: in a hand-written loop and in unisono.

`clips.py overhead` starts this file once per variant. Both loops train the recipe's own model on the recipe's own
windows, with the same number of loader workers, fused AdamW, clipping, and the loss logged every 10 steps.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # imported here, or variants would import it at different times and count it as training memory
from gate import Gate, Rounds
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader

import unisono
from unisono import Loss
from unisono.engine.recipe import Work
from unisono.recipes.clips.loss import ranking_loss, score_loss
from unisono.recipes.clips.recipe import Clips
from unisono.recipes.clips.settings import Config

LEARNING_RATE, CLIP, LOG_EVERY = 1e-3, 0.5, 10
GATE: Gate


def by_hand(job: dict[str, Any]) -> nn.Module:
    """Trains in plain PyTorch."""
    device = torch.device(job["device"])
    recipe = Clips(Config(**job["told"]))
    recipe.prepare(Work(Path(job["folder"])))  # reuses the extracted features
    data = recipe.dataset("train")
    torch.manual_seed(0)
    GATE.model_starts()
    model = recipe.model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)

    def endless() -> Iterator[dict[str, Tensor]]:
        cuda = device.type == "cuda"
        loader = DataLoader(
            data,
            job["batch"],
            num_workers=job["workers"],
            persistent_workers=job["workers"] > 0,
            pin_memory=cuda,
        )
        while True:
            yield from loader

    for step, batch in enumerate(endless(), 1):
        batch = {name: values.to(device, non_blocking=True) for name, values in batch.items()}
        GATE.step_starts()
        with torch.autocast("cuda", torch.bfloat16, enabled=device.type == "cuda"):
            logits = model({name: batch[name] for name in recipe._inputs}).float()
        loss = (score_loss(logits, batch["scores"], "bce") + ranking_loss(logits, batch["scores"])).mean()
        loss.backward()
        clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % LOG_EVERY == 0:
            print(f"step {step}  loss {loss.item():.4f}", flush=True)
        if step == job["rounds"].total_steps:
            return model
    raise AssertionError


class Gated(Clips):
    """The unchanged recipe, except that it waits for its turn at the gate."""

    trained: nn.Module

    def model(self) -> nn.Module:
        """Builds the recipe's model, and tells the gate when that begins."""
        GATE.model_starts()
        Gated.trained = super().model()
        return Gated.trained

    def loss(self, model: nn.Module, batch: Any, noise: Any) -> Loss:
        """Waits at the gate, and computes the recipe's loss."""
        GATE.step_starts()
        return super().loss(model, batch, noise)


def in_unisono(job: dict[str, Any]) -> nn.Module:
    """Trains with unisono's real loop in this process, with the run folder, metrics and progress that users get."""
    cuda = job["device"] == "cuda"
    unisono.train(
        Gated,
        **job["told"],
        output_dir=str(Path(job["folder"]) / "run"),
        max_steps=job["rounds"].total_steps,
        num_epochs=None,
        gpus="0," if cuda else "0",
        strategy="single",
        batch_size=job["batch"],
        mixed_precision="bf16" if cuda else "no",
        learning_rate=LEARNING_RATE,
        lr_schedule="constant",
        warmup_steps=0,
        grad_clip=CLIP,
        num_workers=job["workers"],
        shuffle=False,
        log_every=LOG_EVERY,
        eval_every=-1,
        preview_every=-1,
        save_every=0,  # only the checkpoint at the end, after the last timed step
    )
    return Gated.trained


LOOPS = {"hand": by_hand, "hand again": by_hand, "unisono": in_unisono}


def main() -> None:
    """Trains one variant and writes its weights to the folder."""
    global GATE
    parser = argparse.ArgumentParser()
    parser.add_argument("variant", choices=LOOPS)
    parser.add_argument("pipe", type=int)
    parser.add_argument("job")
    options = parser.parse_args()
    job = json.loads(options.job)
    job["rounds"] = Rounds(**job["rounds"])
    torch.set_num_threads(job["threads"])
    GATE = Gate(Connection(options.pipe), job["rounds"], torch.device(job["device"]))
    model = LOOPS[options.variant](job)
    weights = {name: weight.detach().float().cpu().contiguous() for name, weight in model.named_parameters()}
    save_file(weights, Path(job["folder"]) / "weights.safetensors")


if __name__ == "__main__":
    main()
