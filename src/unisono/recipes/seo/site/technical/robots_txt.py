"""Reads robots.txt as RFC 9309 describes: the longest matching rule applies, and `*` and `$` are wildcards."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from urllib.parse import quote, urlsplit

MAX_BYTES = 500 * 1024
"""Number of bytes to read; the standard lets parsers ignore the rest."""

_KNOWN = ("user-agent", "allow", "disallow", "sitemap", "crawl-delay", "host", "clean-param", "request-rate")


@dataclass(frozen=True)
class Rule:
    """One Allow or Disallow line."""

    allows: bool
    pattern: str
    line: int

    def matches(self, path: str) -> bool:
        """Returns whether a path matches, in linear time, because the file is not trusted."""
        pattern, ends = (self.pattern[:-1], True) if self.pattern.endswith("$") else (self.pattern, False)
        first, *parts = pattern.split("*")
        if not path.startswith(first):
            return False
        at = len(first)
        for number, part in enumerate(parts):
            if ends and number == len(parts) - 1:
                return path.endswith(part) and len(path) - len(part) >= at
            at = path.find(part, at)
            if at < 0:
                return False
            at += len(part)
        return not ends or at == len(path)


@dataclass
class RobotsTxt:
    """The content of a robots.txt."""

    groups: dict[str, list[Rule]] = field(default_factory=dict)
    """Rules of each user agent, in lower case."""
    delays: dict[str, float] = field(default_factory=dict)
    """Crawl-delay of each user agent in seconds."""
    sitemaps: list[tuple[int, str]] = field(default_factory=list)
    """Line and URL of each sitemap."""
    problems: list[tuple[int, str]] = field(default_factory=list)
    """Line and description of each defect."""
    disallows_all: bool = False
    """Whether the server failed to answer, in which case crawlers must assume that nothing is allowed."""

    def rule_of(self, url: str, agent: str) -> Rule | None:
        """Returns the rule that applies to a URL; None if no rule matches."""
        if self.disallows_all:
            return Rule(False, "/", 0)
        parts = urlsplit(url)
        path = _quoted((parts.path or "/") + (f"?{parts.query}" if parts.query else ""))
        if path == "/robots.txt":
            return None
        matching = [rule for rule in self._group(agent) if rule.matches(path)]
        return max(matching, key=lambda rule: (len(rule.pattern), rule.allows), default=None)

    def allows(self, url: str, agent: str) -> bool:
        """Returns whether an agent may fetch a URL."""
        rule = self.rule_of(url, agent)
        return rule is None or rule.allows

    def delay_of(self, agent: str) -> float:
        """Returns the Crawl-delay for an agent in seconds; 0 if none is set."""
        return self.delays.get(agent.lower(), self.delays.get("*", 0.0))

    def _group(self, agent: str) -> list[Rule]:
        return self.groups.get(agent.lower(), self.groups.get("*", []))


def parse_robots(content: bytes | str) -> RobotsTxt:
    """Parses a robots.txt; records lines that it does not understand as problems."""
    text = content[:MAX_BYTES].decode("utf-8-sig", "replace") if isinstance(content, bytes) else content[:MAX_BYTES]
    robots = RobotsTxt()
    agents: list[str] = []
    in_rules = False
    for number, name, value in _lines(text, robots):
        if name == "user-agent":
            agents, in_rules = ([] if in_rules else agents), False
            agents.append(value.lower())
            robots.groups.setdefault(value.lower(), [])
            continue
        if name == "sitemap":
            robots.sitemaps.append((number, value))
            continue
        if name in ("allow", "disallow", "crawl-delay") and not agents:
            robots.problems.append((number, f"{name} before the first user-agent applies to nobody"))
            continue
        in_rules = True
        if name == "crawl-delay" and re.fullmatch(r"\d{1,6}(\.\d{1,6})?", value):
            robots.delays.update(dict.fromkeys(agents, float(value)))
        elif name in ("allow", "disallow") and value:
            if not value.startswith(("/", "*", "$")):
                robots.problems.append((number, f"the path {value[:80]!r} does not begin with /"))
            for agent in agents:
                robots.groups[agent].append(Rule(name == "allow", _quoted(value), number))
    return robots


def _lines(text: str, robots: RobotsTxt) -> Iterator[tuple[int, str, str]]:
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.partition("#")[0].strip()
        name, colon, value = line.partition(":")
        name = name.strip().lower()
        if not line:
            continue
        if not colon or name not in _KNOWN:
            robots.problems.append((number, f"not understood: {line[:80]!r}"))
        else:
            yield number, name, value.strip()


def _quoted(path: str) -> str:
    return quote(path, safe="%/:=&?~+!$,;'@()*[]|#")
