"""Redirects of a site: from the server's answers, from the file `_redirects`, and by <meta http-equiv="refresh">.

`_redirects` is the format of static hosts: `/old /new 301`, with `*` and `:name` in the path. Conditions are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from unisono.recipes.seo.site.addresses import joined


@dataclass(frozen=True)
class Redirect:
    """One redirect."""

    url: str
    target: str
    status: int
    how: str
    """Where the redirect comes from."""


@dataclass
class RedirectRules:
    """All redirects of a site."""

    rules: dict[str, tuple[Redirect, bool]] = field(default_factory=dict)
    """Redirect of each URL, and whether it applies even if the page exists."""
    patterns: list[tuple[re.Pattern[str], Redirect]] = field(default_factory=list)
    problems: list[tuple[int, str]] = field(default_factory=list)
    """Line and description of each defect of `_redirects`."""
    _by_key: dict[str | None, tuple[Redirect, bool]] = field(default_factory=dict)

    def add(self, url: str, target: str, status: int, how: str, *, forced: bool) -> None:
        """Adds a redirect of one URL; only the first redirect of a URL counts."""
        self.rules.setdefault(url, (Redirect(url, target, status, how), forced))

    def index(self, key_of: Callable[[str], str | None]) -> None:
        """Indexes the redirects by the keys of their URLs; only the first rule of a key counts."""
        self._by_key = {key_of(url): rule for url, rule in reversed(self.rules.items())}

    def of(self, key: str, *, exists: bool) -> Redirect | None:
        """Returns the redirect of the URL with this key; None if it has none."""
        if key in self._by_key:
            redirect, forced = self._by_key[key]
            return redirect if (forced or not exists) and 300 <= (redirect.status or 301) < 400 else None
        redirect_by_pattern = None if exists else self._matching(key)
        if redirect_by_pattern is None or not 300 <= redirect_by_pattern.status < 400:
            return None
        return redirect_by_pattern

    def serves(self, key: str) -> bool:
        """Returns whether a rule serves another file for this key without a redirect."""
        rule = self._by_key.get(key)
        redirect = rule[0] if rule else self._matching(key)
        return redirect is not None and redirect.status == 200

    def _matching(self, key: str) -> Redirect | None:
        for pattern, redirect in self.patterns:
            if match := pattern.fullmatch(f"/{key}"):
                target = redirect.target
                for name, value in match.groupdict().items():
                    target = target.replace(f":{name}", value)
                return Redirect(redirect.url, target, redirect.status, redirect.how)
        return None


def parse_redirects(text: str, base: str) -> RedirectRules:
    """Parses a file `_redirects`."""
    result = RedirectRules()
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) < 2 or not words[0].startswith(("/", "http")):
            result.problems.append((number, f"not understood: {line.strip()[:80]!r}"))
            continue
        path, target, *rest = words
        status = next((word for word in rest if re.fullmatch(r"[1-5]\d\d!?", word)), "301")
        how = f"_redirects, line {number}"
        url, target = joined(base, path), joined(base, target)
        if "*" in path or "/:" in path:
            if (pattern := _pattern(path)) is None:
                result.problems.append((number, f"not understood: {line.strip()[:80]!r}"))
            else:
                result.patterns.append((pattern, Redirect(url, target, int(status[:3]), how)))
        else:
            result.add(url, target, int(status[:3]), how, forced=status.endswith("!"))
    return result


def _pattern(path: str) -> re.Pattern[str] | None:
    """Compiles a path to a pattern that matches in linear time: `:name` ends at a slash; one `*` may end the path."""
    if path.count("*") > 1 or ("*" in path and not path.endswith("*")):
        return None
    parts, names = [], set[str]()
    for part in path.removesuffix("*").split("/"):
        name = part[1:]
        if part.startswith(":") and name.isidentifier() and name.isascii() and name not in names:
            names.add(name)
            parts.append(f"(?P<{name}>[^/]+)")
        else:
            parts.append(re.escape(part))
    if "splat" in names:
        return None
    return re.compile("/".join(parts).removesuffix("/") + (r"(?:/(?P<splat>.*))?" if path.endswith("*") else ""))
