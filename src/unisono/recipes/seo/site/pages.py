"""A site as a list of pages: a folder, a sitemap, a list of files, or URLs.

Pages are read one at a time and not kept in memory. Nothing is fetched without a `Fetcher`.
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
from unisono.recipes.seo.site.addresses import host_of, path_of
from unisono.recipes.seo.site.fetching import Fetcher, Unreadable, has_credentials

if TYPE_CHECKING:
    from unisono.recipes.seo.site.crawling.crawler import Crawl, Limits
    from unisono.recipes.seo.site.page_rules import Exists

MAX_BYTES = 20_000_000
"""Size limit of a file."""
MAX_FETCHED = 1_000
"""Default maximum number of pages to fetch."""

_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)


@dataclass
class Site:
    """The pages of a site, which are read on demand."""

    name: str
    pages: list[tuple[str, Path | str]]
    """Name, and file or URL, of each page."""
    root: Path | None = None
    """The folder in which links within the site are looked up."""
    fetcher: Fetcher | None = None
    remarks: list[str] = field(default_factory=list)
    """Messages for the user."""
    crawl: Crawl | None = None
    """The crawl that found the pages; None without a crawl."""
    is_folder: bool = False
    """Whether the site is a whole folder."""
    is_cut: bool = False
    """Whether pages were skipped because of a limit."""

    def __post_init__(self) -> None:
        self._target_exists = lru_cache(maxsize=100_000)(_target_exists)  # every page links to the same menu

    def read(self, source: Path | str) -> bytes | str:
        """Reads the content of a page; raises Unreadable if that fails."""
        if isinstance(source, str):
            if self.crawl is not None:
                return self.crawl.content(source)
            assert self.fetcher is not None
            return self.fetcher.get(source)
        try:
            with source.open("rb") as file:
                content = file.read(MAX_BYTES + 1)
        except OSError as error:
            raise Unreadable(f"could not be read ({error.strerror or error})") from None
        if len(content) > MAX_BYTES:
            raise Unreadable(f"larger than {MAX_BYTES // 10**6} MB")
        return content

    def exists_from(self, source: Path | str) -> Exists | None:
        """Returns a function that tells whether the target of a page's link exists; None for fetched pages."""
        if self.root is None or isinstance(source, str):
            return None
        try:
            inside = source.resolve().relative_to(self.root.resolve())
        except ValueError:
            return None
        root, folder = str(self.root), inside.parent.as_posix()
        return lambda link: self._target_exists(root, folder, link.strip())

    def has(self, path: str) -> bool | None:
        """Returns whether the site's folder contains a path, which begins with a slash; None if there is no folder."""
        return None if self.root is None else self._target_exists(str(self.root), ".", path)


def open_site(
    where: str, fetcher: Fetcher | None = None, most_pages: int | None = None, limits: Limits | None = None
) -> Site:
    """Opens a folder, a sitemap, a page, a list of files or, with a fetcher, a URL or a list of URLs.

    If `limits` is passed, `where` is the URL from which a crawl starts.
    """
    if limits is not None:
        return _crawled(where, fetcher, limits)
    if _ADDRESS.match(where):
        site = Site(where, [(page, page) for page in _pages_of_url(where, _need(fetcher, where))], fetcher=fetcher)
    else:
        site = _of_files(Path(where).expanduser(), fetcher)
    most = most_pages if most_pages is not None else MAX_FETCHED if fetcher else len(site.pages)
    if not site.pages:
        raise ConfigError(one_line(f"{where} has no pages; expected HTML files, a sitemap, or a list of them"))
    if len(site.pages) > most:
        site.remarks.append(f"{len(site.pages) - most:,} more pages were skipped (--most_pages {most})")
        site.is_cut = True
    site.pages = site.pages[:most]
    return site


def _crawled(where: str, fetcher: Fetcher | None, limits: Limits) -> Site:
    from unisono.recipes.seo.site.crawling.crawler import crawl

    if not _ADDRESS.match(where):
        raise ConfigError(one_line(f"--crawl starts from a URL, but {where} is not one"))
    _only_web([where], "SITE")
    found = crawl(where, _need(fetcher, where), limits)
    if not found.pages():
        status = next((f"it answered {visit.status}" for visit in found.visits.values()), "nothing was fetched")
        raise ConfigError(one_line(f"{where}: the crawl found no page; {status}"))
    return Site(where, [(url, url) for url in found.pages()], fetcher=fetcher, remarks=found.remarks, crawl=found)


def _need(fetcher: Fetcher | None, where: str) -> Fetcher:
    if fetcher is None:
        raise ConfigError(one_line(f"{where}: pass --fetch to fetch from the web, or use local files"))
    return fetcher


def _of_files(path: Path, fetcher: Fetcher | None) -> Site:
    name = path.resolve().name or "site"
    if not path.exists():
        raise ConfigError(one_line(f"{path}: no such file or folder"))
    is_page = path.is_file() and path.suffix.lower() in PAGES
    if fetcher is not None:
        if path.is_dir() or is_page:
            raise ConfigError(one_line(f"--fetch is for URLs, but {path} is local; remove --fetch"))
        return Site(name, [(page, page) for page in _only_web(addresses_in(path), str(path))], fetcher=fetcher)
    root = path if path.is_dir() else path.parent
    if is_page:
        return Site(name, [(path.name, path)], root)
    if path.is_file() and plain_suffix(path) != ".xml":
        for line in addresses_in(path):
            if _ADDRESS.match(line):
                _need(fetcher, f"{path} lists URLs ({line[:100]})")
    remarks: list[str] = []
    pages: list[tuple[str, Path | str]] = list(pages_of(path, leave_out_bad=True, remark=remarks.append))
    return Site(name, pages, root, remarks=remarks, is_folder=path.is_dir())


def _only_web(names: list[str], where: str) -> list[str]:
    for name in names:
        if not name.lower().startswith(("http://", "https://")):
            raise ConfigError(one_line(f"{where}: {name[:100]} is not an http(s) URL; remove --fetch to read files"))
        if has_credentials(name):
            raise ConfigError(f"{where}: a URL contains a user name or a password; remove it: the report lists URLs")
    return names


def _pages_of_url(url: str, fetcher: Fetcher) -> list[str]:
    _only_web([url], "SITE")
    name = Path(path_of(url)).name
    if plain_suffix(Path(name)) != ".xml":
        return [url]
    try:
        content = fetcher.get(url)
        with TemporaryDirectory() as folder:
            file = Path(folder, "sitemap.xml.gz" if name.lower().endswith(".gz") else "sitemap.xml")
            file.write_bytes(content.encode() if isinstance(content, str) else content)
            urls = addresses_in(file)
    except (Unreadable, ConfigError) as error:
        raise ConfigError(one_line(f"{url}: {str(error).rpartition('sitemap.xml: ')[2]}")) from None
    # A sitemap from the web may only list pages of its own host.
    return [page for page in _only_web(urls, url) if host_of(page) == host_of(url)]


def _target_exists(root: str, folder: str, link: str) -> bool | None:
    """Returns whether the target of a link on a page in `folder` exists; None if the target is outside the site."""
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
    if inside.split("/")[0] == "..":  # the target is above the site's folder, perhaps in another part of the site
        return False if path.startswith("/") else None
    target = os.path.join(root, inside)
    try:
        if os.path.isdir(target):
            return any(os.path.isfile(os.path.join(target, f"index{end}")) for end in PAGES)
        # Servers may omit the extension: /about is about.html.
        return os.path.isfile(target) or any(os.path.isfile(target + end) for end in PAGES)
    except (OSError, ValueError):  # not a valid file name
        return False
