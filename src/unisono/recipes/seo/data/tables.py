"""Tables as people have them: .csv and .jsonl, compressed or not."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
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
_DELIMITERS = (",", ";", "\t")  # spreadsheets of half of Europe write the second


class Row(NamedTuple):
    """One row of a table; names of columns are in lower case."""

    path: Path
    line: int
    fields: Mapping[str, Any]

    @property
    def where(self) -> str:
        """For messages."""
        return f"{self.path}, line {self.line}"

    def first(self, names: Sequence[str]) -> Any:
        """What stands in the first of these columns that there is."""
        return next((self.fields[name] for name in names if name in self.fields), None)


def rows_of(
    path: Path, needed: Sequence[Sequence[str]], bad: BadRows, remark: Callable[[str], None] = lambda text: None
) -> Iterator[Row]:
    """The rows of a table. Of each group of names in `needed` one must be there; the first is the one we suggest."""
    if plain_suffix(path) not in TABLES:
        raise ConfigError(one_line(f"{path}: expected a table, .csv or .jsonl (or one of them with .gz)"))
    return (_csv if plain_suffix(path) == ".csv" else _jsonl)(path, needed, bad, remark)


def text_in(value: Any) -> str | None:
    """The text without blanks around it; None if it is not text, or there is nothing in it."""
    if not isinstance(value, str):
        return None
    return whole_text(value.strip()) or None


def no_text(value: Any) -> str:
    """Why text_in() gave nothing: "is empty", or "is 12345, not text; …"."""
    if value is None or isinstance(value, str):
        return "is empty"
    hint = "; write it in quotes" if isinstance(value, int | float) else ""
    return f"is {shown(value)}, not text{hint}"


def _csv(path: Path, needed: Sequence[Sequence[str]], bad: BadRows, remark: Callable[[str], None]) -> Iterator[Row]:
    lines = (line for _, line in lines_of(path, remark))
    header, delimiter = _header(next(lines, ""), needed, path)
    # strict: a quote that is never closed would otherwise swallow the rest of the file without a word
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    while True:
        begins = reader.line_num + 2
        # 128 Ki unless told, and pages are longer; it holds for the whole process, where others count on theirs.
        usual = csv.field_size_limit(_LONGEST_FIELD)
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            bad.add(f"{path}, line {begins}", f"not proper CSV ({error}; quotes in a text are written twice)")
            continue
        finally:
            csv.field_size_limit(usual)
        if len(fields) == len(header):
            yield Row(path, begins, dict(zip(header, fields, strict=True)))
        elif any(field.strip() for field in fields):
            told = f"{len(fields)} fields, where the first line has {len(header)}: put texts into double quotes"
            bad.add(f"{path}, line {begins}", told)


def _header(line: str, needed: Sequence[Sequence[str]], path: Path) -> tuple[list[str], str]:
    names: dict[str, list[str]] = {}
    for delimiter in _DELIMITERS:
        try:
            names[delimiter] = [name.strip().lower() for name in next(csv.reader([line], delimiter=delimiter), [])]
        except csv.Error:
            continue
        if not _lacking(names[delimiter], needed):
            return names[delimiter], delimiter
    found = max(names.values(), key=len, default=[])
    raise ConfigError(one_line(f"{path}: {_wrong_columns('its columns are', found, needed)}"))


def _jsonl(path: Path, needed: Sequence[Sequence[str]], bad: BadRows, remark: Callable[[str], None]) -> Iterator[Row]:
    for number, line in lines_of(path, remark):
        if not line.strip():
            continue
        try:
            told = json.loads(line)
        except (ValueError, RecursionError) as error:
            bad.add(f"{path}, line {number}", f"not JSON ({error})")
            continue
        if not isinstance(told, dict):
            bad.add(f"{path}, line {number}", f"expected an object {{...}}, got {shown(told)}")
            continue
        fields = {str(name).strip().lower(): value for name, value in told.items()}
        if _lacking(list(fields), needed):
            bad.add(f"{path}, line {number}", _wrong_columns("its keys are", list(fields), needed))
            continue
        yield Row(path, number, fields)


def _lacking(names: Sequence[str], needed: Sequence[Sequence[str]]) -> list[Sequence[str]]:
    return [group for group in needed if not set(group) & set(names)]


def _wrong_columns(what: str, found: Sequence[str], needed: Sequence[Sequence[str]]) -> str:
    expected = ", ".join(group[0] for group in needed)
    return f"{what} {shown(', '.join(found))}; expected {expected}, and there is no {_lacking(found, needed)[0][0]}"
