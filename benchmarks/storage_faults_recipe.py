"""A small model on tar shards for benchmarks/storage_faults.py that logs the samples of each step, in order."""

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from unisono import Loss, Recipe
from unisono.datasets import TarShards

LOG = "UNISONO_BENCH_SAMPLES"
"""Environment variable: the file to which a rank appends its samples; `-RANK.jsonl` is appended to its name."""


def decode(sample: dict) -> dict[str, torch.Tensor]:
    number = int(sample["cls"])
    values = torch.tensor(list(sample["bin"][:16]), dtype=torch.float64) / 255
    return {"id": torch.tensor(number), "x": values}


class Shards(Recipe):
    """The recipe that is trained while the storage fails."""

    defaults = {"tensorboard": False, "log_every": 1, "learning_rate": 3e-3, "num_workers": 0, "dtype": "float64"}

    @dataclass
    class Config:
        shards: str = ""
        """Paths or addresses of the tar shards."""
        cache: str = ""
        """Folder for the cache and the index of the shards."""
        pace: float = 0.0
        """Seconds to sleep in each micro-batch."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))

    def dataset(self, split: str):
        if split == "eval":
            return None
        cache = Path(self.config.cache)
        return TarShards(self.config.shards, transform=decode, cache_dir=cache / "shards", index_dir=cache / "index")

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor], noise) -> Loss:
        time.sleep(self.config.pace)
        if name := os.environ.get(LOG):
            line = json.dumps({"step": self.clock.step + 1, "ids": batch["id"].tolist()})
            with open(f"{name}-{os.environ.get('RANK', '0')}.jsonl", "a") as log:
                log.write(line + "\n")
        noisy = batch["x"] + 0.1 * noise.normal(16)
        return Loss((model(noisy) - batch["x"]).square().sum(), len(noisy))
