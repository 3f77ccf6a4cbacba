"""Predicts the memory of a whole Wan model from measurements of models with fewer blocks.

Nothing runs here. Every additional block adds the same amount of memory, and memory peaks at one of two moments of a
step. The allocations at these moments are known, which also gives the memory of sharded models. wan_memory.py does the
measurements and writes both to a table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]
GIB = 2**30
GPUS = 8  # number of GPUs in the fsdp columns
COMMON_GIB, FREE_GIB, COMMON_GPUS = (
    79.0,
    6.0,
    (1, 2, 8),
)  # usable memory of an 80 GB GPU, memory to leave free, numbers of GPUs
FLAGS = {"none": "", "every 2nd": "--activation_checkpointing --recompute_every 2", "all": "--activation_checkpointing"}
LORA = {"lora_rank": 32}
# name -> model_config, further settings, two numbers of blocks: far apart, and large enough to dominate the rest
MODELS: dict[str, tuple[str, dict[str, Any], tuple[int, int]]] = {
    "1.3B": ("1.3b", {}, (6, 18)),
    "TI2V-5B": ("ti2v-5b", {}, (4, 12)),
    "14B, LoRA of rank 32": ("14b", LORA, (2, 8)),
    "14B": ("14b", {}, (2, 6)),
}
# name -> batch, frames, height, width
SHAPES = {
    "512x512x1": (1, 1, 512, 512),
    "512x512x1, batch 16": (16, 1, 512, 512),
    "480x832x17": (1, 17, 480, 832),
    "480x832x81": (1, 81, 480, 832),
}
QUICK_SHAPES = {"32x32x1": (1, 1, 32, 32)}
RECOMPUTE = {"none": {}, "all": {"activation_checkpointing": True}}
COLUMNS = ["none", "every 2nd", "all", "none, fsdp", "every 2nd, fsdp", "all, fsdp"]


def config_of(model: str, layers: int, quick: bool) -> Row:
    from unisono.recipes.wan.models.load import CONFIGS

    config = dict(CONFIGS[MODELS[model][0]]) | {"num_layers": layers}
    small = {"num_attention_heads": 2, "attention_head_dim": 12, "ffn_dim": 32, "text_dim": 32, "freq_dim": 32}
    return config | (small if quick else {})


def size(config: Row, exact: bool = False) -> tuple[int, int]:
    """Weights of one block and of the rest, counted on the meta device; `exact`: only weights that stay in 32 bit."""
    import torch
    from diffusers import WanTransformer3DModel

    from unisono.recipes.wan.models.float32_weights import float32_weights

    counts = []
    for number in (1, 2):
        with torch.device("meta"):
            model = WanTransformer3DModel(**config | {"num_layers": number})
        named = dict(model.named_parameters())
        counts.append(sum(named[name].numel() for name in (float32_weights(model) if exact else named)))
    return counts[1] - counts[0], 2 * counts[0] - counts[1]


@dataclass(frozen=True)
class Fullest:
    """Memory in GiB at the two moments of a step at which it peaks."""

    forward: float  # at the end of the forward pass: all activations that blocks store
    backward: float  # at the end of the backward pass: all gradients, and the activations of one block

    @property
    def peak(self) -> float:
        return max(self.forward, self.backward)

    def between(self, other: Fullest) -> Fullest:
        return Fullest((self.forward + other.forward) / 2, (self.backward + other.backward) / 2)


class Whole:
    """Memory of a whole model, derived from measured cases with fewer blocks."""

    def __init__(self, model: str, measured: dict[tuple[str, str, str, int], Row], quick: bool) -> None:
        from unisono.recipes.wan.models.load import CONFIGS

        self.model, self.measured, config = model, measured, config_of(model, 30, quick)
        self.layers, self.depths = CONFIGS[MODELS[model][0]]["num_layers"], MODELS[model][2]
        self.width = config["num_attention_heads"] * config["attention_head_dim"]
        self.block, self.rest = size(config)
        self.exact = size(config, exact=True)  # 32-bit weights that every rank holds unsharded
        self.is_trained = not MODELS[model][1]  # False for a LoRA: few trained weights, all others in 16 bit
        self.state, self.gradient = (12, 4) if self.is_trained else (2, 0)  # bytes per weight
        self.copied = 2 if self.is_trained else 0  # more bytes per weight of blocks that are not recomputed

    @property
    def weights(self) -> int:
        return self.layers * self.block + self.rest

    def failed(self, shape: str, recompute: str) -> str:
        return next((case["failed"] for case in self._cases(shape, recompute) if case["failed"]), "")

    def tokens(self, shape: str) -> int:
        return int(self._cases(shape, "none")[0]["tokens"])

    def on_one(self, shape: str, recompute: str) -> Fullest:
        """Memory on one GPU: the measurement extrapolated to all blocks, and the value derived for the other moment."""
        few, each = self._cases(shape, recompute)[0]["gib"], self._each(shape, recompute)
        continued = few + (self.layers - self.depths[0]) * each
        if not self.is_trained:
            return Fullest(continued, 0)
        if self._is_hidden(shape, recompute):
            kept = self.layers * self._kept(shape, recompute) - self.gradient * self.weights / GIB
            return Fullest(continued + kept, continued)
        one_block = self._cases(shape, "all")[0]["gib"] - self._with_gradients(self.depths[0])
        return Fullest(continued, self._with_gradients(self.layers) + one_block)

    def sharded(self, shape: str, recompute: str, gpus: int) -> Fullest:
        """Memory with fsdp, which shards everything but the exact weights, including gradients and optimizer state.

        During the backward pass of a block, each rank holds unsharded, in 16 bit: the block's weights and gradients,
        the next block's weights, and the weights outside blocks. It also holds the gradients of the block before in
        32 bit. A measured forward pass includes one block's gradients.
        """
        one, exact = self.on_one(shape, recompute), self.layers * self.exact[0] + self.exact[1]
        away, outside = (self.weights - exact) * (1 - 1 / gpus) / GIB, 2 * (self.rest - self.exact[1]) / GIB
        copies = self.copied * self.layers * self.block / GIB if recompute == "none" else 0
        two, busy = 4 * self.block / GIB, 10 * self.block / GIB + outside
        is_hidden = self.is_trained and self._is_hidden(shape, recompute)
        forward = one.forward - self.state * away - copies + (busy if is_hidden else two)
        return Fullest(forward, one.backward - (self.state + self.gradient) * away + busy)

    def peak(self, shape: str, recompute: str, gpus: int = 1) -> float:
        """GiB per GPU, under fsdp if there are several. `recompute` may also be "every 2nd"."""
        return self._fullest(shape, recompute, gpus).peak

    def needed(self, shape: str, recompute: str, gpus: int, shards: int) -> float:
        """GiB per GPU, sharded or not, with EMA weights and more than one micro-batch."""
        fullest, gradients = self._fullest(shape, recompute, shards), self.gradient * self.weights / shards / GIB
        # From the second micro-batch on, gradients exist during the forward pass; ddp holds them twice.
        twice = gradients if gpus > shards else 0.0
        averages = gradients  # the EMA weights take as much memory: 32 bit too
        return max(fullest.forward + gradients, fullest.backward + twice) + averages

    def flags(self, shape: str, gpus: int) -> str:
        """The fastest flags with which a run fits on this many 80 GB GPUs."""
        for recompute, flags in FLAGS.items():
            for shards in (1, gpus) if gpus > 1 else (1,):
                needed = self.needed(shape, recompute, gpus, shards)
                if needed <= COMMON_GIB - FREE_GIB:
                    flags_text = " ".join(filter(None, ["--strategy fsdp" if shards > 1 else "", flags]))
                    return f"`{flags_text}`: {needed:.0f}" if flags_text else f"{needed:.0f}"
        return "no"

    def _fullest(self, shape: str, recompute: str, shards: int) -> Fullest:
        kinds = ("none", "all") if recompute == "every 2nd" else (recompute, recompute)
        one, other = (self.sharded(shape, kind, shards) if shards > 1 else self.on_one(shape, kind) for kind in kinds)
        return one.between(other)

    def _is_hidden(self, shape: str, recompute: str) -> bool:
        """Whether gradients hide the activations: at the peak, another block adds only its gradients."""
        return self._each(shape, recompute) < 1.01 * (self.state + self.gradient) * self.block / GIB

    def _cases(self, shape: str, recompute: str) -> list[Row]:
        return [self.measured[self.model, shape, recompute, depth] for depth in self.depths]

    def _each(self, shape: str, recompute: str) -> float:
        """Memory in GiB that each additional block adds."""
        few, more = self._cases(shape, recompute)
        return float(more["gib"] - few["gib"]) / (self.depths[1] - self.depths[0])

    def _with_gradients(self, layers: int) -> float:
        weights = self.weights + (layers - self.layers) * self.block
        return (self.state + self.gradient) * weights / GIB

    def _kept(self, shape: str, recompute: str) -> float:
        """GiB of activations per block if gradients hide them, derived from the block's input or the largest shape."""
        if recompute == "all":
            return self.tokens(shape) * self.width * 2 / GIB
        shapes = {shape for model, shape, *_ in self.measured if model == self.model and not self.failed(shape, "none")}
        largest = max(shapes, key=self.tokens)
        copied = self.copied * self.block / GIB
        each = self._each(largest, "none") - self.state * self.block / GIB - copied
        return copied + each * self.tokens(shape) / self.tokens(largest)


