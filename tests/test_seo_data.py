"""Queries, pages and labels are read in all common formats, and every mistake in them is one clear line."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import seo_data
from unisono.engine.recipe import Work
from unisono.errors import ConfigError, UserError
from unisono.recipes.seo.data import blocks
from unisono.recipes.seo.data.labelled import read_labelled
from unisono.recipes.seo.data.lines import lines_of
from unisono.recipes.seo.data.pages import parse_page
from unisono.recipes.seo.data.ranking_sets import debian
from unisono.recipes.seo.data.ranking_sets.ids import Ids, hashes_of
from unisono.recipes.seo.data.ranking_sets.ranking import Ranking, read_ranking
from unisono.recipes.seo.data.site import addresses_in, pages_of
from unisono.recipes.seo.data.snippets import read_snippets
from unisono.recipes.seo.data.store import Tokenize, fill_texts, fingerprint_of, open_texts


def refused(call: Callable[[], Any], *words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        call()
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "\n" not in message


def write(path: Path, content: str | bytes, encoding: str = "utf-8") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content if isinstance(content, bytes) else content.encode(encoding)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def jsonl(path: Path, *rows: Any) -> Path:
    return write(path, "".join(json.dumps(row) + "\n" for row in rows))


def texts(stream: Iterator[tuple[int, str]]) -> list[str]:
    pairs = list(stream)
    assert [number for number, _ in pairs] == list(range(len(pairs)))
    return [text for _, text in pairs]


def in_words(ranking: Ranking) -> tuple[set[tuple[str, str, float]], set[tuple[str, str]]]:
    """The texts of queries with their positives and negatives."""
    queries, pages = texts(ranking.queries()), texts(ranking.pages())
    return (
        {
            (queries[query], pages[page], grade)
            for query, page, grade in zip(
                ranking.positives.queries, ranking.positives.pages, ranking.positives.grades, strict=True
            )
        },
        {(queries[query], pages[page]) for query, page in zip(ranking.hard.queries, ranking.hard.pages, strict=True)},
    )


# Rankings ------------------------------------------------------------------------------------------------------------


def beir(folder: Path, train: str, end: str = "") -> Path:
    pages = [{"_id": "a", "title": "Apples", "text": "red"}, {"_id": "b", "title": "", "text": "yellow"}]
    jsonl(folder / f"corpus.jsonl{end}", *pages, {"_id": 7, "text": "seven"})
    jsonl(folder / f"queries.jsonl{end}", *({"_id": f"q{each}", "text": f"query {each}"} for each in (1, 2, 3)))
    write(folder / f"qrels/train.tsv{end}", f"query-id\tcorpus-id\tscore\n{train}")
    return folder


@pytest.mark.parametrize("end", ["", ".gz"])
def test_a_beir_folder_has_the_queries_that_its_split_judges(tmp_path: Path, end: str) -> None:
    folder = beir(tmp_path, "q3\ta\t2\nq1\tb\t1\nq3\t7\t0\nq3\ta\t1\n", end)
    write(folder / "qrels/dev.tsv", "query-id\tcorpus-id\tscore\nq2\t7\t1\n")
    ranking = read_ranking(folder)
    assert texts(ranking.pages()) == ["Apples red", "yellow", "seven"]
    assert texts(ranking.queries()) == ["query 1", "query 3"]
    assert in_words(ranking) == (
        {("query 3", "Apples red", 2.0), ("query 1", "yellow", 1.0)},
        {("query 3", "seven")},
    )
    assert list(ranking.positives.queries) == [0, 1]
    assert ranking.has_split("train") and ranking.has_split("test")
    assert in_words(read_ranking(folder, "test"))[0] == {("query 2", "seven", 1.0)}
    assert read_ranking(folder, "test").page_files == ranking.page_files  # their tokens are stored once


def test_a_missing_split_is_named(tmp_path: Path) -> None:
    folder = beir(tmp_path, "q1\ta\t1\n")
    assert not read_ranking(folder).has_split("test")
    refused(lambda: read_ranking(folder, "test"), "no test split", "train.tsv")


def test_judgements_of_unknown_ids_are_reported_or_skipped(tmp_path: Path) -> None:
    folder, output = beir(tmp_path, "q1\ta\t1\nq1\tzebra\t1\nq9\ta\t1\nq2\tnobody\t1\n"), list[str]()
    refused(lambda: read_ranking(folder), "train.tsv, line 3", "'zebra'", "corpus.jsonl", "--leave_out_bad")
    ranking = read_ranking(folder, leave_out_bad=True, remark=output.append)
    assert in_words(ranking)[0] == {("query 1", "Apples red", 1.0)}
    assert any("skipped 3" in line and "'zebra'" in line for line in output)


def test_a_query_without_positives_is_reported_or_skipped(tmp_path: Path) -> None:
    folder, output = beir(tmp_path, "q1\ta\t1\nq3\tb\t0\n"), list[str]()
    refused(lambda: read_ranking(folder), "query without positives", "'q3'")
    assert texts(read_ranking(folder, leave_out_bad=True, remark=output.append).queries()) == ["query 1"]
    assert any("'q3'" in line for line in output)


def test_duplicate_ids_and_empty_pages_are_reported_or_skipped(tmp_path: Path) -> None:
    folder = beir(tmp_path, "q1\ta\t1\nq2\tc\t1\n")
    rows = [
        {"_id": "a", "text": "one"},
        {"_id": "a", "text": "two"},
        {"_id": "e", "text": " "},
        {"_id": "c", "text": "three"},
    ]
    jsonl(folder / "corpus.jsonl", *rows)
    refused(lambda: read_ranking(folder), "corpus.jsonl, line 3", "'e' is empty")
    jsonl(folder / "corpus.jsonl", *rows[:2], rows[3])
    refused(lambda: read_ranking(folder), "corpus.jsonl, line 2", "'a'", "second time")
    jsonl(folder / "corpus.jsonl", *rows)
    messages: list[str] = []
    ranking = read_ranking(folder, leave_out_bad=True, remark=messages.append)
    assert texts(ranking.pages()) == ["one", "three"]
    assert in_words(ranking)[0] == {("query 1", "one", 1.0), ("query 2", "three", 1.0)}
    assert "skipped 2 unusable rows" in messages[0]


@pytest.mark.parametrize(
    ("name", "judged", "negatives"),
    [
        ("qrels.train.tsv", "5\t0\t100\t1\n6\t0\t101\t1\n", set()),
        ("qrels.tsv", "5 0 100 1\n6 0 101 1\n", set()),
        (
            "qidpidtriples.train.full.2.tsv.gz",
            "5\t100\t102\n6\t101\t100\n5\t100\t101\n",
            {("five", "c"), ("five", "b"), ("six", "a")},
        ),
    ],
)
def test_ms_marco_files_are_read_by_their_ids(
    tmp_path: Path, name: str, judged: str, negatives: set[tuple[str, str]]
) -> None:
    write(tmp_path / "collection.tsv", "100\ta\n101\tb\n102\tc\n")
    write(tmp_path / "queries.train.tsv", "5\tfive\n6\tsix\n8\tnobody asked\n")
    file = write(tmp_path / name, judged)
    for path in (tmp_path, file):
        ranking = read_ranking(path)
        assert in_words(ranking) == ({("five", "a", 1.0), ("six", "b", 1.0)}, negatives)
    write(tmp_path / "collection.tsv", "100\ta\n101 b\n")
    refused(lambda: read_ranking(tmp_path), "collection.tsv, line 2", "a tab")


ROWS = ({("q", "yes", 1.0), ("r", "no", 1.0)}, {("q", "no"), ("q", "never")})


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("t.tsv", "q\tyes\tno\nr\tno\nq\tyes\tnever\n"),
        ("t.tsv.gz", "query\tpositive\tnegative\nq\tyes\tno\nr\tno\nq\tyes\tnever\n"),
        ("t.csv", "query,positive,negative_1,negative_2\nq,yes,no,never\nr,no,,\n"),
        ("t.csv", "Negative;Positive;Query\r\nno;yes;q\r\n;no;r\r\nnever;yes;q\r\n"),
        ("t.jsonl", '{"query":"q","positive":"yes","negative":["no","never"]}\n\n{"query":"r","positive":["no"]}\n'),
        ("t.jsonl.gz", '{"query":"q","pos":["yes"],"neg":["no","never"]}\n{"query":"r","pos":["no"],"neg":[]}\n'),
    ],
)
def test_tables_of_queries_and_pages_are_equivalent_in_every_format(tmp_path: Path, name: str, content: str) -> None:
    ranking = read_ranking(write(tmp_path / name, content))
    assert in_words(ranking) == ROWS
    assert (ranking.num_queries, ranking.num_pages) == (2, 3)
    assert not ranking.has_split("test")


def test_a_folder_may_have_a_table_for_each_split(tmp_path: Path) -> None:
    seo_data.write_ranking(tmp_path / "train.jsonl", 5)
    seo_data.write_ranking(tmp_path / "test.jsonl", 3, first=5)
    assert read_ranking(tmp_path).has_split("test")
    assert read_ranking(tmp_path, "test").num_queries == 3


def test_a_relevant_page_is_never_a_negative_of_the_same_query(tmp_path: Path) -> None:
    ranking = read_ranking(write(tmp_path / "t.tsv", "q\ta\tb\nq\tb\ta\n"))
    assert in_words(ranking) == ({("q", "a", 1.0), ("q", "b", 1.0)}, set())


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("t.csv", "question_text,page_text\nq,p\n", ["question_text, page_text", "no query"]),
        ("t.csv", "query,answers\nq,p\n", ["query, answers", "no positive"]),
        ("t.csv", "query,positive\nq,p\n ,p\n", ["t.csv, line 3", "query is empty"]),
        ("t.csv", "query,positive\nq,\n", ["t.csv, line 2", "query without positives"]),
        ("t.csv", "query,positive\nq,a, b\n", ["t.csv, line 2", "3 fields"]),
        ("t.csv", 'query,positive\n"a\nb",c\nq,"open\n', ["t.csv, line 4", "invalid CSV"]),
        ("t.csv", "", ["no query"]),
        ("t.jsonl", '{"query":"q","positive":"p"}\n{"query":\n', ["t.jsonl, line 2", "not JSON"]),
        ("t.jsonl", '{"query":"q","positive":[]}\n', ["t.jsonl, line 1", "query without positives"]),
        ("t.jsonl", '{"query":"q","positive":3}\n', ["t.jsonl, line 1", "not text"]),
        ("t.jsonl", '{"query":12345,"positive":"p"}\n', ["line 1", "its query is 12345, not text; write it in quotes"]),
        ("t.jsonl", '{"query":"q","postive":"x"}\n', ["t.jsonl, line 1", "query, postive"]),
        ("t.jsonl", "[1]\n", ["t.jsonl, line 1", "expected an object"]),
        ("t.jsonl", "\n", ["no usable row"]),
        ("t.tsv", "only one\n", ["t.tsv, line 1", "no tab"]),
        ("t.tsv", "q\t\tno\n", ["t.tsv, line 1", "positive is empty"]),
        ("t.tsv", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", ["not a text file"]),
        ("t.docx", "x", ["BEIR", ".jsonl"]),
    ],
)
def test_mistakes_in_tables_are_named_with_their_line(
    tmp_path: Path, name: str, content: Any, words: list[str]
) -> None:
    path = write(tmp_path / name, content)
    refused(lambda: read_ranking(path), name, *words)


def test_bad_rows_are_skipped_and_counted(tmp_path: Path) -> None:
    messages: list[str] = []
    path = write(tmp_path / "t.jsonl", 'broken\n{"query":"q","positive":"p"}\n{"query":"","positive":"p"}\n')
    assert in_words(read_ranking(path, leave_out_bad=True, remark=messages.append))[0] == {("q", "p", 1.0)}
    assert (
        len(messages) == 1
        and "skipped 2 unusable rows" in messages[0]
        and "line 1" in messages[0]
        and "line 3" in messages[0]
    )
    path = write(tmp_path / "t.csv", 'query,positive\nq,"p" p\nr,s\na,b,c\n')
    assert in_words(read_ranking(path, leave_out_bad=True))[0] == {("r", "s", 1.0)}


def test_missing_files_are_one_line(tmp_path: Path) -> None:
    refused(lambda: read_ranking(tmp_path / "no.csv"), "no.csv", "no such file")
    refused(lambda: read_ranking(tmp_path), "no files", "BEIR")
    cut = gzip.compress(b"query,positive\n" + b"q,p\n" * 10_000)[:-20]
    (tmp_path / "t.csv.gz").write_bytes(cut)
    refused(lambda: read_ranking(tmp_path / "t.csv.gz"), "t.csv.gz", "damaged or truncated")


def test_a_file_that_changes_while_it_is_used_is_noticed(tmp_path: Path) -> None:
    path = write(tmp_path / "t.tsv", "q\ta\nr\tb\n")
    ranking = read_ranking(path)
    write(path, "q\ta\n")
    refused(lambda: list(ranking.pages()), "changed while it was being read")


def test_fields_may_be_huge_and_contain_line_breaks(tmp_path: Path) -> None:
    page = "a long page\n" * 100_000
    path = write(tmp_path / "t.csv", f'query,positive\n"one\n""two""","{page}"\nr,s\n')
    ranking = read_ranking(path)
    assert texts(ranking.queries()) == ['one\n"two"', "r"]
    assert texts(ranking.pages()) == [page.strip(), "s"]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_unicode_files_are_read_by_their_byte_order_mark(tmp_path: Path, encoding: str) -> None:
    path = write(tmp_path / "t.csv", "query,positive\nplain,page\ngrün,größer\n".encode(encoding))
    assert texts(read_ranking(path).queries()) == ["plain", "grün"]


