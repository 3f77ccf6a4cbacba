"""What the teacher draws from prompts, kept on disk.

    prompt → embedding → noise of (seed, prompt, number) → the sampler's path with guidance → x̂₀

and, for the losses that need them, its answers at new noise levels of x̂₀ and points of its path. Samples are drawn in
blocks of a fixed size: in other company the last bits would be others, so a block is never cut, whoever draws it. Whole
blocks are shared over the processes. A block is one file, which appears complete or not at all, under a name that says
everything it depends on, its samples included: a killed run goes on with the blocks that are missing, and another
number of processes finds the same bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from unisono.engine.memory import is_out_of_memory
from unisono.engine.recipe import Work
from unisono.errors import TrainingFailed, UserError
from unisono.recipes.common.fingerprint import together
from unisono.recipes.common.packs import Kept, Packs, Shelf
from unisono.recipes.common.progress import Progress
from unisono.recipes.common.whole_files import remove_leftovers, write_whole
from unisono.recipes.wan.objective import TIMESTEPS, noised
from unisono.recipes.wan.sample import sample
from unisono.recipes.wan_distill.drawing import Drawing, position_of, positions_of
from unisono.recipes.wan_distill.teacher import Teacher

_FORMAT = 2  # of what is kept; what has another one is not found
_PATIENCE_S = 10.0  # network file systems may show a new file a little later

Rows = Callable[[str], Tensor]
"""[text length, width] what the teacher gets for a prompt."""
Numbered = tuple[str, int]
"""A prompt, and which of its samples."""


class Rollouts:
    """The samples of some prompts, `count` for each, from number `first` on."""

    def __init__(self, folder: Path, drawing: Drawing, prompts: Sequence[str], count: int, first: int = 0) -> None:
        self.folder, self.drawing = folder, drawing
        self.items = [(prompt, first + k) for k in range(count) for prompt in prompts]
        self._packs = Packs(folder, self._is_ours)
        self._blocks = _in_blocks(prompts, range(first, first + count), drawing.block)
        like = together("rollout", _FORMAT, asdict(drawing))
        self._keys = [together(like, block) for block in self._blocks]

    @property
    def key(self) -> str:
        """A name for all of them together."""
        return together(*self._keys)

    @property
    def _storage(self) -> torch.dtype:
        """16 bit where the teacher computes in 16."""
        return torch.float32 if self.drawing.dtype == "float32" else torch.bfloat16

    def _is_ours(self, kept: Kept) -> bool:
        return kept.shape == self.drawing.shape and kept.dtype == self._storage

    def _file(self, number: int) -> Path:
        return self.folder / f"{self._keys[number]}.safetensors"

    def _has(self, number: int) -> bool:
        return len(self._packs.entries(self._file(number))) == len(self._blocks[number]) * len(self.kinds)

    @property
    def kinds(self) -> list[str]:
        """What is kept of each sample."""
        points = range(len(self.drawing.points))
        return [
            "data",
            *(f"velocity{place}" for place in range(self.drawing.pairs)),
            *(f"{kind}{place}" for place in points for kind in ("point", "velocity_at")),
        ]

    def fill(self, work: Work, teacher: Callable[[], Teacher], rows: Rows, what: str) -> list[float]:
        """Draws this process's share of what is missing; the seconds of a sample in each block that was drawn."""
        remove_leftovers(self.folder)
        # Shared are all blocks, not only the missing ones: those look different to a process that looks later.
        mine = [number for number in work.share(range(len(self._blocks))) if not self._has(number)]
        progress = self._progress(work, what, mine)
        took: list[float] = []
        for number in mine:
            progress.say()
            model, began = teacher(), time.perf_counter()
            drawn, seconds = self._draw(number, model, rows, work)
            if work.stopping:
                return []
            self._check(number, drawn)
            self._write(number, drawn)
            progress.done(len(self._blocks[number]), time.perf_counter() - began)
            took.append(seconds / len(self._blocks[number]))
        progress.end()
        return took

    def fill_together(self, work: Work, teacher: Teacher, rows: Rows, what: str) -> None:
        """The same with a teacher that all processes compute with: each draws as many blocks, some for nothing."""
        here = [number for number in range(len(self._blocks)) if not self._has(number)]
        missing: list[int] = work.gather(here)[0]  # others may see another folder, or see it later
        mine = list(work.share(missing))
        progress = self._progress(work, what, mine)
        for turn in range(work.largest_share(missing)):
            if work.meet():
                return
            progress.say()
            number, began = mine[turn] if turn < len(mine) else missing[0], time.perf_counter()
            drawn, _ = self._draw(number, teacher, rows, replace(work, _asked_to_stop=bool))  # none leaves by itself
            if not all(work.gather(_is_finite(drawn))):
                self._check(number, drawn)
                raise TrainingFailed("the teacher draws numbers that are not finite; another process says from what")
            if turn < len(mine):
                self._write(number, drawn)
                progress.done(len(self._blocks[number]), time.perf_counter() - began)
        progress.end()

    def _progress(self, work: Work, what: str, mine: Sequence[int]) -> Progress:
        number = sum(len(self._blocks[block]) for block in mine)
        return Progress(work, f"samples that the teacher draws {what}", number, len(self.items))

    def _draw(self, number: int, teacher: Teacher, rows: Rows, work: Work) -> tuple[dict[str, Tensor], float]:
        try:
            return self._drawn(number, teacher, rows, work)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        raise TrainingFailed(
            f"out of memory while the teacher draws {self.drawing.block} samples at once; use a smaller "
            "--rollout_batch, --teacher_dtype float8, or --teacher_device_strategy cpu"
        )

    @torch.no_grad()
    def _drawn(self, number: int, teacher: Teacher, rows: Rows, work: Work) -> tuple[dict[str, Tensor], float]:
        """What is kept of a block, by kind, and the seconds that its samples took."""
        drawing, block, device = self.drawing, self._blocks[number], work.device
        # A smaller last block is filled up: its bits are then those of a full one, and nothing is compiled anew.
        filled = block + [block[-1]] * (drawing.block - len(block))
        begin = torch.stack([drawing.begin(*item) for item in filled]).to(device)
        text = torch.stack([rows(prompt) for prompt, _ in filled]).to(device, teacher.dtype)
        empty = rows(drawing.negative).to(device, teacher.dtype).expand_as(text)
        kept: dict[str, Tensor] = {}

        def observe(step: int, sigma: float, latents: Tensor, velocity: Tensor) -> None:
            if step in drawing.points:
                place = drawing.points.index(step)
                kept[f"point{place}"], kept[f"velocity_at{place}"] = latents, velocity

        began = time.perf_counter()
        data = sample(
            teacher.experts,
            begin,
            (text, empty),
            drawing.scheduler(),
            steps=drawing.steps,
            guidance=teacher.sampler_guidance,
            observe=observe,
            stopping=lambda: work.stopping,
        )
        data = kept["data"] = data.to(self._storage)  # rounded first: its pairs belong to what is kept
        data.sum().item()  # waits for the device
        seconds = time.perf_counter() - began
        for place in range(drawing.pairs):
            if work.stopping:
                break
            sigma = torch.stack([drawing.level(*item, place) for item in filled]).to(device)
            noise = drawing.noise(positions_of(filled, place).to(device))
            kept[f"velocity{place}"] = teacher.velocity(noised(data.float(), noise, sigma), sigma, text, empty)
        whole = {name: values[: len(block)].to(self._storage).cpu() for name, values in kept.items()}
        return whole, seconds * len(block) / len(filled)

    def _check(self, number: int, drawn: dict[str, Tensor]) -> None:
        """Refuses what is not a number."""
        for (prompt, _), data in zip(self._blocks[number], drawn["data"], strict=True):
            if not data.isfinite().all():
                raise TrainingFailed(
                    f"the teacher draws numbers that are not finite from {prompt!r}; try --teacher_dtype bfloat16 or "
                    "float32, or a smaller --guidance"
                )

    def _write(self, number: int, drawn: dict[str, Tensor]) -> None:
        tensors = {
            f"{item}.{kind}": drawn[kind][item].contiguous()
            for item in range(len(self._blocks[number]))
            for kind in self.kinds
        }
        write_whole(self._file(number), save(tensors))

    def open(self) -> Samples:
        """The samples, once all processes have drawn their share."""
        deadline = time.monotonic() + _PATIENCE_S
        there: dict[str, dict[Numbered, Kept]] = {kind: {} for kind in self.kinds}
        for number, block in enumerate(self._blocks):
            while not self._has(number):
                if time.monotonic() > deadline:
                    raise UserError(
                        f"{self._file(number)} is not there, although it was written: cache_dir (or output_dir) must "
                        "be one folder that all machines see, and nobody may remove what is in it meanwhile"
                    )
                time.sleep(0.2)
            entries = self._packs.entries(self._file(number))
            for kind, found in there.items():
                found |= {item: entries[f"{place}.{kind}"] for place, item in enumerate(block)}
        return Samples(self, {kind: [found[item] for item in self.items] for kind, found in there.items()})


