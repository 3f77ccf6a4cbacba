"""Pages with a label each: a number, or a class."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
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

_MOST_WHOLE = 20  # different whole numbers that are taken for classes
_LARGEST = 1e15  # of a number: the square of it is still one in 32 bits
_FEWEST_EACH = 2  # rows for each of them, or they are rather numbers

Kind = Literal["auto", "class", "number"]


@dataclass(frozen=True)
class Labelled:
    """Texts and what people say of them."""

    texts: list[str]
    labels: list[float] | list[int]
    """Numbers; or of classes, which of `names`."""
    names: list[str] | None = None
    """The classes in order; None where labels are numbers."""


def read_labelled(
    path: str | Path,
    *,
    said: Callable[[str], None] = lambda text: None,
    leave_out_bad: bool = False,
    kind: Kind = "auto",
) -> Labelled:
    """The rows of a .csv or .jsonl with the columns text and label.

    `kind` auto: labels are classes if they are words or few whole numbers.
    """
    place, bad = Path(path).expanduser(), BadRows(leave_out_bad)
    texts: list[str] = []
    labels: list[float | str] = []
    wheres: list[int] = []
    for row in rows_of(place, (TEXT, LABEL), bad, said):
        text, label = text_in(row.first(TEXT)), _label(row.first(LABEL))
        if text is None:
            bad.add(row.where, f"its text {no_text(row.first(TEXT))}")
        elif label is None:
            bad.add(row.where, f"its label is {shown(row.first(LABEL))}; expected a number (below 1e15) or a word")
        else:
            texts.append(text)
            labels.append(label)
            wheres.append(row.line)
    words = [index for index, label in enumerate(labels) if isinstance(label, str)]
    if kind == "number" or (kind == "auto" and len(words) * 2 < len(labels)):
        for index in words:  # a column of numbers in which something else stands
            where = f"{place}, line {wheres[index]}"
            bad.add(where, f"its label is {shown(labels[index])}, where a number was expected (--label class: a word)")
        kept = sorted(set(range(len(labels))) - set(words))
        texts, labels = [texts[index] for index in kept], [labels[index] for index in kept]
    bad.tell(said, len(labels), "row", place)
    return _classes(place, texts, labels) if _are_classes(labels, kind) else _numbers(place, texts, labels)


def _label(value: Any) -> float | str | None:
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


def _are_classes(labels: list[float | str], kind: Kind) -> bool:
    if kind != "auto":
        return kind == "class"
    if any(isinstance(label, str) for label in labels):
        return True
    different = set(labels)
    few = len(different) <= min(_MOST_WHOLE, max(2, len(labels) // _FEWEST_EACH))
    return few and all(float(label).is_integer() for label in different)


def _classes(path: Path, texts: list[str], labels: list[float | str]) -> Labelled:
    words = [label if isinstance(label, str) else f"{label:g}" for label in labels]
    numbers = all(not isinstance(label, str) for label in labels)
    counts = Counter(words)
    if len(counts) < 2:
        what = f"all {len(words):,} labels are {shown(words[0])}"
        raise ConfigError(one_line(f"{path}: {what}; there is nothing to tell apart: give rows of another class too"))
    if len(counts) > max(2, len(words) // 2):
        raise ConfigError(
            one_line(
                f"{path}: {len(counts):,} different labels in {len(words):,} rows, such as {shown(words[0])}; a class "
                "needs several rows: is this the right column?"
            )
        )
    names = sorted(counts, key=float) if numbers else sorted(counts)
    index = {name: number for number, name in enumerate(names)}
    return Labelled(texts, [index[word] for word in words], names)


def _numbers(path: Path, texts: list[str], labels: list[float | str]) -> Labelled:
    numbers = [float(label) for label in labels]
    if float(np.std(numbers)) < 1e-12:  # also where their differences are lost in computing
        what = f"all {len(numbers):,} labels are {numbers[0]:g}" + (
            ", or very nearly so" if len(set(numbers)) > 1 else ""
        )
        raise ConfigError(one_line(f"{path}: {what}; there is nothing to learn: give rows with other labels too"))
    return Labelled(texts, numbers)
