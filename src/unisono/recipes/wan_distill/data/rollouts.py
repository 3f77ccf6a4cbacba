"""The teacher's roll-outs: samples generated from prompts, stored on disk.

    prompt → embedding → noise of (seed, prompt, number) → the sampler's trajectory with guidance → x̂₀

If a loss needs them, a roll-out also contains the teacher's velocities for x̂₀ with new noise of several levels, and at
points of the trajectory.

The teacher generates samples in blocks of a fixed size, because the batch size affects the last bits; ranks divide
whole blocks and never split a block. A block is one file, written atomically, whose name is a hash of everything that
the block depends on, including its samples. A killed run therefore continues with the missing blocks, and any number of
ranks produces the same bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from unisono.engine.recipe import Work
from unisono.engine.step.out_of_memory import is_out_of_memory
from unisono.errors import TrainingFailed, UserError
from unisono.observe.progress import Advance
from unisono.recipes.common.cache_files import remove_leftovers, write_cache_file
from unisono.recipes.common.fingerprint import combined
from unisono.recipes.common.packs import PackEntry, PackReader, Packs
from unisono.recipes.wan.objective import TIMESTEPS, noised
from unisono.recipes.wan.sample import sample
from unisono.recipes.wan_distill.data.rollout_spec import RolloutSpec, position_of, positions_of
from unisono.recipes.wan_distill.models.teacher import Teacher

_FORMAT = 2  # part of the key, so files in another format are never found
_VISIBLE_WITHIN_S = 10.0  # how long to wait for a new file, which network file systems may show late

Embed = Callable[[str], Tensor]
"""Maps a prompt to its text embedding, [text length, width]."""
SampleId = tuple[str, int]
"""A prompt, and the number of one of its samples."""


class Rollouts:
    """The teacher's samples for some prompts: `count` per prompt, starting with number `first`."""

    def __init__(self, folder: Path, spec: RolloutSpec, prompts: Sequence[str], count: int, first: int = 0) -> None:
        self.folder, self.spec = folder, spec
        numbers = range(first, first + count)
        self.items: list[SampleId] = [(prompt, number) for number in numbers for prompt in prompts]
        self._packs = Packs(folder, self._fits)
        self._blocks = _in_blocks(prompts, numbers, spec.block)
        spec_key = combined("rollout", _FORMAT, asdict(spec))
        self._keys = [combined(spec_key, block) for block in self._blocks]

    @property
    def key(self) -> str:
        """A hash of the keys of all blocks."""
        return combined(*self._keys)

    @property
    def _storage(self) -> torch.dtype:
        """The dtype on disk: bfloat16 if the teacher computes in 16 bits, otherwise float32."""
        return torch.float32 if self.spec.dtype == "float32" else torch.bfloat16

    def _fits(self, entry: PackEntry) -> bool:
        return entry.shape == self.spec.shape and entry.dtype == self._storage

    def _file(self, number: int) -> Path:
        return self.folder / f"{self._keys[number]}.safetensors"

    def _has(self, number: int) -> bool:
        return len(self._packs.entries(self._file(number))) == len(self._blocks[number]) * len(self.tensor_names)

    @property
    def tensor_names(self) -> list[str]:
        """Names of the tensors stored per sample."""
        points = range(len(self.spec.points))
        return [
            "data",
            *(f"velocity{level}" for level in range(self.spec.pairs)),
            *(f"{kind}{point}" for point in points for kind in ("point", "velocity_at")),
        ]

    def fill(self, work: Work, teacher: Callable[[], Teacher], embed: Embed, purpose: str) -> list[float]:
        """Generates this rank's share of the missing blocks; returns the seconds per sample of each block."""
        if work.stopping:  # returns before the progress line appears
            return []
        remove_leftovers(self.folder)
        # Ranks divide all blocks, not only the missing ones: a rank that looked later would see fewer missing blocks
        # and divide them differently.
        mine = [number for number in work.share(range(len(self._blocks))) if not self._has(number)]
        seconds_per_sample: list[float] = []
        with self._progress(work, purpose, mine) as advance:
            for number in mine:
                tensors, seconds = self._generate(number, teacher(), embed, work)
                if work.stopping:
                    return []
                self._check(number, tensors)
                self._write(number, tensors)
                advance(len(self._blocks[number]))
                seconds_per_sample.append(seconds / len(self._blocks[number]))
        return seconds_per_sample

    def fill_together(self, work: Work, teacher: Teacher, embed: Embed, purpose: str) -> None:
        """Like `fill`, for a sharded teacher.

        All ranks compute the same number of blocks, some only to take part in the other ranks' collectives.
        """
        missing_here = [number for number in range(len(self._blocks)) if not self._has(number)]
        missing: list[int] = work.gather(missing_here)[0]  # all ranks use rank 0's list: each may see different files
        mine = list(work.share(missing))
        with self._progress(work, purpose, mine) as advance:
            for turn in range(work.largest_share(missing)):
                if work.meet():
                    return
                number = mine[turn] if turn < len(mine) else missing[0]
                # No rank stops inside a block, because the other ranks would wait for it.
                tensors, _ = self._generate(number, teacher, embed, replace(work, _asked_to_stop=bool))
                if not all(work.gather(_is_finite(tensors))):
                    self._check(number, tensors)
                    raise TrainingFailed("the teacher's samples are not finite; another rank reports the prompt")
                if turn < len(mine):
                    self._write(number, tensors)
                    advance(len(self._blocks[number]))

    def _progress(self, work: Work, purpose: str, mine: Sequence[int]) -> AbstractContextManager[Advance]:
        number = sum(len(self._blocks[block]) for block in mine)
        return work.progress(f"teacher samples {purpose}", number, of=len(self.items))

    def _generate(self, number: int, teacher: Teacher, embed: Embed, work: Work) -> tuple[dict[str, Tensor], float]:
        try:
            return self._block_of(number, teacher, embed, work)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        raise TrainingFailed(
            f"out of memory while the teacher generates {self.spec.block} samples at once; use a smaller "
            "--rollout_batch, --teacher_dtype float8, or --teacher_device_strategy cpu"
        )

    @torch.no_grad()
    def _block_of(self, number: int, teacher: Teacher, embed: Embed, work: Work) -> tuple[dict[str, Tensor], float]:
        """Generates a block; returns its tensors by name, and the seconds that its samples took."""
        spec, block, device = self.spec, self._blocks[number], work.device
        # Pads a smaller last block, so that its samples round as in a full block and nothing is recompiled.
        filled = block + [block[-1]] * (spec.block - len(block))
        initial_noise = torch.stack([spec.initial_noise(*sample_id) for sample_id in filled]).to(device)
        text = torch.stack([embed(prompt) for prompt, _ in filled]).to(device, teacher.dtype)
        empty = embed(spec.negative).to(device, teacher.dtype).expand_as(text)
        tensors: dict[str, Tensor] = {}

        def observe(step: int, sigma: float, latents: Tensor, velocity: Tensor) -> None:
            if step in spec.points:
                point = spec.points.index(step)
                tensors[f"point{point}"], tensors[f"velocity_at{point}"] = latents, velocity

        start = time.perf_counter()
        data = sample(
            teacher.experts,
            initial_noise,
            (text, empty),
            spec.scheduler(),
            steps=spec.steps,
            guidance=teacher.guidance,
            observe=observe,
            stopping=lambda: work.stopping,
        )
        data = tensors["data"] = data.to(self._storage)  # rounds first: the velocities must belong to the stored sample
        data.sum().item()  # waits for the device, so that the measured time is complete
        seconds = time.perf_counter() - start
        for level in range(spec.pairs):
            if work.stopping:
                break
            sigma = torch.stack([spec.level(*sample_id, level) for sample_id in filled]).to(device)
            noise = spec.noise(positions_of(filled, level).to(device))
            tensors[f"velocity{level}"] = teacher.velocity(noised(data.float(), noise, sigma), sigma, text, empty)
        unpadded = {name: values[: len(block)].to(self._storage).cpu() for name, values in tensors.items()}
        return unpadded, seconds * len(block) / len(filled)

    def _check(self, number: int, tensors: dict[str, Tensor]) -> None:
        """Raises TrainingFailed if a sample is not finite."""
        for (prompt, _), data in zip(self._blocks[number], tensors["data"], strict=True):
            if not data.isfinite().all():
                raise TrainingFailed(
                    f"the teacher's sample of {prompt!r} is not finite; try --teacher_dtype bfloat16 or float32, or a "
                    "smaller --guidance"
                )

    def _write(self, number: int, tensors: dict[str, Tensor]) -> None:
        by_sample = {
            f"{index}.{name}": tensors[name][index].contiguous()
            for index in range(len(self._blocks[number]))
            for name in self.tensor_names
        }
        write_cache_file(self._file(number), save(by_sample))

    def open(self) -> Samples:
        """Opens the samples after all ranks have generated their shares."""
        deadline = time.monotonic() + _VISIBLE_WITHIN_S
        stored: dict[str, dict[SampleId, PackEntry]] = {name: {} for name in self.tensor_names}
        for number, block in enumerate(self._blocks):
            while not self._has(number):
                if time.monotonic() > deadline:
                    raise UserError(
                        f"{self._file(number)} was written but cannot be found: cache_dir (or output_dir) must be one "
                        "folder that all machines share, and nothing may be removed from it during a run"
                    )
                time.sleep(0.2)
            entries = self._packs.entries(self._file(number))
            for name, by_sample in stored.items():
                by_sample |= {sample_id: entries[f"{index}.{name}"] for index, sample_id in enumerate(block)}
        return Samples(self, {name: [by_sample[it] for it in self.items] for name, by_sample in stored.items()})


