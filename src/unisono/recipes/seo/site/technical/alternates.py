"""Checks hreflang: codes, targets, and whether the pages refer to each other."""

from __future__ import annotations

from collections.abc import Iterator

from unisono.recipes.seo.site.finding import Finding
from unisono.recipes.seo.site.technical.codes import problem_of
from unisono.recipes.seo.site.technical.page_facts import PageFacts
from unisono.recipes.seo.site.technical.site_facts import SiteFacts

_MAX = 200  # maximum number of languages per page


def check_alternates(site: SiteFacts, page: PageFacts) -> Iterator[Finding]:
    """Yields findings about the hreflang elements of a page."""
    own = site.key(page.url)
    urls: dict[str, str] = {}
    names_itself = False

    def finding(kind: str, severity: str, subject: str, evidence: str, fix: str) -> Finding:
        return Finding(kind, severity, page.name, evidence[:400], fix, subject)

    for code, url in page.alternates[:_MAX]:
        if problem := problem_of(code):
            fix = "Use a language, optionally with a country: en, en-GB, zh-Hant, x-default."
            yield finding("hreflang: invalid code", "error", code[:40], f"{code[:40]!r}: {problem}", fix)
        if urls.setdefault(code.lower(), url) != url:
            evidence = f"{code}: {urls[code.lower()]} and {url}"
            yield finding("hreflang: code is repeated", "error", code[:40], evidence, "Name one URL for each code.")
        target = site.resolve(url)
        if site.key(url) == own:
            names_itself = True
            continue
        if target.kind in ("missing", "loop"):
            evidence = f"{code}: {url} does not exist"
            yield finding("hreflang: page is missing", "error", url, evidence, "Name an existing page.")
        elif target.chain:
            evidence = f"{code}: {url} redirects to {target.url}"
            yield finding("hreflang: page redirects", "warning", url, evidence, f"Name {target.url[:200]}.")
        elif target.page is not None:
            yield from _of_page(site, page, site.pages[target.page], code, url)
    if page.alternates and not names_itself:
        fix = "Add an hreflang element for the page itself."
        evidence = f"names {', '.join(list(urls)[:10])}, but not itself"
        yield finding("hreflang: page does not name itself", "warning", "", evidence, fix)
    if page.alternates and page.canonical and site.key(page.canonical) not in (own, None):
        fix = "Name only canonical pages; remove hreflang here, or make the page its own canonical."
        evidence = f"the canonical URL is {page.canonical}"
        yield finding("hreflang: page is not canonical", "error", "", evidence, fix)


def _of_page(site: SiteFacts, page: PageFacts, other: PageFacts, code: str, url: str) -> Iterator[Finding]:
    if not other.is_page:
        return
    if site.key(page.url) not in {site.key(back) for _, back in other.alternates[:_MAX]}:
        evidence = f"{code}: {other.name} does not name {page.name}"
        fix = "Add the missing element to the other page; one-sided pairs are ignored."
        yield Finding("hreflang: no return link", "error", page.name, evidence[:400], fix, url)
    if other.noindex:
        evidence = f"{code}: {other.name} is noindex"
        yield Finding("hreflang: page is noindex", "error", page.name, evidence[:400], "Name an indexable page.", url)
