"""The format of MS MARCO: a folder with collection.tsv, queries.tsv, and judgements or triples of ids.

Files may have their official names (queries.train.tsv, qrels.dev.small.tsv, qidpidtriples.train.full.2.tsv).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from unisono.config.values import shown
from unisono.errors import ConfigError
from unisono.recipes.common.tree import one_line
from unisono.recipes.seo.data.bad_rows import BadRows
from unisono.recipes.seo.data.lines import lines_of
from unisono.recipes.seo.data.ranking_sets.by_ids import Judged, Text, judged_lines
from unisono.recipes.seo.data.ranking_sets.ranking import chosen_split, first_file, splits_in
from unisono.recipes.seo.data.tables import text_in

_ID = re.compile(r"[A-Za-z]{0,3}\d+")  # document ids such as D1555982
_NUM_LINES = 100  # number of lines read to detect the format


class Marco:
    """One split of an MS MARCO folder; `judged` is the file of judgements or triples if the user chose one."""

    def __init__(self, folder: Path, collection: Path, split: str, judged: Path | None = None) -> None:
        splits = {} if judged else splits_in(folder, _judged_names)
        plain = first_file(folder, "qrels.tsv", "triples.tsv", "qidpidtriples.tsv")
        if plain and "train" not in splits and not judged:
            splits["train"] = plain
        self.judged_file = judged or chosen_split(folder, splits, split)
        self.splits = tuple(splits) or ("train",)
        parts = splits_in(folder, lambda name: [f"queries.{name}.tsv"])
        same = self.judged_file.name.removesuffix(".gz").replace("qrels", "queries", 1)
        queries = first_file(folder, same) if same.startswith("queries") else None
        queries = queries or parts.get(split) or first_file(folder, "queries.tsv")
        if queries is None:
            raise ConfigError(one_line(f"{folder} has {collection.name} but no queries.tsv or queries.{split}.tsv"))
        self.pages_file, self.queries_file = collection, queries

    def pages(self, bad: BadRows) -> Iterator[Text]:
        """Yields the pages of the collection, without the URLs of documents."""
        return _texts(self.pages_file, bad)

    def queries(self, bad: BadRows) -> Iterator[Text]:
        """Yields the queries of this split, and possibly of other splits."""
        return _texts(self.queries_file, bad)

    def judged(self, bad: BadRows) -> Iterator[Judged]:
        """Yields the judgements of this split."""
        return (_triples if _are_triples(self.judged_file) else judged_lines)(self.judged_file, bad)


def has_ids(path: Path) -> bool:
    """Returns whether the first lines of a .tsv contain ids instead of texts."""
    lines = [line.split() for _, line in islice(lines_of(path), 2)]
    return bool(lines) and len(lines[-1]) in (3, 4) and all(_ID.fullmatch(field) for field in lines[-1][:-1])


def _judged_names(split: str) -> list[str]:
    triples = [f"{name}.{split}{end}.tsv" for name in ("qidpidtriples", "triples") for end in ("", ".full.2", ".full")]
    return [f"qrels.{split}.tsv", *triples]


def _are_triples(path: Path) -> bool:
    """Returns whether the third column contains page ids and not grades: page ids have three or more digits."""
    lines = [line.split() for _, line in islice(lines_of(path), _NUM_LINES)]
    return "triples" in path.name.lower() or any(
        len(fields) == 3 and _ID.fullmatch(fields[2]) and len(fields[2]) > 2 for fields in lines
    )


def _texts(path: Path, bad: BadRows) -> Iterator[Text]:
    for number, line in lines_of(path):
        name, *fields = line.rstrip("\r\n").split("\t")
        if not name.strip() and not fields:
            continue
        text = text_in(" ".join(fields[1:] if len(fields) > 2 else fields))
        if not name.strip() or not fields:
            bad.add(f"{path}, line {number}", f"expected an id, a tab and a text, got {shown(line.strip())}")
        elif text is None:
            bad.add(f"{path}, line {number}", f"the text of {shown(name.strip())} is empty")
        else:
            yield Text(number, name.strip(), text)


def _triples(path: Path, bad: BadRows) -> Iterator[Judged]:
    for number, line in lines_of(path):
        fields = line.split()
        if len(fields) == 3:
            yield Judged(number, fields[0], fields[1], 1.0)
            yield Judged(number, fields[0], fields[2], 0.0)
        elif fields:
            bad.add(
                f"{path}, line {number}", f"expected ids of query, positive and negative, got {shown(line.strip())}"
            )
