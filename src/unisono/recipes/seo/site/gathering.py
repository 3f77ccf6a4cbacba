"""Gathers the facts of a site for the technical checks: its pages, robots.txt, sitemaps and redirects."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote, urljoin, urlsplit

from unisono.errors import ConfigError
from unisono.recipes.common.tree import Outside, Tree
from unisono.recipes.seo.data.pages import Page, parse_page
from unisono.recipes.seo.site.addresses import joined, path_of
from unisono.recipes.seo.site.fetching import Unreadable
from unisono.recipes.seo.site.pages import Site
from unisono.recipes.seo.site.technical.page_facts import PageFacts, add_facts
from unisono.recipes.seo.site.technical.redirect_rules import RedirectRules, parse_redirects
from unisono.recipes.seo.site.technical.robots_txt import RobotsTxt, parse_robots
from unisono.recipes.seo.site.technical.site_facts import NO_HOST, SiteFacts, base_of, key_of
from unisono.recipes.seo.site.technical.sitemaps import Sitemaps, read_sitemaps

_SITEMAPS = ("sitemap.xml", "sitemap_index.xml", "sitemap.xml.gz")


class Gathering:
    """Collects facts page by page, and then the facts of the whole site."""

    def __init__(self, site: Site, base: str | None = None) -> None:
        """`base` is the URL at which a local folder is served."""
        self._site, self._base = site, base or NO_HOST
        self._pages: list[PageFacts] = []

    def parse(self, name: str, source: Path | str, content: bytes | str) -> Page:
        """Parses a page and adds its facts."""
        facts = PageFacts(name, self._url_of(name, source))
        page = parse_page(content, name, lambda root: add_facts(facts, root))
        facts.title, facts.description = page.title or "", page.description or ""
        facts.is_page = page.is_html
        if self._site.crawl is not None and isinstance(source, str):
            facts.robots += [("X-Robots-Tag", value) for value in self._site.crawl.visits[source].robots]
        self._pages.append(facts)
        return page

    def last_link_texts(self) -> list[str]:
        """Returns the link texts of the page that was added last."""
        return [link.text for link in self._pages[-1].links]

    def add_unreadable(self, name: str, source: Path | str) -> None:
        """Adds a page that cannot be read."""
        self._pages.append(PageFacts(name, self._url_of(name, source), is_page=False))

    def finish(self) -> SiteFacts:
        """Returns the facts of the whole site."""
        if self._site.crawl is not None:
            return self._crawled()
        return self._local() if self._site.root is not None else self._fetched()

    def _url_of(self, name: str, source: Path | str) -> str:
        if isinstance(source, str):
            return source
        if name.lower().startswith(("http://", "https://")):  # an entry of a sitemap
            return name
        try:
            assert self._site.root is not None
            inside = source.resolve().relative_to(self._site.root.resolve()).as_posix()
        except ValueError:
            inside = source.name
        return urljoin(self._base, quote(inside, errors="replace"))

    def _crawled(self) -> SiteFacts:
        crawl = self._site.crawl
        assert crawl is not None
        redirects = RedirectRules()
        for visit in crawl.visits.values():
            if visit.location:
                redirects.add(visit.url, visit.location, visit.status, "server", forced=True)
        base = urljoin(crawl.start, "/")
        statuses = {
            key: visit.status for url, visit in crawl.visits.items() if (key := key_of(url, base, False)) is not None
        }
        facts = SiteFacts(
            self._pages,
            base,
            False,
            crawl.robots,
            crawl.sitemaps,
            redirects,
            statuses,
            is_complete=crawl.is_complete and len(self._pages) == len(crawl.pages()),
        )
        facts.start = facts.resolve(crawl.start).page
        return facts

    def _fetched(self) -> SiteFacts:
        base = joined(self._pages[0].url, "/") if self._pages else NO_HOST
        return SiteFacts(self._pages, base, False)

    def _local(self) -> SiteFacts:
        site = self._site
        assert site.root is not None
        folder = _Folder(site)
        base = self._base
        robots = self._robots(folder)
        sitemaps = self._sitemaps(folder, robots)
        if base == NO_HOST:
            entries = [entry.url for entry in sitemaps.entries]
            base = base_of([(page.name, page.canonicals) for page in self._pages], entries)
        text = folder.text("_redirects")
        redirects = parse_redirects(text, base) if text is not None else RedirectRules()
        for page in self._pages:  # update URLs that were resolved before the base was known
            if page.url.startswith(NO_HOST):
                page.url = base + page.url.removeprefix(NO_HOST)
        return SiteFacts(
            self._pages,
            base,
            True,
            robots,
            sitemaps,
            redirects,
            has_file=lambda path: site.has(f"/{path}"),
            is_complete=site.is_folder and not site.is_cut,
        )

    def _robots(self, folder: _Folder) -> RobotsTxt | None:
        text = folder.text("robots.txt")
        return None if text is None else parse_robots(text)

    def _sitemaps(self, folder: _Folder, robots: RobotsTxt | None) -> Sitemaps:
        """Reads the sitemaps that robots.txt names, or those with the usual names; looks up URLs by their path."""
        named = [path_of(url).lstrip("/") for _, url in robots.sitemaps] if robots else []
        folder_path = urlsplit(self._base).path.strip("/")
        named = [name.removeprefix(f"{folder_path}/") if folder_path else name for name in named]

        def read(name: str) -> bytes | str | None:
            path = path_of(name).lstrip("/")
            return folder.content(path)

        return read_sitemaps(named or _SITEMAPS, read, named)


class _Folder:
    """Reads files of a local site, and never files outside its folder."""

    def __init__(self, site: Site) -> None:
        assert site.root is not None
        self._site, self._tree = site, Tree(site.root)

    def content(self, name: str) -> bytes | str | None:
        """Returns the content of a file; None if it does not exist."""
        try:
            inside = self._tree.relative(name)
            if inside not in self._tree:
                return None
            return self._site.read(self._tree.path(inside))
        except (Outside, Unreadable, OSError, ValueError) as error:
            raise ConfigError(f"{name}: {error}") from None

    def text(self, name: str) -> str | None:
        """Returns the text of a file; None if it does not exist or cannot be read."""
        try:
            content = self.content(name)
        except ConfigError:
            return None
        return content.decode("utf-8-sig", "replace") if isinstance(content, bytes) else content
