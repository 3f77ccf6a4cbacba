"""The format of BEIR: a folder with corpus.jsonl, queries.jsonl and qrels/train.tsv, test.tsv or dev.tsv."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from unisono.config.values import shown
from unisono.errors import ConfigError
from unisono.recipes.common.tree import one_line
from unisono.recipes.seo.data.bad_rows import BadRows
from unisono.recipes.seo.data.ranking_sets.by_ids import Judged, Text, judged_lines
from unisono.recipes.seo.data.ranking_sets.ranking import chosen_split, first_file, splits_in
from unisono.recipes.seo.data.tables import Row, no_text, rows_of, text_in

_ID, _TEXT = ("_id", "id"), ("text",)


class Beir:
    """One split of a BEIR folder."""

    def __init__(self, folder: Path, corpus: Path, split: str) -> None:
        queries = first_file(folder, "queries.jsonl")
        splits = splits_in(folder / "qrels", lambda name: [f"{name}.tsv"])
        if queries is None or not splits:
            lacking = "queries.jsonl" if queries is None else "qrels/train.tsv or qrels/test.tsv"
            raise ConfigError(one_line(f"{folder} has {corpus.name} but no {lacking}; a BEIR folder has both"))
        self.pages_file, self.queries_file = corpus, queries
        self.judged_file = chosen_split(folder / "qrels", splits, split)
        self.splits = tuple(splits)

    def pages(self, bad: BadRows) -> Iterator[Text]:
        """Yields the title and text of each page."""
        for row in rows_of(self.pages_file, (_ID, _TEXT), bad):
            title, text = text_in(row.fields.get("title")), text_in(row.first(_TEXT))
            yield from _text(row, " ".join(part for part in (title, text) if part), bad)

    def queries(self, bad: BadRows) -> Iterator[Text]:
        """Yields the queries of all splits."""
        for row in rows_of(self.queries_file, (_ID, _TEXT), bad):
            yield from _text(row, text_in(row.first(_TEXT)) or "", bad)

    def judged(self, bad: BadRows) -> Iterator[Judged]:
        """Yields the judgements of this split."""
        return judged_lines(self.judged_file, bad)


def _text(row: Row, text: str, bad: BadRows) -> Iterator[Text]:
    id_value = row.first(_ID)
    name = str(id_value).strip() if isinstance(id_value, str | int) else ""
    if not name:
        bad.add(row.where, f"its id is {shown(id_value)}; expected a string")
    elif not text:
        bad.add(row.where, f"the text of {shown(name)} {no_text(row.first(_TEXT))}")
    else:
        yield Text(row.line, name, text)
