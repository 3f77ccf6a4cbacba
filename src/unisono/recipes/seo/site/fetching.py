"""Fetches pages over http or https, with limits on size and time.

Redirects to other hosts are not followed, and only hosts that the user named may have addresses in the local network.
"""

from __future__ import annotations

import codecs
import http.client
import io
import ipaddress
import socket
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlsplit, urlunsplit

from unisono import __version__

AGENT = "unisono"
"""User agent of unisono's requests. A crawl obeys the rules for this name in robots.txt."""


class Unreadable(Exception):
    """Raised if a page cannot be read; the message gives the reason."""


@dataclass(frozen=True)
class Answer:
    """A server's answer, which may be a redirect or an error."""

    status: int
    headers: Mapping[str, str]
    """Headers with names in lower case; repeated ones are joined by commas."""
    content: bytes | str
    """Empty unless the content type is wanted."""

    @property
    def kind(self) -> str:
        """The content type without parameters."""
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()


@dataclass
class Fetcher:
    """Fetches pages and counts the bytes per host."""

    private_hosts: Collection[str] = ()
    """Hosts named by the user, which may be in the local network."""
    seconds: float = 30.0
    """Time limit per page in seconds."""
    max_bytes: int = 5_000_000
    """Size limit per page in bytes."""
    fetched: dict[str, int] = field(default_factory=dict)
    """Number of bytes fetched from each host."""

    def __post_init__(self) -> None:
        self._opener = urllib.request.OpenerDirector()  # has no handlers for file:, ftp: and proxies
        guard = _Guard(frozenset(host.lower() for host in self.private_hosts), min(10.0, self.seconds))
        errors = urllib.request.HTTPErrorProcessor(), urllib.request.HTTPDefaultErrorHandler()
        for handler in (_Web(guard), _SameHost(), *errors):
            self._opener.add_handler(handler)
        self._plain_opener = urllib.request.OpenerDirector()  # follows no redirect
        self._plain_opener.add_handler(_Web(guard))

    def get(self, url: str) -> bytes | str:
        """Fetches the content of a URL; returns text if the server declares the encoding, otherwise bytes."""
        until = time.monotonic() + self.seconds
        try:
            with self._opener.open(_request(url), timeout=min(10.0, self.seconds)) as answer:
                content = self._content(answer, url, until)
        except urllib.error.HTTPError as error:
            raise Unreadable(f"the server answered {error.code} {error.reason}") from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise _not_fetched(error) from None
        return content

    def answer(self, url: str, wanted: Collection[str] = ()) -> Answer:
        """Returns the server's answer for a URL, whatever its status; does not follow redirects.

        The content is read only if the status is 200 and `wanted` is empty or contains the content type.
        """
        until = time.monotonic() + self.seconds
        try:
            with self._plain_opener.open(_request(url), timeout=min(10.0, self.seconds)) as answer:
                names = dict.fromkeys(name.lower() for name in answer.headers)
                headers = {name: ", ".join(answer.headers.get_all(name, [])) for name in names}
                found = Answer(answer.status, headers, b"")
                if answer.status != 200 or (wanted and found.kind not in wanted):
                    return found
                return Answer(answer.status, headers, self._content(answer, url, until))
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise _not_fetched(error) from None

    def _content(self, answer: Any, url: str, until: float) -> bytes | str:
        if answer.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise Unreadable("the server sent a compressed response, which was not requested")
        content = self._read(answer, until)
        host = urlsplit(url).hostname or ""
        self.fetched[host] = self.fetched.get(host, 0) + len(content)
        return _decoded(content, answer.headers.get_content_charset())

    def _read(self, answer: Any, until: float) -> bytes:
        parts = io.BytesIO()
        while part := answer.read1(65536):
            parts.write(part)
            if parts.tell() > self.max_bytes:
                raise Unreadable(f"larger than {self.max_bytes / 1e6:g} MB")
            if time.monotonic() > until:
                raise Unreadable(f"not finished after {self.seconds:g} s")
        return parts.getvalue()


