"""The pages, files and redirects of a site, and the lookup of URLs among them.

A local site is a folder: a URL's path names a file, and URLs may omit `index.html` and `.html`. For a crawled site, the
server's answers tell what a URL leads to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from urllib.parse import quote, unquote, urlsplit

from unisono.recipes.seo.site.technical.page_facts import PageFacts
from unisono.recipes.seo.site.technical.redirect_rules import Redirect, RedirectRules
from unisono.recipes.seo.site.technical.robots_txt import RobotsTxt
from unisono.recipes.seo.site.technical.sitemaps import Sitemaps

NO_HOST = "https://site.invalid/"
"""Base of the URLs of a local site that does not declare its own."""

_MAX_HOPS = 20
_DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class Target:
    """What a URL leads to."""

    kind: str
    """page, file, missing, loop, outside (on another site, so not checked) or unknown (not fetched)."""
    page: int | None = None
    chain: tuple[Redirect, ...] = ()
    """The redirects on the way."""
    status: int = 200
    url: str = ""
    """The URL at the end of the redirects."""


@dataclass
class SiteFacts:
    """Facts about all pages of a site."""

    pages: Sequence[PageFacts]
    base: str = NO_HOST
    is_local: bool = True
    robots: RobotsTxt | None = None
    sitemaps: Sitemaps = field(default_factory=Sitemaps)
    redirects: RedirectRules = field(default_factory=RedirectRules)
    statuses: dict[str, int] = field(default_factory=dict)
    """HTTP status of each crawled URL, by the URL's key; 0 if there was no answer."""
    has_file: Callable[[str], bool | None] | None = None
    """Tells whether a path below the base is a file of a local site; None if that is unknown."""
    is_complete: bool = False
    """Whether all pages are known; otherwise, pages without incoming links or sitemap entries cannot be found."""
    start: int | None = None
    """The number of the start page."""

    def __post_init__(self) -> None:
        self.resolve = lru_cache(maxsize=200_000)(self._resolve)
        self._numbers: dict[str, int] = {}
        for number, page in enumerate(self.pages):
            key = self.key(page.url)
            if key is not None:
                self._numbers.setdefault(key, number)
            if page.refresh is not None and page.refresh[0] <= 10:
                self.redirects.add(page.url, page.refresh[1], 0, "meta refresh", forced=True)
        self.redirects.index(self.key)
        if self.start is None:
            self.start = self._numbers.get(self.key(self.base) or "")

    def key(self, url: str) -> str | None:
        """Returns a key that identifies a URL within the site; None if the URL is outside."""
        if self.is_local and url.startswith(NO_HOST):
            url = self.base + url.removeprefix(NO_HOST)
        return key_of(url, self.base, self.is_local)

    def page_of_path(self, url: str) -> int | None:
        """Returns the page with the path of a URL, whatever its host; only for local sites that declare no host."""
        if not self.base.startswith(NO_HOST):
            return None
        try:
            key = self.key(self.base + urlsplit(url).path.lstrip("/"))
        except ValueError:
            return None
        return None if key is None else self._numbers.get(key)

    def _resolve(self, url: str) -> Target:
        chain: list[Redirect] = []
        seen = set[str]()
        while True:
            key = self.key(url)
            if key is None:
                return Target("outside", chain=tuple(chain), url=url)
            number = self._numbers.get(key)
            redirect = self.redirects.of(key, exists=number is not None)
            if redirect is not None:
                chain.append(redirect)
                if key in seen or len(chain) > _MAX_HOPS:
                    return Target("loop", chain=tuple(chain), url=url)
                seen.add(key)
                url = redirect.target
                continue
            return Target(*self._kind(key, number), chain=tuple(chain), status=self.statuses.get(key, 200), url=url)

    def _kind(self, key: str, number: int | None) -> tuple[str, int | None]:
        if number is not None and (self.pages[number].is_page or self.is_local):
            return "page", number
        if key in self.statuses:
            status = self.statuses[key]
            return ("unknown" if status == 0 else "missing" if status >= 400 else "file"), None
        if self.redirects.serves(key):
            return "file", None
        exists = self.has_file(key) if self.has_file is not None else None
        return ("unknown" if exists is None else "file" if exists else "missing"), None


def key_of(url: str, base: str, is_local: bool) -> str | None:
    """Returns the normalised path of a URL relative to the base; None if the URL is not below the base."""
    try:
        parts, home = urlsplit(url), urlsplit(base)
        same = (parts.hostname, _port(parts)) == (home.hostname, _port(home)) or (
            # http and https on their default ports are the same site
            parts.hostname == home.hostname and {_port(parts), _port(home)} == {80, 443}
        )
    except ValueError:
        return None
    if parts.scheme not in ("http", "https") or not same:
        return None
    path = "/" + quote(unquote(parts.path), safe="/:@!$&'()*+,;=~").lstrip("/")
    folder = home.path.rpartition("/")[0] + "/"
    if not f"{path}/".startswith(folder):
        return None
    path = path[len(folder) :]
    if not is_local:
        scheme = "" if parts.scheme == home.scheme else f"{parts.scheme}:"
        return f"{scheme}{path}{f'?{parts.query}' if parts.query else ''}"
    name = path.rpartition("/")[2]
    if name.lower() in ("index.html", "index.htm", "index.xhtml"):
        path = path[: len(path) - len(name)]
    for ending in (".html", ".htm", ".xhtml"):
        path = path.removesuffix(ending)
    return path.rstrip("/")


def base_of(pages: Sequence[tuple[str, Sequence[str]]], sitemap: Sequence[str]) -> str:
    """Returns the origin that a local site declares, by most of its canonical URLs or else by its sitemap."""
    for urls in ([url for _, canonicals in pages for url in canonicals[:1]], sitemap):
        origins = Counter(origin for url in urls if (origin := _origin(url)))
        if origins:
            return origins.most_common(1)[0][0]
    return NO_HOST


def _origin(url: str) -> str:
    try:
        parts = urlsplit(url)
    except ValueError:
        return ""
    known = parts.scheme in ("http", "https") and parts.netloc and parts.netloc != urlsplit(NO_HOST).netloc
    return f"{parts.scheme}://{parts.netloc}/" if known else ""


def _port(parts: object) -> int | None:
    scheme, port = getattr(parts, "scheme", ""), getattr(parts, "port", None)
    return port or _DEFAULT_PORTS.get(scheme)