@pytest.mark.parametrize("encoding", ["latin-1", "koi8-r", "utf-16-le"])
def test_other_encodings_are_rejected(tmp_path: Path, encoding: str) -> None:
    text = "query,positive\nплан,page\n" if encoding == "koi8-r" else "query,positive\ngrün,page\n"
    path = write(tmp_path / "t.csv", text.encode(encoding))
    refused(lambda: read_ranking(path), "not a text file" if encoding == "utf-16-le" else "iconv")


def test_an_endless_line_does_not_fill_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unisono.recipes.seo.data.lines.MAX_LINE", 1000)
    path = write(tmp_path / "t.tsv.gz", "x" * 5000)
    refused(lambda: list(lines_of(path)), "line 1", "longer than")


def test_ids_are_looked_up_by_number_and_the_first_duplicate_wins() -> None:
    ids = Ids(hashes_of(["b", "a", "b", "c"]))
    assert ids.first.tolist() == [True, True, False, True]
    assert ids.numbers(["a", "b", "c", "d"]).tolist() == [1, 0, 2, -1]
    assert Ids(hashes_of([])).numbers(["a"]).tolist() == [-1]


# Labels and snippets -------------------------------------------------------------------------------------------------


def test_words_and_a_few_distinct_integers_are_classes_and_other_numbers_are_regression_targets(tmp_path: Path) -> None:
    words = read_labelled(write(tmp_path / "a.csv", "text,label\none,spam\ntwo,ham\nthree,spam\nfour,ham\n"))
    assert (words.texts, words.labels, words.names) == (["one", "two", "three", "four"], [1, 0, 1, 0], ["ham", "spam"])
    whole = write(tmp_path / "b.csv", "label,text\n" + "".join(f"{n % 3 + 9}.0,page {n}\n" for n in range(9)))
    assert (read_labelled(whole).labels, read_labelled(whole).names) == ([0, 1, 2] * 3, ["9", "10", "11"])
    assert read_labelled(whole, kind="number").labels == [9.0, 10.0, 11.0] * 3
    numbers = read_labelled(jsonl(tmp_path / "c.jsonl", *({"text": f"t{n}", "label": n / 4} for n in range(9))))
    assert (numbers.names, numbers.labels[1]) == (None, 0.25)
    yes = read_labelled(jsonl(tmp_path / "d.jsonl", *({"text": f"t{n}", "label": n > 3} for n in range(9))))
    assert yes.names == ["false", "true"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("text,label\na,good\nb,good\n", ["all 2 labels are 'good'", "another class"]),
        ("text,label\na,1.5\nb,1.5\n", ["all 2 labels are 1.5"]),
        ("text,label\na,1.5\nb,2\nc,3.25\nd,n/a\n", ["line 5", "'n/a'", "number"]),
        ("text,label\na,nan\nb,2\n", ["line 2", "'nan'"]),
        ("text,label\na,\nb,2\n", ["line 2", "label"]),
        ("text,label\n ,1\nb,2\n", ["line 2", "text is empty"]),
        ("text,label\na,x y\nb,z u\nc,v w\n", ["3 distinct labels in 3 rows"]),
        ("page_text,label\na,1\n", ["page_text, label", "no text"]),
    ],
)
def test_labels_that_cannot_be_learned_from_are_refused(tmp_path: Path, content: str, words: list[str]) -> None:
    path = write(tmp_path / "l.csv", content)
    refused(lambda: read_labelled(path), "l.csv", *words)


