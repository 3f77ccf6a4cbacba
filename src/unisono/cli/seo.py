"""unisono seo SITE [--run RUN]: a report of a site: its pages by what a run has learnt, and what plain rules find."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from unisono.cli.device import usable_device
from unisono.errors import EXIT_DONE, ConfigError
from unisono.recipes.seo.looking import Judge, look_at

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def main(words: list[str], judge: Judge | None = None) -> int:
    """Runs the command; whoever passes a judge needs no run."""
    options = _options(words)
    queries = _queries(options.queries) if options.queries else []
    from unisono.observe.report.words import a_count
    from unisono.recipes.seo.fetching import Fetcher
    from unisono.recipes.seo.report import write_report
    from unisono.recipes.seo.site import open_site

    named = [*options.private_host, *([urlsplit(options.site).hostname or ""] if "://" in options.site else [])]
    site = open_site(options.site, Fetcher(named) if options.fetch else None, options.most_pages)
    output = options.output or Path("seo") / _file_name(site.name)
    _check_output(output, options.overwrite)
    if judge is None and options.run is not None:
        judge = _trained(options, queries)
    findings = look_at(site, options.keywords, queries, judge)
    page = write_report(output, findings)
    failed = sum(bool(each.failed) for each in findings.pages)
    unread = sum(bool(each.unreadable) for each in findings.pages)
    for host, size in findings.fetched.items():
        print(f"fetched {size:,} bytes from {host}")
    said = [a_count(len(findings.pages), "page"), f"{failed:,} with a failed check"]
    said += [f"{a_count(len(findings.repeats), 'group')} of duplicates"] if findings.repeats else []
    said += [f"{unread:,} could not be read"] if unread else []
    print(f"{page}: {', '.join(said)}")
    return EXIT_DONE


def _options(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="unisono seo",
        description="Report on a site: plain checks of every page, duplicate pages and, with a run of the recipe "
        "`seo`, its pages by learned score (task score) or the best pages of your queries (task rank). Only local "
        "files are read unless you say --fetch.",
    )
    parser.add_argument("site", metavar="SITE", help="a folder of HTML pages, a sitemap, a page, or a list of files")
    parser.add_argument("--run", type=Path, help="the run's folder, or a model's; without one: rules only")
    parser.add_argument("--queries", type=Path, metavar="FILE", help="one query per line: the best pages of each")
    parser.add_argument(
        "--keywords", type=_comma_separated, default=[], metavar="A,B", help="words that every page should have"
    )
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="where to write (default: seo/NAME)")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier report in that folder")
    parser.add_argument("--fetch", action="store_true", help="get web addresses (SITE, or those that SITE lists)")
    parser.add_argument(
        "--private_host", action="append", default=[], metavar="HOST", help="fetch from this host of the local network"
    )
    parser.add_argument("--most_pages", type=int, metavar="N", help="at most (default: all; 1,000 with --fetch)")
    parser.add_argument("--label", help="of a run with classes: pages by the probability of this one (default: last)")
    parser.add_argument("--device", default="auto", help="auto (default), cpu, cuda, cuda:1")
    options = parser.parse_args([_underscored(word) for word in words])
    if options.most_pages is not None and options.most_pages < 1:
        raise ConfigError(f"--most_pages {options.most_pages}: expected at least 1")
    return options


def _underscored(word: str) -> str:
    """Hyphens and underscores are the same in a flag's name."""
    name, has_value, value = word.partition("=")
    return name.replace("-", "_").replace("__", "--", 1) + has_value + value if word.startswith("--") else word


def _comma_separated(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _file_name(name: str) -> str:
    """A folder's name that is one on every system."""
    host = urlsplit(name).hostname if "://" in name else None
    return re.sub(r"[^\w.-]+", "_", host or name).strip("._")[:80] or "site"


def _check_output(folder: Path, overwrite: bool) -> None:
    """Said before an hour of reading that the report cannot be written."""
    from unisono.recipes.seo.report import FILES

    for path in (folder, *folder.parents):
        if path.exists() and not path.is_dir():
            raise ConfigError(f"--output {folder}: {path} is a file; give a folder")
    there = [name for name in FILES if (folder / name).exists()]
    if there and not overwrite:
        raise ConfigError(f"{folder} has a {there[0]} already; give --overwrite, or another --output")


def _queries(path: Path) -> list[str]:
    from unisono.recipes.seo.data.lines import lines_of

    if path.suffix.lower() in (".csv", ".tsv", ".jsonl", ".json"):
        raise ConfigError(f"--queries {path}: expected a text file with one query per line")
    found = [" ".join(line.split()) for _, line in lines_of(path, lambda text: print(text, file=sys.stderr))]
    if not any(found):
        raise ConfigError(f"--queries {path}: there is no query in it; write one per line")
    return [query for query in dict.fromkeys(found) if query]


def _trained(options: argparse.Namespace, queries: Sequence[str]) -> Judge:
    """The model of a run (or a model's folder): one that ranks where there are queries, otherwise one that scores."""
    run: Path = options.run
    if not run.is_dir() and str(run) != "minilm":
        raise ConfigError(f"--run {run}: there is no such folder; nothing is fetched for it")
    from unisono.observe.folder import RunFolder
    from unisono.recipes.seo.using import open_ranker, open_scorer

    device = usable_device(options.device)
    config = (RunFolder.read(run) or {}).get("config", {})
    task = config.get("task") if isinstance(config, dict) else None
    if task == "rank" and not queries:
        raise ConfigError(f"--run {run} ranks pages for queries; give --queries FILE, one query per line")
    if task == "rank" or (task != "score" and queries):
        ranker = open_ranker(run).to(device)
        asked = ranker.embed(queries, "query") if ranker.embeds else None

        def rank(queries: Sequence[str], texts: Sequence[str]) -> NDArray[np.floating[Any]]:
            scores = asked @ ranker.embed(texts, "page").T if asked is not None else ranker.scores(queries, texts)
            return scores.numpy()

        return Judge(f"{run} ({ranker.told})", rank=rank)
    scorer = open_scorer(run).to(device)
    names = scorer.names
    if options.label is not None and options.label not in names:
        there = f"its classes are {', '.join(names)}" if names else "it gives numbers, not classes"
        raise ConfigError(f"--label {options.label}: {there}")
    shown = names.index(options.label) if options.label is not None else len(names) - 1

    def score(texts: Sequence[str]) -> list[tuple[float, str]]:
        found = scorer.scores(texts)
        if not names:
            return [(value, "") for value in found.tolist()]
        return [(row[shown], names[row.index(max(row))]) for row in found.tolist()]

    what = f"the probability of {names[shown]!r} by " if names else ""
    return Judge(f"{what}{run} ({scorer.told})", score=score)
