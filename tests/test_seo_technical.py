"""The technical checks of `unisono seo` find each planted problem, and nothing on a healthy site."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from test_report import Page
from unisono.cli.main import main
from unisono.recipes.seo.site.technical.codes import problem_of
from unisono.recipes.seo.site.technical.pixels import TITLE_FONT, pixels
from unisono.recipes.seo.site.technical.redirect_rules import parse_redirects
from unisono.recipes.seo.site.technical.robots_txt import parse_robots

HOST = "https://www.garden.example"


def html(name: str, head: str = "", body: str = "", canonical: str | None = None) -> str:
    url = f"{HOST}/{name.removesuffix('index.html')}" if canonical is None else canonical
    link = f'<link rel="canonical" href="{url}">' if url else ""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Page {name}</title>'
        f'<meta name="description" content="What {name} is about">{link}{head}</head>'
        f"<body><h1>{name}</h1><p>{f'Words about {name} in a garden. ' * 25}</p>{body}</body></html>"
    )


def links(*names: str) -> str:
    return "".join(f'<a href="{name}">All about {name}</a> ' for name in names)


def make(folder: Path, pages: dict[str, str], *, sitemap: list[str] | None = None, **files: str) -> Path:
    """A site whose first page links to all others; `sitemap` lists names or URLs."""
    for name, content in pages.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    if sitemap is not None:
        urls = [each if "://" in each else f"{HOST}/{each.removesuffix('index.html')}" for each in sitemap]
        entries = "".join(f"<url><loc>{url}</loc></url>" for url in urls)
        (folder / "sitemap.xml").write_text(
            f'<urlset xmlns="http://www.sitemaps.org/schemas/sitemap/0.9">{entries}</urlset>'
        )
    for name, content in files.items():
        (folder / {"robots": "robots.txt", "redirects": "_redirects"}[name]).write_text(content)
    return folder


def report_of(site: Path, out: Path, *more: str) -> dict[str, Any]:
    assert main(["seo", str(site), "--output", str(out), *more]) == 0
    report: dict[str, Any] = json.loads((out / "report.json").read_text())
    return report


CHECKS = {"text length", "readability", "one h1", "heading order", "same description"}


def found(site: Path, out: Path, *more: str) -> set[tuple[str, str]]:
    """Kind and page of all findings, without those about the text of pages."""
    findings = report_of(site, out, *more)["findings"]
    assert all(each["evidence"] and each["fix"] and each["severity"] for each in findings)
    return {(each["kind"], each["page"]) for each in findings if each["kind"] not in CHECKS}


def test_a_healthy_site_has_no_finding(tmp_path: Path) -> None:
    product = json.dumps(
        {
            "@context": "https://schema.org",
            "@graph": [
                {
                    "@type": "Product",
                    "name": "Spade",
                    "image": "a.png",
                    "description": "d",
                    "brand": {"@type": "Brand", "name": "B"},
                    "offers": {"@type": "Offer", "price": 3, "priceCurrency": "EUR", "availability": "InStock"},
                }
            ],
        }
    )
    both = "".join(
        f'<link rel="alternate" hreflang="{code}" href="{HOST}/{name}">'
        for code, name in (("en", "en.html"), ("de-AT", "de"), ("x-default", "en"))
    )
    pages = {
        "index.html": html(
            "index.html", body=links("en", "de.html", "/shop/", f"{HOST}/old", "https://other.example/")
        ),
        "en.html": html("en.html", both, links("/")),
        "de.html": html("de.html", both, links("./", "#top", "mailto:a@b.example")),
        "shop/index.html": html(
            "shop/index.html",
            f'<script type="application/ld+json">{product}</script>',
            '<div itemscope itemtype="https://schema.org/Recipe"><span itemprop="name">Soup</span>'
            '<img itemprop="image" src="/x.png" alt="soup"><i itemprop="recipeIngredient">a</i>'
            '<i itemprop="recipeInstructions">b</i><i itemprop="totalTime">PT5M</i></div>',
        ),
    }
    site = make(tmp_path / "s", pages, sitemap=list(pages), robots=f"User-agent: *\nSitemap: {HOST}/sitemap.xml\n")
    (site / "old").write_text("a file")
    assert found(site, tmp_path / "out") == set()


def test_each_planted_problem_is_found_once_on_its_page(tmp_path: Path) -> None:
    alternate = '<link rel="alternate" hreflang="{}" href="{}">'
    offer = '{"@context": "https://schema.org", "@type": ["Product"], "name": "Spade", "review": {"@type": "Review"}}'
    pages = {
        "index.html": html("index.html", body=links(*(f"p{number}.html" for number in range(20)), "gone.html", "/a")),
        "p0.html": html("p0.html", '<meta name="robots" content="noindex, index">'),
        "p1.html": html("p1.html", canonical=f"{HOST}/nowhere"),
        "p2.html": html("p2.html", f'<link rel="canonical" href="{HOST}/p3.html">'),
        "p3.html": html("p3.html", canonical=f"{HOST}/p0.html"),
        "p4.html": html("p4.html", canonical=f"{HOST}/p5.html"),
        "p5.html": html("p5.html", canonical=f"{HOST}/p6.html"),
        "p6.html": html("p6.html", alternate.format("en-UK", "/p6.html") + alternate.format("de", "/p7.html")),
        "p7.html": html("p7.html", alternate.format("de", "p7.html")),
        "p8.html": html("p8.html", alternate.format("fr", f"{HOST}/fr-gone")),
        "p9.html": html("p9.html", f'<script type="application/ld+json">{offer}</script>'),
        "p10.html": html("p10.html", '<script type="application/ld+json">{"@type": Product}</script>'),
        "p11.html": html("p11.html", body='<div itemscope itemtype="http://schema.org/Event"><b itemprop="name">E</b>'),
        "p12.html": html("p12.html", '<meta http-equiv="refresh" content="0; URL=\'/p13.html\'">'),
        "p13.html": html("p13.html", '<meta name="googlebot" content="nofollow">'),
        "p14.html": html("p14.html", canonical=f"{HOST}/r1"),
        "p15.html": html("p15.html", canonical="https://other.example/x"),
        "p16.html": html("p16.html", '<meta name="robots" content="none">'),
        "p17.html": html("p17.html", body='<a href="p18.html"></a><a href="/p19">click here</a>'),
        "p18.html": html("p18.html", body=f'<link rel="canonical" href="{HOST}/p18.html">', canonical=""),
        "p19.html": html("p19.html", body='<a rel="nofollow" href="p18">Page eighteen</a><img src="x.png">'),
        "alone.html": html("alone.html").replace("<title>", "<title>" + "WWWW " * 11),
    }
    listed = [name for name in pages if name not in ("p7.html", "p12.html", "p15.html")]
    site = make(
        tmp_path / "s",
        pages,
        sitemap=[*listed, "lost.html", "https://other.example/p1", "r1"],
        robots="User-agent: *\nDisallow: /p16\nDisalow: /x\nUser-agent: unisono\nDisallow: /\n"
        f"Sitemap: {HOST}/sitemap.xml",
        redirects="/r1 /r2 302\n/r2 /p17.html\n/a /b\n/b /a\n/c /gone2 301\nwhat\n/p6.html /p7.html\n",
    )
    assert found(site, tmp_path / "out") == {
        ("noindex", "p0.html"),
        ("contradicting robots directives", "p0.html"),
        ("noindex page in the sitemap", "p0.html"),
        ("canonical is missing", "p1.html"),
        ("several canonical URLs", "p2.html"),
        ("canonical to a noindex page", "p3.html"),
        ("canonical chain", "p4.html"),
        *(("non-canonical page in the sitemap", f"p{number}.html") for number in (3, 4, 5)),
        ("non-canonical page in the sitemap", "p14.html"),
        ("hreflang: invalid code", "p6.html"),
        ("hreflang: no return link", "p6.html"),
        ("not in a sitemap", "p7.html"),
        ("hreflang: page is missing", "p8.html"),
        ("hreflang: page does not name itself", "p8.html"),
        ("structured data: required field missing", "p9.html"),
        ("structured data: recommended field missing", "p9.html"),
        ("invalid structured data", "p10.html"),
        ("structured data: required field missing", "p11.html"),
        ("structured data: recommended field missing", "p11.html"),
        ("redirect by meta refresh", "p12.html"),
        ("nofollow", "p13.html"),
        ("canonical redirects", "p14.html"),
        ("canonical on another site", "p15.html"),
        ("noindex", "p16.html"),
        ("nofollow", "p16.html"),
        ("blocked by robots.txt", "p16.html"),
        ("noindex is not seen", "p16.html"),
        ("noindex page in the sitemap", "p16.html"),
        ("blocked page in the sitemap", "p16.html"),
        ("link without text", "p17.html"),
        ("link text says nothing", "p17.html"),
        ("canonical outside of head", "p18.html"),
        ("internal nofollow link", "p19.html"),
        ("image texts", "p19.html"),
        ("orphan page", "alone.html"),
        ("title is too wide", "alone.html"),
        ("title", "alone.html"),
        ("broken link", "index.html"),
        ("link to a redirect loop", "index.html"),
        ("link to a redirect", "index.html"),
        ("redirect chain", f"{HOST}/r1"),
        ("temporary redirect", f"{HOST}/r1"),
        ("redirect loop", f"{HOST}/a"),
        ("redirect loop", f"{HOST}/b"),
        ("redirect to a missing page", f"{HOST}/c"),
        ("_redirects", "_redirects"),
        ("robots.txt", "robots.txt"),
        ("sitemap entry is missing", "sitemap.xml"),
        ("sitemap entry of another site", "sitemap.xml"),
        ("sitemap entry redirects", "sitemap.xml"),
    }
    table = list(csv.DictReader((tmp_path / "out" / "findings.csv").open()))
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert [row["kind"] for row in table] == [each["kind"] for each in report["findings"]]
    order = [row["severity"] for row in table]
    assert order == sorted(order, key=["error", "warning", "notice"].index) and set(order) == {
        "error",
        "warning",
        "notice",
    }
    [broken] = [each for each in report["findings"] if each["kind"] == "broken link"]
    assert "/gone.html does not exist" in broken["evidence"] and "All about gone.html" in broken["evidence"]
    [pair] = [each for each in report["findings"] if each["kind"] == "hreflang: no return link"]
    assert pair["evidence"] == "de: p7.html does not name p6.html"
    fields = {each["subject"] for each in report["findings"] if each["kind"].endswith("required field missing")}
    assert fields == {"Review author", "Review reviewRating", "Event startDate", "Event location"}


def test_a_site_below_a_path_is_checked_with_its_base_url(tmp_path: Path) -> None:
    pages = {
        "index.html": html("index.html", body=links("/docs/a.html", "b.html", "/shop/"), canonical=f"{HOST}/docs/"),
        "a.html": html("a.html", canonical=f"{HOST}/docs/a.html"),
        "b.html": html("b.html", canonical=f"{HOST}/docs/b.html"),
    }
    site = make(tmp_path / "s", pages)
    names = found(site, tmp_path / "out", "--base_url", f"{HOST}/docs")
    assert names == set()


def test_two_reports_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pages = {
        "index.html": html("index.html", body=links("a.html", "b.html", "c.html")),
        "a.html": html("a.html", body=links("gone.html", "gone2.html")),
        "b.html": html("b.html", '<meta name="robots" content="noindex">'),
        "c.html": html("c.html", '<meta name="robots" content="noindex">'),
    }
    site = make(tmp_path / "s", pages)
    before = report_of(site, tmp_path / "before")
    assert before["changes"] is None
    (site / "a.html").write_text(html("a.html", body=links("gone.html", "lost.html")))
    (site / "b.html").write_text(html("b.html"))
    (site / "c.html").unlink()
    capsys.readouterr()
    report = report_of(site, tmp_path / "after", "--compare", str(tmp_path / "before"))
    names = {
        name: {(each["kind"], each["page"], each["subject"].rpartition("/")[2]) for each in report["changes"][name]}
        for name in ("new", "fixed", "not_read_again")
    }
    assert names["new"] == {("broken link", "a.html", "lost.html"), ("broken link", "index.html", "c.html")}
    assert names["fixed"] == {("broken link", "a.html", "gone2.html"), ("noindex", "b.html", "")}
    assert names["not_read_again"] == {("noindex", "c.html", "")}
    assert ("broken link", "a.html", "gone.html") not in names["new"] | names["fixed"]
    out = capsys.readouterr().out
    assert "2 new, 2 fixed, " in out and "1 on pages that were not read again" in out
    page = (tmp_path / "after" / "report.html").read_text()
    assert "What changed" in page and "lost.html" in page


@pytest.mark.parametrize("content", ["[]", "{", '{"findings": [{"kind": 1}], "pages": []}', '{"pages": []}'])
def test_a_file_that_is_no_report_cannot_be_compared(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site = make(tmp_path / "s", {"index.html": html("index.html")})
    (tmp_path / "old.json").write_text(content)
    assert main(["seo", str(site), "--output", str(tmp_path / "o"), "--compare", str(tmp_path / "old.json")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "--compare" in error and not (tmp_path / "o").exists()


def test_hostile_content_is_neither_markup_nor_a_formula(tmp_path: Path) -> None:
    attack = "=cmd|' /C calc'!A0<script>alert(1)</script>"
    escaped = attack.replace("<", "&lt;")
    pages = {
        "index.html": html("index.html", body=f'<a href="gone-{escaped}">{escaped}</a><a href="a\'&quot;&gt;<b>x</a>'),
        "=1+1.html": html("=1+1.html", '<meta name="robots" content="noindex">', canonical=""),
    }
    site = make(tmp_path / "s", pages, robots="=cmd: <script>\n" * 3)
    report_of(site, tmp_path / "out")
    page = Page((tmp_path / "out" / "report.html").read_text())
    assert len(page.all("script")) == 1 and "alert(1)" in page.text
    rows = list(csv.reader((tmp_path / "out" / "findings.csv").open()))
    assert all(not cell.startswith(("=", "+", "-", "@")) for row in rows for cell in row)
    assert any(row[2] == "'=1+1.html" for row in rows)


def test_links_out_of_the_folder_are_not_followed_by_the_technical_checks(tmp_path: Path) -> None:
    site = make(tmp_path / "s", {"index.html": html("index.html")})
    (tmp_path / "secret.txt").write_text("User-agent: *\nDisallow: /\nnot understood\n")
    (site / "robots.txt").symlink_to(tmp_path / "secret.txt")
    (site / "sitemap.xml").symlink_to(tmp_path / "secret.txt")
    kinds = {kind for kind, _ in found(site, tmp_path / "out")}
    assert kinds == {"sitemap"}  # which says that it leads outside
    assert "not understood" not in (tmp_path / "out" / "report.json").read_text()


def test_structured_data_that_is_nested_deeply_or_huge_is_a_finding_not_a_crash(tmp_path: Path) -> None:
    deep = "[" * 100_000
    many = '<div itemscope itemtype="https://schema.org/Person">' * 1_500 + '<i itemprop="name">x</i>' * 1_500
    pages = {
        "index.html": html("index.html", f'<script type="application/ld+json">{deep}</script>', links("a.html")),
        "a.html": html("a.html", body=many),
    }
    report = report_of(make(tmp_path / "s", pages), tmp_path / "out")
    problems = {each["page"]: each["evidence"] for each in report["findings"] if "invalid structured" in each["kind"]}
    assert "script 1" in problems["index.html"] and "2,000 elements" in problems["a.html"]


@pytest.mark.parametrize(
    ("code", "valid"),
    [
        *((code, True) for code in ("en", "en-GB", "zh-Hant-TW", "x-default")),
        *((code, False) for code in ("en-UK", "en_GB", "jp", "", "es-419", "de-DE-x", "xx")),
    ],
)
def test_hreflang_codes(code: str, valid: bool) -> None:
    assert (problem_of(code) == "") is valid


def test_robots_txt_follows_the_longest_rule_with_wildcards() -> None:
    robots = parse_robots(
        "User-agent: a\nUser-agent: B\nDisallow: /x\nAllow: /x/y$\nAllow: /*.png$\nCrawl-delay: 2.5\n\n"
        "User-agent: *\nDisallow: /\n\nSitemap: https://e.example/s.xml\n"
    )
    allowed = {
        path: robots.allows(f"https://e.example{path}", "b") for path in ("/", "/x", "/x/y", "/x/yz", "/x/1.png")
    }
    assert allowed == {"/": True, "/x": False, "/x/y": True, "/x/yz": False, "/x/1.png": True}
    assert not robots.allows("https://e.example/", "other") and robots.allows("https://e.example/robots.txt", "other")
    assert robots.delay_of("A") == 2.5 and robots.sitemaps == [(11, "https://e.example/s.xml")]
    slow = parse_robots(f"User-agent: *\nDisallow: /{'*a' * 5000}$\n")
    assert slow.allows(f"https://e.example/{'a' * 3000}", "b")  # in linear time


def test_redirect_rules_have_wildcards_and_names() -> None:
    rules = parse_redirects("/blog/* /news/:splat\n/u/:name/about /people/:name 302\n/app/* /app.html 200\n", HOST)
    rules.index(lambda url: url)
    assert rules.of("blog/a/b", exists=False).target == f"{HOST}/news/a/b"  # type: ignore[union-attr]
    assert rules.of("u/ann/about", exists=False).target == f"{HOST}/people/ann"  # type: ignore[union-attr]
    assert rules.of("app/x", exists=False) is None and rules.serves("app/x")
    assert rules.of("blog/a", exists=True) is None


def test_widths_are_those_of_the_font_of_search_results() -> None:
    assert pixels("i" * 45, TITLE_FONT) < 220 < pixels("W" * 12, TITLE_FONT)
    assert pixels("Ä", TITLE_FONT) == pixels("A", TITLE_FONT) == 13
    assert pixels("漢字", TITLE_FONT) == 40