def test_bad_labels_are_skipped_and_counted(tmp_path: Path) -> None:
    messages: list[str] = []
    path = write(tmp_path / "l.csv", "text,label\na,1.5\nb,n/a\nc,2.25\n,3\nd,inf\n")
    kept = read_labelled(path, leave_out_bad=True, remark=messages.append)
    assert (kept.texts, kept.labels) == (["a", "c"], [1.5, 2.25])
    assert "skipped 3 unusable rows" in messages[0]


def test_snippets_come_from_tables_folders_of_pages_and_sitemaps(tmp_path: Path) -> None:
    table = write(tmp_path / "s.csv", "text,title,description\na page,A title,What it is\n")
    assert read_snippets(table, "title") == [("a page", "A title")]
    assert read_snippets(table, "description") == [("a page", "What it is")]
    refused(lambda: read_snippets(write(tmp_path / "t.csv", "text,headline\na,b\n"), "title"), "text, headline")
    site = seo_data.write_site(tmp_path / "site", 3)
    result = read_snippets(site, "title")
    assert len(result) == 3 and result[0][1] == seo_data.made(0).title and seo_data.made(0).page in result[0][0]
    write(site / "page-0003.html", "<p>No title here</p>")
    refused(lambda: read_snippets(site, "title"), "page-0003.html", "no title")
    messages: list[str] = []
    assert read_snippets(site, "title", leave_out_bad=True, remark=messages.append) == result
    assert "page-0003.html" in messages[0]


