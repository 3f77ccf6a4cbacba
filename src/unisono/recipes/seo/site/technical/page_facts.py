"""The facts about a page that the technical checks need; they take about two kilobytes of memory for a typical page."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from sys import intern
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urljoin

from unisono.recipes.seo.site.technical.structured import Items, items_in

if TYPE_CHECKING:
    from lxml.etree import _Element as Element

MAX_LINKS = 3_000
"""Maximum number of links to check per page."""

_ROBOTS_META = ("robots", "googlebot", "bingbot")
_REFRESH = re.compile(r"\s*(\d{1,4})(?:\.\d*)?\s*[;,]\s*(?:url\s*=\s*)?[\"']?([^\"'>]+)", re.IGNORECASE)
_MAX_URL = 2_000


class Link(NamedTuple):
    """A link on a page."""

    target: str
    """URL, absolute if the page's own URL is known."""
    text: str
    nofollow: bool


@dataclass
class PageFacts:
    """Facts about one page; URLs are absolute."""

    name: str
    url: str
    title: str = ""
    description: str = ""
    canonicals: list[str] = field(default_factory=list)
    canonicals_in_body: int = 0
    robots: list[tuple[str, str]] = field(default_factory=list)
    """Origin and value (in lower case) of each robots directive."""
    alternates: list[tuple[str, str]] = field(default_factory=list)
    """Code and URL of each hreflang element."""
    links: list[Link] = field(default_factory=list)
    refresh: tuple[int, str] | None = None
    """Seconds and target of a redirect by <meta http-equiv="refresh">."""
    items: Items = field(default_factory=Items)
    is_page: bool = True
    """Whether the page could be read as HTML."""

    @property
    def directives(self) -> set[str]:
        """All robots directives of the page, of its meta elements and of its headers."""
        return {value for _, value in self.robots}

    @property
    def noindex(self) -> bool:
        """Whether search engines must not show the page."""
        return bool({"noindex", "none"} & self.directives)

    @property
    def nofollow(self) -> bool:
        """Whether search engines must not follow the page's links."""
        return bool({"nofollow", "none"} & self.directives)

    @property
    def canonical(self) -> str | None:
        """The first canonical URL."""
        return self.canonicals[0] if self.canonicals else None


def add_facts(page: PageFacts, root: Element) -> None:
    """Adds the facts found in a page's elements; resolves relative URLs with the page's URL and <base>."""
    base = next((joined(page.url, href) for each in root.iter("base") if (href := each.get("href"))), page.url)
    for each in root.iter("meta"):
        name, content = (each.get("name") or "").strip().lower(), each.get("content") or ""
        if name in _ROBOTS_META:
            page.robots += [(f'<meta name="{name}">', value) for value in directives_of(content)]
        if (each.get("http-equiv") or "").strip().lower() == "refresh" and (match := _REFRESH.match(content[:3000])):
            page.refresh = (int(match[1]), joined(base, match[2]))
    for each in root.iter("link"):
        relations, href = (each.get("rel") or "").lower().split(), (each.get("href") or "").strip()
        if "canonical" in relations and href:
            if any(above.tag == "body" for above in each.iterancestors()):
                page.canonicals_in_body += 1
            else:
                page.canonicals.append(joined(base, href))
        if "alternate" in relations and (code := each.get("hreflang")) is not None:
            page.alternates.append((code.strip(), joined(base, href)))
    for each in root.iter("a", "area"):
        href = (each.get("href") or "").strip()
        if not href or len(page.links) >= MAX_LINKS:
            continue
        text = " ".join(_text_of(each).split())[:200]
        nofollow = bool({"nofollow", "ugc", "sponsored"} & set((each.get("rel") or "").lower().split()))
        page.links.append(Link(intern(joined(base, href)), intern(text), nofollow))
    page.items = items_in(root, base)


def directives_of(content: str) -> list[str]:
    """Returns the directives in the content of a robots meta element or an X-Robots-Tag header."""
    values = []
    for part in content.lower().split(","):
        agent, colon, value = part.strip().partition(":")
        # Remove the crawler from "googlebot: noindex", but keep "max-snippet: 5" and "unavailable_after: …" unchanged.
        values.append(value.strip() if colon and agent.endswith("bot") else part.strip())
    return [value[:100] for value in values if value]


def joined(base: str, href: str) -> str:
    """Returns the absolute URL of a link without its fragment; `href` itself if it is not a URL."""
    href = "".join(href.split()) if len(href) <= _MAX_URL else href[:_MAX_URL]
    try:
        return urljoin(base, href).partition("#")[0]
    except ValueError:
        return href


def _text_of(element: Element) -> str:
    """Returns the text of a link, or the alt text of its images."""
    text = "".join(str(part) for part in element.itertext())
    if text.strip():
        return text
    labels = [each.get("alt") or "" for each in element.iter("img")]
    return " ".join(labels) or element.get("aria-label") or element.get("title") or ""
