"""Checks which pages search engines may index: robots directives, robots.txt, canonical URLs and sitemaps."""

from __future__ import annotations

from collections.abc import Iterator

from unisono.recipes.seo.site.finding import Finding
from unisono.recipes.seo.site.technical.page_facts import PageFacts
from unisono.recipes.seo.site.technical.site_facts import SiteFacts, Target

AGENT = "googlebot"
"""The crawler whose rules in robots.txt are checked."""

_CONTRADICTIONS = (("index", "noindex"), ("follow", "nofollow"), ("all", "none"), ("all", "noindex"))


def check_robots(site: SiteFacts, page: PageFacts) -> Iterator[Finding]:
    """Yields findings about the robots directives of a page, and about the rules of robots.txt that apply to it."""
    sources = ", ".join(dict.fromkeys(source for source, _ in page.robots))
    if page.noindex:
        fix = "Keep it if the page must not be found; otherwise remove noindex."
        yield Finding("noindex", "notice", page.name, f"noindex in {sources}", fix)
    if page.nofollow:
        fix = "Remove nofollow, unless the links of the page must not count."
        yield Finding("nofollow", "notice", page.name, f"nofollow in {sources}", fix)
    for allows, forbids in _CONTRADICTIONS:
        if {allows, forbids} <= page.directives:
            fix = "Keep one of them; search engines obey the stricter one."
            yield Finding(
                "contradicting robots directives", "error", page.name, f"{allows} and {forbids} in {sources}", fix
            )
            break
    rule = site.robots.rule_of(page.url, AGENT) if site.robots else None
    if rule is not None and not rule.allows:
        evidence = f"robots.txt, line {rule.line}: Disallow: {rule.pattern[:100]}"
        fix = "Remove the rule, unless the page must not be crawled."
        yield Finding("blocked by robots.txt", "notice", page.name, evidence, fix)
        if page.noindex:
            fix = "Allow crawling in robots.txt; otherwise noindex is never seen and the page may stay in the index."
            yield Finding("noindex is not seen", "error", page.name, evidence, fix)


def check_canonical(site: SiteFacts, page: PageFacts) -> Iterator[Finding]:
    """Yields findings about a page's canonical URL; `page_rules` checks whether it is missing or relative."""
    if page.canonicals_in_body:
        fix = "Move the element into <head>; search engines ignore it in <body>."
        yield Finding("canonical outside of head", "error", page.name, '<link rel="canonical"> in <body>', fix)
    if len(set(page.canonicals)) > 1:
        fix = "Keep one; search engines ignore all of them."
        yield Finding("several canonical URLs", "error", page.name, ", ".join(page.canonicals[:5])[:400], fix)
    url = page.canonical
    if url is None:
        return
    target = site.resolve(url)
    own = site.key(page.url)

    def finding(kind: str, severity: str, evidence: str, fix: str) -> Finding:
        return Finding(kind, severity, page.name, evidence[:400], fix, url)

    if target.kind == "missing":
        yield finding("canonical is missing", "error", f"{url} {_answer(target)}", "Name an existing page.")
    elif target.kind == "loop":
        yield finding("canonical is a redirect loop", "error", described(target), "Name a page that does not redirect.")
    elif target.chain and not (target.kind == "page" and target.chain[0].how == "meta refresh"):
        yield finding("canonical redirects", "warning", described(target), f"Name the end: {target.url[:200]}")
    elif target.kind == "outside" and site.key(page.url) is not None:
        fix = "Keep it if the other site has the original; otherwise name the page's own URL."
        yield finding("canonical on another site", "warning", url, fix)
    elif target.page is not None and site.key(site.pages[target.page].url) != own:
        other = site.pages[target.page]
        if other.noindex:
            fix = "Name a page that may be indexed."
            yield finding("canonical to a noindex page", "error", f"{other.name} is noindex", fix)
        if other.canonical and site.key(other.canonical) not in (site.key(other.url), None):
            evidence = f"{other.name} itself names {other.canonical}"
            yield finding("canonical chain", "warning", evidence, f"Name {other.canonical[:200]}.")
        if page.noindex:
            fix = "Use one of both: noindex may be applied to the canonical page."
            evidence = f"noindex, and the canonical URL names {other.name}"
            yield finding("noindex and another canonical", "warning", evidence, fix)


