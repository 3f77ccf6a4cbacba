"""Trains Wan with the usual hand-written loop: Accelerate, diffusers, gradient checkpointing (see wan_step.py).

    python benchmarks/wan_usual.py DATA --batch_size 16 --max_steps 12

The model's random weights, the samples, their noise and noise levels are those of `unisono train wan-flow` on the same
folder of latents, so that the two loss curves can be compared. Everything else is as in the usual script, except that
the data is in memory, which makes this loop faster than most. The last line printed is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from diffusers import WanTransformer3DModel
from safetensors.torch import load_file

from unisono.data.noise import Noise
from unisono.data.order import Order
from unisono.data.seeding import seed_everything
from unisono.recipes.wan.models.load import transformer_config
from unisono.recipes.wan.objective import NoiseLevels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--model_config", default="1.3b")
    parser.add_argument("--batch_size", type=int, default=1)
    parser.add_argument("--max_steps", type=int, default=12)
    parser.add_argument("--learning_rate", type=float, default=1e-5)
    parser.add_argument("--shift", type=float, default=3.0)
    parser.add_argument("--store_activations", action="store_true", help="without gradient checkpointing")
    options = parser.parse_args()

    accelerator = Accelerator(mixed_precision="bf16")
    device = accelerator.device
    seed_everything(0)
    model = WanTransformer3DModel(**transformer_config(None, options.model_config))
    if not options.store_activations:
        model.enable_gradient_checkpointing()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, weight_decay=0.01)
    model, optimizer = accelerator.prepare(model, optimizer)

    files = sorted(options.data.glob("*.latent.safetensors"))
    latents = torch.stack([load_file(file)["latent"] for file in files]).to(device)
    rows = [load_file(str(file).replace(".latent", ""))["embeddings"] for file in files]
    text = torch.zeros(len(rows), 512, rows[0].shape[-1], dtype=torch.bfloat16)
    for number, row in enumerate(rows):
        text[number, : len(row)] = row
    text, order = text.to(device), Order(len(files), seed=0)
    levels = NoiseLevels(shift=options.shift)

    losses, times = [], []
    for step in range(options.max_steps):
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        positions = torch.arange(step * options.batch_size, (step + 1) * options.batch_size, device=device)
        chosen = order.indices(positions)
        noise = Noise(0, positions)
        chance = noise.uniform(3, dtype=torch.float64)
        sigma = levels.quantile(chance[:, 0]).float()
        clean = latents[chosen]
        draws = noise.normal(*clean.shape[1:])
        column = sigma.view(-1, 1, 1, 1, 1)
        noisy = (1 - column) * clean + column * draws
        predicted = model(noisy, sigma * 1000, text[chosen], return_dict=False)[0]
        loss = F.mse_loss(predicted.float(), draws - clean)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        times.append(1000 * (time.perf_counter() - began))
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    print(json.dumps({"losses": losses, "step_ms": times, "mem_gib": peak}))


if __name__ == "__main__":
    main()
