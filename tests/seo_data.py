"""Synthetic queries, pages and labels.

A topic has several things, and every thing has two words: queries use one, pages the other. A model that learns which
words belong together finds the page; counting common words finds only the topic. Everything is a function of the seed
and the number.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np

_SYLLABLES = ("ba", "de", "fi", "go", "lu", "ma", "ne", "pi", "ro", "su", "ta", "ve", "wi", "xo", "zu", "ka")
_FILLERS = ("the page tells", "here one reads", "many people ask", "it is known", "this part shows", "notes are")
_GOOD, _POOR = ("clear", "complete", "recent", "tested"), ("broken", "outdated", "missing", "vague")
NUM_TOPICS, NUM_THINGS, NUM_NAMED = 12, 30, 3


class Made(NamedTuple):
    """One synthetic page."""

    query: str
    page: str
    topic: int
    label: str
    """good or poor, depending on a word in the text."""
    title: str


def made(number: int, seed: int = 0) -> Made:
    """A page, and the query that it answers."""
    random = _random(seed, number)
    topic = random.randint(NUM_TOPICS)
    things = random.choice(NUM_THINGS, NUM_NAMED, replace=False)
    # Queries and pages use different endings, so that they share no word by chance.
    query_words = [_word(f"asked {topic} {thing}", "n") for thing in things]
    page_words = [_word(f"told {topic} {thing}", "s") for thing in things]
    good = random.randint(2)
    mark = (_POOR, _GOOD)[good][random.randint(4)]
    parts = [
        f"{_FILLERS[random.randint(6)]} {word} and {_word(f'beside {random.randint(200)}')}" for word in page_words
    ]
    random.shuffle(parts)
    name = _word(f"topic {topic}")
    page = f"All about {name}. " + " ".join(f"{part.capitalize()}." for part in parts) + f" What it says is {mark}."
    return Made(
        f"{name} " + " ".join(query_words), page, int(topic), ("poor", "good")[good], f"{name}: {', '.join(page_words)}"
    )


def write_ranking(path: Path, num: int, seed: int = 0, first: int = 0) -> Path:
    """A .jsonl of queries and their pages."""
    rows = [made(number, seed) for number in range(first, first + num)]
    return _jsonl(path, [{"query": row.query, "positive": row.page} for row in rows])


def write_site(folder: Path, num: int, seed: int = 0) -> Path:
    """A folder of HTML pages."""
    folder.mkdir(parents=True)
    for number in range(num):
        row = made(number, seed)
        html = (
            f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{row.title}</title>'
            f'<meta name="description" content="{row.page[:100]}"></head>'
            f"<body><h1>{row.title}</h1><p>{row.page}</p></body></html>\n"
        )
        (folder / f"page-{number:04d}.html").write_text(html)
    return folder


def _jsonl(path: Path, rows: list[dict[str, str]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _random(*keys: object) -> np.random.RandomState:
    # numpy guarantees that RandomState never changes its numbers.
    return np.random.RandomState(np.frombuffer(hashlib.sha256(repr(keys).encode()).digest(), np.uint32))


def _word(meaning: str, end: str = "") -> str:
    digest = hashlib.sha256(meaning.encode()).digest()
    return "".join(_SYLLABLES[byte % 16] for byte in digest[:3]) + end
