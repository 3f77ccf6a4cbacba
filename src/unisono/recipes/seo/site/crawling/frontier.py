"""The URLs that a crawl still has to visit, and the reasons for the URLs that it skips."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from urllib.parse import urlsplit, urlunsplit

_LONGEST_URL = 2_000
_MOST_REPEATED = 3  # a path with more repetitions, such as /a/b/a/b/a/b/a/b, usually comes from endless links


@dataclass
class Frontier:
    """URLs of one origin, in the order in which they were found."""

    origin: str
    """Scheme, host and port, such as https://example.com:8443."""
    max_waiting: int = 50_000
    skipped: Counter[str] = field(default_factory=Counter)
    """Number of skipped URLs, by reason."""

    def __post_init__(self) -> None:
        self._waiting: deque[tuple[str, int]] = deque()
        self._known = set[str]()

    def add(self, url: str, depth: int, *, first: bool = False) -> None:
        """Adds a URL if it is new and belongs to the origin."""
        normal = normalised(url)
        if normal is None or origin_of(normal) != self.origin or normal in self._known:
            return
        if len(self._known) >= self.max_waiting:
            self.skipped["too many URLs"] += 1
            return
        self._known.add(normal)
        segments = Counter(part for part in urlsplit(normal).path.split("/") if part)
        if len(normal) > _LONGEST_URL or max(segments.values(), default=0) > _MOST_REPEATED:
            self.skipped["probably endless"] += 1
            return
        if first:
            self._waiting.appendleft((normal, depth))
        else:
            self._waiting.append((normal, depth))

    def next(self) -> tuple[str, int] | None:
        """Removes and returns the next URL and its depth; None if no URL is left."""
        return self._waiting.popleft() if self._waiting else None

    def __len__(self) -> int:
        return len(self._waiting)


def normalised(url: str) -> str | None:
    """Normalises a URL: no fragment, no default port, scheme and host in lower case; None if it is not http(s)."""
    try:
        parts = urlsplit(url.strip())
        port = parts.port
    except ValueError:
        return None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
        return None
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    if port and port != {"http": 80, "https": 443}[parts.scheme]:
        host += f":{port}"
    return urlunsplit((parts.scheme, host, parts.path or "/", parts.query, ""))


def origin_of(url: str) -> str:
    """Returns scheme, host and port of a normalised URL."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"
