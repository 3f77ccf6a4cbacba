"""Checks the links of a page and the redirects of a site, and finds pages that no page links to."""

from __future__ import annotations

from collections.abc import Iterator

from unisono.recipes.seo.site.finding import Finding
from unisono.recipes.seo.site.technical.indexing import described, is_indexable
from unisono.recipes.seo.site.technical.page_facts import PageFacts
from unisono.recipes.seo.site.technical.site_facts import SiteFacts

_LEAST_TEXT = ("here", "click here", "more", "read more", "learn more", "link", "this page", "this", "hier", "mehr")


def check_links(site: SiteFacts, page: PageFacts) -> Iterator[Finding]:
    """Yields findings about the links of a page, one per target."""

    def finding(kind: str, severity: str, subject: str, evidence: str, fix: str) -> Finding:
        return Finding(kind, severity, page.name, evidence[:400], fix, subject)

    for link in {link.target: link for link in reversed(page.links)}.values():
        target = site.resolve(link.target)
        shown = link.target
        label = f" (text: {link.text[:80]!r})" if link.text else ""
        if target.kind == "missing":
            status = f"answers {target.status}" if target.status >= 400 else "does not exist"
            via = f", after {described(target)}" if target.chain else ""
            fix = "Correct or remove the link."
            yield finding("broken link", "error", link.target, f"{shown} {status}{label}{via}", fix)
        elif target.kind == "loop":
            yield finding("link to a redirect loop", "error", link.target, described(target) + label, "Break the loop.")
        elif target.chain and target.kind != "outside":
            fix = f"Link to {target.url[:200]}."
            yield finding("link to a redirect", "notice", link.target, described(target) + label, fix)
        elif target.page is not None and link.nofollow:
            fix = "Remove rel=nofollow from links within the site."
            yield finding("internal nofollow link", "notice", link.target, f"{shown}{label}", fix)
        if page.url.startswith("https://") and link.target.startswith("http://") and site.key(link.target) is not None:
            yield finding("link to http", "warning", link.target, f"{shown}{label}", "Link to https.")
    texts = {link.text.casefold(): link for link in page.links if site.key(link.target) is not None}
    vague = [f"{link.text!r} → {link.target}" for text, link in texts.items() if text in _LEAST_TEXT]
    if vague:
        fix = "Say in the link's text what the page is about."
        yield finding("link text says nothing", "notice", "", "; ".join(vague[:5]), fix)
    empty = [link.target for link in page.links if not link.text]
    if empty:
        fix = "Give the link a text, or its image an alt text."
        yield finding("link without text", "warning", "", f"{len(empty):,}: {'; '.join(empty[:5])}", fix)


def check_redirects(site: SiteFacts) -> Iterator[Finding]:
    """Yields findings about the redirects of the site."""
    for redirect, _ in site.redirects.rules.values():
        if not 300 <= (redirect.status or 301) < 400:
            continue
        target = site.resolve(redirect.url)
        if not target.chain or target.chain[0] != redirect:
            continue  # a page exists at this URL, so the rule does not apply
        page = next((each.name for each in site.pages if each.url == redirect.url), redirect.url)

        def finding(kind: str, severity: str, evidence: str, fix: str, page: str = page) -> Finding:
            return Finding(kind, severity, page, evidence[:400], fix)

        if target.kind == "loop":
            yield finding("redirect loop", "error", described(target), "Break the loop: redirect to an existing page.")
        elif target.kind == "missing":
            yield finding("redirect to a missing page", "error", described(target), "Redirect to an existing page.")
        elif len(target.chain) > 1:
            fix = f"Redirect directly to {target.url[:200]}."
            yield finding("redirect chain", "warning", described(target), fix)
        if redirect.how == "meta refresh":
            fix = "Redirect on the server (301); search engines and browsers may show the page first."
            yield finding("redirect by meta refresh", "warning", f"to {redirect.target}", fix)
        elif redirect.status in (302, 303, 307):
            fix = "Answer 301 or 308 if the move is permanent."
            yield finding("temporary redirect", "notice", f"{redirect.status} to {redirect.target}", fix)
    for line, problem in site.redirects.problems[:100]:
        fix = "Correct the line: /old /new 301."
        yield Finding("_redirects", "warning", "_redirects", f"line {line}: {problem}", fix, problem)


def check_orphans(site: SiteFacts) -> Iterator[Finding]:
    """Yields findings about indexable pages that no other page links to; none unless all pages are known."""
    if not site.is_complete or len(site.pages) < 2:
        return
    linked = linked_pages(site)
    for number, page in enumerate(site.pages):
        if number != site.start and number not in linked and is_indexable(site, page):
            fix = "Link to it from a related page, or remove it."
            yield Finding("orphan page", "warning", page.name, "no other page links to it", fix)


def linked_pages(site: SiteFacts) -> set[int]:
    """Returns the pages that another page links to, directly or through a redirect."""
    linked = set[int]()
    for number, page in enumerate(site.pages):
        targets = {site.resolve(link.target).page for link in page.links if not link.nofollow}
        linked |= {target for target in targets if target is not None and target != number}
    return linked
