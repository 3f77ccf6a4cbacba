"""`unisono seo` writes a page for a browser and a JSON file, fetches only on request, and fails in one line."""

from __future__ import annotations

import gzip
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote

import numpy as np
import pytest

from browser import Browser
from test_report import Page
from unisono.cli import seo
from unisono.cli.main import main
from unisono.errors import ConfigError
from unisono.recipes.seo.site import analysis as looking
from unisono.recipes.seo.site import fetching
from unisono.recipes.seo.site.analysis import Model
from unisono.recipes.seo.site.fetching import Fetcher, Unreadable, has_credentials
from unisono.recipes.seo.site.pages import open_site
from unisono.recipes.seo.site.report import Findings, PageFindings, write_report
from unisono.recipes.seo.site.text_rules import Check

ATTACK = "'\"><script>alert(1)</script><img src=x onerror=alert(2)>&lt;#?%2e"
TEXTS = {
    "frost": "Frost in spring harms young plants. Cover them with fleece at night and bring pots inside the house.",
    "tomatoes": "Tomatoes want sun and much water. Feed them every week, and tie them to a stick when they grow.",
    "compost": "Compost is made of leaves and kitchen waste. Turn the heap once a month and keep it a little wet.",
}


def html(title: str, text: str, more: str = "", headline: str = "") -> str:
    escaped = title.replace("&", "&amp;").replace("<", "&lt;")
    words = escaped.replace('"', "")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escaped}</title>'
        f'<meta name="description" content="About {words}"><link rel="canonical" href="https://a.example/{len(title)}">'
        f"</head><body><h1>{headline or escaped}</h1><p>{text}</p>{more}</body></html>"
    )


def make_site(folder: Path) -> Path:
    (folder / "notes").mkdir(parents=True)
    for name, text in TEXTS.items():
        (folder / f"{name}.html").write_text(html(f"All about {name}", f"{text} " * 8, '<a href="/gone.html">x</a>'))
    copied = html("A copy", f"{TEXTS['frost']} " * 8, '<img src="x.png">', headline="All about frost")
    (folder / "notes" / "copy.html").write_text(copied.replace("</p>", '</p><a href="/frost">x</a>'))
    (folder / "attack.html").write_text(html(ATTACK, "Nothing here is markup. " * 40))
    (folder / "notes" / "paper.html").write_bytes(b"%PDF-1.7 nothing")
    return folder


@pytest.fixture
def site(tmp_path: Path) -> Path:
    return make_site(tmp_path / "garden")


def said_by(arguments: Sequence[str | Path], capsys: pytest.CaptureFixture[str]) -> str:
    """The one-line error of a command."""
    assert main(["seo", *map(str, arguments)]) == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.count("\n") == 1, output
    return output.err


