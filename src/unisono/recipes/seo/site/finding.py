"""A finding: one problem on one page, with evidence and advice."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from unisono.recipes.seo.site.text_rules import Check

SEVERITIES = ("error", "warning", "notice")
"""An error keeps a page out of search or shows users something broken; a notice is often about something intended."""

# Severities of failed page checks; all other checks are warnings.
_OF_CHECKS = {
    "title": "error",
    "same text": "error",
    "heading order": "notice",
    "text length": "notice",
    "readability": "notice",
    "canonical": "notice",
}


@dataclass(frozen=True)
class Finding:
    """One problem on one page."""

    kind: str
    severity: str
    page: str
    """The page's name in the report."""
    evidence: str
    fix: str
    subject: str = ""
    """The part of the page that the finding is about, such as a link's URL. Identifies the finding in later reports."""

    @property
    def key(self) -> tuple[str, str, str]:
        """Identifies the finding in reports of different days, even if its evidence changes."""
        return self.kind, self.page, self.subject

    def to_json(self) -> dict[str, str]:
        """Returns the finding's entry in report.json."""
        return asdict(self)


def of_check(page: str, check: Check) -> Finding:
    """Converts a failed check to a finding."""
    severity = "notice" if check.name.startswith("keyword: ") else _OF_CHECKS.get(check.name, "warning")
    return Finding(check.name, severity, page, check.found, check.advice)


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Sorts findings by severity, then kind, then page."""
    return sorted(findings, key=lambda each: (SEVERITIES.index(each.severity), each.kind, each.page, each.subject))