class Samples:
    """Reads stored samples by their numbers."""

    def __init__(self, rollouts: Rollouts, stored: dict[str, list[PackEntry]]) -> None:
        self.items, self.spec = rollouts.items, rollouts.spec
        self._shelves = {name: PackReader(rollouts.folder, entries) for name, entries in stored.items()}

    def __len__(self) -> int:
        return len(self.items)

    def data(self, number: int) -> Tensor:
        """Returns the latent of a sample, [C, f, h, w]."""
        return self._shelves["data"][number].float()

    def pair(self, number: int, level: int) -> dict[str, Tensor]:
        """Returns a noise level, the position of its noise in the random stream, and the teacher's velocity."""
        sample_id = self.items[number]
        return {
            "sigma": self.spec.level(*sample_id, level),
            "position": torch.tensor(position_of(*sample_id, level)),
            "velocity": self._shelves[f"velocity{level}"][number],
        }

    def point(self, number: int, index: int) -> dict[str, Tensor]:
        """Returns a point of the teacher's trajectory, its noise level, and the teacher's velocity at the point."""
        return {
            "point": self._shelves[f"point{index}"][number],
            "point_sigma": torch.tensor(self.spec.sigmas[self.spec.points[index]]),
            "point_velocity": self._shelves[f"velocity_at{index}"][number],
        }