def report_of(folder: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return report


def failed(report: dict[str, Any], page: str) -> dict[str, str]:
    [result] = [each for each in report["pages"] if each["page"] == page]
    return {check["name"]: check["found"] for check in result["checks"] if check["passed"] is False}


def test_without_a_run_the_report_contains_only_rule_based_checks(
    site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["seo", str(site), "--output", str(out)]) == 0
    counts = "6 pages, 5 with a failed check, 8 technical errors, 1 group of duplicates, 1 could not be read"
    assert f"{out / 'report.html'}: {counts}" in capsys.readouterr().out
    assert sorted(os.listdir(out)) == ["findings.csv", "report.html", "report.json"]
    report = report_of(out)
    assert any("Rules only: no model" in remark for remark in report["remarks"])
    assert report["scored_by"] is None and all(page["score"] is None for page in report["pages"])
    assert failed(report, "tomatoes.html") == {"broken links": "target missing: /gone.html"}
    assert failed(report, "notes/copy.html") == {
        "image texts": "1 of 1 without alt: x.png",
        "same text": "as frost.html",
    }
    assert failed(report, "frost.html")["same text"] == "as notes/copy.html"
    assert [page["unreadable"] for page in report["pages"] if page["page"] == "notes/paper.html"] == [
        "not HTML: it is a PDF"
    ]
    assert report["duplicates"] == [{"what": "same text", "share": 1.0, "pages": ["frost.html", "notes/copy.html"]}]


def test_queries_without_a_run_are_ranked_by_bm25_and_the_report_says_so(site: Path, tmp_path: Path) -> None:
    queries = tmp_path / "queries.txt"
    queries.write_text("water for tomatoes\n\ncompost heap\nzebra\ncompost heap\n")
    assert main(["seo", str(site), "--output", str(tmp_path / "out"), "--queries", str(queries)]) == 0
    report = report_of(tmp_path / "out")
    assert "BM25" in report["ranked_by"] and "no model" in report["ranked_by"]
    answers = {each["query"]: [page["page"] for page in each["pages"]] for each in report["queries"]}
    assert answers["water for tomatoes"][0] == "tomatoes.html" and answers["compost heap"][0] == "compost.html"
    assert answers["zebra"] == [] and len(answers) == 3
    [best] = [page["best_queries"] for page in report["pages"] if page["page"] == "compost.html"]
    assert best[0]["query"] == "compost heap"


def test_a_ranking_model_ranks_the_pages_of_each_query_next_to_bm25_ranks(site: Path, tmp_path: Path) -> None:
    def rank(queries: Sequence[str], texts: Sequence[str]) -> np.ndarray:
        return np.array(
            [[float("frost" in text.lower()) - 0.1 * number for text in texts] for number in range(len(queries))]
        )

    queries = tmp_path / "queries.txt"
    queries.write_text("sun\nwater")
    words = [str(site), "--output", str(tmp_path / "out"), "--queries", str(queries)]
    assert seo.main(words, Model("a model", rank=rank)) == 0
    report = report_of(tmp_path / "out")
    assert report["ranked_by"] == "a model"
    first = report["queries"][0]["pages"][0]
    assert first == {"page": "frost.html", "score": 1.0, "place_by_words": None}  # it does not contain `sun`
    by_page = {page["page"]: page for page in report["queries"][1]["pages"]}
    assert by_page["tomatoes.html"]["place_by_words"] == 1
    assert "notes/paper.html" not in by_page  # pages without text are not ranked
    [best] = [page["best_queries"] for page in report["pages"] if page["page"] == "frost.html"]
    assert [each["query"] for each in best] == ["sun", "water"]


def test_a_scoring_model_orders_the_pages_and_checks_do_not_change_it(site: Path, tmp_path: Path) -> None:
    def score(texts: Sequence[str]) -> list[tuple[float, str]]:
        return [(len(text) / 1000, "long") for text in texts]

    assert seo.main([str(site), "--output", str(tmp_path / "out")], Model("a model", score=score)) == 0
    report = report_of(tmp_path / "out")
    assert report["scored_by"] == "a model" and report["checks_are"] == "plain rules, not learned"
    scores = {page["page"]: page["score"] for page in report["pages"]}
    assert scores.pop("notes/paper.html") is None
    page = (tmp_path / "out" / "report.html").read_text()
    places = [page.index(f'">{name}</a>') for name in sorted(scores, key=lambda name: -scores[name])]
    assert places == sorted(places)


def test_a_real_model_ranks_a_site(site: Path, tmp_path: Path) -> None:
    queries = tmp_path / "queries.txt"
    queries.write_text("protect seedlings from cold nights\nwhat to do with kitchen scraps\n")
    words = [str(site), "--run", "minilm", "--queries", str(queries), "--output", str(tmp_path / "out"), "--device=cpu"]
    assert main(["seo", *words]) == 0
    report = report_of(tmp_path / "out")
    tops = [each["pages"][0]["page"] for each in report["queries"]]
    assert tops[0] in ("frost.html", "notes/copy.html") and tops[1] == "compost.html"
    assert "minilm" in report["ranked_by"] and 0.2 < report["queries"][0]["pages"][0]["score"] <= 1


def test_the_folder_of_a_classifier_scores_a_site_by_the_class_that_is_named(
    site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

    vocabulary = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *"abcdefghijklmnopqrstuvwxyz",
        *(f"##{c}" for c in "abcdefgh"),
    ]
    model, vocabulary_file = tmp_path / "model", tmp_path / "vocab.txt"
    vocabulary_file.write_text("\n".join(vocabulary))
    BertTokenizerFast(str(vocabulary_file), model_max_length=64).save_pretrained(model)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    names = {0: "dull", 1: "fair", 2: "lively"}
    torch.manual_seed(0)
    config = BertConfig(vocab_size=len(vocabulary), max_position_embeddings=64, id2label=names, **sizes)
    BertForSequenceClassification(config).save_pretrained(model)
    words = [str(site), "--run", str(model), "--device", "cpu", "--output"]
    assert main(["seo", *words, str(tmp_path / "last")]) == 0
    assert main(["seo", *words, str(tmp_path / "named"), "--label", "dull"]) == 0
    last, named = report_of(tmp_path / "last"), report_of(tmp_path / "named")
    assert "probability of 'lively'" in last["scored_by"] and "probability of 'dull'" in named["scored_by"]
    for one, other in zip(last["pages"], named["pages"], strict=True):
        if one["unreadable"] is None:
            assert 0 < one["score"] < 1 and 0 < other["score"] < 1 and one["score"] + other["score"] < 1
            assert one["label"] == other["label"] and one["label"] in names.values()
    capsys.readouterr()
    assert "the classes of the run are dull, fair, lively" in said_by(
        [*words, tmp_path / "x", "--label", "good"], capsys
    )


def test_a_run_is_opened_according_to_its_task(site: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rows = [f'"{text} {number}",{len(name)}.{number % 9}' for number in range(8) for name, text in TEXTS.items()]
    (tmp_path / "labelled.csv").write_text("text,label\n" + "\n".join(rows))
    run = tmp_path / "run"
    words = f"--task score --model tiny --label number --max_steps 1 --batch_size 4 --nproc 1 --output_dir {run}"
    assert main(["train", "seo", "--data_path", str(tmp_path / "labelled.csv"), *words.split()]) == 0
    assert main(["seo", str(site), "--run", str(run), "--device", "cpu", "--output", str(tmp_path / "out")]) == 0
    report = report_of(tmp_path / "out")
    assert report["scored_by"] == f"{run} (weights of step_00000001)"
    scores = [page["score"] for page in report["pages"] if page["unreadable"] is None]
    assert len(scores) == 5 and all(3 < score < 10 for score in scores)  # in the unit of the labels
    capfd.readouterr()
    assert main(["seo", str(site), "--run", str(run), "--label", "good", "--output", str(tmp_path / "x")]) == 2
    assert "numbers, not classes" in capfd.readouterr().err


def test_processing_in_blocks_does_not_change_the_order() -> None:
    drawn = np.random.default_rng(0)
    scores = drawn.integers(0, 5, (4, 50)).astype(np.float32)  # with many equals
    scores[0, 7] = np.nan
    target = [
        [page for page in np.argsort(-row, kind="stable")[:10].tolist() if np.isfinite(row[page])] for row in scores
    ]
    for size in (1, 7, 50):
        best = looking._Best(4, 50)
        for first in range(0, 50, size):
            pages = range(first, min(first + size, 50))
            best.add(range(4), pages, scores[:, first : first + size])
        assert [[page for page, _ in best.pages_of(query)] for query in range(4)] == target
        result = [query for query, _ in best.queries_of(3)]
        assert result == np.argsort(-scores[:, 3], kind="stable")[:3].tolist()


def test_content_of_pages_is_escaped_in_the_report(site: Path, tmp_path: Path) -> None:
    odd = site / "a'\"><script>alert(3)<\n\udcff.html"
    odd.write_text(html(ATTACK, "Odd names. " * 60, f'<a href="{ATTACK.replace(chr(34), "")}">x</a>'))
    (tmp_path / "q.txt").write_text(f"{ATTACK}\n")
    words = [str(site), "--output", str(tmp_path / "out"), "--queries", str(tmp_path / "q.txt"), "--keywords", ATTACK]
    assert main(["seo", *words]) == 0
    text = (tmp_path / "out" / "report.html").read_text()
    page = Page(text)
    assert len(page.all("script")) == 1 and not page.all("img")
    assert all(not name.startswith("on") for _, attributes in page.elements for name in attributes)
    assert not {tag for tag, _ in page.elements} & {"link", "iframe", "object", "base", "form"}
    assert "onerror=alert(2)" in page.text
    links = [link["href"] or "" for link in page.all("a")]
    assert len(links) == 7 and all(link.startswith("./") for link in links)
    for link in links:
        assert os.path.exists(
            os.fsencode(tmp_path / "out")
            + b"/"
            + unquote(link, errors="surrogateescape").encode(errors="surrogateescape")
        )


@pytest.mark.parametrize("by_file", [False, True])
def test_a_keyword_is_checked_on_its_own_page_only(tmp_path: Path, by_file: bool) -> None:
    """On the page that matches it best, or on the page that a file assigns to it."""
    site = tmp_path / "kettles"
    site.mkdir()
    for name in ("descale", "buy", "repair"):
        (site / f"{name}.html").write_text(
            html(f"How to {name} a kettle", f"We {name} it with care and a cloth. " * 30)
        )
    keywords = "descale kettle,repair kettle,toaster"
    if by_file:
        keywords = str(tmp_path / "keywords.csv")
        Path(keywords).write_text("page,keyword\nbuy.html,descale kettle\n,repair kettle\ngone.html,toaster\n")
    assert main(["seo", str(site), "--output", str(tmp_path / "out"), "--keywords", keywords]) == 0
    report = report_of(tmp_path / "out")
    result = {
        page["page"]: [check["name"] for check in page["checks"] if check["name"].startswith("keyword")]
        for page in report["pages"]
    }
    home = "buy.html" if by_file else "descale.html"
    expected: dict[str, list[str]] = {"buy.html": [], "descale.html": [], "repair.html": ["keyword: repair kettle"]}
    assert result == expected | {home: ["keyword: descale kettle"]}
    output = " ".join(report["remarks"])
    assert "“repair kettle”: checked on repair.html" in output
    assert ("--keywords names gone.html" if by_file else "“toaster”: no page contains any of its words") in output


def test_an_unreachable_site_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and does not listen
        address = f"http://127.0.0.1:{closed.getsockname()[1]}/"
        output = said_by([address, "--fetch", "--output", tmp_path / "out"], capsys)
    assert "the page cannot be read: could not be fetched" in output and "no report was written" in output
    assert not (tmp_path / "out").exists()


def test_an_invalid_url_is_not_a_link(tmp_path: Path) -> None:
    pages = [PageFindings("a", "javascript:alert(1)"), PageFindings("b", "https://a.example/?a=1&b='\"><x>")]
    page = Page(write_report(tmp_path, Findings("s", pages)).read_text())
    assert [link["href"] for link in page.all("a")] == ["https://a.example/?a=1&b=%27%22%3E%3Cx%3E"]


def test_a_large_site_makes_a_page_of_bounded_size(tmp_path: Path) -> None:
    many = [PageFindings(f"p{n}", Path(f"p{n}"), "T", n, [Check("title", False, "x", "y")]) for n in range(6000)]
    text = write_report(tmp_path, Findings("s", many)).read_text()
    assert text.count("<tr ") == 5000 and "1,000 more pages are in report.json" in text
    assert len(report_of(tmp_path)["pages"]) == 6000


def test_nothing_is_overwritten_without_the_flag(
    site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "report.json").write_text("mine")
    assert "--overwrite" in said_by([site, "--output", out], capsys)
    assert os.listdir(out) == ["report.json"] and (out / "report.json").read_text() == "mine"
    (out / "other.txt").write_text("mine too")
    assert main(["seo", str(site), "--output", str(out), "--overwrite"]) == 0
    assert report_of(out)["site"] == "garden" and (out / "other.txt").read_text() == "mine too"


def test_a_report_among_the_pages_is_skipped(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(site)
    assert main(["seo", "."]) == 0 and main(["seo", ".", "--overwrite"]) == 0
    assert len(report_of(site / "seo" / "garden")["pages"]) == 6


def test_mistakes_are_one_line(site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--output", tmp_path / "out"]
    empty, queries = tmp_path / "empty.txt", tmp_path / "queries.txt"
    empty.write_text("\n \n")
    queries.write_text("a query\n")
    (tmp_path / "nothing").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text(json.dumps({"recipe": "Seo", "config": {"task": "rank"}, "sources": {}}))
    (tmp_path / "table.csv").write_text("query\nx\n")
    for words, output in [
        ([tmp_path / "none"], "no such file or folder"),
        ([tmp_path / "nothing"], "it has no pages"),
        ([empty], "no usable page"),
        ([site, "--most_pages", "0"], "--most_pages 0"),
        ([site, "--queries", empty], "it contains no query"),
        ([site, "--queries", tmp_path / "none.txt"], "none.txt"),
        ([site, "--queries", tmp_path / "table.csv"], "one query per line"),
        ([site, "--run", "some/model"], "no such folder"),
        ([site, "--run", tmp_path / "run"], "pass --queries FILE"),
        ([site, "--run", "minilm", "--queries", queries, "--device", "nonsense"], "--device nonsense"),
        ([site, "--fetch"], "--fetch is for URLs"),
        (["https://a.example/"], "pass --fetch"),
        (["file:///etc/passwd", "--fetch"], "is not an http(s) URL"),
    ]:
        assert output in said_by([*words, *out], capsys), words
    assert not (tmp_path / "out").exists()
    assert "is a file" in said_by([site, "--output", queries / "x"], capsys)


def test_lists_and_sitemaps_name_the_pages(site: Path, tmp_path: Path) -> None:
    (site / "list.txt").write_text("# mine\nfrost.html\nnotes/copy.html\ngone.html\n")
    (site / "sitemap.xml").write_text(
        '<urlset xmlns="http://www.sitemaps.org/schemas/sitemap/0.9"><url><loc>https://a.example/frost</loc></url></urlset>'
    )
    listed = open_site(str(site / "list.txt"))
    assert [name for name, _ in listed.pages] == ["frost.html", "notes/copy.html"]
    assert any("gone.html" in remark for remark in listed.remarks)
    assert [place for _, place in open_site(str(site / "sitemap.xml")).pages] == [site / "frost.html"]
    assert [name for name, _ in open_site(str(site / "frost.html")).pages] == ["frost.html"]
    cut = open_site(str(site), most_pages=2)
    assert len(cut.pages) == 2 and "4 more pages were skipped" in cut.remarks[0]


def test_help_comes_without_torch() -> None:
    code = "import sys; from unisono.cli import seo\ntry: seo.main(['--help'])\nfinally: print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.endswith("False\n")


# ---- the web ----


class Web:
    """A small web server that records its requests."""

    def __init__(self) -> None:
        requests: list[str] = []

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                requests.append(self.path)
                port = self.server.server_address[1]
                body, code, headers = html(f"Page {self.path}", "Words of a page. " * 40).encode(), 200, {}
                if self.path == "/gone":
                    code = 404
                elif self.path == "/moved":
                    code, headers = 301, {"Location": "/page"}
                elif self.path == "/away":
                    code, headers = 302, {"Location": f"http://localhost:{port}/page"}
                elif self.path == "/port":
                    code, headers = 302, {"Location": "http://127.0.0.1:1/page"}
                elif self.path == "/file":
                    code, headers = 302, {"Location": "file:///etc/passwd"}
                elif self.path == "/round":
                    code, headers = 302, {"Location": "/round"}
                elif self.path == "/large":
                    body = b"x" * 300_000
                elif self.path == "/packed":
                    body, headers = gzip.compress(body), {"Content-Encoding": "gzip"}
                elif self.path == "/latin":
                    body, headers = (
                        "<title>Caf\xe9</title><p>x".encode("latin-1"),
                        {"Content-Type": "text/html; charset=latin-1"},
                    )
                elif self.path.startswith("/sitemap"):
                    there = f"http://127.0.0.1:{port}"
                    places = "".join(
                        f"<url><loc>{place}</loc></url>" for place in (f"{there}/a", f"{there}/b", "http://10.0.0.1/c")
                    )
                    body = f"<urlset>{places}</urlset>".encode()
                    body = gzip.compress(body) if self.path.endswith(".gz") else body
                self.send_response(code)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                for part in [body] if self.path != "/slow" else [b"x"] * 100:
                    self.wfile.write(part)
                    if self.path == "/slow":
                        time.sleep(0.1)

            def log_message(self, format: str, *args: Any) -> None:
                pass

            def handle(self) -> None:
                with suppress(OSError):  # the client has closed the connection
                    super().handle()

        self.asked = requests
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}"
        Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture(scope="module")
def served() -> Iterator[Web]:
    web = Web()
    yield web
    web.server.shutdown()


@pytest.fixture
def web(served: Web) -> Web:
    served.asked.clear()
    return served


def test_a_page_without_content_is_refused_with_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.html").write_text("")
    one = said_by([tmp_path / "a.html", "--output", tmp_path / "out"], capsys)
    assert "a.html: the page cannot be read: empty; no report was written" in one
    (tmp_path / "b.html").write_text("")
    several = said_by([tmp_path, "--output", tmp_path / "out"], capsys)
    assert "none of the 2 pages can be read; the first one: empty; no report was written" in several


def test_urls_are_fetched_only_on_request_and_reported(
    web: Web, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    listed = tmp_path / "urls.txt"
    listed.write_text(f"{web.address}/page\n{web.address}/gone\n")
    out = tmp_path / "out"
    assert "pass --fetch" in said_by([listed, "--output", out], capsys)
    assert web.asked == []
    # A local address that is only listed in a file does not count as named by the user.
    refused = said_by([listed, "--fetch", "--output", tmp_path / "refused"], capsys)
    assert "none of the 2 pages can be read; the first one" in refused and "--private_host" in refused
    assert web.asked == [] and not (tmp_path / "refused").exists()
    assert main(["seo", str(listed), "--fetch", "--private-host", "127.0.0.1", "--output", str(out)]) == 0
    assert "bytes from 127.0.0.1" in capsys.readouterr().out and web.asked == ["/page", "/gone"]
    page, gone = report_of(out)["pages"]
    assert page["title"] == "Page /page" and "404" in gone["unreadable"]
    assert list(report_of(out)["fetched_bytes"]) == ["127.0.0.1"]


@pytest.mark.parametrize("name", ["sitemap.xml", "sitemap.xml.gz"])
def test_a_sitemap_from_the_web_names_pages_of_its_own_host_only(web: Web, tmp_path: Path, name: str) -> None:
    assert main(["seo", f"{web.address}/{name}", "--fetch", "--output", str(tmp_path / "out")]) == 0
    assert [page["page"] for page in report_of(tmp_path / "out")["pages"]] == [f"{web.address}/a", f"{web.address}/b"]
    assert web.asked == [f"/{name}", "/a", "/b"]


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/away", "another host"),
        ("/port", "another host"),
        ("/file", "not allowed"),
        ("/round", "infinite loop"),
        ("/gone", "404"),
        ("/large", "larger than 0.2 MB"),
        ("/packed", "compressed"),
        ("/slow", "not finished after 1 s"),
    ],
)
def test_pages_that_cannot_be_fetched_are_reported_with_the_reason(web: Web, path: str, said: str) -> None:
    with pytest.raises(Unreadable, match=said):
        Fetcher(["127.0.0.1", "localhost"], seconds=1, max_bytes=200_000).get(web.address + path)


def test_redirects_on_the_same_host_are_followed_and_the_servers_encoding_is_used(web: Web) -> None:
    fetcher = Fetcher(["127.0.0.1"])
    assert b"Page /page" in fetcher.get(f"{web.address}/moved")  # type: ignore[operator]
    assert fetcher.get(f"{web.address}/latin") == "<title>Café</title><p>x"
    assert b"Page /%C3%A4%20b" in fetcher.get(f"{web.address}/ä b")  # type: ignore[operator]


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("file:///etc/passwd", "not an http"),
        ("ftp://a.example/", "not an http"),
        ("data:text/html,x", "not an http"),
        ("http://", "not an http"),
        ("http://me:secret@a.example/", "password"),
        ("http://[::1/", "could not be fetched"),
        ("http://a.example:99999/", "could not be fetched"),
        ("http://169.254.169.254/latest/", "local network"),
        ("http://[::ffff:127.0.0.1]/", "local network"),
        ("http://2130706433/", "local network"),  # 127.0.0.1 as one number
    ],
)
def test_private_and_malformed_addresses_are_refused(url: str, said: str) -> None:
    with pytest.raises(Unreadable, match=said):
        Fetcher().get(url)


