"""`unisono seo URL --crawl` crawls a real server: one host, within limits, obeying robots.txt."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from test_seo_technical import html, links
from unisono.cli.main import main
from unisono.recipes.seo.site.crawling.crawler import Limits, crawl
from unisono.recipes.seo.site.crawling.frontier import Frontier, normalised
from unisono.recipes.seo.site.fetching import Fetcher

Response = str | tuple[int, dict[str, str], str]


class Server:
    """A web server on this machine that answers with these pages and records its requests."""

    def __init__(self, answer: Callable[[str], Response | None]) -> None:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.requests.append((self.path, time.monotonic(), self.headers["User-Agent"]))
                found = answer(self.path)
                status, headers, body = (
                    (404, {}, "no") if found is None else (200, {}, found) if isinstance(found, str) else found
                )
                content = body.encode()
                self.send_response(status)
                for name, value in {"Content-Type": "text/html", **headers}.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                pass

        self.requests: list[tuple[str, float, str]] = []
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def paths(self) -> list[str]:
        return [path for path, _, _ in self.requests]

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


@pytest.fixture
def serve() -> Iterator[Callable[[dict[str, Response]], Server]]:
    servers: list[Server] = []

    def start(pages: dict[str, Response] | Callable[[str], Response | None]) -> Server:
        servers.append(Server(pages if callable(pages) else pages.get))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def page(name: str, head: str = "", body: str = "") -> str:
    return html(name, head, body, canonical="")


def crawled(server: Server, out: Path, *more: str, start: str = "/") -> dict[str, Any]:
    words = ["seo", f"{server.url}{start}", "--crawl", "--delay", "0", "--output", str(out), *more]
    assert main(words) == 0
    report: dict[str, Any] = json.loads((out / "report.json").read_text())
    return report


def found(report: dict[str, Any], server: Server) -> set[tuple[str, str]]:
    usual = {"canonical", "text length", "readability", "one h1", "heading order"}
    pairs = {(each["kind"], each["page"].removeprefix(server.url)) for each in report["findings"]}
    return {pair for pair in pairs if pair[0] not in usual}


def test_a_crawl_finds_what_only_the_server_knows(
    serve: Callable[..., Server], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = serve({"/": page("elsewhere"), "/secret": page("secret")})
    site: dict[str, Response] = {}
    server = serve(site)
    site |= {
        "/": page("home", body=links("/a", "/b?x=1", "/gone", "/old", "/loop1", "/out", "/private/x", elsewhere.url)),
        "/a": (200, {"X-Robots-Tag": "googlebot: noindex"}, page("a", body=links("/", "/file.pdf", "/error"))),
        "/b?x=1": page("b", body='<a href="/hidden" rel="nofollow">Hidden page</a>'),
        "/old": (301, {"Location": "/older"}, ""),
        "/older": (302, {"Location": "/a#part"}, ""),
        "/loop1": (301, {"Location": "/loop2"}, ""),
        "/loop2": (301, {"Location": "/loop1"}, ""),
        "/out": (302, {"Location": f"{elsewhere.url}/secret"}, ""),
        "/file.pdf": (200, {"Content-Type": "application/pdf"}, "%PDF-1.7"),
        "/error": (500, {}, "no"),
        "/alone": page("alone"),
        "/private/x": page("private"),
        "/robots.txt": (
            200,
            {"Content-Type": "text/plain"},
            f"User-agent: *\nDisallow: /private\nSitemap: {server.url}/map.xml",
        ),
        "/map.xml": (
            200,
            {"Content-Type": "application/xml"},
            '<urlset xmlns="http://www.sitemaps.org/schemas/sitemap/0.9">'
            + "".join(
                f"<url><loc>{server.url}{name}</loc></url>" for name in ("/", "/alone", "/gone", "/old", "/b?x=1")
            )
            + "</urlset>",
        ),
    }
    report = crawled(server, tmp_path / "out")
    assert {each["page"].removeprefix(server.url) for each in report["pages"]} == {"/", "/a", "/b?x=1", "/alone"}
    assert found(report, server) == {
        ("broken link", "/"),
        ("broken link", "/a"),
        ("link to a redirect", "/"),
        ("link to a redirect loop", "/"),
        ("noindex", "/a"),
        ("orphan page", "/alone"),
        ("redirect chain", "/old"),
        ("temporary redirect", "/older"),
        ("temporary redirect", "/out"),
        ("redirect loop", "/loop1"),
        ("redirect loop", "/loop2"),
        ("sitemap entry is missing", "/map.xml"),
        ("sitemap entry redirects", "/map.xml"),
    }
    evidence = {each["evidence"] for each in report["findings"] if each["kind"] == "broken link"}
    assert any("answers 404" in each for each in evidence) and any("answers 500" in each for each in evidence)
    assert elsewhere.requests == []  # the crawl never leaves the host
    assert not {"/hidden", "/private/x"} & set(server.paths)
    assert len(server.paths) == len(set(server.paths)) and server.paths[0] == "/robots.txt"
    assert all(agent.startswith("unisono/") for _, _, agent in server.requests)
    assert "Skipped 1 URLs: disallowed by robots.txt." in report["remarks"]
    assert "fetched" in capsys.readouterr().out and (tmp_path / "out" / "findings.csv").exists()


def test_a_crawl_keeps_its_limits(serve: Callable[..., Server], tmp_path: Path) -> None:
    def endless(path: str) -> Response | None:
        if path == "/robots.txt":
            return None
        return page(
            path, body=links(f"{path}1", f"{path}2", f"{path.rstrip('/')}/again/", "//evil.example/", "ftp://x/")
        )

    server = serve(endless)
    report = crawled(server, tmp_path / "few", "--most_pages", "12")
    assert len([path for path in server.paths if path != "/sitemap.xml"]) == 12
    assert any("over the limit of --most_pages" in remark for remark in report["remarks"])
    assert "orphan page" not in {each["kind"] for each in report["findings"]}  # some pages are unknown
    server.requests.clear()
    crawled(server, tmp_path / "shallow", "--max_depth", "1")
    assert set(server.paths) == {"/robots.txt", "/sitemap.xml", "/", "/1", "/2", "/again/"}


def test_a_crawl_waits_between_requests_as_robots_txt_asks(serve: Callable[..., Server]) -> None:
    server = serve(
        {
            "/": page("home", body=links("/a", "/b")),
            "/a": page("a"),
            "/b": page("b"),
            "/robots.txt": (200, {"Content-Type": "text/plain"}, "User-agent: unisono\nCrawl-delay: 0.2\n"),
        }
    )
    crawl(server.url, Fetcher(["127.0.0.1"]), Limits(delay=0.0))
    times = [when for _, when, _ in server.requests]
    gaps = [after - before for before, after in pairwise(times[1:])]  # from the first page on
    assert len(gaps) == 3 and min(gaps) >= 0.19
    waits: list[float] = []
    crawl(server.url, Fetcher(["127.0.0.1"]), Limits(delay=30.0), waits.append)
    assert len(waits) == 4 and all(25 < wait <= 30 for wait in waits)


@pytest.mark.parametrize(
    ("robots", "start", "words"),
    [
        ((200, {}, "User-agent: *\nDisallow: /"), "/", "disallows it for unisono"),
        ((503, {}, ""), "/", "robots.txt cannot be read"),
        (None, "/away", "redirects to http://localhost"),
        (None, "/gone", "it answered 404"),
    ],
)
def test_what_cannot_be_crawled_is_one_line(
    robots: Response | None,
    start: str,
    words: str,
    serve: Callable[..., Server],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    site: dict[str, Response] = {} if robots is None else {"/robots.txt": robots}
    server = serve(site)
    site |= {"/": page("home"), "/away": (302, {"Location": server.url.replace("127.0.0.1", "localhost") + "/"}, "")}
    out = tmp_path / "out"
    assert main(["seo", f"{server.url}{start}", "--crawl", "--delay", "0", "--output", str(out)]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1 and not out.exists()


def test_a_crawl_of_another_name_does_not_reach_the_local_network(serve: Callable[..., Server]) -> None:
    """The guard checks the address to which it connects, so a public name of a private address is refused."""
    server = serve({"/": page("home")})
    from unisono.recipes.seo.site.fetching import Unreadable

    with pytest.raises(Unreadable, match="local network"):
        Fetcher(["www.example.com"]).answer(server.url)


def test_a_folder_is_not_crawled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "index.html").write_text(page("home"))
    assert main(["seo", str(tmp_path), "--crawl", "--output", str(tmp_path / "o")]) == 2
    assert "--crawl starts from a URL" in capsys.readouterr().err


def test_a_frontier_holds_only_urls_of_its_origin() -> None:
    frontier = Frontier("https://a.example")
    for url in ("https://a.example/x#y", "https://A.example:443/x", "http://a.example/x", "https://u:p@a.example/z"):
        frontier.add(url, 0)
    frontier.add("https://a.example:8443/", 0)
    frontier.add("https://a.example/" + "a/b/" * 9, 0)
    assert frontier.next() == ("https://a.example/x", 0) and frontier.next() is None
    assert frontier.skipped == {"probably endless": 1}
    assert normalised("https://[::1]:8080") == "https://[::1]:8080/" and normalised("https://a:b/") is None
