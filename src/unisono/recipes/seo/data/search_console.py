"""Reads Google Search Console's exports: which queries showed which pages, how often, and at which position.

An export from the website is a ZIP archive with one CSV sheet of queries and one of pages. It does not tell which query
showed which page, unless it was filtered by one page. Exports by the API (Looker Studio, BigQuery, spreadsheet add-ons)
have both in one table. Numbers are formatted as in the user's language: 12.5%, 12,5 %, 1.234, 1 234.
"""

from __future__ import annotations

import csv
import re
import zipfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from unisono.config.values import shown
from unisono.errors import ConfigError
from unisono.recipes.common.tree import one_line
from unisono.recipes.seo.data.lines import lines_of, plain_suffix


def _names(text: str) -> list[str]:
    """Returns a column's names in several languages, in lower case."""
    return [" ".join(name.split()) for name in text.split("|")]


_QUERY = _names(
    """
    query | queries | top queries | search query | keyword | suchanfrage | suchanfragen | häufigste suchanfragen |
    requête | requêtes | requêtes les plus fréquentes | consulta | consultas | consultas principales | principales
    consultas | query più frequenti | principais consultas | zoekopdracht | zoekopdrachten | populairste
    zoekopdrachten
    """
)
_PAGE = _names(
    """
    page | pages | top pages | landing page | url | address | seite | seiten | die häufigsten seiten | häufigste
    seiten | pages les plus populaires | página | páginas | páginas principales | principales páginas | pagina |
    pagine | pagine principali | principais páginas | populairste pagina's
    """
)
_CLICKS = _names(
    """
    clicks | url clicks | klicks | clics | clic | cliques | klikken
    """
)
_IMPRESSIONS = _names(
    """
    impressions | impressionen | impresiones | impressioni | impressões | vertoningen
    """
)
_POSITION = _names(
    """
    position | average position | avg. position | posición | posizione | posição | positie
    """
)
_FILTER = re.compile(r"=?(https?://\S+)")
_THOUSANDS = re.compile(r"\d{1,3}(?:([.,'’ \u00a0\u202f])\d{3})(?:\1\d{3})*")
_SPACES = re.compile(r"[\s\u00a0\u202f'’]")
_MAX_MEMBERS, _MAX_BYTES = 50, 200_000_000
_DELIMITERS = ",;\t"


@dataclass(frozen=True)
class Shown:
    """How often a page was shown for a query. If page or query is None, the total over all pages or queries."""

    query: str | None
    page: str | None
    clicks: float
    impressions: float
    position: float


@dataclass
class SearchConsole:
    """The rows of an export."""

    pairs: list[Shown] = field(default_factory=list)
    """Rows that name both a query and a page."""
    queries: list[Shown] = field(default_factory=list)
    pages: list[Shown] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def rows_by_query(self) -> dict[str, list[Shown]]:
        """Returns the rows of each query that also name a page."""
        rows: dict[str, list[Shown]] = {}
        for row in self.pairs:
            rows.setdefault(row.query or "", []).append(row)
        return rows

    def top_queries(self, most: int) -> list[str]:
        """Returns the `most` queries with the most impressions."""
        totals = Counter[str]()
        for row in self.queries or self.pairs:
            if row.query:
                totals[row.query] += max(1, int(row.impressions))
        return [query for query, _ in totals.most_common(most)]


def read_search_console(path: str | Path) -> SearchConsole:
    """Reads an export: a .csv, a .zip of them as Google writes it, or a folder of either."""
    place = Path(path).expanduser()
    result = SearchConsole()
    if place.is_dir():
        files = sorted(each for each in place.iterdir() if each.suffix.lower() in (".csv", ".zip"))
        if not files:
            raise ConfigError(one_line(f"{place}: no .csv or .zip; expected an export of Search Console"))
        sheets = [each for each in files if each.suffix.lower() == ".csv"]
        _add(result, sheets, str(place)) if sheets else None
        for each in files:
            if each not in sheets:
                _add_zip(result, each)
    elif place.suffix.lower() == ".zip":
        _add_zip(result, place)
    elif plain_suffix(place) in (".csv", ".tsv", ".txt"):
        _add(result, [place], str(place))
    else:
        raise ConfigError(one_line(f"{place}: expected an export of Search Console, .csv or .zip"))
    if not (result.pairs or result.queries or result.pages):
        raise ConfigError(one_line(f"{place}: no sheet of queries or pages in it; export the search results report"))
    if not result.pairs:
        result.remarks.append(
            "The Search Console export does not say which query showed which page; filter it by one page, or export "
            "both columns by the API, to use its clicks as evidence for a page."
        )
    return result