def _request(url: str) -> urllib.request.Request:
    return urllib.request.Request(_clean(url), headers={"User-Agent": f"{AGENT}/{__version__}"})


def _not_fetched(error: Exception) -> Unreadable:
    reason = getattr(error, "reason", None) or error
    return Unreadable(f"could not be fetched ({' '.join(str(reason).split())[:200]})")


def has_credentials(url: str) -> bool:
    """Returns whether a URL contains a user name or a password."""
    try:
        return urlsplit(url.strip()).username is not None
    except ValueError:
        return "@" in url


def _clean(url: str) -> str:
    """Returns the URL with special characters quoted; raises Unreadable if it is not a web address."""
    parts = urlsplit(url.strip())
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise Unreadable("not an http(s) URL")
    if has_credentials(url):
        raise Unreadable("the URL contains a user name or a password; remove it")
    host = parts.hostname.encode("idna").decode()
    where = f"[{host}]" if ":" in host else host
    where += f":{parts.port}" if parts.port else ""
    signs = "%/:=&?~+!$,;'@()*"
    return urlunsplit((parts.scheme, where, quote(parts.path, signs) or "/", quote(parts.query, signs), ""))


def _decoded(content: bytes, charset: str | None) -> bytes | str:
    """Decodes the content with the declared encoding, unless it begins with a byte order mark."""
    if charset is None or content.startswith((codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return content
    try:
        return content.decode(charset, "replace")
    except (LookupError, ValueError):
        return content


@dataclass(frozen=True)
class _Guard:
    """Connects to public addresses, and to hosts that the user has named."""

    named: frozenset[str]
    seconds: float

    def connect(self, host: str, port: int) -> socket.socket:
        # Connects to the address that was checked: a second DNS lookup could return a different one.
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        for _, _, _, _, address in addresses:
            if host.lower() not in self.named and not _is_public(str(address[0])):
                raise Unreadable(
                    f"{host} is in a local network ({address[0]}); name it with --private_host to allow it"
                )
        error: OSError | None = None
        for _, _, _, _, address in addresses:
            try:
                return socket.create_connection((str(address[0]), port), timeout=self.seconds)
            except OSError as failed:
                error = failed
        raise error or OSError(f"{host} has no address")


def _is_public(address: str) -> bool:
    ip = ipaddress.ip_address(address.partition("%")[0])
    inner = (ip.ipv4_mapped or ip.sixtofour) if isinstance(ip, ipaddress.IPv6Address) else None
    return (inner or ip).is_global and not ip.is_multicast


class _Web(urllib.request.AbstractHTTPHandler):
    """Opens http and https connections through the guard."""

    def __init__(self, guard: _Guard) -> None:
        super().__init__()
        self._guard, self._tls = guard, ssl.create_default_context()
        self.http_request = self.https_request = self.do_request_

    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        guard = self._guard

        class Connection(http.client.HTTPConnection):
            def connect(self) -> None:
                self.sock = guard.connect(self.host, self.port)

        return self.do_open(Connection, request)

    def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        guard, tls = self._guard, self._tls

        class Connection(http.client.HTTPSConnection):
            def connect(self) -> None:
                self.sock = tls.wrap_socket(guard.connect(self.host, self.port), server_hostname=self.host)

        return self.do_open(Connection, request)


class _SameHost(urllib.request.HTTPRedirectHandler):
    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        old, new = urlsplit(req.full_url), urlsplit(newurl)
        to_https = (old.scheme, new.scheme) == ("http", "https") and old.port is None and new.port is None
        if new.hostname != old.hostname or ((new.scheme, new.port) != (old.scheme, old.port) and not to_https):
            raise Unreadable(f"redirects to another host ({newurl[:100]}), which is not followed")
        return super().redirect_request(req, fp, code, msg, headers, newurl)
