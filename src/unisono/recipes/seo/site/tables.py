"""Writes findings as CSV for spreadsheets."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence

from unisono.recipes.seo.site.finding import Finding

_COLUMNS = ("severity", "kind", "page", "evidence", "fix", "subject")


def findings_csv(findings: Iterable[Finding]) -> str:
    """Returns the findings as CSV."""
    return csv_of(_COLUMNS, ([getattr(finding, name) for name in _COLUMNS] for finding in findings))


def csv_of(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Returns a table as CSV. No cell is a formula, because the text of pages is not trusted."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([_cell(value) for value in row] for row in rows)
    return file.getvalue()


def _cell(value: object) -> object:
    if not isinstance(value, str):
        return value
    text = " ".join(value.replace("\0", "").split())
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text