def test_an_address_with_a_password_is_refused_without_repeating_it(tmp_path: Path) -> None:
    listed = tmp_path / "pages.txt"
    listed.write_text("http://a.example/\nhttp://bob:hunter2@a.example/\n")
    for site in ("http://bob:hunter2@a.example/", "http://bob:hunter2@[::1/", str(listed)):
        with pytest.raises(ConfigError, match="a user name or a password") as refused:
            open_site(site, Fetcher())
        assert "hunter2" not in str(refused.value)
    assert not has_credentials("http://a.example?mail=bob@b.example") and has_credentials("http://:secret@a.example/")


def test_a_name_that_leads_into_the_local_network_is_refused(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.getaddrinfo

    def lying(host: str, port: int, *rest: Any, **more: Any) -> Any:
        return real("127.0.0.1" if host == "public.example" else host, port, *rest, **more)

    monkeypatch.setattr(fetching.socket, "getaddrinfo", lying)
    with pytest.raises(Unreadable, match=r"public\.example is in a local network"):
        Fetcher().get(f"http://public.example:{web.server.server_port}/page")
    assert web.asked == []


def test_a_proxy_of_the_environment_is_not_used(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", web.address)
    with pytest.raises(Unreadable):
        Fetcher().get("http://10.255.255.1/")
    assert web.asked == []


# ---- the page in a browser ----


@pytest.fixture(scope="module")
def shown(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Browser:
    """A browser showing the report of a site with scores and queries."""
    folder = tmp_path_factory.mktemp("shown")
    (folder / "queries.txt").write_text(f"water for tomatoes\n{ATTACK}\n")
    words = [
        str(make_site(folder / "garden")),
        "--queries",
        str(folder / "queries.txt"),
        "--output",
        str(folder / "out"),
    ]
    assert (
        seo.main(words, Model(f"a model {ATTACK}", score=lambda texts: [(len(t) / 1000, ATTACK) for t in texts])) == 0
    )
    browser.events.clear()
    browser("Page.navigate", url=(folder / "out" / "report.html").as_uri())
    browser.wait("document.readyState == 'complete' && !!document.querySelector('#table')")
    return browser


NAMES = (
    "[...document.querySelectorAll('#table tbody tr')].filter(row => row.offsetHeight)"
    ".map(row => row.querySelector('.name').textContent)"
)


def type_in(browser: Browser, what: str, value: str, event: str) -> None:
    browser.ask(f"document.querySelector('{what}').value = '{value}'")
    browser.ask(f"document.querySelector('{what}').dispatchEvent(new Event('{event}'))")


def test_a_browser_shows_the_report_without_requests_or_foreign_scripts(shown: Browser) -> None:
    urls = [e["params"]["request"]["url"] for e in shown.events if e["method"] == "Network.requestWillBeSent"]
    assert len(urls) == 1 and urls[0].endswith("report.html")
    wrong = [e["params"] for e in shown.events if e["method"] in ("Log.entryAdded", "Runtime.exceptionThrown")]
    assert not wrong and not [e for e in shown.events if e["method"] == "Page.javascriptDialogOpening"]
    assert shown.ask("document.querySelectorAll('script').length") == 1
    assert ATTACK in shown.ask("document.querySelector('#table').textContent")


def test_the_table_sorts_by_every_column_with_pages_without_a_score_last(shown: Browser) -> None:
    def click(name: str) -> list[str]:
        shown.ask(f"document.querySelector('[data-sort={name}]').click()")
        names: list[str] = shown.ask(NAMES)
        return names

    up = click("page")
    assert len(up) == 6
    titles = shown.ask("[...document.querySelectorAll('#table tbody .page')].map(c => c.textContent.toLowerCase())")
    assert titles == sorted(titles) and click("page") == up[::-1]
    for name in ("score", "words"):
        down = click(name)
        values = shown.ask(f"[...document.querySelectorAll('#table td.{name}')].map(c => c.dataset.value)")
        numbers = [float(value) for value in values if value]
        assert numbers == sorted(numbers, reverse=True) and len(set(numbers)) > 1
        assert shown.ask(f"document.querySelector('th.{name}').getAttribute('aria-sort')") == "descending"
        click(name)
        values = shown.ask(f"[...document.querySelectorAll('#table td.{name}')].map(c => c.dataset.value)")
        numbers = [float(value) for value in values if value]
        assert numbers == sorted(numbers) and sorted(down) == sorted(up)
    assert click("words")[-1] == "notes/paper.html"  # without any
    assert [click("score")[-1] for _ in range(3)] == ["notes/paper.html"] * 3
    best = "document.querySelector('#table tbody tr td.score').dataset"
    value, first = shown.ask(f"{best}.value"), shown.ask(NAMES)[0]
    shown.ask(f"{best}.value = ''")
    assert click("score")[-2:] == click("score")[-2:] == [first, "notes/paper.html"]
    shown.ask(f"document.querySelector('#table tbody tr:nth-last-child(2) td.score').dataset.value = '{value}'")


def test_pages_are_filtered_by_a_failed_check_and_by_words(shown: Browser) -> None:
    shown.ask("[...document.querySelectorAll('.pick')].find(b => b.textContent.startsWith('same text')).click()")
    assert sorted(shown.ask(NAMES)) == ["frost.html", "notes/copy.html"]
    assert shown.ask("document.querySelector('#shown').textContent") == "2 of 6 pages"
    type_in(shown, "#find", "COPY", "input")
    assert shown.ask(NAMES) == ["notes/copy.html"]
    type_in(shown, "#find", "", "input")
    shown.ask("document.querySelector('.pick[aria-pressed=true]').click()")
    assert len(shown.ask(NAMES)) == 6


def test_the_report_has_a_dark_mode_and_fits_a_phone(shown: Browser) -> None:
    grounds = []
    for scheme in ("light", "dark"):
        shown("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        grounds.append(shown.ask("getComputedStyle(document.body).backgroundColor"))
    assert grounds == ["rgb(246, 247, 249)", "rgb(16, 19, 24)"]
    shown("Emulation.setDeviceMetricsOverride", width=360, height=740, deviceScaleFactor=1, mobile=True)
    assert shown.ask("document.documentElement.scrollWidth") <= 360
    assert shown.ask("getComputedStyle(document.querySelector('#sort').parentElement).display") != "none"
    type_in(shown, "#sort", "words", "change")
    assert shown.ask(NAMES)[-1] == "notes/paper.html"
    shown("Emulation.clearDeviceMetricsOverride")
