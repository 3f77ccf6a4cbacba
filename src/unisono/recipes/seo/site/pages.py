"""A site as a list of pages: a folder, a sitemap, a list of files, or, if asked, web addresses.

Pages are read one at a time and not kept, so a site may be large. Nothing is fetched unless a `Fetcher` is given.
"""

from __future__ import annotations

import os
import posixpath
import re
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from unisono.errors import ConfigError
from unisono.recipes.common.tree import one_line
from unisono.recipes.seo.data.lines import plain_suffix
from unisono.recipes.seo.data.site import PAGES, addresses_in, pages_of
from unisono.recipes.seo.site.fetching import Fetcher, Unreadable, names_somebody

if TYPE_CHECKING:
    from unisono.recipes.seo.site.page_rules import Exists

LARGEST_PAGE = 20_000_000
"""Bytes; a file that is larger is no page."""
MOST_FETCHED = 1_000
"""Pages that are fetched of a site, unless the user says how many."""

_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)


@dataclass
class Site:
    """The pages of a site, by name, and how each is read."""

    name: str
    pages: list[tuple[str, Path | str]]
    """The name of each, and its file or its address."""
    root: Path | None = None
    """The folder that links within the site lead to."""
    fetcher: Fetcher | None = None
    remarks: list[str] = field(default_factory=list)
    """What the user should know of it."""

    def __post_init__(self) -> None:
        self._is_there = lru_cache(maxsize=100_000)(_is_there)  # the menu of a site is the same on every page

    def read(self, place: Path | str) -> bytes | str:
        """The content of a page."""
        if isinstance(place, str):
            assert self.fetcher is not None
            return self.fetcher.get(place)
        try:
            with place.open("rb") as file:
                content = file.read(LARGEST_PAGE + 1)
        except OSError as error:
            raise Unreadable(f"cannot be read ({error.strerror or error})") from None
        if len(content) > LARGEST_PAGE:
            raise Unreadable(f"larger than {LARGEST_PAGE // 10**6} MB: no page")
        return content

    def exists_from(self, place: Path | str) -> Exists | None:
        """Says of a page's links whether their files are there; None where there is no folder to look in."""
        if self.root is None or isinstance(place, str):
            return None
        try:
            inside = place.resolve().relative_to(self.root.resolve())
        except ValueError:
            return None
        root, folder = str(self.root), inside.parent.as_posix()
        return lambda link: self._is_there(root, folder, link.strip())


def open_site(where: str, fetcher: Fetcher | None = None, most_pages: int | None = None) -> Site:
    """The site that a folder, a sitemap, a page, a list of files or addresses, or (with a fetcher) an address is."""
    if _ADDRESS.match(where):
        site = Site(where, [(page, page) for page in _of_address(where, _asked(fetcher, where))], fetcher=fetcher)
    else:
        site = _of_files(Path(where).expanduser(), fetcher)
    most = most_pages if most_pages is not None else MOST_FETCHED if fetcher else len(site.pages)
    if not site.pages:
        raise ConfigError(one_line(f"{where} names no page; expected HTML files, a sitemap, or a list of them"))
    if len(site.pages) > most:
        site.remarks.append(f"{len(site.pages) - most:,} more pages were left out: --most_pages {most}")
    site.pages = site.pages[:most]
    return site


def _asked(fetcher: Fetcher | None, where: str) -> Fetcher:
    if fetcher is None:
        raise ConfigError(one_line(f"{where}: nothing is fetched unless you ask; give --fetch, or local files"))
    return fetcher


def _of_files(path: Path, fetcher: Fetcher | None) -> Site:
    name = path.resolve().name or "site"
    if not path.exists():
        raise ConfigError(one_line(f"{path}: there is no such file or folder"))
    is_page = path.is_file() and path.suffix.lower() in PAGES
    if fetcher is not None:
        if path.is_dir() or is_page:
            raise ConfigError(one_line(f"--fetch is for web addresses, and {path} is local; leave it out"))
        return Site(name, [(page, page) for page in _only_web(addresses_in(path), str(path))], fetcher=fetcher)
    root = path if path.is_dir() else path.parent
    if is_page:
        return Site(name, [(path.name, path)], root)
    if path.is_file() and plain_suffix(path) != ".xml":
        for line in addresses_in(path):
            if _ADDRESS.match(line):
                _asked(fetcher, f"{path} names web addresses ({line[:100]})")
    remarks: list[str] = []
    return Site(name, list(pages_of(path, leave_out_bad=True, remark=remarks.append)), root, remarks=remarks)


def _only_web(names: list[str], where: str) -> list[str]:
    for name in names:
        if not name.lower().startswith(("http://", "https://")):
            raise ConfigError(one_line(f"{where}: {name[:100]} is no http(s) address; leave out --fetch for files"))
        if names_somebody(name):
            raise ConfigError(f"{where}: an address holds a name or a password; take it out: reports name addresses")
    return names


def _of_address(url: str, fetcher: Fetcher) -> list[str]:
    _only_web([url], "SITE")
    name = Path(urlsplit(url).path).name
    if plain_suffix(Path(name)) != ".xml":
        return [url]
    try:
        content = fetcher.get(url)
        with TemporaryDirectory() as folder:
            file = Path(folder, "sitemap.xml.gz" if name.lower().endswith(".gz") else "sitemap.xml")
            file.write_bytes(content.encode() if isinstance(content, str) else content)
            found = addresses_in(file)
    except (Unreadable, ConfigError) as error:
        raise ConfigError(one_line(f"{url}: {str(error).rpartition('sitemap.xml: ')[2]}")) from None
    # A sitemap from the web may only name pages of its own host.
    return [page for page in _only_web(found, url) if urlsplit(page).hostname == urlsplit(url).hostname]


def _is_there(root: str, folder: str, link: str) -> bool | None:
    """Whether the file that a link of a page in this folder means is there; None for what leads elsewhere."""
    if link.startswith(("#", "?")):
        return None
    try:
        parts = urlsplit(link)
    except ValueError:
        return False
    if parts.scheme or parts.netloc:
        return None
    path = unquote(parts.path)
    inside = posixpath.normpath(path.lstrip("/") if path.startswith("/") else posixpath.join(folder, path))
    if inside.split("/")[0] == "..":  # above the folder: another part of the site, which is not ours to look at
        return False if path.startswith("/") else None
    place = os.path.join(root, inside)
    try:
        if os.path.isdir(place):
            return any(os.path.isfile(os.path.join(place, f"index{end}")) for end in PAGES)
        # Servers leave the ending out: /about is about.html.
        return os.path.isfile(place) or any(os.path.isfile(place + end) for end in PAGES)
    except (OSError, ValueError):  # no name that a file can have
        return False
