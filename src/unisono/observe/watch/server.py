"""Serves the live page on this machine, with the standard library's server.

The page shows the contents of run folders, which may be private. By default the server listens on 127.0.0.1, and
answers only requests whose host name is this machine: otherwise a web site could resolve its own name to 127.0.0.1 and
read the page. On any other address, and with --token also on 127.0.0.1, a request needs the token: the first request
takes it from the printed address, later requests from a cookie.
"""

from __future__ import annotations

import gzip
import ipaddress
import json
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

from unisono.errors import UserError
from unisono.formatting import printable, shorten
from unisono.observe.watch.folder_of_runs import Runs
from unisono.observe.watch.page import Parts, RunView, changed_parts, list_parts, whole_page

PORT = 8420
_EVERY_S = 0.5  # the run folders are read at most this often, however many browsers ask
_TIMEOUT_S = 30.0


class Site:
    """The pages of a set of runs."""

    def __init__(self, runs: Runs, clock: Callable[[], float] = time.monotonic) -> None:
        self._runs, self._clock = runs, clock
        self._lock = Lock()
        self._updated_at = float("-inf")
        self._views: dict[str, RunView] = {}

    def page(self, path: str, name: str | None) -> str | None:
        """Returns the whole page at `path`; None if there is none."""
        with self._lock:
            shown = self._parts(path, name)
            if shown is None:
                return None
            title, parts = shown
            state = "state" if name is None else f"state?name={quote(name, safe='')}"
            return whole_page(title, parts, state, home=name is not None)

    def state(self, name: str | None, seen: dict[str, str]) -> dict[str, Any] | None:
        """Returns the parts that have changed; `seen` are the digests of the parts that the browser shows."""
        with self._lock:
            shown = self._parts("/" if name is None else "/run", name)
            if shown is None:
                return None
            title, parts = shown
            return {"title": title, "parts": changed_parts(parts, seen)}

    def _parts(self, path: str, name: str | None) -> tuple[str, Parts] | None:
        now = self._clock()
        if now - self._updated_at >= _EVERY_S:
            self._runs.update()
            self._updated_at = self._clock()
        if path == "/" and name is None and not self._runs.is_one_run:
            return "Runs · unisono", list_parts(self._runs)
        if name is None:
            name = next(iter(self._runs.by_name), None)
        run = self._runs.by_name.get(name) if name is not None else None
        if run is None or name is None:
            return None
        view = self._views.get(name)
        if view is None or view.run is not run:
            view = self._views[name] = RunView(run, name)
        step = f"{run.step:,} of {run.total_steps:,}" if run.total_steps else f"{run.step:,}"
        return f"{step} · {shorten(printable(name), 60)} · {run.state[0]}", view.parts()


@contextmanager
def serving(runs: Runs, host: str, port: int, *, with_token: bool = False) -> Iterator[tuple[ThreadingHTTPServer, str]]:
    """Opens the port; yields the server, and the address to open in a browser. Raises UserError if that fails."""
    is_local = _is_loopback(host)
    token = "" if is_local and not with_token else secrets.token_urlsafe(18)
    handler = type("Handler", (_Handler,), {"site": Site(runs), "token": token, "only_local_names": is_local})
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        kind = type("Server", (_Server,), {"address_family": family})
        server = kind((host, port), handler)
    except (OSError, UnicodeError) as error:
        raise UserError(_why_not(host, port, error)) from None
    with server:
        shown = f"[{host}]" if ":" in host else host
        if host in ("0.0.0.0", "::", ""):
            shown = socket.gethostname()
        yield server, f"http://{shown}:{server.server_port}/" + (f"?token={token}" if token else "")


def _why_not(host: str, port: int, error: OSError | UnicodeError) -> str:
    if isinstance(error, UnicodeError | socket.gaierror):
        return f"--host {host}: there is no such address on this machine; use 127.0.0.1, or 0.0.0.0 for all"
    reason = error.strerror or error
    if error.errno == 98 or "in use" in str(reason).lower():
        return f"port {port} is in use; choose another one with --web PORT, or any free one with --web 0"
    if isinstance(error, PermissionError):
        return f"port {port} requires root privileges; choose one above 1023 with --web PORT"
    return f"--host {host}, port {port}: cannot listen there ({reason}); use --host 127.0.0.1"


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Prints nothing, because a browser may close a connection at any time."""


class _Handler(BaseHTTPRequestHandler):
    site: Site
    token: str
    only_local_names: bool
    server_version, sys_version = "unisono", ""
    protocol_version = "HTTP/1.1"
    timeout = _TIMEOUT_S

    def do_GET(self) -> None:
        """Answers a request of the browser."""
        address = urlsplit(self.path)
        query = parse_qs(address.query, max_num_fields=20)
        name = query.get("name", [None])[0]
        if self.only_local_names and not _names_this_machine(self.headers.get("Host", "")):
            return self._refuse(HTTPStatus.FORBIDDEN, "This server answers only at 127.0.0.1 and localhost.")
        if self.token and not self._has_token(query.get("token", [""])[0]):
            return self._refuse(
                HTTPStatus.FORBIDDEN, "Open the address that unisono watch has printed; it contains the token."
            )
        if self.token and "token" in query:  # keep it out of the history and of screenshots
            return self._send(HTTPStatus.SEE_OTHER, b"", "text/plain", Location="./", **self._cookie())
        if address.path in ("/", "/run"):
            page = self.site.page(address.path, name)
            if page is not None:
                return self._send(HTTPStatus.OK, page.encode("utf-8", "replace"), "text/html")
        if address.path == "/state":
            pairs = (each.partition(":") for each in query.get("seen", [""])[0].split(",")[:50])
            state = self.site.state(name, {part: digest for part, _, digest in pairs})
            if state is not None:
                return self._send(HTTPStatus.OK, json.dumps(state).encode("utf-8", "replace"), "application/json")
        return self._refuse(HTTPStatus.NOT_FOUND, "There is no such page; the run may have been removed.")

    def _has_token(self, given: str) -> bool:
        try:
            cookie = SimpleCookie(self.headers.get("Cookie", "")).get(self._cookie_name())
        except CookieError:
            cookie = None
        return any(
            secrets.compare_digest(text.encode("utf-8", "replace"), self.token.encode())
            for text in (given, cookie.value if cookie else "")
        )

    def _cookie_name(self) -> str:
        return f"unisono_{self.connection.getsockname()[1]}"  # cookies do not distinguish ports

    def _cookie(self) -> dict[str, str]:
        return {"Set-Cookie": f"{self._cookie_name()}={self.token}; HttpOnly; SameSite=Lax; Path=/"}

    def _refuse(self, status: HTTPStatus, text: str) -> None:
        self._send(status, text.encode(), "text/plain")

    def _send(self, status: HTTPStatus, body: bytes, kind: str, **headers: str) -> None:
        if len(body) > 1000 and "gzip" in self.headers.get("Accept-Encoding", ""):
            body, headers = gzip.compress(body, 1), {**headers, "Content-Encoding": "gzip"}
        self.send_response(status)
        always = {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(body)),
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
        }
        for name, value in {**always, **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Prints no line per request."""


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _names_this_machine(host: str) -> bool:
    name = host[: host.index("]") + 1] if host.startswith("[") and "]" in host else host.partition(":")[0]
    return _is_loopback(name.strip("[]").lower())
