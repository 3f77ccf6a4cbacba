"""Runs all technical checks of a site."""

from __future__ import annotations

from collections.abc import Iterator

from unisono.recipes.seo.site.finding import Finding, worst_first
from unisono.recipes.seo.site.technical.alternates import check_alternates
from unisono.recipes.seo.site.technical.indexing import (
    check_canonical,
    check_robots,
    check_robots_txt,
    check_sitemaps,
)
from unisono.recipes.seo.site.technical.link_rules import check_links, check_orphans, check_redirects
from unisono.recipes.seo.site.technical.page_facts import PageFacts
from unisono.recipes.seo.site.technical.pixels import (
    DESCRIPTION_FONT,
    MAX_DESCRIPTION,
    MAX_TITLE,
    TITLE_FONT,
    pixels,
)
from unisono.recipes.seo.site.technical.schema_types import check_items
from unisono.recipes.seo.site.technical.site_facts import NO_HOST, SiteFacts


def technical_findings(site: SiteFacts) -> list[Finding]:
    """Runs all technical checks; returns their findings, worst first."""
    return worst_first({each.key: each for each in map(_shown, _findings(site))}.values())


def _shown(finding: Finding) -> Finding:
    """Removes the placeholder host from the URLs of a local site."""
    parts = (getattr(finding, name).replace(NO_HOST, "/") for name in ("page", "evidence", "fix", "subject"))
    page, evidence, fix, subject = parts
    return Finding(finding.kind, finding.severity, page, evidence, fix, subject)


def _findings(site: SiteFacts) -> Iterator[Finding]:
    for page in site.pages:
        if page.is_page:
            yield from check_robots(site, page)
            yield from check_canonical(site, page)
            yield from check_alternates(site, page)
            yield from check_items(page)
            yield from check_links(site, page)
            yield from _check_widths(page)
    yield from check_redirects(site)
    yield from check_robots_txt(site)
    yield from check_sitemaps(site)
    yield from check_orphans(site)


def _check_widths(page: PageFacts) -> Iterator[Finding]:
    for name, text, font_size, most in (
        ("title", page.title, TITLE_FONT, MAX_TITLE),
        ("description", page.description, DESCRIPTION_FONT, MAX_DESCRIPTION),
    ):
        width = pixels(text, font_size)
        if width > most:
            fix = f"Shorten it to {most} pixels; search results hide the rest."
            yield Finding(f"{name} is too wide", "warning", page.name, f"about {width:,} of {most} pixels", fix)