class Samples:
    """What was drawn, by number."""

    def __init__(self, rollouts: Rollouts, there: dict[str, list[Kept]]) -> None:
        self.items, self.drawing = rollouts.items, rollouts.drawing
        self._shelves = {kind: Shelf(rollouts.folder, kept) for kind, kept in there.items()}

    def __len__(self) -> int:
        return len(self.items)

    def data(self, number: int) -> Tensor:
        """[C, f, h, w] what the teacher drew."""
        return self._shelves["data"][number].float()

    def pair(self, number: int, place: int) -> dict[str, Tensor]:
        """A noise level, where its noise is among all random numbers, and the teacher's answer there."""
        prompt, k = self.items[number]
        return {
            "sigma": self.drawing.level(prompt, k, place),
            "position": torch.tensor(position_of(prompt, k, place)),
            "velocity": self._shelves[f"velocity{place}"][number],
        }

    def point(self, number: int, place: int) -> dict[str, Tensor]:
        """A point of the teacher's path, its noise level, and what the teacher said there."""
        return {
            "point": self._shelves[f"point{place}"][number],
            "point_sigma": torch.tensor(self.drawing.sigmas[self.drawing.points[place]]),
            "point_velocity": self._shelves[f"velocity_at{place}"][number],
        }


def points_of_all_levels(samples: Samples, rows: Rows, most: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    """Some samples, each at another noise level: [batch, ...] points, their times, and the rows of their prompts."""
    number = min(len(samples), most)
    items, drawing = samples.items[:number], replace(samples.drawing, pairs=number, fixed=True)
    sigma = torch.stack([drawing.level(*item, place) for place, item in enumerate(items)])
    noise = drawing.noise(positions_of(items, 0))
    data = torch.stack([samples.data(place) for place in range(number)])
    text = torch.stack([rows(prompt) for prompt, _ in items])
    return noised(data, noise, sigma), sigma * TIMESTEPS, text


def _in_blocks(prompts: Sequence[str], numbers: Sequence[int], size: int) -> list[list[Numbered]]:
    """No more blocks than the samples fill: of each number the full ones, then what is left over of all numbers.

    Full blocks hold one number, so that prompts and numbers which are added later leave them as they are.
    """
    whole = len(prompts) // size * size
    full = [
        [(prompt, number) for prompt in prompts[start : start + size]]
        for number in numbers
        for start in range(0, whole, size)
    ]
    left = [(prompt, number) for number in numbers for prompt in prompts[whole:]]
    return full + [left[start : start + size] for start in range(0, len(left), size)]


def _is_finite(drawn: dict[str, Tensor]) -> bool:
    return all(bool(values.isfinite().all()) for values in drawn.values())
