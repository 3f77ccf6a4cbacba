"""Pages from the web, carefully: http and https only, of limited size and time, never led to another host, and never to
an address of the local network whose host the user has not named.
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
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlsplit, urlunsplit

from unisono import __version__


class Unreadable(Exception):
    """A page that cannot be read; the message says why. The others are read all the same."""


@dataclass
class Fetcher:
    """Gets pages from the web, and remembers what it got."""

    private_hosts: Collection[str] = ()
    """Hosts that may be in the local network: those that the user has named."""
    seconds: float = 30.0
    """For a whole page."""
    largest: int = 5_000_000
    """Bytes of a page."""
    got: dict[str, int] = field(default_factory=dict)
    """Bytes fetched, by host."""

    def __post_init__(self) -> None:
        self._opener = urllib.request.OpenerDirector()  # an empty one: no file:, no ftp:, no proxy
        guard = _Guard(frozenset(host.lower() for host in self.private_hosts), min(10.0, self.seconds))
        errors = urllib.request.HTTPErrorProcessor(), urllib.request.HTTPDefaultErrorHandler()
        for handler in (_Web(guard), _SameHost(), *errors):
            self._opener.add_handler(handler)

    def get(self, url: str) -> bytes | str:
        """What an address answers: text where the server names its encoding."""
        until = time.monotonic() + self.seconds
        try:
            request = urllib.request.Request(_clean(url), headers={"User-Agent": f"unisono/{__version__}"})
            with self._opener.open(request, timeout=min(10.0, self.seconds)) as answer:
                if answer.headers.get("Content-Encoding", "identity").lower() != "identity":
                    raise Unreadable("came packed, which was not asked for")
                content = self._read(answer, until)
                charset = answer.headers.get_content_charset()
        except urllib.error.HTTPError as error:
            raise Unreadable(f"the server answers {error.code} {error.reason}") from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            raise Unreadable(f"cannot be fetched ({' '.join(str(reason).split())[:200]})") from None
        host = urlsplit(url).hostname or ""
        self.got[host] = self.got.get(host, 0) + len(content)
        return _decoded(content, charset)

    def _read(self, answer: Any, until: float) -> bytes:
        parts = io.BytesIO()
        while part := answer.read1(65536):
            parts.write(part)
            if parts.tell() > self.largest:
                raise Unreadable(f"larger than {self.largest / 1e6:g} MB")
            if time.monotonic() > until:
                raise Unreadable(f"not finished after {self.seconds:g} s")
        return parts.getvalue()


def names_somebody(url: str) -> bool:
    """Whether an address holds the name or the password of somebody."""
    try:
        return urlsplit(url.strip()).username is not None
    except ValueError:
        return "@" in url


def _clean(url: str) -> str:
    """The address with every sign allowed in a request; refuses what is no web address."""
    parts = urlsplit(url.strip())
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise Unreadable("no http(s) address")
    if names_somebody(url):
        raise Unreadable("holds a name or a password; take it out")
    host = parts.hostname.encode("idna").decode()
    where = f"[{host}]" if ":" in host else host
    where += f":{parts.port}" if parts.port else ""
    signs = "%/:=&?~+!$,;'@()*"
    return urlunsplit((parts.scheme, where, quote(parts.path, signs) or "/", quote(parts.query, signs), ""))


def _decoded(content: bytes, charset: str | None) -> bytes | str:
    """By what the server says, unless the file itself begins with a byte order mark."""
    if charset is None or content.startswith((codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return content
    try:
        return content.decode(charset, "replace")
    except (LookupError, ValueError):
        return content


@dataclass(frozen=True)
class _Guard:
    """Connects to public addresses, and to the hosts that were named."""

    named: frozenset[str]
    seconds: float

    def connect(self, host: str, port: int) -> socket.socket:
        # The address that was looked at is the one connected to: a name may answer otherwise a moment later.
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        for _, _, _, _, address in found:
            if host.lower() not in self.named and not _is_public(str(address[0])):
                raise Unreadable(
                    f"{host} is in a local network ({address[0]}); name it with --private_host to allow it"
                )
        error: OSError | None = None
        for _, _, _, _, address in found:
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
    """Opens http and https through the guard."""

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
            raise Unreadable(f"leads to another host ({newurl[:100]}), which is not followed")
        return super().redirect_request(req, fp, code, msg, headers, newurl)