def check_sitemaps(site: SiteFacts) -> Iterator[Finding]:
    """Yields findings about the sitemaps: entries that must not be listed, and pages that are not listed."""
    for name, problem in site.sitemaps.problems:
        yield Finding("sitemap", "error", name, problem[:300], "Correct the sitemap.", problem[:60])
    listed = set[int]()
    for entry in site.sitemaps.entries:
        target = site.resolve(entry.url)
        page = site.pages[target.page] if target.page is not None else None
        if target.page is not None:
            listed.add(target.page)
        for kind, severity, evidence, fix in _problems_of_entry(site, entry.url, target, page):
            name = page.name if page is not None and not target.chain else entry.sitemap
            yield Finding(kind, severity, name, f"{entry.url}: {evidence}"[:400], fix, entry.url)
    if site.is_complete and site.sitemaps.names:
        for number, page in enumerate(site.pages):
            if number not in listed and is_indexable(site, page):
                fix = "Add it to the sitemap, or exclude it from search."
                yield Finding("not in a sitemap", "notice", page.name, "no sitemap lists it", fix)


def _problems_of_entry(
    site: SiteFacts, url: str, target: Target, page: PageFacts | None
) -> Iterator[tuple[str, str, str, str]]:
    remove = "Remove it from the sitemap."
    if not url.lower().startswith(("http://", "https://")):
        if site.is_local and target.kind == "page":
            return
        yield "sitemap entry is not absolute", "error", "not an http(s) URL", "Write the absolute URL."
    elif target.kind == "outside":
        yield "sitemap entry of another site", "error", f"is not below {site.base}", remove
    elif target.kind in ("missing", "loop"):
        evidence = _answer(target) if target.kind == "missing" else described(target)
        yield "sitemap entry is missing", "error", evidence, f"{remove[:-1]}, or restore the page."
    elif target.chain:
        yield "sitemap entry redirects", "warning", described(target), f"List {target.url[:200]} instead."
    elif page is not None:
        if page.noindex:
            yield "noindex page in the sitemap", "error", "the page is noindex", f"{remove[:-1]}, or remove noindex."
        rule = site.robots.rule_of(url, AGENT) if site.robots else None
        if rule is not None and not rule.allows:
            evidence = f"robots.txt, line {rule.line}, disallows it"
            yield "blocked page in the sitemap", "error", evidence, f"{remove[:-1]}, or allow it in robots.txt."
        is_own = page.canonical is None or site.key(page.canonical) == site.key(page.url)
        if not is_own and site.resolve(page.canonical or "").kind not in ("missing", "loop"):
            evidence = f"its canonical URL is {page.canonical}"
            yield "non-canonical page in the sitemap", "warning", evidence, "List the canonical URL instead."


def check_robots_txt(site: SiteFacts) -> Iterator[Finding]:
    """Yields findings about the robots.txt file itself."""
    if site.robots is None:
        return
    for line, problem in site.robots.problems[:100]:
        evidence = f"line {line}: {problem}"
        yield Finding("robots.txt", "warning", "robots.txt", evidence, "Correct the line; crawlers skip it.", problem)
    for line, url in site.robots.sitemaps:
        if not url.lower().startswith(("http://", "https://")):
            evidence = f"line {line}: Sitemap: {url[:200]}"
            yield Finding("robots.txt", "warning", "robots.txt", evidence, "Write the absolute URL.", url[:200])


def is_indexable(site: SiteFacts, page: PageFacts) -> bool:
    """Returns whether search engines may show a page under its own URL."""
    if not page.is_page or page.noindex or (page.refresh is not None and page.refresh[0] <= 10):
        return False
    if site.robots is not None and not site.robots.allows(page.url, AGENT):
        return False
    if page.canonical is None:
        return True
    return site.key(page.canonical) == site.key(page.url) or site.resolve(page.canonical).kind in ("missing", "loop")


def described(target: Target) -> str:
    """Describes the redirects to a target in words."""
    hops = [f"{each.url} ({each.status or each.how})" for each in target.chain[:8]]
    more = f" → … {len(target.chain) - 8} more" if len(target.chain) > 8 else ""
    return f"{' → '.join(hops)}{more} → {target.url}"


def _answer(target: Target) -> str:
    return f"answers {target.status}" if target.status >= 400 else "does not exist"
