"""The variants of benchmarks/wan_peer.py, the most important first: program, model and flags."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

MUSUBI, UNISONO = "musubi", "unisono"
LORA_RANK = 32


@dataclass(frozen=True)
class Model:
    """Sizes of a Wan 2.1 text-to-video transformer, and musubi-tuner's name for it."""

    task: str
    dim: int
    ffn_dim: int
    num_heads: int
    num_layers: int


@dataclass(frozen=True)
class Shape:
    """A sample: its latent [channels, frames, height, width], its video, and its text embedding [tokens, width]."""

    latent: tuple[int, int, int, int]
    text: tuple[int, int] = (512, 4096)

    @property
    def num_frames(self) -> int:
        return 4 * (self.latent[1] - 1) + 1

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels."""
        return 8 * self.latent[3], 8 * self.latent[2]


MODELS = {"14b": Model("t2v-14B", 5120, 13824, 40, 40), "1.3b": Model("t2v-1.3B", 1536, 8960, 12, 30)}
SHAPE = Shape((16, 5, 60, 104))
LOSS_SHAPE = Shape((16, 1, 24, 24))
# For --tiny, a rehearsal on any machine.
TINY_MODELS = {"14b": Model("t2v-14B", 256, 512, 2, 4), "1.3b": Model("t2v-1.3B", 128, 256, 1, 2)}
TINY_SHAPE = Shape((16, 2, 8, 12))


@dataclass(frozen=True)
class Steps:
    """Steps of a run: the first ones are not timed."""

    warm_up: int
    timed: int

    @property
    def total(self) -> int:
        return self.warm_up + self.timed


USUAL = Steps(4, 6)
SLOW = Steps(2, 3)  # for variants that take several seconds per step


@dataclass(frozen=True)
class Variant:
    """One row of the table."""

    what: str
    program: str
    model: str
    flags: tuple[str, ...]
    expected_s: float
    """Roughly how long a run takes on an H200."""
    cap_gib: float | None = None
    """Most memory that torch may allocate: the part of a smaller card that a training process gets."""
    steps: Steps = USUAL

    @property
    def needs_gpu(self) -> bool:
        """musubi-tuner swaps blocks only with a GPU."""
        return "--blocks_to_swap" in self.flags

    @property
    def name(self) -> str:
        return f"{self.model} {self.program}, {self.what}"


def _variant(program: str, model: str, what: str, flags: str, expected_s: float, cap_gib: float | None) -> Variant:
    steps = SLOW if "--blocks_to_swap" in flags else USUAL
    return Variant(what, program, model, tuple(shlex.split(flags)), expected_s, cap_gib, steps)


def _musubi(model: str, what: str, flags: str, expected_s: float, cap_gib: float | None = None) -> Variant:
    return _variant(MUSUBI, model, what, flags, expected_s, cap_gib)


def _unisono(model: str, what: str, flags: str, expected_s: float, cap_gib: float | None = None) -> Variant:
    return _variant(UNISONO, model, what, flags, expected_s, cap_gib)


# musubi-tuner's flags, as its documentation recommends them.
CHECKPOINTING = "--gradient_checkpointing"
COMPILED = "--compile --compile_mode default --compile_cache_size_limit 32"
FP8 = f"{CHECKPOINTING} --fp8_base --fp8_scaled"
ONE_WAY = "--block_swap_h2d_only --use_pinned_memory_for_block_swap"
# unisono's flags.
RECOMPUTE = "--activation_checkpointing"
SMALL = f"{RECOMPUTE} --base_precision"

# Programs alternate, so that neighbours in the table run one after the other.
VARIANTS = (
    _musubi("14b", "checkpointing", CHECKPOINTING, 60),
    _unisono("14b", "checkpointing", RECOMPUTE, 65),
    _musubi("14b", "compiled", COMPILED, 100),
    _unisono("14b", "no checkpointing", "", 60),
    _musubi("14b", "fp8, 20 blocks swapped", f"{FP8} --blocks_to_swap 20", 75, 23),
    _unisono("14b", "fp8, checkpointing, 24 GB card", f"{SMALL} fp8", 60, 22),
    _musubi("14b", "fp8, 36 blocks swapped, 12 GB card", f"{FP8} --blocks_to_swap 36", 85, 11),
    _unisono("14b", "fp8, checkpointing, 24 blocks on host", f"{SMALL} fp8 --blocks_on_host 24", 70, 14.5),
    _unisono("14b", "nf4, checkpointing, 30 blocks on host", f"{SMALL} nf4 --blocks_on_host 30", 75, 10.5),
    _unisono("14b", "nf4, checkpointing, 16 GB card", f"{SMALL} nf4", 65, 14.5),
    _musubi("14b", "no checkpointing", "", 50),
    _unisono("14b", "fp8", "--base_precision fp8", 60),
    _musubi("14b", "fp8, 24 GB card", FP8, 55, 23),
    _unisono("14b", "selective checkpointing", f"{RECOMPUTE} selective", 65),
    _musubi("1.3b", "checkpointing", CHECKPOINTING, 25),
    _unisono("1.3b", "checkpointing", RECOMPUTE, 35),
    _musubi("1.3b", "no checkpointing", "", 25),
    _unisono("1.3b", "no checkpointing", "", 35),
    _musubi("14b", "fp8, 26 blocks swapped, 16 GB card", f"{FP8} --blocks_to_swap 26", 80, 15),
    _unisono("14b", "every 2nd block recomputed", f"{RECOMPUTE} --recompute_every 2", 65),
    _musubi("14b", "fp8, 20 blocks swapped, one way", f"{FP8} --blocks_to_swap 20 {ONE_WAY}", 65, 23),
    _unisono("14b", "int8, checkpointing", f"{SMALL} int8", 65),
    _musubi("14b", "fp8, 36 blocks swapped, one way", f"{FP8} --blocks_to_swap 36 {ONE_WAY}", 75, 11),
    _unisono("14b", "fp8, checkpointing", f"{SMALL} fp8", 60),
    _musubi("14b", "compiled, checkpointing", f"{CHECKPOINTING} {COMPILED}", 70),
    _musubi("14b", "fp8, 36 blocks swapped, 16 GB card", f"{FP8} --blocks_to_swap 36", 85, 15),
)