# Pages ---------------------------------------------------------------------------------------------------------------

PAGE = """<!DOCTYPE html><html lang="en-GB"><head><title> Red &amp;
green </title><META NAME="Description" CONTENT=" All of  it "><link rel="alternate canonical" href="https://x.org/a">
<style>p { color: red }</style></head><body><svg><title>an icon</title></svg><h1>The <b>head</b>line</h1>
<p>One<!-- hidden -->two <a href=" /next ">three</a>.<br>Four<script>alert("no")</script></p><h3></h3>
<ul><li>five<li>six</ul><p hidden>seven</p><a>no address</a><a href="">eight</a><img src="a.png" alt="">
<img data-src="b.png"><nav>Menü</nav></body></html>"""


def test_parse_page_extracts_what_visitors_and_search_engines_see() -> None:
    page = parse_page(PAGE, "a.html")
    assert (page.name, page.title, page.description) == ("a.html", "Red & green", "All of it")
    assert (page.lang, page.canonical, page.encoding, page.problems) == ("en-GB", "https://x.org/a", None, [])
    assert page.headings == [(1, "The headline"), (3, "")]
    assert page.text == "The headline\n\nOnetwo three.\nFour\n\nfive\n\nsix\n\nno addresseight\n\nMenü"
    assert page.links == ["/next", ""]
    assert page.images == [("a.png", ""), ("b.png", None)]
    bare = parse_page(b"<p>x", "b.html")
    assert (bare.title, bare.description, bare.lang, bare.canonical) == (None, None, None, None)
    assert parse_page(b"<title></title><p>x", "b.html").title == ""


