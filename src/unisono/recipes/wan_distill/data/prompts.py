"""The teacher's prompts, from a text file or generated for the built-in shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import shorten

from unisono.errors import ConfigError
from unisono.recipes.wan.tiny.shapes import COLOURS, SHAPES, WORDINGS

BUILT_IN = "shapes"
_MOST_BYTES = 2**30
_EVERY, _MOST_HELD_OUT = 20, 64  # default of num_eval: one prompt in twenty, at most 64


@dataclass(frozen=True)
class Prompts:
    """Training prompts and held-out prompts."""

    train: list[str]
    held_out: list[str] = field(default_factory=list)
    remarks: tuple[str, ...] = ()


def prompts_of(data_path: str, eval_data_path: str | None, num_eval: int | None) -> Prompts:
    """Reads the prompts that the settings name, without duplicates, and splits them into training and held-out ones."""
    is_built_in = data_path == BUILT_IN
    train, remarks = ([*_of_shapes()], []) if is_built_in else read_prompts(data_path, "data_path")
    if eval_data_path:
        held_out, more = read_prompts(eval_data_path, "eval_data_path")
        excluded, num_before = set(held_out), len(train)
        train = [prompt for prompt in train if prompt not in excluded]
        if num_shared := num_before - len(train):
            more.append(f"eval_data_path: {num_shared:,} of its prompts are also in data_path, and are held out")
        if not train:
            raise ConfigError(
                f"data_path {data_path}: eval_data_path holds out all of its prompts; pass other prompts to train on"
            )
        return Prompts(train, held_out, (*remarks, *more))
    candidates = [prompt for prompt, is_spare in _of_shapes().items() if is_spare] if is_built_in else train
    if num_eval is None:
        usual = min(_MOST_HELD_OUT, max(1, len(train) // _EVERY)) if len(train) > 1 else 0
        num_eval = len(candidates) if is_built_in else usual
    if is_built_in and num_eval > len(candidates):
        raise ConfigError(
            f"num_eval {num_eval}: at most {len(candidates)} built-in prompts can be held out, one wording of every "
            "colour and shape"
        )
    if num_eval >= len(train):
        raise ConfigError(
            f"num_eval {num_eval}: data_path {data_path} has {len(train):,} distinct prompts, and some must remain for "
            "training"
        )
    held_out = [candidates[(2 * number + 1) * len(candidates) // (2 * num_eval)] for number in range(num_eval)]
    excluded = set(held_out)
    return Prompts([prompt for prompt in train if prompt not in excluded], held_out, tuple(remarks))


def read_prompts(path: str, setting: str) -> tuple[list[str], list[str]]:
    """Returns the non-empty lines of a text file without duplicates, and remarks for the user."""
    file = Path(path).expanduser()
    try:
        if not file.is_file():
            raise ConfigError(f"{setting} {path}: no such file; expected a text file with one prompt per line")
        if file.stat().st_size > _MOST_BYTES:
            raise ConfigError(f"{setting} {path}: larger than 1 GiB; expected a text file with one prompt per line")
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{setting} {path} cannot be read as UTF-8 text ({error})") from None
    if "\0" in text:
        raise ConfigError(f"{setting} {path} is not a text file; expected one prompt per line")
    lines = [line.strip() for line in text.split("\n")]
    prompts = [line for line in lines if line]
    if not prompts:
        raise ConfigError(f"{setting} {path} has no prompts; expected one per line")
    distinct = list(dict.fromkeys(prompts))
    num_duplicates = len(prompts) - len(distinct)
    return distinct, [f"{setting}: {num_duplicates:,} duplicate prompts are ignored"] if num_duplicates else []


def _of_shapes() -> dict[str, bool]:
    """Returns all wordings of all colours and shapes; True marks each pair's single wording that may be held out."""
    return {
        wording.format(colour=colour, shape=shape): number == (first + second) % len(WORDINGS)
        for first, colour in enumerate(COLOURS)
        for second, shape in enumerate(SHAPES)
        for number, wording in enumerate(WORDINGS)
    }


def unknown_to_tiny(prompts: Sequence[str]) -> str | None:
    """Returns a warning if the tiny teacher was not trained on some of the prompts, otherwise None."""
    unknown = [prompt for prompt, label in zip(prompts, labels(prompts), strict=True) if label is None]
    if not unknown:
        return None
    return (
        f"the tiny teacher does not understand {len(unknown):,} of {len(prompts):,} prompts "
        f"({shorten(unknown[0], 60)!r}): it knows one colour ({', '.join(COLOURS)}) with one shape "
        f"({', '.join(SHAPES)}), as in --data_path shapes"
    )


def labels(prompts: Sequence[str]) -> list[tuple[int, int] | None]:
    """Returns each prompt's colour index and shape index; None for a prompt that is not about the built-in shapes."""
    pairs: list[tuple[int, int] | None] = []
    for prompt in prompts:
        words = prompt.split()
        colours = [number for number, colour in enumerate(COLOURS) if colour in words]
        shapes = [number for number, shape in enumerate(SHAPES) if shape in words]
        pairs.append((colours[0], shapes[0]) if len(colours) == len(shapes) == 1 else None)
    return pairs
