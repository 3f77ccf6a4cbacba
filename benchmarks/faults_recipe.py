"""A small, slowed-down language model for benchmarks/faults.py that records the samples of each step."""

import time
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from unisono import Loss, Recipe

VOCABULARY = 17


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 24)
        layer = nn.TransformerEncoderLayer(24, 2, 48, dropout=0.1, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(24, VOCABULARY)

    def forward(self, tokens: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        return self.head(self.body(self.embed(tokens) + shift[:, None], mask=mask, is_causal=True))


class Sequences(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 500

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(10) * (index % 7 + 1) + index) % VOCABULARY
        tokens[int(torch.randint(10, ()))] = 0  # an augmentation that is keyed by the sample
        return {"id": torch.tensor(index), "tokens": tokens}


class Patient(Recipe):
    """The recipe that is trained while faults are injected."""

    defaults = {"tensorboard": False, "log_every": 1, "learning_rate": 3e-3, "num_workers": 0, "ema_decay": 0.9}

    @dataclass
    class Config:
        pace: float = 0.0
        """Seconds to sleep in each micro-batch."""

    def model(self) -> nn.Module:
        return Reader()

    def dataset(self, split: str) -> torch.utils.data.Dataset:
        return Sequences() if split == "train" else torch.utils.data.Subset(Sequences(), range(24))

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor], noise) -> Loss:
        time.sleep(self.config.pace if model.training else 0)
        tokens, ids = batch["tokens"], batch["id"]
        scores = model(tokens[:, :-1], noise.normal(24) * 0.1)
        total = cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
        # Two sums of hashed sample numbers identify the batch: which samples, and how often each occurs.
        scrambled = (ids * 2654435761) % 2**31
        return Loss(total, tokens[:, 1:].numel(), metrics={"print": scrambled.sum(), "squares": ids.square().sum()})