@pytest.mark.parametrize(
    ("content", "encoding"),
    [
        (PAGE.encode(), "utf-8"),
        (b"\xef\xbb\xbf" + PAGE.encode(), "utf-8"),
        (PAGE.encode("utf-16"), "utf-16-le"),
        (PAGE.encode("utf-16-be"), "utf-16-be"),
        (PAGE.encode("latin-1"), "cp1252"),
        (PAGE.replace("<head>", "<head><meta charset=ISO-8859-1>").encode("latin-1"), "cp1252"),
        (b'<?xml version="1.0" encoding="iso-8859-15"?>' + PAGE.encode("iso-8859-15"), "iso8859-15"),
        (
            PAGE.replace("<head>", '<head><meta http-equiv="Content-Type" content="text/html; charset=cp850">').encode(
                "cp850"
            ),
            "cp850",
        ),
    ],
)
def test_pages_are_read_in_any_encoding(content: bytes, encoding: str) -> None:
    page = parse_page(content, "a.html")
    assert page.encoding == encoding
    assert page.text.endswith("Menü")
    assert page.problems == []


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"%PDF-1.7\n%\xe2\xe3\xcf\xd3", "it is a PDF"),
        (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "a PNG image"),
        (b"\xff\xd8\xff\xe0\0\x10JFIF", "a JPEG image"),
        (bytes(range(256)) * 20, "not text"),
        (b"", "empty"),
        (b" \n ", "empty"),
        (b"only words", "no tag"),
        (b"<html><body></body></html>", "no visible content"),
        (b"<!doctype html>", "no visible content"),
        (b"<p>a</b></i>", "2 end tags without a start tag"),
        (b"<meta charset=klingon><p>a", "unknown encoding klingon"),
        (b"<meta charset=base64><p>a", "unknown encoding base64"),
        (b"<meta charset=utf-8><p>gr\xfcn", "is not: read as Windows-1252"),
        (b"<div>" * 9000 + b"deep", "deep: truncated"),
    ],
)
def test_defects_of_a_page_are_reported_and_never_raised(content: bytes, problem: str) -> None:
    page = parse_page(content, "a.html")
    assert any(problem in each for each in page.problems), page.problems


def test_parse_page_never_raises_whatever_the_bytes() -> None:
    random = np.random.RandomState(0)
    for _ in range(300):
        content = bytearray(PAGE.encode())
        for place in random.randint(0, len(content), 30):
            content[place] = random.randint(256)
        for page in (parse_page(bytes(content), "a.html"), parse_page(bytes(content).decode("latin-1"), "a.html")):
            assert page.text.encode() or page.title or page.problems
    assert parse_page("<p>half \ud800 a character", "a.html").text.encode()


def test_a_page_cannot_refer_to_files_of_the_machine(tmp_path: Path) -> None:
    secret = write(tmp_path / "secret", "the secret")
    content = f'<!DOCTYPE html [<!ENTITY x SYSTEM "file://{secret}">]><html><body><p>a &x; b</p></body></html>'
    assert "the secret" not in parse_page(content, "a.html").text


# Sites ---------------------------------------------------------------------------------------------------------------


def sitemap(*addresses: str) -> str:
    image = (
        '<image xmlns="http://www.google.com/schemas/sitemap-image/1.1"><loc>https://x.org/picture.png</loc></image>'
    )
    entries = "".join(f"<url><loc> {each} </loc>{image}</url>" for each in addresses)
    return f'<?xml version="1.0"?><urlset xmlns="http://www.sitemaps.org/schemas/sitemap/0.9">{entries}</urlset>'


def a_site(folder: Path) -> Path:
    for name in ("index.html", "about.htm", "blog/index.html", "blog/post one.html", "x.org/mirror.html"):
        write(folder / name, f"<p>{name}</p>")
    write(folder / "picture.png", b"\x89PNG")
    write(folder / ".git/hidden.html", "<p>hidden")
    return folder


def test_the_pages_of_a_folder_come_in_order(tmp_path: Path) -> None:
    names = ["about.htm", "blog/index.html", "blog/post one.html", "index.html", "x.org/mirror.html"]
    assert pages_of(a_site(tmp_path)) == [(name, tmp_path / name) for name in names]
    (tmp_path / "empty").mkdir()
    refused(lambda: pages_of(tmp_path / "empty"), "it has no pages", ".html")
    refused(lambda: pages_of(tmp_path / "nowhere"), "expected a folder of pages, a sitemap")


