"""Parses untrusted URLs: for an invalid URL, these functions return a value where Python's raise ValueError."""

from __future__ import annotations

from urllib.parse import urljoin, urlsplit


def joined(base: str, link: str) -> str:
    """Returns the absolute URL of a link; the link itself if it is not a valid URL, such as `http://[x`."""
    try:
        return urljoin(base, link)
    except ValueError:
        return link


def path_of(url: str) -> str:
    """Returns the path of a URL; empty if the URL is invalid."""
    try:
        return urlsplit(url).path
    except ValueError:
        return ""


def host_of(url: str) -> str | None:
    """Returns the host name of a URL; None if the URL has none or is invalid."""
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None
