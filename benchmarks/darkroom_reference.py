"""Two hand-written loops to compare with `unisono train darkroom` (see darkroom.py).

    python benchmarks/darkroom_reference.py reference     # a reference model of Algorithm Distillation, with Accelerate
    python benchmarks/darkroom_reference.py plain         # unisono's model in an eager loop, bf16

The reference model is reimplemented from a description. Its loop is faster than the usual one: the data is already on
the GPU, and nothing waits for a loader, for other processes, or to print the loss of every step. The histories are
random bytes, because their content does not affect the step time. The last line printed is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROOM, ACTIONS, HORIZON = 9, 5, 20
WARMUP, LENGTH_OF_RUN = 1000, 50_000


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model and the data."""

    transitions: int = 240
    width: int = 64
    layers: int = 4
    heads: int = 4
    batch: int = 512
    histories: int = 7300
    steps: int = 1000


class Context(NamedTuple):
    """A batch of the reference model: past transitions, the current cell, and the action taken there."""

    states: Tensor  # [batch, transitions, 2]
    actions: Tensor  # [batch, transitions]
    rewards: Tensor
    next_states: Tensor
    query: Tensor  # [batch], a cell
    target: Tensor  # [batch]


class ReferenceModel(nn.Module):
    """Predicts an action from one token per past transition and a last token for the current cell."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width = sizes.width
        self.embed_transition = nn.Linear(2 + ACTIONS + 1 + 2, width)
        self.embed_query = nn.Embedding(ROOM * ROOM, width)
        self.embed_kind = nn.Embedding(2, width)
        self.positions = nn.Parameter(torch.randn(sizes.transitions, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, sizes.heads, 4 * width, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, sizes.layers)
        self.head = nn.Linear(width, ACTIONS)
        mask = nn.Transformer.generate_square_subsequent_mask(sizes.transitions)
        self.mask: Tensor
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, context: Context) -> Tensor:
        """Returns the logits of the actions, [batch, actions]."""
        hot = F.one_hot(context.actions, ACTIONS).float()
        columns = [context.states.float(), hot, context.rewards.float()[..., None], context.next_states.float()]
        steps = self.embed_transition(torch.cat(columns, -1)) + self.embed_kind.weight[0]
        query = self.embed_query(context.query) + self.embed_kind.weight[1]
        tokens = torch.cat([steps, query[:, None]], 1)
        encoded = self.encoder(tokens + self.positions[: tokens.shape[1]], mask=self.mask)
        return self.head(encoded[:, -1])


class KnownData:
    """Histories on the device, as bytes; contexts may start at any step."""

    def __init__(self, cells: Tensor, actions: Tensor, rewards: Tensor, length: int) -> None:
        self.cells, self.actions, self.rewards, self.length = cells, actions, rewards, length

    def draw(self, batch: int) -> Context:
        """A random batch of `length` tokens, including the query."""
        histories, steps = self.cells.shape
        device = self.cells.device
        rows = torch.randint(histories, (batch, 1), device=device)
        starts = torch.randint(steps - self.length + 1, (batch, 1), device=device)
        at = rows * steps + starts + torch.arange(self.length, device=device)
        cells, actions = self.cells.view(-1)[at].long(), self.actions.view(-1)[at].long()
        places = torch.stack([cells // ROOM, cells % ROOM], -1)
        rewards = self.rewards.view(-1)[at[:, :-1]]
        return Context(places[:, :-1], actions[:, :-1], rewards, places[:, 1:], cells[:, -1], actions[:, -1])


def random_bytes(sizes: Sizes, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Cells, actions and rewards, [histories, steps]."""
    shape = (sizes.histories, sizes.steps)
    cells, actions, rewards = (
        torch.randint(high, shape, dtype=torch.uint8, device=device) for high in (ROOM * ROOM, ACTIONS, 2)
    )
    return cells, actions, rewards


def reference(sizes: Sizes, device: torch.device) -> tuple[Callable[[], None], str]:
    """Returns a training step of the reference model with Accelerate, and its precision."""
    from accelerate import Accelerator

    # fp16 needs a GPU; without one this is only a smoke test.
    precision = "fp16" if device.type == "cuda" else "bf16"
    accelerator = Accelerator(mixed_precision=precision, cpu=device.type == "cpu")
    data = KnownData(*random_bytes(sizes, accelerator.device), sizes.transitions)
    model = ReferenceModel(sizes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.99), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up_then_cosine)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)

    def step() -> None:
        with accelerator.accumulate(model):
            context = data.draw(sizes.batch)
            loss = F.cross_entropy(model(context), context.target)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()

    return step, precision


def plain(sizes: Sizes, device: torch.device) -> tuple[Callable[[], None], str]:
    """Returns a training step of unisono's model in plain PyTorch, and its precision."""
    from unisono.recipes.darkroom.data.windows import Windows
    from unisono.recipes.darkroom.recipe import Darkroom
    from unisono.recipes.darkroom.sources.source import Histories

    config = Darkroom.Config(
        n_transit=sizes.transitions, tf_n_embd=sizes.width, tf_n_layer=sizes.layers, tf_n_head=sizes.heads
    )
    model = Darkroom(config).model().to(device)
    tasks = torch.zeros(1, dtype=torch.int64, device=device)
    data = Windows.of(
        Histories(tasks, *(column[None] for column in random_bytes(sizes, device))), HORIZON, sizes.transitions
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.01, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up_then_cosine)

    def step() -> None:
        contexts = data.gather(torch.randint(len(data), (sizes.batch,), device=device))
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(contexts.tokens)
        F.cross_entropy(logits.float().flatten(0, 1), contexts.actions.flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)

    return step, "bf16"


def warm_up_then_cosine(step: int) -> float:
    if step < WARMUP:
        return step / WARMUP
    return 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (LENGTH_OF_RUN - WARMUP)))


def measure(step: Callable[[], None], device: torch.device, *, warm_up: int, bouts: int, steps: int) -> list[float]:
    """Returns the milliseconds per step of each bout of `steps` steps."""
    times = []
    for number in range(-1, bouts):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        length = steps if number >= 0 else warm_up
        for _ in range(length):
            step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if number >= 0:
            times.append((time.perf_counter() - start) / length * 1e3)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("loop", choices=["reference", "plain"])
    parser.add_argument("--bouts", type=int, default=10, help="number of timed bouts")
    parser.add_argument("--steps", type=int, default=50, help="steps per bout")
    parser.add_argument("--warm_up", type=int, default=100, help="steps before the first timed bout")
    parser.add_argument("--quick", action="store_true", help="smoke test with a tiny model; the numbers mean nothing")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes = Sizes(40, 16, 1, 4, 8, histories=50, steps=100) if options.quick else Sizes()
    torch.manual_seed(0)
    step, precision = {"reference": reference, "plain": plain}[options.loop](sizes, device)
    ms = measure(step, device, warm_up=options.warm_up, bouts=options.bouts, steps=options.steps)
    print(json.dumps({"loop": options.loop, "precision": precision, "device": str(device), "step_ms": ms}))


if __name__ == "__main__":
    main()