@pytest.mark.parametrize("end", ["", ".gz"])
def test_urls_of_a_local_sitemap_are_read_from_files_next_to_it(tmp_path: Path, end: str) -> None:
    a_site(tmp_path)
    urls = ["https://x.org/", "https://x.org/blog/post%20one.html?a=1#b", "https://x.org/blog/", "about.htm"]
    urls += ["https://x.org/about", "https://x.org/mirror.html", "https://x.org/"]
    path = write(tmp_path / f"sitemap.xml{end}", sitemap(*urls))
    result = {name: str(file.relative_to(tmp_path)) for name, file in pages_of(path)}
    assert list(result) == urls[:-1]
    assert list(result.values()) == [
        "index.html", "blog/post one.html", "blog/index.html", "about.htm", "about.htm", "x.org/mirror.html"
    ]  # fmt: skip
    assert addresses_in(path) == urls[:-1]
    index = write(
        tmp_path / "all.xml",
        f"<sitemapindex><sitemap><loc>https://x.org/maps/sitemap.xml{end}</loc></sitemap></sitemapindex>",
    )
    assert pages_of(index) == pages_of(path)


def test_a_list_of_files_is_a_site(tmp_path: Path) -> None:
    path = write(a_site(tmp_path) / "list.txt", "# mine\nindex.html\r\n\nblog/post one.html\nhttps://x.org/about\n")
    assert [name for name, _ in pages_of(path)] == ["index.html", "blog/post one.html", "https://x.org/about"]


def test_missing_listed_pages_are_reported_or_skipped(tmp_path: Path) -> None:
    path, output = write(a_site(tmp_path) / "list.txt", "index.html\ngone.html\n"), list[str]()
    refused(lambda: pages_of(path), "list.txt, line 2", "'gone.html'")
    assert [name for name, _ in pages_of(path, leave_out_bad=True, remark=output.append)] == ["index.html"]
    assert "gone.html" in output[0]


def test_a_list_cannot_name_files_outside_its_folder(tmp_path: Path) -> None:
    write(tmp_path / "outside.html", "<p>secret")
    inside = a_site(tmp_path / "site")
    (inside / "link.html").symlink_to(tmp_path / "outside.html")
    for name in ("../outside.html", str(tmp_path / "outside.html"), "https://x.org/../../outside.html", "link.html"):
        refused(lambda name=name: pages_of(write(inside / "list.txt", name)), "leads outside")
    with pytest.raises(ConfigError, match="leads outside"):
        pages_of(write(inside / "s.xml", sitemap("https://../outside.html")))


def test_entities_in_a_sitemap_are_not_expanded(tmp_path: Path) -> None:
    a_site(tmp_path)
    secret = write(tmp_path / "secret", "index.html")
    attack = f'<!DOCTYPE u [<!ENTITY x SYSTEM "file://{secret}">]><urlset><url><loc>&x;</loc></url></urlset>'
    refused(lambda: pages_of(write(tmp_path / "s.xml", attack)), "s.xml")
    bomb = '<!DOCTYPE u [<!ENTITY a "aaaaaaaaaa">' + "".join(
        f'<!ENTITY {chr(98 + n)} "{f"&{chr(97 + n)};" * 10}">' for n in range(9)
    )
    refused(lambda: pages_of(write(tmp_path / "s.xml", f"{bomb}]><urlset><url><loc>&j;</loc></url></urlset>")), "s.xml")
    refused(lambda: pages_of(write(tmp_path / "s.xml", "<urlset><url>")), "not valid XML")
    refused(lambda: pages_of(write(tmp_path / "s.xml", "<rss/>")), "<rss>")


# Tokens --------------------------------------------------------------------------------------------------------------


def by_letters(some: Any) -> list[list[int]]:
    return [[ord(letter) for letter in text] for text in some]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_TEXTS", 10)


def some_texts(number: int = 95) -> list[str]:
    return [f"text {each} " * (each % 4 + 1) for each in range(number)]


def tokens(folder: Path) -> list[list[int]]:
    return [row.tolist() for row in open_texts(folder)]


@pytest.mark.usefixtures("small_blocks")
def test_tokens_survive_a_round_trip(tmp_path: Path) -> None:
    all_texts = some_texts()
    place = fill_texts(tmp_path, lambda: all_texts, by_letters, "f", Work(tmp_path))
    kept = open_texts(place)
    assert len(kept) == 95 and kept[3].dtype == np.int32
    assert tokens(place) == by_letters(all_texts)
    assert kept.lengths.tolist() == [len(text) for text in all_texts] and kept.lengths.dtype == np.int32
    assert kept[-1].tolist() == by_letters(all_texts[-1:])[0]
    with pytest.raises(IndexError):
        kept[95]
    again = pickle.loads(pickle.dumps(kept))
    assert len(pickle.dumps(kept)) < 1000 and again[7].tolist() == kept[7].tolist()
    assert tokens(tmp_path) == tokens(place)
    assert sorted(path.name for path in place.iterdir()) == ["starts.npy", "texts.json", "tokens.npy"]


