"""Crawls one origin breadth first: one request at a time, with a delay, within limits, obeying robots.txt.

The crawler never leaves the origin of its start URL: redirects are recorded and followed only within it. Pages are
stored in a temporary file, so that memory does not grow with the size of the site.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from tempfile import TemporaryFile

from unisono.errors import ConfigError
from unisono.recipes.common.tree import one_line
from unisono.recipes.seo.data.pages import parse_page
from unisono.recipes.seo.site.addresses import joined
from unisono.recipes.seo.site.crawling.frontier import Frontier, normalised, origin_of
from unisono.recipes.seo.site.fetching import AGENT, Answer, Fetcher, Unreadable
from unisono.recipes.seo.site.technical.page_facts import PageFacts, add_facts, directives_of
from unisono.recipes.seo.site.technical.robots_txt import RobotsTxt, parse_robots
from unisono.recipes.seo.site.technical.sitemaps import Sitemaps, read_sitemaps

MAX_PAGES, MAX_DEPTH, DELAY = 1_000, 20, 1.0
"""Default limits: requests, clicks from the start, and seconds between requests."""

_PAGES = ("text/html", "application/xhtml+xml")
_MAX_DELAY, _MAX_BYTES, _PROGRESS_EVERY_S = 60.0, 2 * 10**9, 5.0


@dataclass(frozen=True)
class Limits:
    """Limits of a crawl."""

    max_requests: int = MAX_PAGES
    max_depth: int = MAX_DEPTH
    delay: float = DELAY
    """Seconds between the end of a request and the next one; a larger Crawl-delay in robots.txt takes precedence."""


@dataclass
class Visit:
    """One URL that was requested."""

    url: str
    status: int
    """HTTP status; 0 if there was no answer."""
    location: str = ""
    """Target of a redirect."""
    robots: tuple[str, ...] = ()
    """Directives of the X-Robots-Tag headers."""
    is_page: bool = False
    problem: str = ""
    """The reason why there was no answer."""


@dataclass
class Crawl:
    """The result of a crawl."""

    start: str
    visits: dict[str, Visit] = field(default_factory=dict)
    robots: RobotsTxt | None = None
    """None if the site has no robots.txt."""
    sitemaps: Sitemaps = field(default_factory=Sitemaps)
    is_complete: bool = False
    """Whether the crawl visited every URL that it found."""
    remarks: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._file = TemporaryFile()  # noqa: SIM115 (it lives as long as the crawl)
        self._places: dict[str, tuple[int, int, bool]] = {}

    @property
    def num_bytes(self) -> int:
        """Size of the stored pages."""
        return self._file.seek(0, 2)

    def store(self, url: str, content: bytes | str) -> None:
        """Stores a page."""
        data = content.encode("utf-8", "replace") if isinstance(content, str) else content
        self._places[url] = (self._file.seek(0, 2), len(data), isinstance(content, str))
        self._file.write(data)

    def content(self, url: str) -> bytes | str:
        """Returns the content of a stored page."""
        if url not in self._places:
            visit = self.visits[url]
            raise Unreadable(visit.problem or f"the server answered {visit.status}")
        start, size, is_text = self._places[url]
        self._file.seek(start)
        data = self._file.read(size)
        return data.decode() if is_text else data

    def pages(self) -> list[str]:
        """Returns the URLs of all pages in crawl order, including pages that could not be read."""
        return [url for url, visit in self.visits.items() if visit.is_page or visit.problem]


def crawl(start: str, fetcher: Fetcher, limits: Limits, sleep: Callable[[float], None] = time.sleep) -> Crawl:
    """Crawls the origin of a URL."""
    url = normalised(start)
    if url is None:
        raise ConfigError(one_line(f"{start}: expected an http(s) URL without user name"))
    return _Crawler(url, fetcher, limits, sleep).run()


class _Crawler:
    def __init__(self, start: str, fetcher: Fetcher, limits: Limits, sleep: Callable[[float], None]) -> None:
        self._fetcher, self._limits, self._sleep = fetcher, limits, sleep
        self._start = start
        self._requests = 0
        self._delay = limits.delay
        self._last_request, self._last_progress = 0.0, time.monotonic()

    def run(self) -> Crawl:
        crawl_robots, rules = self._read_robots()
        origin = origin_of(self._start)
        self._enter()
        if origin_of(self._start) != origin:
            crawl_robots, rules = self._read_robots()
            origin = origin_of(self._start)
        crawl = self._crawl = Crawl(self._start, robots=crawl_robots)
        self._frontier, self._rules = Frontier(origin), rules
        self._frontier.add(self._start, 0)
        self._visit_all()
        named = [url for _, each in rules.sitemaps if (url := normalised(joined(f"{origin}/", each)))]
        own = [url for url in named if origin_of(url) == origin]
        crawl.sitemaps = read_sitemaps(own or [f"{origin}/sitemap.xml"], self._sitemap, own)
        for entry in crawl.sitemaps.entries:  # pages that no page links to
            self._frontier.add(entry.url, 1)
        self._visit_all()
        self._finish()
        return crawl

    def _read_robots(self) -> tuple[RobotsTxt | None, RobotsTxt]:
        """Reads robots.txt and adopts its Crawl-delay; raises ConfigError if it disallows the start URL."""
        robots, rules = self._robots(origin_of(self._start))
        if not rules.allows(self._start, AGENT):
            cause = "cannot be read" if rules.disallows_all else f"disallows it for {AGENT}"
            raise ConfigError(one_line(f"{self._start} was not crawled: robots.txt {cause}"))
        self._delay = max(self._limits.delay, min(rules.delay_of(AGENT), _MAX_DELAY))
        return robots, rules

    def _enter(self) -> None:
        """Follows a redirect from http://example.com to https://example.com; rejects redirects to other origins."""
        try:
            answer = self._request(self._start, _PAGES)
        except Unreadable as error:
            raise ConfigError(one_line(f"{self._start}: {error}; no report was written")) from None
        target = normalised(joined(self._start, answer.headers.get("location", "")))
        if not 300 <= answer.status < 400 or target is None or origin_of(target) == origin_of(self._start):
            self._first_answer: Answer | None = answer
            return
        self._first_answer = None
        if origin_of(target) == origin_of(self._start).replace("http://", "https://", 1):
            self._start = target
            return
        raise ConfigError(one_line(f"{self._start} redirects to {target[:200]}; pass that URL to crawl it"))

    def _robots(self, origin: str) -> tuple[RobotsTxt | None, RobotsTxt]:
        """Returns the site's robots.txt (None if it does not exist), and the rules that the crawl obeys."""
        url = f"{origin}/robots.txt"
        for _ in range(5):  # redirects that RFC 9309 lets crawlers follow
            try:
                answer = self._request(url, ())
            except Unreadable:
                return None, RobotsTxt(disallows_all=True)
            target = normalised(joined(url, answer.headers.get("location", "")))
            if not 300 <= answer.status < 400 or target is None or origin_of(target) != origin:
                break
            url = target
        if answer.status == 200:
            robots = parse_robots(answer.content)
            return robots, robots
        return None, RobotsTxt(disallows_all=answer.status >= 500)

    def _visit_all(self) -> None:
        while (following := self._frontier.next()) is not None:
            url, depth = following
            if not self._rules.allows(url, AGENT):
                self._frontier.skipped["disallowed by robots.txt"] += 1
            elif self._requests >= self._limits.max_requests:
                self._frontier.skipped["over the limit of --most_pages"] += 1
            elif self._crawl.num_bytes > _MAX_BYTES:
                self._frontier.skipped["over 2 GB in total"] += 1
            else:
                self._visit(url, depth)

    def _visit(self, url: str, depth: int) -> None:
        try:
            if url == self._start and self._first_answer is not None:
                answer = self._first_answer
            else:
                answer = self._request(url, _PAGES)
        except Unreadable as error:
            self._crawl.visits[url] = Visit(url, 0, problem=str(error))
            return
        location = answer.headers.get("location", "") if 300 <= answer.status < 400 else ""
        robots = tuple(directives_of(answer.headers.get("x-robots-tag", "")))
        visit = Visit(url, answer.status, joined(url, location) if location else "", robots)
        self._crawl.visits[url] = visit
        if visit.location:
            self._frontier.add(visit.location, depth, first=True)
        elif answer.status == 200 and answer.kind in _PAGES:
            visit.is_page = True
            self._crawl.store(url, answer.content)
            self._follow(url, answer, visit, depth)

    def _follow(self, url: str, answer: Answer, visit: Visit, depth: int) -> None:
        facts = PageFacts(url, url)
        parse_page(answer.content, url, lambda root: add_facts(facts, root))
        facts.robots += [("X-Robots-Tag", value) for value in visit.robots]
        if facts.refresh is not None:
            self._frontier.add(facts.refresh[1], depth)
        if facts.nofollow:
            return
        for link in facts.links:
            if link.nofollow:
                continue
            if depth >= self._limits.max_depth:
                self._frontier.skipped[f"more than {self._limits.max_depth} clicks away"] += 1
            else:
                self._frontier.add(link.target, depth + 1)

    def _sitemap(self, url: str) -> bytes | str | None:
        normal = normalised(url)
        if normal is None or origin_of(normal) != origin_of(self._start):
            raise ConfigError(f"{url}: is on another host and was not read")
        try:
            answer = self._request(normal, ())
        except Unreadable as error:
            raise ConfigError(f"{url}: {error}") from None
        return answer.content if answer.status == 200 else None

    def _request(self, url: str, wanted: tuple[str, ...]) -> Answer:
        """Requests a URL after the delay; downloads only the content types in `wanted` (all types if it is empty)."""
        wait = self._last_request + self._delay - time.monotonic()
        if self._requests and wait > 0:
            self._sleep(wait)
        self._requests += 1
        try:
            return self._fetcher.answer(url, wanted)
        finally:
            self._last_request = time.monotonic()
            if self._last_request - self._last_progress > _PROGRESS_EVERY_S:
                self._last_progress = self._last_request
                print(f"crawled {self._requests:,} URLs", file=sys.stderr)

    def _finish(self) -> None:
        crawl, skipped = self._crawl, self._frontier.skipped
        crawl.is_complete = not (set(skipped) - {"disallowed by robots.txt"})
        crawl.remarks = [f"Skipped {number:,} URLs: {reason}." for reason, number in skipped.items()]
        if crawl.robots is None:
            crawl.remarks.append("The site has no robots.txt.")
