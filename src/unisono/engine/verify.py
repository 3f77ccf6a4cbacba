"""The proof: the same few steps on several numbers of ranks, micro-batches and strategies, compared.

Each variant is an ordinary run, started as a user would start it, and compared by what it leaves behind: the losses in
metrics.jsonl and the weights in its last checkpoint.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from unisono.checkpoint.export import load_whole
from unisono.checkpoint.find import list_steps
from unisono.config.file import as_yaml
from unisono.config.resolve import Resolved
from unisono.devices import visible_gpus
from unisono.engine.batch import plan_batch
from unisono.engine.checks import check_settings
from unisono.errors import EXIT_USER_ERROR, ConfigError, TrainingFailed, UserError
from unisono.settings import Settings

# (loss, weight): largest difference relative to max(1, |value|) that counts as the same. Below float64 weights whose
# gradient is pure rounding (attention's key biases) may wander under Adam, while the losses agree. In 16 bit a few
# steps move weights by no more than that, so only the losses can tell.
TOLERANCES = {"float64": (1e-10, 1e-10), "float32": (1e-5, 1e-3), "bf16": (2e-3, math.inf), "fp16": (1e-3, math.inf)}


@dataclass(frozen=True)
class Question:
    """What is to be compared."""

    ranks: Sequence[int]
    steps: int
    strategies: Sequence[str]
    precision: str

    def __post_init__(self) -> None:
        """Refuses what cannot be asked."""
        if self.precision not in TOLERANCES:
            raise ConfigError(f"--precision {self.precision}: expected {', '.join(TOLERANCES)}")
        for strategy in self.strategies:
            if strategy not in ("ddp", "fsdp"):
                raise ConfigError(f"--strategies {strategy}: expected ddp or fsdp (one rank always runs single)")


@dataclass(frozen=True)
class Variant:
    """One way of carrying out the same steps."""

    ranks: int
    strategy: str
    micro_batch: int
    micro_batches: int

    @property
    def title(self) -> str:
        """In words."""
        return f"{self.ranks} rank{'s' * (self.ranks > 1)}, {self.strategy}, {self.micro_batches} x {self.micro_batch}"


@dataclass(frozen=True)
class Answer:
    """A variant beside the first one."""

    variant: Variant
    loss_difference: float
    weight_difference: float
    first_different: str | None
    same: bool


def variants(question: Question, global_batch: int) -> list[Variant]:
    """The runs to make: each number of ranks with one micro-batch per rank and with several, under each strategy."""
    found = []
    for ranks in question.ranks:
        share = -(-global_batch // ranks)
        for strategy in ("single",) if ranks == 1 else question.strategies:
            found += [
                Variant(ranks, strategy, size, -(-share // size)) for size in (share, *_uneven(global_batch, ranks))
            ]
    return found


def _uneven(global_batch: int, ranks: int) -> list[int]:
    """A size for micro-batches that cannot be equal: the mean of equal parts' means would hide a loss that is one."""
    share = -(-global_batch // ranks)
    sizes = [-(-share // parts) for parts in (3, 4, 5, 2) if share >= parts]
    uneven = [size for size in sizes if size < share and global_batch % (ranks * -(-share // size))]
    # Batch norm refuses a single sample, so rather none of them.
    return sorted(uneven, key=lambda size: share // -(-share // size) < 2)[:1]


def uneven_batch(global_batch: int, ranks: Sequence[int]) -> int:
    """A batch that does not divide by the ranks, for the same reason."""
    return global_batch + 1 if global_batch % max(ranks) == 0 and max(ranks) > 1 else global_batch


def verify(recipe: str, resolved: Resolved, question: Question, tell: Callable[[str], None]) -> list[Answer]:
    """Runs every variant and compares it with the first."""
    settings = resolved.build(Settings)
    check_settings(settings)
    plan = plan_batch(settings.batch, resolved.explicit, devices=max(question.ranks))
    batch = plan.global_batch
    if not resolved.explicit("global_batch_size"):
        batch = uneven_batch(batch, question.ranks)
    answers: list[Answer] = []
    with tempfile.TemporaryDirectory(prefix="unisono-verify-") as folder:
        first: tuple[list[float], Path] | None = None
        asked = list(variants(question, batch))
        for number, variant in enumerate(asked):
            tell(f"running {variant.title} ({number + 1} of {len(asked)}) …")
            run = Path(folder) / str(number)
            losses, checkpoint = _run(recipe, resolved, question, variant, batch, run)
            first = first or (losses, checkpoint)
            answers.append(_compare(variant, first, (losses, checkpoint), question.precision))
    return answers


def _run(
    recipe: str, resolved: Resolved, question: Question, variant: Variant, global_batch: int, folder: Path
) -> tuple[list[float], Path]:
    mixed = question.precision if question.precision in ("bf16", "fp16") else "no"
    config = resolved.with_values(
        "flag",
        output_dir=str(folder / "run"),
        max_steps=question.steps,
        num_epochs=None,
        global_batch_size=global_batch,
        gradient_accumulation_steps=None,
        batch_size=variant.micro_batch,
        strategy=variant.strategy,
        nproc=variant.ranks,
        gpus=_gpus(resolved, variant.ranks),
        mixed_precision=mixed,
        lr_schedule="constant",
        warmup_steps=0,
        dtype="float64" if question.precision == "float64" else "float32",
        disable_dropout=True,
        resume="never",
        log_every=1,
        save_every=0,
        eval_every=-1,
        preview_every=-1,
        tensorboard=False,
        max_restarts=0,
    )
    folder.mkdir()
    file = folder / "config.yaml"
    file.write_text(as_yaml(config))
    command = [sys.executable, "-m", "unisono", "train", recipe, "--config", str(file)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == EXIT_USER_ERROR:
        raise UserError(done.stderr.strip().splitlines()[-1].removeprefix("unisono: "))
    if done.returncode != 0:
        raise TrainingFailed(f"{variant.title} ended with exit code {done.returncode}:\n{done.stderr.strip()[-2000:]}")
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    _, checkpoint = list_steps(folder / "run" / "checkpoints")[-1]
    return [float(line["loss"]) for line in lines], checkpoint


def _gpus(resolved: Resolved, ranks: int) -> str:
    """As many GPUs as ranks, or as there are: then ranks share them."""
    if resolved.explicit("gpus") and resolved.values["gpus"] == "0":
        return "0"
    return str(min(ranks, len(visible_gpus())))


def _compare(
    variant: Variant, first: tuple[list[float], Path], other: tuple[list[float], Path], precision: str
) -> Answer:
    loss_limit, weight_limit = TOLERANCES[precision]
    pairs = zip(first[0], other[0], strict=True)
    loss = max(abs(a - b) / max(1.0, abs(a)) for a, b in pairs)
    if loss != loss:
        loss = float("inf")
    weight, different = 0.0, None
    expected, found = load_whole(first[1], "model."), load_whole(other[1], "model.")
    for name in sorted(expected, key=_natural):
        a, b = expected[name].double(), found[name].double()
        gap = float(((a - b).abs() / a.abs().clamp(min=1.0)).max()) if a.numel() else 0.0
        weight = max(weight, gap)
        if not gap <= weight_limit and different is None:
            different = name
    return Answer(variant, loss, weight, different, loss <= loss_limit and different is None)


def _natural(name: str) -> list[tuple[int, str]]:
    """blocks.2 before blocks.10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