@pytest.mark.usefixtures("small_blocks")
def test_two_processes_write_the_same_bytes_as_one_and_share_the_work(tmp_path: Path) -> None:
    all_texts, calls = some_texts(), list[int]()
    meeting, output = threading.Barrier(2), [None, None]

    def run(part: int) -> None:
        def gather(value: Any) -> list[Any]:
            output[part] = value
            meeting.wait(20)
            both = list(output)
            meeting.wait(20)
            return both

        def tokenize(some: Any) -> list[list[int]]:
            calls.append(part)
            return by_letters(some)

        fill_texts(tmp_path / "two", lambda: all_texts, tokenize, "f", Work(tmp_path, part, 2, _gather=gather))

    threads = [threading.Thread(target=run, args=(part,)) for part in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    one = fill_texts(tmp_path / "one", lambda: all_texts, by_letters, "f", Work(tmp_path))
    two = tmp_path / "two" / one.name
    assert sorted(calls) == [0] * 5 + [1] * 5
    assert all((one / name).read_bytes() == (two / name).read_bytes() for name in ("tokens.npy", "starts.npy"))


@pytest.mark.usefixtures("small_blocks")
def test_tokens_are_recomputed_only_if_the_fingerprint_changes(tmp_path: Path) -> None:
    first = fill_texts(tmp_path, some_texts, by_letters, "a", Work(tmp_path))
    other = fill_texts(tmp_path, lambda: ["other"], by_letters, "b", Work(tmp_path))
    assert first != other and tokens(first) == by_letters(some_texts()) and tokens(other) == by_letters(["other"])

    def never(some: Any) -> list[list[int]]:
        raise AssertionError("computed again")

    assert fill_texts(tmp_path, some_texts, never, "a", Work(tmp_path)) == first
    with pytest.raises(UserError, match="found 2"):
        open_texts(tmp_path)


@pytest.mark.usefixtures("small_blocks")
def test_damaged_tokens_are_recomputed(tmp_path: Path) -> None:
    place = fill_texts(tmp_path, some_texts, by_letters, "a", Work(tmp_path))
    with (place / "tokens.npy").open("r+b") as file:
        file.truncate(500)
    with pytest.raises(UserError, match="damaged"):
        open_texts(place)
    fill_texts(tmp_path, some_texts, by_letters, "a", Work(tmp_path))
    assert tokens(place) == by_letters(some_texts())


FILLING = """
import sys, time
from pathlib import Path
from unisono.engine.recipe import Work
from unisono.recipes.seo.data import blocks
from unisono.recipes.seo.data.store import fill_texts
blocks.BLOCK_TEXTS = 10
calls = 0
def tokenize(some):
    global calls
    calls += 1
    time.sleep(float(sys.argv[2]))
    return [[ord(letter) for letter in text] for text in some]
texts = [f"text {each} " * (each % 4 + 1) for each in range(95)]
print("begin", flush=True)
fill_texts(Path(sys.argv[1]), lambda: texts, tokenize, "f", Work(Path(sys.argv[1])))
print("calls", calls, flush=True)
"""


def filling(folder: Path, seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", FILLING, str(folder), str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_a_killed_fill_continues_where_it_stopped(tmp_path: Path) -> None:
    process = filling(tmp_path, 0.5)
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("*/block-*"))) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    there = len(list(tmp_path.glob("*/block-*")))
    assert 3 <= there < 10
    reported, _ = filling(tmp_path, 0).communicate(timeout=90)
    assert reported.split() == ["begin", "calls", str(10 - there)]
    assert tokens(tmp_path) == by_letters(some_texts())


def test_two_runs_that_fill_the_same_folder_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    both = [filling(tmp_path, 0.03), filling(tmp_path, 0.05)]
    assert [process.communicate(timeout=90) and process.returncode for process in both] == [0, 0]
    assert tokens(tmp_path) == by_letters(some_texts())
    assert not list(tmp_path.glob("*/block-*")) and not list(tmp_path.glob("*/.*"))


@pytest.mark.usefixtures("small_blocks")
def test_a_fill_that_is_asked_to_stop_keeps_its_finished_blocks(tmp_path: Path) -> None:
    stop_requests = iter([False, False, *[True] * 20])
    place = fill_texts(
        tmp_path, some_texts, by_letters, "f", Work(tmp_path, _asked_to_stop=lambda: next(stop_requests))
    )
    assert len(list(place.glob("block-*"))) == 2 and not (place / "texts.json").exists()
    fill_texts(tmp_path, some_texts, by_letters, "f", Work(tmp_path))
    assert tokens(place) == by_letters(some_texts())


def test_many_texts_take_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_CHARACTERS", 2**17)

    def stream() -> Iterator[str]:
        return (f"{number} " + "x" * 10_000 for number in range(2_000))  # 20 MB

    tracemalloc.start()
    place = fill_texts(tmp_path, stream, lambda some: [[1, 2, 3]] * len(some), "f", Work(tmp_path))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(open_texts(place)) == 2_000
    assert peak < 3 * 2**20, peak


def test_a_store_without_texts_is_empty(tmp_path: Path) -> None:
    assert len(open_texts(fill_texts(tmp_path, lambda: [], by_letters, "f", Work(tmp_path)))) == 0


def test_a_real_tokenizer_truncates_and_counts(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "b"])}
    backend = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]")
    tokenize = Tokenize(tokenizer, 4)
    place = fill_texts(tmp_path, lambda: ["a", "a b", "a b a", "b b b b b b"], tokenize, "f", Work(tmp_path))
    assert tokens(place) == [[2, 4, 3], [2, 4, 5, 3], [2, 4, 5, 3], [2, 5, 5, 3]]
    assert open_texts(place).num_cut == 2
    plain = Tokenize(tokenizer, 4, special_tokens=False)
    assert plain(["a b a b b", " "]) == [[4, 5, 4, 5], [0]] and plain.num_cut == 1


