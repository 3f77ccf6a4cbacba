"""Compares the findings of a report with an earlier report: which findings are new, fixed or still there."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unisono.errors import ConfigError
from unisono.plain_files import read_json
from unisono.recipes.common.tree import one_line
from unisono.recipes.seo.site.finding import SEVERITIES, Finding


@dataclass
class Changes:
    """What changed since an earlier report."""

    since: str
    """Name of the earlier report."""
    new: list[Finding] = field(default_factory=list)
    fixed: list[Finding] = field(default_factory=list)
    """Findings of the earlier report that are no longer found, although their page was read again."""
    gone: list[Finding] = field(default_factory=list)
    """Findings of the earlier report whose page was not read this time."""
    num_remaining: int = 0

    def to_json(self) -> dict[str, Any]:
        """Returns the entry in report.json."""
        lists = {"new": self.new, "fixed": self.fixed, "not_read_again": self.gone}
        named = {name: [finding.to_json() for finding in findings] for name, findings in lists.items()}
        return {"since": self.since, "remaining": self.num_remaining, **named}


@dataclass
class Earlier:
    """The findings and pages of an earlier report."""

    name: str
    findings: list[Finding]
    pages: set[str]
    """Names of the pages that were read for it."""


def read_earlier(path: Path) -> Earlier:
    """Reads an earlier report: its folder or its report.json."""
    file = path / "report.json" if path.is_dir() else path
    try:
        report = read_json(file)
        entries = report["findings"]
        findings = [Finding(**{name: str(entry[name]) for name in Finding.__dataclass_fields__}) for entry in entries]
        pages = {str(page["page"]) for page in report["pages"] if not page["unreadable"]}
    except OSError as error:
        raise ConfigError(one_line(f"--compare {file}: {error.strerror or error}")) from None
    except ValueError as error:
        raise ConfigError(one_line(f"--compare {file}: not JSON ({error})")) from None
    except (KeyError, TypeError):
        raise ConfigError(one_line(f"--compare {file}: not a report.json of unisono seo with findings")) from None
    if any(finding.severity not in SEVERITIES for finding in findings):
        raise ConfigError(one_line(f"--compare {file}: not a report.json of unisono seo with findings"))
    return Earlier(str(path), findings, pages)


def compare(earlier: Earlier, new: Iterable[Finding], pages: Collection[str]) -> Changes:
    """Compares the findings with earlier ones; `pages` are the names of the pages that were read this time."""
    before = {finding.key: finding for finding in earlier.findings}
    after = {finding.key: finding for finding in new}
    missing = [finding for key, finding in before.items() if key not in after]
    not_read = earlier.pages - set(pages)
    return Changes(
        earlier.name,
        [finding for key, finding in after.items() if key not in before],
        [finding for finding in missing if finding.page not in not_read],
        [finding for finding in missing if finding.page in not_read],
        len(before.keys() & after.keys()),
    )
