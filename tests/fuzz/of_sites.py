"""Readers of sites: HTML, sitemaps, robots.txt, redirects, reports, answers of web servers, and folders of models."""

from __future__ import annotations

import http.server
import json
import threading
from pathlib import Path
from typing import Any

from fuzz.reader import Reader, write
from unisono.errors import UnisonoError

_PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>A page about walking boots</title>
<base href="/"><link rel="canonical" href="https://example.org/page.html">
<link rel="alternate" hreflang="de" href="https://example.org/de.html">
<meta name="description" content="Boots for walking &amp; more"><meta name="robots" content="index, max-snippet:-1">
<script type="application/ld+json">{"@context": "https://schema.org", "@type": "Article", "headline": "Boots",
"author": {"@type": "Person", "name": "A"}, "image": ["a.png"], "@graph": [{"@type": ["Product", "Thing"]}]}</script>
</head><body><h1>Walking boots</h1><h2>Size</h2><p>The boots are good. They last for years.</p>
<div itemscope itemtype="https://schema.org/Product"><span itemprop="name">Boot</span></div>
<img src="a.png" alt=""><a href="other.html">Other</a><a href="//evil.test/x" rel="nofollow">x</a></body></html>
"""
_OTHER = (
    "<html><head><title>Other</title></head><body><p>Another page, with words.</p><a href=page.html>b</a></body></html>"
)
_SITEMAP = """<?xml version="1.0" encoding="UTF-8"?>
<urlset xmlns="http://www.sitemaps.org/schemas/sitemap/0.9">
<url><loc>https://example.org/page.html</loc><lastmod>2024-01-01</lastmod></url>
<url><loc>https://example.org/other.html</loc></url></urlset>
"""
_ROBOTS = (
    "User-agent: *\nDisallow: /private/*.html$\nAllow: /\nCrawl-delay: 1\n\nUser-agent: unisono\nDisallow:\n"
    "Sitemap: https://example.org/sitemap.xml\n"
)
_REDIRECTS = "/old /page.html 301\n/a/* /other.html 302!\n/:name/x https://example.org/:name\n# a comment\n"
_SITE = {
    "page.html": _PAGE,
    "other.html": _OTHER,
    "sitemap.xml": _SITEMAP,
    "robots.txt": _ROBOTS,
    "_redirects": _REDIRECTS,
}
_HTML_WORDS = (
    *(b"<script>", b"</script>", b"<!--", b"]]>", b"<![CDATA[", b"<svg><style>", b"<table><td>", b"<a href='", b"&#0;"),
    *(b"&#xD800;", b"<div>" * 300, b"<b " + b"a=1 " * 300, b'<meta charset="utf-7">', b'<meta charset="x">', b"<base>"),
    *(b'{"@graph": [[[', b'"@type": {"@type": []}', b'href="http://[::1"', b"itemscope itemref=a", b"\xc3\x28"),
)
_XML_WORDS = (
    *(b"<loc>", b"</loc>", b"<sitemapindex>", b'<!DOCTYPE x [<!ENTITY a SYSTEM "../outside/secret.txt">]>', b"&a;"),
    *(b'<!DOCTYPE x [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;&a;">]>', b"&b;", b"<url/>", b"file:///etc/passwd", b"<?xml"),
)
_ROBOTS_WORDS = (b"User-agent: unisono\n", b"Disallow: /*a*a*a*a*a*a*a*a*$\n", b"Crawl-delay: nan\n", b"Allow: %zz\n")


def _analyse(folder: Path) -> None:
    from unisono.recipes.seo.site.analysis import analyse
    from unisono.recipes.seo.site.keywords import read_keywords
    from unisono.recipes.seo.site.pages import open_site
    from unisono.recipes.seo.site.report import html, write_report

    findings = analyse(open_site(str(folder)), read_keywords("boots"), ["walking boots"])
    report = folder / "made"
    report.mkdir()
    json.dumps(findings.to_json())
    write_report(report, findings)
    html(findings, report)


def _read_sitemap(folder: Path) -> None:
    from unisono.recipes.seo.data.site import addresses_in, pages_of
    from unisono.recipes.seo.site.technical.sitemaps import read_sitemaps

    content = (folder / "sitemap.xml").read_bytes()
    read_sitemaps(["https://example.org/sitemap.xml"], lambda url: content if url.endswith("sitemap.xml") else None)
    addresses_in(folder / "sitemap.xml")
    pages_of(folder / "sitemap.xml", leave_out_bad=True)


def _read_robots(folder: Path) -> None:
    from unisono.recipes.seo.site.technical.robots_txt import parse_robots

    robots = parse_robots((folder / "robots.txt").read_bytes())
    for url in ("https://example.org/private/x.html", "https://example.org/" + "a" * 2000, "https://example.org/%ff"):
        robots.allows(url, "unisono"), robots.rule_of(url, "Googlebot")
    robots.delay_of("unisono")


def _read_redirects(folder: Path) -> None:
    from unisono.recipes.seo.site.technical.redirect_rules import parse_redirects

    rules = parse_redirects((folder / "_redirects").read_text(errors="replace"), "https://example.org/")
    for key in ("/old", "/a/b/c", "/" + "a/" * 1000, "/x/x"):
        rules.of(key, exists=False)


def _read_html(folder: Path) -> None:
    from unisono.recipes.seo.data.pages import parse_page
    from unisono.recipes.seo.site.page_rules import check_page

    check_page(parse_page((folder / "page.html").read_bytes(), "page.html"), ["boots"])


def _read_snippets(folder: Path) -> None:
    from unisono.recipes.seo.data.snippets import read_snippets

    for write_what in ("title", "description"):
        read_snippets(folder / "site.txt", write_what, leave_out_bad=True)  # type: ignore[arg-type]


def _crawl(folder: Path) -> None:
    """Crawls a real server whose answers, with status line and headers, are the files."""
    from unisono.recipes.seo.site.crawling.crawler import Limits, crawl
    from unisono.recipes.seo.site.fetching import Fetcher

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.partition("?")[0].lstrip("/") or "index"
            path = folder / name
            data = path.read_bytes() if name in _ANSWERS else b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"
            self.wfile.write(data)
            self.close_connection = True

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            fetcher = Fetcher(private_hosts=["127.0.0.1"], seconds=5.0)
            crawl(f"http://127.0.0.1:{server.server_port}/", fetcher, Limits(), sleep=lambda seconds: None)
        finally:
            server.shutdown()
            thread.join()


def _answer(content: str, kind: str = "text/html; charset=utf-8", *headers: str) -> bytes:
    body = content.encode()
    lines = ["HTTP/1.1 200 OK", f"Content-Type: {kind}", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


_ANSWERS = {
    "index": _answer(_PAGE),
    "other.html": _answer(_OTHER, "text/html", 'Link: </page.html>; rel="canonical"'),
    "page.html": b"HTTP/1.1 301 Moved\r\nLocation: /other.html\r\nContent-Length: 0\r\n\r\n",
    "robots.txt": _answer("User-agent: *\nDisallow: /private\n", "text/plain"),
    "sitemap.xml": _answer(_SITEMAP, "application/xml", "X-Robots-Tag: noindex"),
}
_HTTP_WORDS = (
    *(b"HTTP/1.1 302 Found\r\n", b"Location: file:///etc/passwd\r\n", b"Location: http://169.254.169.254/\r\n"),
    *(
        b"Content-Length: -1\r\n",
        b"Transfer-Encoding: chunked\r\n",
        b"Content-Encoding: gzip\r\n",
        b"Location: //[x/\r\n",
    ),
    *(b"Content-Type: text/html; charset=undefined\r\n", b"HTTP/9.9 999999\r\n", b"\r\n\r\n", b"Location: /%00\r\n"),
)


def _write_report(folder: Path) -> None:
    write(_SITE)(folder / "site")
    _analyse(folder / "site")
    (folder / "report.json").write_bytes((folder / "site" / "made" / "report.json").read_bytes())


def _read_report(folder: Path) -> None:
    from unisono.recipes.seo.site.changes import compare, read_earlier

    earlier = read_earlier(folder / "report.json")
    compare(earlier, [], [])


_MODEL = {
    "config.json": json.dumps({"model_type": "bert", "hidden_size": 32, "architectures": ["BertModel"]}),
    "model.safetensors.index.json": json.dumps({"weight_map": {"a": "model-1.safetensors"}}),
    "model-1.safetensors": b"\x08\0\0\0\0\0\0\0{}      ",
    "modules.json": json.dumps(
        [
            {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
            {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        ]
    ),
    "1_Pooling/config.json": json.dumps({"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True}),
    "config_sentence_transformers.json": json.dumps({"prompts": {"query": "query: "}, "default_prompt_name": None}),
    "sentence_bert_config.json": json.dumps({"max_seq_length": 128}),
}


def _read_model(folder: Path) -> None:
    from unisono.recipes.seo.models.folders import check_folder, read_layout

    check_folder(folder, "model")
    read_layout(folder, "model")


def _unreadable() -> tuple[type[Exception], ...]:
    from unisono.recipes.seo.site.fetching import Unreadable

    return UnisonoError, Unreadable


READERS = [
    Reader("html", "unisono.recipes.seo.data.pages", write({"page.html": _PAGE}), _read_html, words=_HTML_WORDS),
    Reader(
        "site",
        "unisono.recipes.seo.site.gathering",
        write(_SITE),
        _analyse,
        words=(*_HTML_WORDS, *_XML_WORDS, *_ROBOTS_WORDS),
    ),
    Reader(
        "sitemap",
        "unisono.recipes.seo.site.technical.sitemaps",
        write({"sitemap.xml": _SITEMAP, "page.html": _PAGE, "other.html": _OTHER}),
        _read_sitemap,
        damaged=("sitemap.xml",),
        words=_XML_WORDS,
    ),
    Reader(
        "robots",
        "unisono.recipes.seo.site.technical.robots_txt",
        write({"robots.txt": _ROBOTS}),
        _read_robots,
        words=_ROBOTS_WORDS,
    ),
    Reader(
        "redirects",
        "unisono.recipes.seo.site.technical.redirect_rules",
        write({"_redirects": _REDIRECTS}),
        _read_redirects,
        words=(b"/:a/:b/* ", b" 999!\n", b"http://[x ", b"/* /:splat\n"),
    ),
    Reader(
        "snippets",
        "unisono.recipes.seo.data.snippets",
        write({"site.txt": "page.html\nother.html\n", "page.html": _PAGE, "other.html": _OTHER}),
        _read_snippets,
        words=(*_HTML_WORDS, b"../outside/secret.html\n", b"/etc/passwd\n"),
    ),
    Reader(
        "web_server",
        "unisono.recipes.seo.site.crawling.crawler",
        write(_ANSWERS),
        _crawl,
        errors=_unreadable(),
        words=_HTTP_WORDS,
    ),
    Reader("seo_report", "unisono.recipes.seo.site.changes", _write_report, _read_report, damaged=("report.json",)),
    Reader("model_folder", "unisono.recipes.seo.models.folders", write(_MODEL), _read_model),
]
