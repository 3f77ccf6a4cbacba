"""Reads sitemaps: their entries and their defects."""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from io import BytesIO

from unisono.errors import ConfigError
from unisono.recipes.seo.data.site import sitemap_root

MAX_BYTES = 50_000_000
"""Size limit of a sitemap in the protocol."""

_MAX_SITEMAPS, _MAX_ENTRIES = 100, 200_000
_DATE = re.compile(r"\d{4}(-\d\d(-\d\d(T\d\d:\d\d(:\d\d(\.\d+)?)?(Z|[+-]\d\d:\d\d))?)?)?")


@dataclass(frozen=True)
class Entry:
    """A page that a sitemap lists."""

    url: str
    sitemap: str
    """URL or name of the sitemap."""


@dataclass
class Sitemaps:
    """All entries of the sitemaps of a site."""

    entries: list[Entry] = field(default_factory=list)
    problems: list[tuple[str, str]] = field(default_factory=list)
    """Sitemap and description of each defect."""
    names: list[str] = field(default_factory=list)
    """The sitemaps that were read."""


Read = Callable[[str], bytes | str | None]
"""Reads a sitemap by its URL; returns None if it does not exist, and raises ConfigError if it cannot be read."""


def read_sitemaps(urls: Iterable[str], read: Read, required: Iterable[str] = ()) -> Sitemaps:
    """Reads sitemaps and the sitemaps that they list; `required` are the sitemaps that robots.txt names."""
    result, needed = Sitemaps(), set(required)
    waiting = list(dict.fromkeys(urls))
    known = set(waiting)
    while waiting:
        url = waiting.pop(0)
        try:
            content = read(url)
            if content is None:
                if url in needed:
                    result.problems.append((url, "is named in robots.txt or in a sitemap, but does not exist"))
                continue
            kind, entries = _entries(content, url, result)
        except ConfigError as error:
            result.problems.append((url, str(error).removeprefix(f"{url}: ")))
            continue
        result.names.append(url)
        if kind == "urlset":
            room = _MAX_ENTRIES - len(result.entries)
            result.entries += [Entry(entry, url) for entry in entries[:room]]
            if not entries:
                result.problems.append((url, "lists no page"))
            continue
        for entry in entries:
            if entry not in known and len(known) < _MAX_SITEMAPS:
                known.add(entry)
                needed.add(entry)
                waiting.append(entry)
    return result


def _entries(content: bytes | str, url: str, result: Sitemaps) -> tuple[str, list[str]]:
    from lxml import etree

    root = sitemap_root(_plain(content, url), url)
    kind, urls, bad_dates = etree.QName(root).localname, [], 0
    for each in root.iterchildren("{*}url", "{*}sitemap"):
        location = (each.findtext("{*}loc") or "").strip()
        date = (each.findtext("{*}lastmod") or "").strip()
        bad_dates += bool(date) and not _DATE.fullmatch(date)
        if location:
            urls.append(location[:2_000])
    if bad_dates:
        result.problems.append((url, f"{bad_dates:,} lastmod are not dates of the form 2026-11-19"))
    repeated = len(urls) - len(set(urls))
    if repeated:
        result.problems.append((url, f"{repeated:,} entries are repeated"))
    if len(urls) > 50_000:
        result.problems.append((url, f"lists {len(urls):,} URLs; at most 50,000 are allowed"))
    return kind, list(dict.fromkeys(urls))


def _plain(content: bytes | str, url: str) -> bytes:
    data = content.encode() if isinstance(content, str) else content
    if data[:2] == b"\x1f\x8b":
        try:
            with gzip.GzipFile(fileobj=BytesIO(data)) as file:
                data = file.read(MAX_BYTES + 1)
        except (OSError, EOFError, zlib.error):
            raise ConfigError(f"{url}: damaged gzip file") from None
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{url}: larger than 50 MB")
    return data