def test_fingerprints_distinguish_files_and_settings(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "x")
    first = fingerprint_of([path], "tokenizer", 256)
    assert fingerprint_of([path], "tokenizer", 256) == first
    assert fingerprint_of([path], "tokenizer", 128) != first
    os.utime(path, (1, 1))
    assert fingerprint_of([path], "tokenizer", 256) != first


# Debian's packages ----------------------------------------------------------------------------------------------------

TOLD = " ".join(["It reads a great many kinds of files and shows them on every screen."] * 6)
PACKAGES = "Package: {0}\nSection: {1}\nDescription: {2}\nDescription-md5: 0\n\n"
TRANSLATION = "Package: {0}\nDescription-md5: 0\nDescription-en: {1}\n {2}\n .\n It is written in {0}.\n\n"


def apt_get(folder: Path, lists: dict[str, str], code: int = 0) -> Path:
    """A fake apt-get that writes these lists, and the arguments of its calls."""
    program = write(
        folder / "bin/apt-get",
        f"""#!{sys.executable}
import json, sys
from pathlib import Path
words = sys.argv[1:]
options = dict(word.split("=", 1) for word in words if "=" in word)
config = Path(words[words.index("-c") + 1]).read_text()
Path({str(folder / "called.json")!r}).write_text(json.dumps([words, options, config]))
for name, content in {lists!r}.items():
    (Path(options["Dir::State::lists"]) / name).write_text(content)
if {code}:
    print("E: The sources could not be reached", file=sys.stderr)
sys.exit({code})
""",
    )
    program.chmod(0o755)
    return program.parent


def test_debian_packages_become_queries_and_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [
        ("zview", "graphics", "Fast Viewer of files"),
        ("aview", "non-free/text", "viewer for ASCII"),
        ("tiny", "misc", "t"),
    ]
    lists = {
        "x_main_binary-amd64_Packages": "".join(PACKAGES.format(*entry) for entry in entries),
        "x_main_i18n_Translation-en": "".join(
            TRANSLATION.format(name, reported, "short" if name == "tiny" else f"{name} is one. VIEWER! {TOLD}")
            for name, _, reported in entries
        )
        + TRANSLATION.format("zview-dev", "development files", f"zview is one. VIEWER! {TOLD}"),
    }
    monkeypatch.setenv("PATH", str(apt_get(tmp_path, lists)))
    result = debian.packages(tmp_path / "cache")
    assert [(each.name, each.section, each.synopsis) for each in result] == [
        ("aview", "text", "viewer for ASCII"),
        ("zview", "graphics", "Fast Viewer of files"),
    ]
    assert result[1].body == f"zview is one. VIEWER! {TOLD}\nIt is written in zview."
    words, options, config = json.loads((tmp_path / "called.json").read_text())
    assert words[-1] == "update" and str(tmp_path / "cache") in options["Dir::State::lists"]
    assert str(tmp_path / "cache") in options["Dir::Cache"]
    assert "#clear APT::Update::Post-Invoke;" in config
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [debian.PACKAGES_FILE]

    monkeypatch.setenv("PATH", "")  # stored, so apt is not needed
    ranking = debian.read_debian(tmp_path / "cache", work=Work(tmp_path))
    assert in_words(ranking)[0] == {(each.synopsis, each.body, 1.0) for each in result}
    assert ranking.sections is not None and sorted(ranking.sections.tolist()) == [0, 1]
    hard = texts(debian.read_debian(tmp_path / "cache", hard=True).pages())[1]
    assert "files" not in hard and "VIEWER" not in hard and " of " not in hard and "great many kinds and shows" in hard
    assert hard.endswith("\nIt is written in zview.")
    (tmp_path / "cache" / debian.PACKAGES_FILE).write_bytes(b"\x1f\x8bbroken")
    refused(lambda: debian.packages(tmp_path / "cache"), debian.PACKAGES_FILE, "damaged")


def test_without_apt_or_its_sources_the_error_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    refused(lambda: debian.packages(tmp_path / "cache"), "apt-get is not installed", debian.PACKAGES_FILE)
    monkeypatch.setenv("PATH", str(apt_get(tmp_path, {}, 100)))
    refused(lambda: debian.packages(tmp_path / "cache"), "could not be reached")
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.slow
def test_apt_itself_gives_thousands_of_packages(tmp_path: Path) -> None:
    if shutil.which("apt-get") is None:
        pytest.skip("NOT TESTED: there is no apt-get")
    try:
        ranking = debian.read_debian(tmp_path)
    except ConfigError as error:
        pytest.skip(f"NOT TESTED: {error}")
    assert ranking.num_pages > 10_000 and ranking.num_queries > 0.98 * ranking.num_pages
    assert ranking.sections is not None and len(ranking.sections) == ranking.num_pages