def points_of_all_levels(samples: Samples, embed: Embed, most: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    """Adds noise of different levels to some samples; returns these, [batch, ...], and their timesteps and texts."""
    number = min(len(samples), most)
    items, spec = samples.items[:number], replace(samples.spec, pairs=number, fixed=True)
    sigma = torch.stack([spec.level(*sample_id, level) for level, sample_id in enumerate(items)])
    noise = spec.noise(positions_of(items, 0))
    data = torch.stack([samples.data(index) for index in range(number)])
    text = torch.stack([embed(prompt) for prompt, _ in items])
    return noised(data, noise, sigma), sigma * TIMESTEPS, text


def _in_blocks(prompts: Sequence[str], numbers: Sequence[int], size: int) -> list[list[SampleId]]:
    """Divides the samples into as few blocks as possible.

    Full blocks contain samples with the same number, so that they do not change if prompts or numbers are added later.
    The last blocks contain the remaining samples of all numbers.
    """
    whole = len(prompts) // size * size
    full = [
        [(prompt, number) for prompt in prompts[start : start + size]]
        for number in numbers
        for start in range(0, whole, size)
    ]
    left = [(prompt, number) for number in numbers for prompt in prompts[whole:]]
    return full + [left[start : start + size] for start in range(0, len(left), size)]


def _is_finite(tensors: dict[str, Tensor]) -> bool:
    return all(bool(values.isfinite().all()) for values in tensors.values())
