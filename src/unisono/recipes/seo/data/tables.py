"""Reads tables: .csv and .jsonl, gzipped or not."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from unisono.config.values import shown
from unisono.errors import ConfigError
from unisono.recipes.common.tree import one_line
from unisono.recipes.seo.data.bad_rows import BadRows
from unisono.recipes.seo.data.lines import lines_of, plain_suffix
from unisono.recipes.seo.data.tokens import whole_text

TABLES = (".csv", ".jsonl")

_LONGEST_FIELD = 2**24
_DELIMITERS = (",", ";", "\t")  # European spreadsheets use semicolons


class Row(NamedTuple):
    """One row of a table; column names are in lower case."""

    path: Path
    line: int
    fields: Mapping[str, Any]

    @property
    def where(self) -> str:
        """The file and line of this row, for error messages."""
        return f"{self.path}, line {self.line}"

    def first(self, names: Sequence[str]) -> Any:
        """Returns the value of the first of these columns that exists."""
        return next((self.fields[name] for name in names if name in self.fields), None)


def rows_of(path: Path, needed: Sequence[Sequence[str]], bad: BadRows) -> Iterator[Row]:
    """Yields the rows of a table, which needs a column of each group in `needed`; errors suggest its first name."""
    if plain_suffix(path) not in TABLES:
        raise ConfigError(one_line(f"{path}: expected a table, .csv or .jsonl (or one of them with .gz)"))
    return (_csv if plain_suffix(path) == ".csv" else _jsonl)(path, needed, bad)


def text_in(value: Any) -> str | None:
    """Returns a text without surrounding blanks; None if the value is empty or not text."""
    if not isinstance(value, str):
        return None
    return whole_text(value.strip()) or None


def no_text(value: Any) -> str:
    """Says why text_in() returned None: "is empty", or "is 12345, not text; …"."""
    if value is None or isinstance(value, str):
        return "is empty"
    hint = "; write it in quotes" if isinstance(value, int | float) else ""
    return f"is {shown(value)}, not text{hint}"


def _csv(path: Path, needed: Sequence[Sequence[str]], bad: BadRows) -> Iterator[Row]:
    lines = (line for _, line in lines_of(path))
    header, delimiter = _header(next(lines, ""), needed, path)
    # strict=True, because otherwise a quote that is never closed would silently swallow the rest of the file.
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    while True:
        begins = reader.line_num + 2
        # The default limit of 128 Ki characters is too low for pages. The limit is global, so restore it afterwards.
        usual = csv.field_size_limit(_LONGEST_FIELD)
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            bad.add(f"{path}, line {begins}", f"invalid CSV ({error}; double the quotes inside a text)")
            continue
        finally:
            csv.field_size_limit(usual)
        if len(fields) == len(header):
            yield Row(path, begins, dict(zip(header, fields, strict=True)))
        elif any(field.strip() for field in fields):
            problem = f"{len(fields)} fields, but the header has {len(header)}: put texts into double quotes"
            bad.add(f"{path}, line {begins}", problem)


def _header(line: str, needed: Sequence[Sequence[str]], path: Path) -> tuple[list[str], str]:
    names: dict[str, list[str]] = {}
    for delimiter in _DELIMITERS:
        try:
            names[delimiter] = [name.strip().lower() for name in next(csv.reader([line], delimiter=delimiter), [])]
        except csv.Error:
            continue
        if not _lacking(names[delimiter], needed):
            return names[delimiter], delimiter
    columns = max(names.values(), key=len, default=[])
    raise ConfigError(one_line(f"{path}: {_wrong_columns('its columns are', columns, needed)}"))


def _jsonl(path: Path, needed: Sequence[Sequence[str]], bad: BadRows) -> Iterator[Row]:
    for number, line in lines_of(path):
        if not line.strip():
            continue
        try:
            content = json.loads(line)
        except (ValueError, RecursionError) as error:
            bad.add(f"{path}, line {number}", f"not JSON ({error})")
            continue
        if not isinstance(content, dict):
            bad.add(f"{path}, line {number}", f"expected an object {{...}}, got {shown(content)}")
            continue
        fields = {str(name).strip().lower(): value for name, value in content.items()}
        if _lacking(list(fields), needed):
            bad.add(f"{path}, line {number}", _wrong_columns("its keys are", list(fields), needed))
            continue
        yield Row(path, number, fields)


def _lacking(names: Sequence[str], needed: Sequence[Sequence[str]]) -> list[Sequence[str]]:
    return [group for group in needed if not set(group) & set(names)]


def _wrong_columns(start: str, columns: Sequence[str], needed: Sequence[Sequence[str]]) -> str:
    expected = ", ".join(group[0] for group in needed)
    return f"{start} {shown(', '.join(columns))}; expected {expected}; there is no {_lacking(columns, needed)[0][0]}"
