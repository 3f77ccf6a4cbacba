"""The pages of a site are compared by meaning: planted faults are found, and few others are reported."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from browser import Browser
from unisono.cli.main import main
from unisono.recipes.seo.data.pages import Page
from unisono.recipes.seo.site.semantic.contents import Contents
from unisono.recipes.seo.site.semantic.limits import OF_MEANING
from unisono.recipes.seo.site.semantic.space import Dense, Lexical, Vectors

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

from seo_site import Sets, compared
from seo_site_planted import Truth, make_site, write_clicks
from seo_site_words import ASPECTS

ATTACK = "'\"><script>alert(1)</script><img src=x onerror=alert(2)>"


def report_of(out: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((out / "report.json").read_text())
    return report


def planted(folder: Path, num_articles: int, *words: str) -> tuple[dict[str, Any], Truth, Sets]:
    """The report about a planted site, the truth, and both as sets for each kind."""
    truth = make_site(folder / "new", folder / "old", seed=1, num_articles=num_articles)
    (folder / "queries.txt").write_text("\n".join(truth.queries))
    clicks = write_clicks(folder / "clicks.csv", truth)
    command = [str(folder / "new"), "--old", str(folder / "old"), "--queries", str(folder / "queries.txt")]
    command += ["--search_console", str(clicks), "--output", str(folder / "out"), *words]
    assert main(["seo", *command]) == 0
    report = report_of(folder / "out")
    return report, truth, compared(report["meaning"], report["meaning"], truth)


def check(sets: Sets, kinds: Sequence[str], recall: float, precision: float) -> None:
    for kind in kinds:
        found, truth = sets[kind]
        right = len(found & truth)
        assert right >= recall * len(truth) and right >= precision * len(found), (kind, truth - found, found - truth)


def write_page(file: Path, title: str, sentences: Sequence[str], links: str = "") -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title></head>'
        f"<body><h1>{title}</h1><p>{' '.join(sentences)}</p>{links}</body></html>"
    )


def test_minilm_finds_the_same_content_in_other_words_and_pages_that_moved(tmp_path: Path) -> None:
    def facts(aspect: str, wording: int, thing: str = "bee smoker") -> list[str]:
        words = {"t": thing, "T": thing, "n": 20, "tool": "a hive tool", "stuff": "beeswax"}
        words |= {"place": "the shed", "Place": "The shed"}
        return [fact.split("|")[wording].format(**words) for fact in ASPECTS[aspect][3:]]

    new = tmp_path / "new"
    write_page(new / "clean.html", "Cleaning a bee smoker", facts("clean", 0))
    write_page(new / "notes.html", "A spotless smoker", facts("clean", 1)[::-1])
    write_page(new / "repair.html", "Repairing a broken bee smoker", facts("repair", 0))
    write_page(new / "history.html", "The history of the bee smoker", facts("history", 0))
    write_page(new / "brake.html", "Cleaning a disc brake", facts("clean", 0, "disc brake"))
    write_page(tmp_path / "old" / "p1.html", "When the smoker fails", facts("repair", 1))
    write_page(tmp_path / "old" / "p2.html", "Loans", ["Payday loans are paid in ten minutes.", "Interest is weekly."])
    out = tmp_path / "out"
    words = ["--encoder", "minilm", "--old", str(tmp_path / "old"), "--output", str(out), "--device", "cpu"]
    assert main(["seo", str(new), *words]) == 0
    meaning = report_of(out)["meaning"]
    assert [sorted(each["pages"]) for each in meaning["near_duplicates"]] == [["clean.html", "notes.html"]]
    assert {each["old"]: each["new"] for each in meaning["redirects"]} == {"p1.html": "repair.html", "p2.html": None}
    assert "minilm" in meaning["encoder"] and meaning["near_duplicates"][0]["bm25"] < 0.7
    assert (out / "redirects.csv").read_text().splitlines()[1].startswith("/p1.html,/repair.html,")
    fixes = {finding["kind"]: finding["fix"] for finding in report_of(out)["findings"]}
    assert fixes["missing redirect"] == "Redirect: /p1.html /repair.html 301"


def test_without_an_encoder_words_are_compared_and_the_report_says_what_to_pass(tmp_path: Path) -> None:
    report, truth, sets = planted(tmp_path, 160)
    assert report["meaning"]["encoder"] == "BM25"
    assert any("--encoder minilm" in remark for remark in report["remarks"])
    kinds = ["unreachable pages", "competing pages, by Search Console", "off-topic pages", "missing links"]
    check(sets, kinds, 0.95, 0.9)
    check(sets, ["redirects"], 0.75, 0.75)
    assert all(finding["page"] and finding["evidence"] and finding["fix"] for finding in report["findings"])
    hit = next(each for each in report["meaning"]["missing_links"] if (each["page"], each["target"]) in truth.links)
    assert hit["anchor"].lower() in hit["sentence"].lower() and "bm25" in hit


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--encoder", "some/model"], "downloads no models"),
        (["--old", "nowhere", "--semantic"], "no such file or folder"),
        (["--search_console", "nowhere.csv"], "nowhere.csv"),
    ],
)
def test_wrong_arguments_are_one_line(
    tmp_path: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "a.html").write_text("<title>A</title><p>A text.</p>")
    assert main(["seo", str(tmp_path / "site"), "--output", str(tmp_path / "out"), *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and not (tmp_path / "out").exists()


def test_templates_with_a_slot_are_ignored_and_own_sentences_kept() -> None:
    contents = Contents()
    names = ("kettle", "toaster", "grill", "mixer", "oven", "iron", "lamp", "radio")
    for number, name in enumerate(names):
        text = (
            f"Menu\n\nOrder the {name} today and we deliver the {name} within three days.\n\n"
            f"Only the {name} page number {number} says this about {name}s and fact {number * 7}."
        )
        contents.add(Page(name, f"The {name} | Shop of Ann", headings=[(1, name)], text=text), ["A link"])
    for name, content in zip(names, contents.finish(), strict=True):
        assert content.title == f"The {name}" and content.num_dropped == 2
        assert len(content.sentences) == 1 and content.sentences[0].startswith(f"Only the {name}")


def test_nearest_in_blocks_equals_all_pairs_at_once() -> None:
    draw = np.random.default_rng(0)
    rows = draw.standard_normal((1300, 24)).astype(np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    numbers, cosines = Vectors(rows).nearest(Vectors(rows), 7, is_same=True)
    every = rows @ rows.T
    np.fill_diagonal(every, -np.inf)
    assert np.allclose(cosines, -np.sort(-every, axis=1)[:, :7], atol=1e-5)
    assert np.allclose(np.take_along_axis(every, numbers, axis=1), cosines, atol=1e-5)
    assert np.allclose(Vectors(rows).pairs([3, 5], [4, 5]), [every[3, 4], 1.0], atol=1e-5)


def test_bm25_cosines_need_common_words() -> None:
    lexical = Lexical(["red kettle", "red kettle boils", "green bicycle", "a blue bicycle"])
    vectors = lexical.embed(["red kettle", "kettle red", "green bicycle", "unknown"])
    cosines = vectors.matrix(vectors)
    assert cosines[0, 1] == pytest.approx(1, abs=1e-5) and cosines[0, 2] == 0 and not cosines[3].any()


def test_limits_rise_for_an_encoder_that_finds_everything_similar() -> None:
    class Narrow:
        name = "narrow"

        def embed(self, texts: Sequence[str], kind: str = "page") -> np.ndarray:
            rows = 3.0 + np.random.default_rng(0).standard_normal((len(texts), 16))
            return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)

    space = Dense(Narrow())
    space.adapt(space.embed([str(number) for number in range(50)]))
    assert OF_MEANING.candidate < space.limits.candidate < 1 and space.limits.shared == OF_MEANING.shared


def test_hostile_titles_are_text_on_the_page(tmp_path: Path, browser: Browser) -> None:
    site = tmp_path / "site"
    site.mkdir()
    title = ATTACK.replace("&", "&amp;").replace("<", "&lt;")
    for number in range(6):
        links = '<a href="/0.html">start</a>' if number != 3 else ""
        (site / f"{number}.html").write_text(
            f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title} {number}</title></head><body>'
            f"<h1>{title}</h1><p>{title} mentions {title} {(number + 1) % 6} and boats. Sails need wind.</p>{links}"
            "</body></html>"
        )
    (site / "index.html").write_text(
        '<title>Start</title><p>All.</p><a href="/0.html">zero</a><a href="/1.html">one</a>'
    )
    (tmp_path / "q.txt").write_text(f"{ATTACK}\n")
    (tmp_path / "c.csv").write_text(
        "Query,Page,Clicks,Impressions,CTR,Position\n"
        + "".join(f'"{ATTACK.replace(chr(34), chr(34) * 2)}",https://x.example/{n}.html,5,50,10%,3\n' for n in (0, 1))
    )
    words = [str(site), "--output", str(tmp_path / "out"), "--queries", str(tmp_path / "q.txt")]
    assert main(["seo", *words, "--search_console", str(tmp_path / "c.csv")]) == 0
    report = report_of(tmp_path / "out")
    assert [each["query"] for each in report["meaning"]["competing"]] == [ATTACK] and report["meaning"]["unreachable"]
    for width in (1200, 390):
        browser.events.clear()
        browser("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 400)
        browser("Page.navigate", url=(tmp_path / "out" / "report.html").as_uri())
        browser.wait("document.readyState == 'complete' && document.querySelectorAll('h2').length > 3")
        browser.ask("document.querySelectorAll('details').forEach(each => each.open = true)")
        assert "Pages compared with each other" in browser.ask("document.body.innerText")
        assert "onerror=alert(2)" in browser.ask("document.body.innerText")
        assert browser.ask("document.querySelectorAll('img').length") == 0
        assert browser.ask("document.documentElement.scrollWidth <= innerWidth")
        assert not [each for each in browser.events if each["method"] == "Page.javascriptDialogOpening"]
    browser("Emulation.clearDeviceMetricsOverride")


@pytest.mark.slow
def test_minilm_finds_the_planted_faults(tmp_path: Path) -> None:
    """The figures of benchmarks/results/seo_site.md; the targets that it misses are lower here."""
    _, _, sets = planted(tmp_path, 160, "--encoder", "minilm", "--device", "cpu")
    check(sets, ["unreachable pages", "topics", "redirects"], 0.95, 0.9)
    check(sets, ["competing pages, by Search Console", "missing links"], 0.9, 0.9)
    check(sets, ["off-topic pages"], 0.95, 0.8)
    check(sets, ["near duplicates"], 0.65, 0.75)
