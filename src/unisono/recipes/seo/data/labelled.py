"""Pages with one label each: a number or a class."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from unisono.config.values import shown
from unisono.errors import ConfigError
from unisono.recipes.common.tree import one_line
from unisono.recipes.seo.data.bad_rows import BadRows
from unisono.recipes.seo.data.tables import no_text, rows_of, text_in

TEXT = ("text", "page", "content", "body")
LABEL = ("label", "score", "target", "class", "labels")

_MAX_CLASSES = 20  # up to this many distinct integers are treated as classes
_MIN_PER_CLASS = 2  # with fewer rows per distinct integer on average, integers are treated as numbers
_LARGEST = 1e15  # largest label: its square is still finite in float32

Kind = Literal["auto", "class", "number"]


@dataclass(frozen=True)
class Labelled:
    """Texts with one label each."""

    texts: list[str]
    labels: list[float] | list[int]
    """Numbers, or indices of `names`."""
    names: list[str] | None = None
    """Names of the classes; None if labels are numbers."""


def read_labelled(
    path: str | Path,
    *,
    remark: Callable[[str], None] = lambda text: None,
    leave_out_bad: bool = False,
    kind: Kind = "auto",
) -> Labelled:
    """Reads a .csv or .jsonl with the columns text and label."""
    file, bad = Path(path).expanduser(), BadRows(leave_out_bad)
    texts: list[str] = []
    labels: list[float | str] = []
    line_numbers: list[int] = []
    for row in rows_of(file, (TEXT, LABEL), bad):
        text, label = text_in(row.first(TEXT)), label_value(row.first(LABEL))
        if text is None:
            bad.add(row.where, f"its text {no_text(row.first(TEXT))}")
        elif label is None:
            bad.add(row.where, f"its label is {shown(row.first(LABEL))}; expected a number (below 1e15) or a word")
        else:
            texts.append(text)
            labels.append(label)
            line_numbers.append(row.line)
    words = [index for index, label in enumerate(labels) if isinstance(label, str)]
    if kind == "number" or (kind == "auto" and len(words) * 2 < len(labels)):
        for index in words:  # the column contains numbers, and a few other entries that are reported as bad rows
            problem = f"its label is {shown(labels[index])}, expected a number (--label class accepts words)"
            bad.add(f"{file}, line {line_numbers[index]}", problem)
        usable = sorted(set(range(len(labels))) - set(words))
        texts, labels = [texts[index] for index in usable], [labels[index] for index in usable]
    bad.report(remark, len(labels), "row", file)
    return Labelled(texts, *encode_labels(labels, kind, file))


def label_value(value: Any) -> float | str | None:
    """Returns a label as a number or a word; None if it is neither."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        word = text_in(value)
        try:
            number = float(word or "")
        except ValueError:
            return word
        return number if abs(number) < _LARGEST else None
    return float(value) if isinstance(value, int | float) and abs(value) < _LARGEST else None


def encode_labels(
    labels: Sequence[float | str], kind: Kind, source: object
) -> tuple[list[float] | list[int], list[str] | None]:
    """Returns numbers and None, or class indices and the class names. `source` names the data in errors.

    If `kind` is auto, labels are classes if they are words or a few distinct integers.
    """
    numbers = [label for label in labels if not isinstance(label, str)]
    if kind == "class" or (kind == "auto" and (len(numbers) < len(labels) or _are_few_integers(numbers))):
        return _classes(labels, source)
    if len(numbers) < len(labels):
        word = next(label for label in labels if isinstance(label, str))
        raise ConfigError(one_line(f"{source}: {shown(word)} is not a number; words are labels of kind class"))
    if float(np.std(numbers)) < 1e-12:  # also rejects differences that are lost to rounding
        nearly = ", or nearly so" if len(set(numbers)) > 1 else ""
        raise ConfigError(
            one_line(f"{source}: all {len(numbers):,} labels are {numbers[0]:g}{nearly}; add rows with other labels")
        )
    return numbers, None


def _are_few_integers(numbers: list[float]) -> bool:
    distinct = set(numbers)
    few = len(distinct) <= min(_MAX_CLASSES, max(2, len(numbers) // _MIN_PER_CLASS))
    return few and all(number.is_integer() for number in distinct)


def _classes(labels: Sequence[float | str], source: object) -> tuple[list[int], list[str]]:
    words = [label if isinstance(label, str) else f"{label:g}" for label in labels]
    counts = Counter(words)
    if len(counts) < 2:
        problem = f"all {len(words):,} labels are {shown(words[0])}; add rows of another class"
        raise ConfigError(one_line(f"{source}: {problem}"))
    if len(counts) > max(2, len(words) // 2):
        raise ConfigError(
            one_line(
                f"{source}: {len(counts):,} distinct labels in {len(words):,} rows, such as {shown(words[0])}; a "
                "class needs several rows: is this the right column?"
            )
        )
    numeric = all(not isinstance(label, str) for label in labels)
    names = sorted(counts, key=float) if numeric else sorted(counts)
    index = {name: number for number, name in enumerate(names)}
    return [index[word] for word in words], names
