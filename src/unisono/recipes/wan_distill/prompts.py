"""The prompts that a teacher draws from: a text file, or those of the built-in shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import shorten

from unisono.errors import ConfigError
from unisono.recipes.wan.tiny.shapes import COLOURS, SHAPES, WORDINGS

BUILT_IN = "shapes"
_MOST_BYTES = 2**30
_EVERY, _MOST_HELD_OUT = 20, 64  # prompts that are held out, where nobody says how many


@dataclass(frozen=True)
class Prompts:
    """What is drawn to learn from, and what is held out."""

    train: list[str]
    held_out: list[str] = field(default_factory=list)
    remarks: tuple[str, ...] = ()


def prompts_of(data_path: str, eval_data_path: str | None, num_eval: int | None) -> Prompts:
    """The prompts that the settings name, each once."""
    is_ours = data_path == BUILT_IN
    train, remarks = ([*_of_shapes()], []) if is_ours else read_prompts(data_path, "data_path")
    if eval_data_path:
        held_out, more = read_prompts(eval_data_path, "eval_data_path")
        apart, shared = set(held_out), len(train)
        train = [prompt for prompt in train if prompt not in apart]
        if len(train) < shared:
            more.append(f"eval_data_path: {shared - len(train):,} of its prompts are in data_path too, and held out")
        if not train:
            raise ConfigError(f"data_path {data_path}: all of its prompts are held out by eval_data_path")
        return Prompts(train, held_out, (*remarks, *more))
    candidates = [prompt for prompt, spare in _of_shapes().items() if spare] if is_ours else train
    if num_eval is None:
        usual = min(_MOST_HELD_OUT, max(1, len(train) // _EVERY)) if len(train) > 1 else 0
        num_eval = len(candidates) if is_ours else usual
    if is_ours and num_eval > len(candidates):
        raise ConfigError(
            f"num_eval {num_eval}: of the built-in prompts at most {len(candidates)} are held out, one wording of "
            "every colour and shape"
        )
    if num_eval >= len(train):
        raise ConfigError(
            f"num_eval {num_eval}: data_path {data_path} has {len(train):,} different prompts, and some must be left"
        )
    held_out = [candidates[(2 * number + 1) * len(candidates) // (2 * num_eval)] for number in range(num_eval)]
    apart = set(held_out)
    return Prompts([prompt for prompt in train if prompt not in apart], held_out, tuple(remarks))


def read_prompts(path: str, setting: str) -> tuple[list[str], list[str]]:
    """The lines of a text file that are not empty, each once; and what is worth telling."""
    file = Path(path).expanduser()
    try:
        if not file.is_file():
            raise ConfigError(f"{setting} {path}: there is no such file; expected a text file, one prompt in each line")
        if file.stat().st_size > _MOST_BYTES:
            raise ConfigError(f"{setting} {path}: more than 1 GiB; expected a text file, one prompt in each line")
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{setting} {path} cannot be read as text in UTF-8 ({error})") from None
    if "\0" in text:
        raise ConfigError(f"{setting} {path} is not a text file; expected one prompt in each line")
    lines = [line.strip() for line in text.split("\n")]
    there = [line for line in lines if line]
    if not there:
        raise ConfigError(f"{setting} {path} has no prompts; expected one in each line")
    once = list(dict.fromkeys(there))
    again = len(there) - len(once)
    return once, [f"{setting}: {again:,} prompts stand there more than once, and count once"] if again else []


def _of_shapes() -> dict[str, bool]:
    """Every wording of every colour and shape; of each pair another one can be spared and held out."""
    return {
        wording.format(colour=colour, shape=shape): number == (first + second) % len(WORDINGS)
        for first, colour in enumerate(COLOURS)
        for second, shape in enumerate(SHAPES)
        for number, wording in enumerate(WORDINGS)
    }


def unknown_to_tiny(prompts: Sequence[str]) -> str | None:
    """What to say about prompts that the tiny teacher draws nothing of meaning from, if there are any."""
    strange = [prompt for prompt, label in zip(prompts, labels(prompts), strict=True) if label is None]
    if not strange:
        return None
    return (
        f"{len(strange):,} of {len(prompts):,} prompts mean nothing to the tiny teacher ({shorten(strange[0], 60)!r}): "
        f"it knows one colour ({', '.join(COLOURS)}) with one shape ({', '.join(SHAPES)}), as in --data_path shapes"
    )


def labels(prompts: Sequence[str]) -> list[tuple[int, int] | None]:
    """Of prompts about the built-in shapes: the number of the colour and of the shape."""
    found: list[tuple[int, int] | None] = []
    for prompt in prompts:
        words = prompt.split()
        colours = [number for number, colour in enumerate(COLOURS) if colour in words]
        shapes = [number for number, shape in enumerate(SHAPES) if shape in words]
        found.append((colours[0], shapes[0]) if len(colours) == len(shapes) == 1 else None)
    return found
