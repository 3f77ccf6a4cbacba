"""Exports of Search Console: read in every form, shown beside scores, and turned into labels for training."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unisono.cli.main import main
from unisono.errors import ConfigError
from unisono.recipes.seo.data.search_console import Shown, number_in, read_search_console
from unisono.recipes.seo.site.semantic.clicks import decay_of, weak_labels
from unisono.recipes.seo.site.semantic.rivals import Seen

PAIRS = """Query,Page,Clicks,Impressions,CTR,Position
clean kettle,https://a.example/clean.html,40,400,10%,2.5
clean kettle,https://a.example/descale.html,12,300,4%,6.1
buy kettle,https://a.example/buy.html,5,100,5%,8
buy kettle,https://a.example/gone.html,1,90,1.1%,30
kettle,https://a.example/clean.html,0,3,0%,55
"""


def write_site(folder: Path) -> Path:
    folder.mkdir()
    texts = {
        "index": "Kettles of all kinds are here. We write about them every week and answer letters.",
        "clean": "Rub the outside with a soft cloth. A little soap removes grease. Rinse it twice and let it dry.",
        "descale": "Boil vinegar and water to dissolve lime. Pour it out after an hour. Then boil plain water once.",
        "buy": "A good kettle costs forty euros. Look for a long guarantee and a cable that can be replaced.",
    }
    for name, text in texts.items():
        links = "".join(f'<a href="/{other}.html">{other} page</a> ' for other in texts)
        (folder / f"{name}.html").write_text(
            f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{name} kettle</title>'
            f'<link rel="canonical" href="https://a.example/{name}.html"></head>'
            f"<body><h1>{name} kettle</h1><p>{text}</p>{links}</body></html>"
        )
    return folder


@pytest.mark.parametrize(
    ("text", "is_count", "value"),
    [
        ("1,234", True, 1234),
        ("1.234", True, 1234),
        ("1\u202f234", True, 1234),
        ("1'234'567", True, 1234567),
        ("12", True, 12),
        ("12.0", True, 12),
        ("3.75", False, 3.75),
        ("3,75", False, 3.75),
        ("1.234", False, 1.234),
        ("12.5%", False, 0.125),
        ("12,5\u00a0%", False, 0.125),
        ("0%", False, 0),
    ],
)
def test_numbers_are_read_as_google_writes_them_in_any_language(text: str, is_count: bool, value: float) -> None:
    assert number_in(text, is_count=is_count) == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "-", "n/a", "-3", "nan", "1e999", "inf"])
def test_what_is_no_number_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="is not"):
        number_in(text)


def test_the_zip_of_the_website_is_read_in_german(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "export.zip", "w") as archive:
        archive.writestr(
            "Suchanfragen.csv",
            'Häufigste Suchanfragen,Klicks,Impressionen,CTR,Position\nkessel,"1.024",20.480,"5,01 %","3,7"\n',
        )
        archive.writestr(
            "../Seiten.csv", "Die häufigsten Seiten,Klicks,Impressionen,CTR,Position\nhttps://a.example/,9,10,90 %,1\n"
        )
        archive.writestr("Länder.csv", "Land,Klicks,Impressionen,CTR,Position\nDeutschland,9,10,90 %,1\n")
        archive.writestr("Filter.csv", "Filter,Wert\nSuchtyp,Web\nDatum,Letzte 3 Monate\n")
    export = read_search_console(tmp_path / "export.zip")
    assert export.queries == [Shown("kessel", None, 1024, 20480, 3.7)]
    assert export.pages == [Shown(None, "https://a.example/", 9, 10, 1)]
    assert export.pairs == [] and "does not say which query" in export.remarks[0]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["export.zip"]  # nothing was extracted


def test_an_export_that_is_filtered_by_one_page_has_pairs(tmp_path: Path) -> None:
    (tmp_path / "Queries.csv").write_text("Top queries,Clicks,Impressions,CTR,Position\nkettle,3,50,6%,4.2\n")
    (tmp_path / "Filters.csv").write_text("Filter,Value\nSearch type,Web\nPage,https://a.example/clean.html\n")
    assert read_search_console(tmp_path).pairs == [Shown("kettle", "https://a.example/clean.html", 3, 50, 4.2)]


def test_damaged_and_foreign_files_are_one_line_errors(tmp_path: Path) -> None:
    (tmp_path / "x.zip").write_bytes(b"PK\x03\x04 nothing")
    (tmp_path / "x.csv").write_text("Name,Price\nkettle,3\n")
    (tmp_path / "y.csv").write_text("Query,Clicks,Impressions,CTR,Position\nkettle,many,3,1%,2\n")
    (tmp_path / "z.pdf").write_text("")
    for name, message in (
        ("x.zip", "not a readable .zip"),
        ("x.csv", "columns"),
        ("y.csv", "row 2"),
        ("z.pdf", "expected"),
    ):
        with pytest.raises(ConfigError, match=message) as error:
            read_search_console(tmp_path / name)
        assert "\n" not in str(error.value)


def report_with(site: Path, out: Path, *words: str) -> dict[str, Any]:
    assert main(["seo", str(site), "--output", str(out), *words]) == 0
    report: dict[str, Any] = json.loads((out / "report.json").read_text())
    return report


def test_clicks_and_positions_stand_beside_the_scores_and_prove_that_pages_compete(tmp_path: Path) -> None:
    site, export = write_site(tmp_path / "site"), tmp_path / "export.csv"
    export.write_text(PAIRS)
    report = report_with(site, tmp_path / "out", "--search_console", str(export))
    [query] = [each for each in report["queries"] if each["query"] == "clean kettle"]
    google = {each["page"]: each.get("google") for each in query["pages"]}
    assert google["clean.html"] == {"clicks": 40, "impressions": 400, "position": 2.5}
    assert query["google"]["impressions"] == 700
    [page] = [each for each in report["pages"] if each["page"] == "clean.html"]
    assert page["google"]["clicks"] == 40 and page["google"]["impressions"] == 403
    [contest] = [each for each in report["meaning"]["competing"] if each["measured"]]
    assert contest["query"] == "clean kettle"
    assert [each["page"] for each in contest["pages"]] == ["clean.html", "descale.html"]
    [finding] = [
        each for each in report["findings"] if each["kind"] == "competing pages" and each["severity"] == "warning"
    ]
    assert finding["page"] == "descale.html" and "position 6.1, 12 of 300 clicked" in finding["evidence"]
    assert any("names 1 pages that the site does not have" in remark for remark in report["remarks"])
    assert "Google: position 2.5, 40 of 400 clicked" in (tmp_path / "out" / "report.html").read_text()


def test_labels_from_clicks_are_training_data(tmp_path: Path) -> None:
    site, export, labels = write_site(tmp_path / "site"), tmp_path / "export.csv", tmp_path / "labels.jsonl"
    export.write_text(PAIRS)
    report_with(site, tmp_path / "out", "--search_console", str(export), "--labels", str(labels))
    rows = [json.loads(line) for line in labels.read_text().splitlines()]
    assert {(row["query"], row["page"]) for row in rows} == {
        ("clean kettle", "clean.html"),
        ("clean kettle", "descale.html"),
        ("buy kettle", "buy.html"),
    }
    assert all(0 < row["weight"] <= 1 and row["positive"] for row in rows)
    assert main(["seo", str(site), "--output", str(tmp_path / "x"), "--labels", str(labels)]) == 2
    from unisono.recipes.seo.data.ranking_sets.ranking import read_ranking

    data = read_ranking(labels)
    assert (data.num_queries, data.num_pages) == (2, 3)


def test_weights_correct_for_the_position() -> None:
    """Of two equally attractive pages, the one at position 8 gets an eighth of the clicks and the same attraction."""
    same = weak_labels({"q": {0: Seen(800, 8000, 1.0), 1: Seen(1000, 80000, 8.0)}}, decay=1.0)
    assert [round(each.weight, 2) for each in same] == [1.0, 1.0]
    raw = weak_labels({"q": {0: Seen(800, 8000, 1.0), 1: Seen(1000, 80000, 8.0)}}, decay=0.0)
    assert raw[1].weight == pytest.approx(0.125, rel=0.01)
    rare = weak_labels({"q": {0: Seen(800, 8000, 1.0), 1: Seen(1, 10, 1.0)}}, decay=1.0)
    assert len(rare) == 2 and rare[1].weight < 0.6  # few impressions are uncertain


def test_the_decay_is_fitted_to_the_export() -> None:
    draw = np.random.default_rng(0)
    for decay in (0.5, 1.0, 1.6):
        rows = []
        for number in range(400):
            position, attraction = float(draw.integers(1, 30)), float(draw.uniform(0.05, 0.6))
            clicks = draw.binomial(2000, attraction * position**-decay)
            rows.append(Shown(f"q{number}", "p", float(clicks), 2000.0, position))
        assert decay_of(rows) == pytest.approx(decay, abs=0.15)
    assert decay_of(rows[:3]) == 1.0