def _add_zip(result: SearchConsole, path: Path) -> None:
    try:
        with zipfile.ZipFile(path) as archive, TemporaryDirectory() as folder:
            members = [each for each in archive.infolist() if each.filename.lower().endswith(".csv")][:_MAX_MEMBERS]
            sheets = []
            for number, member in enumerate(members):
                with archive.open(member) as file:
                    content = file.read(_MAX_BYTES + 1)
                if len(content) > _MAX_BYTES:
                    raise ConfigError(one_line(f"{path}: {member.filename} is larger than {_MAX_BYTES // 10**6} MB"))
                sheets.append(Path(folder, f"{number}.csv"))  # never the name in the archive
                sheets[-1].write_bytes(content)
            _add(result, sheets, str(path))
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError) as error:
        raise ConfigError(one_line(f"{path}: not a readable .zip ({error})")) from None
    except OSError as error:
        raise ConfigError(one_line(f"{path} cannot be read ({error.strerror or error})")) from None


def _add(result: SearchConsole, sheets: Iterable[Path], where: str) -> None:
    """Adds the sheets of one export."""
    tables = [_table(sheet) for sheet in sheets]
    only_page = next((page for header, rows in tables if (page := _page_filter(header, rows))), None)
    for header, rows in tables:
        columns = _columns(header)
        if columns is None:
            if len(tables) == 1:
                expected = "a column Query or Page, and Clicks, Impressions and Position"
                raise ConfigError(one_line(f"{where}: its columns are {shown(', '.join(header))}; expected {expected}"))
            continue
        of_query, of_page, clicks, impressions, position = columns
        for number, row in enumerate(rows, 2):
            if len(row) != len(header):
                continue
            try:
                each = Shown(
                    None if of_query is None else " ".join(row[of_query].split()),
                    only_page if of_page is None else row[of_page].strip(),
                    number_in(row[clicks], is_count=True),
                    number_in(row[impressions], is_count=True),
                    number_in(row[position]),
                )
            except ValueError as error:
                raise ConfigError(one_line(f"{where}, row {number}: {error}")) from None
            if each.query is not None and each.page is not None:
                result.pairs.append(each)
            (result.pages if each.query is None else result.queries if of_page is None else []).append(each)


def _table(sheet: Path) -> tuple[list[str], list[list[str]]]:
    lines = [line for _, line in lines_of(sheet)]
    first = lines[0] if lines else ""
    delimiter = max(_DELIMITERS, key=first.count)
    try:
        header, *rows = csv.reader(lines, delimiter=delimiter) if lines else ([],)
    except csv.Error as error:
        raise ConfigError(one_line(f"{sheet}: not valid CSV ({error})")) from None
    return [name.strip() for name in header], rows


def _columns(header: list[str]) -> tuple[int | None, int | None, int, int, int] | None:
    names = [name.casefold() for name in header]

    def place(accepted: list[str]) -> int | None:
        return next((number for number, name in enumerate(names) if name in accepted), None)

    query, page = place(_QUERY), place(_PAGE)
    clicks, impressions, position = place(_CLICKS), place(_IMPRESSIONS), place(_POSITION)
    if (query is None and page is None) or clicks is None or impressions is None or position is None:
        return None
    return query, page, clicks, impressions, position


def _page_filter(header: list[str], rows: list[list[str]]) -> str | None:
    """Returns the page that the export was filtered by, according to its sheet of filters; None if there is none."""
    if len(header) != 2:
        return None
    urls = [match[1] for row in rows if len(row) == 2 and (match := _FILTER.fullmatch(row[1].strip()))]
    return urls[0] if len(urls) == 1 else None


def number_in(text: str, *, is_count: bool = False) -> float:
    """Parses a number as Google formats it in any language; with `is_count`, 1.234 and 1,234 both mean 1234."""
    plain = text.strip().removesuffix("%").strip()
    if is_count and _THOUSANDS.fullmatch(plain):
        return float(re.sub(r"\D", "", plain))
    plain = _SPACES.sub("", plain)
    decimal = max(plain.rfind("."), plain.rfind(","))
    if decimal >= 0:
        plain = re.sub(r"[.,]", "", plain[:decimal]) + "." + plain[decimal + 1 :]
    try:
        value = float(plain)
    except ValueError:
        raise ValueError(f"{shown(text)} is not a number") from None
    if not 0 <= value < 1e15:
        raise ValueError(f"{shown(text)} is not a count or a position")
    return value / 100 if text.strip().endswith("%") else value