def finished(cases: list[Row], quick: bool) -> list[Row]:
    """One row per model and shape: GiB of the whole model, on one GPU and sharded."""
    cases_by_key = {(case["model"], case["shape"], case["recompute"], case["layers"]): case for case in cases}
    measured = {(case["model"], case["shape"]) for case in cases}
    rows = []
    for model in dict.fromkeys(model for model in MODELS for other, _ in measured if other == model):
        whole = Whole(model, cases_by_key, quick)
        for shape in (shape for shape in SHAPES | QUICK_SHAPES if (model, shape) in measured):
            row: Row = {"model": model, "shape": shape, "layers": whole.layers, "weights": whole.weights}
            row["tokens"] = whole.tokens(shape)
            failed = {recompute: whole.failed(shape, recompute) for recompute in RECOMPUTE}
            row |= {f"{recompute}_failed": message for recompute, message in failed.items() if message}
            if not any(failed.values()):
                for suffix, gpus in (("", 1), (", fsdp", GPUS)):
                    row |= {name + suffix: whole.peak(shape, name, gpus) for name in FLAGS}
                row["fits"] = {str(gpus): whole.flags(shape, gpus) for gpus in COMMON_GPUS}
            rows.append(row)
    return rows


def fits(rows: list[Row]) -> list[str]:
    """The table of flags for 80 GB GPUs, for one sample at a time."""
    lines = [f"| model | shape | {' | '.join(f'{gpus} × 80 GB' for gpus in COMMON_GPUS)} |"]
    lines.append("|---" * (2 + len(COMMON_GPUS)) + "|")
    for row in rows:
        if "fits" in row and "batch" not in row["shape"]:
            lines.append(f"| {' | '.join([row['model'], row['shape'], *row['fits'].values()])} |")
    return lines


def cell(row: Row, name: str, gpu_gib: float) -> str:
    """Formats GiB; in italics if not measured (every 2nd block recomputed, sharded, or more than the GPU has)."""
    if name not in row:
        return f"FAILED: {row[f'{name}_failed']}".replace("|", " ") if f"{name}_failed" in row else ""
    is_measured = name in RECOMPUTE and row[name] <= gpu_gib
    return f"{row[name]:.1f}" if is_measured else f"*{row[name]:.1f}*"
