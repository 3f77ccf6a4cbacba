"""Reads pages with their titles or descriptions, which the task `snippet` learns to write."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from unisono.errors import ConfigError
from unisono.recipes.common.tree import one_line
from unisono.recipes.seo.data.bad_rows import BadRows
from unisono.recipes.seo.data.labelled import TEXT
from unisono.recipes.seo.data.lines import plain_suffix
from unisono.recipes.seo.data.pages import MAX_BYTES, parse_page
from unisono.recipes.seo.data.site import pages_of
from unisono.recipes.seo.data.tables import TABLES, no_text, rows_of, text_in


def read_snippets(
    path: str | Path,
    write: Literal["title", "description"],
    *,
    remark: Callable[[str], None] = lambda text: None,
    leave_out_bad: bool = False,
) -> list[tuple[str, str]]:
    """Returns pairs of page text and title or description from a table, a folder, a sitemap or a list of files."""
    place, bad = Path(path).expanduser(), BadRows(leave_out_bad)
    if not place.is_dir() and plain_suffix(place) in TABLES:
        pairs = _of_table(place, write, bad)
    else:
        pairs = _of_site(place, write, bad, remark, leave_out_bad)
    bad.report(remark, len(pairs), "page", place)
    return pairs


def _of_table(path: Path, write: str, bad: BadRows) -> list[tuple[str, str]]:
    pairs = []
    for row in rows_of(path, (TEXT, (write,)), bad):
        text, target = text_in(row.first(TEXT)), text_in(row.first((write,)))
        if text is None or target is None:
            what, lacking = ("text", TEXT) if text is None else (write, (write,))
            bad.add(row.where, f"its {what} {no_text(row.first(lacking))}")
        else:
            pairs.append((text, target))
    return pairs


def _of_site(
    path: Path, write: str, bad: BadRows, remark: Callable[[str], None], leave_out_bad: bool
) -> list[tuple[str, str]]:
    pairs = []
    for _, file in pages_of(path, leave_out_bad=leave_out_bad, remark=remark):
        page = parse_page(read_page(file), str(file))
        target = page.title if write == "title" else page.description
        if not page.text:
            bad.add(str(file), "; ".join(page.problems) or "it contains no text")
        elif not target:
            bad.add(str(file), f"it has no {write}" + "".join(f"; {problem}" for problem in page.problems))
        else:
            pairs.append((page.text, target))
    return pairs


def read_page(file: Path) -> bytes:
    """Returns the bytes of a page; raises ConfigError if the page cannot be read."""
    try:
        with file.open("rb") as opened:
            return opened.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(one_line(f"{file} cannot be read ({error.strerror or error})")) from None
