"""`unisono seo SITE [--run RUN]`: reports on a site, by fixed rules and by the scores of a trained run."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from unisono.cli.arguments import Parser
from unisono.cli.device import usable_device
from unisono.errors import EXIT_DONE, ConfigError
from unisono.recipes.common.tree import one_line

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from unisono.recipes.seo.data.search_console import SearchConsole
    from unisono.recipes.seo.site.analysis import Comparison, Model
    from unisono.recipes.seo.site.changes import Changes
    from unisono.recipes.seo.site.crawling.crawler import Limits
    from unisono.recipes.seo.site.report import Findings
    from unisono.recipes.seo.trained import SiteEncoder

_MAX_QUERIES = 300  # of a Search Console export, use only the queries with the most impressions


def main(argv: list[str], model: Model | None = None) -> int:
    """Runs the command; a caller may pass a model instead of a run."""
    options = _options(argv)
    queries = _queries(options.queries) if options.queries else []
    export = _export(options)
    queries = queries or (export.top_queries(_MAX_QUERIES) if export else [])
    from unisono.formatting import format_count
    from unisono.recipes.seo.site.analysis import analyse
    from unisono.recipes.seo.site.changes import compare, read_earlier
    from unisono.recipes.seo.site.fetching import Fetcher
    from unisono.recipes.seo.site.keywords import read_keywords
    from unisono.recipes.seo.site.pages import open_site
    from unisono.recipes.seo.site.report import write_labels, write_report

    keywords = read_keywords(options.keywords)
    private_hosts = [*options.private_host, *([urlsplit(options.site).hostname or ""] if "://" in options.site else [])]
    fetcher = Fetcher(private_hosts) if options.fetch or options.crawl else None
    output = options.output or Path("seo") / _file_name(_name_of(options.site))
    _check_output(output, options.overwrite)
    earlier = read_earlier(options.compare) if options.compare else None
    site = open_site(options.site, fetcher, options.most_pages, _limits(options))
    is_only_encoder = not queries and (options.semantic or options.old) and _task_of(options.run or Path()) == "rank"
    if model is None and options.run is not None and not is_only_encoder:
        model = _trained_model(options, queries)
    findings = analyse(site, keywords, queries, model, options.base_url, _comparison(options, export))
    _check_reached(site.name, findings)
    if earlier is not None:
        read = {each.name for each in findings.pages if not each.unreadable}
        findings.changes = compare(earlier, findings.all_findings(), read)
    page = write_report(output, findings)
    if options.labels:
        write_labels(options.labels, findings)
        print(f"{options.labels}: {format_count(len(findings.labels), 'pair')} of query and page")
    failed = sum(bool(each.failed) for each in findings.pages)
    unread = sum(bool(each.unreadable) for each in findings.pages)
    for host, size in findings.fetched.items():
        print(f"fetched {size:,} bytes from {host}")
    parts = [format_count(len(findings.pages), "page"), f"{failed:,} with a failed check"]
    errors = sum(finding.severity == "error" for finding in findings.technical)
    parts += [format_count(errors, "technical error")] if errors else []
    parts += [f"{format_count(len(findings.duplicates), 'group')} of duplicates"] if findings.duplicates else []
    parts += [f"{unread:,} could not be read"] if unread else []
    print(f"{page}: {', '.join(parts)}")
    if findings.changes is not None:
        changes = findings.changes
        print(f"since {changes.since}: {_counts(changes)}")
    return EXIT_DONE


def _options(argv: list[str]) -> argparse.Namespace:
    parser = Parser(
        "seo",
        "Report on a site: rule-based checks of every page, duplicate pages and, with a run of the recipe `seo`, the "
        "pages by learned score (task score) or the best pages for your queries (task rank). Reads only local files "
        "unless you pass --fetch.",
    )
    parser.add_argument(
        "site", metavar="SITE", help="a folder of HTML pages, a sitemap, one page, or a text file that lists pages"
    )
    parser.add_argument("--run", type=Path, help="folder of a trained run or of a model (default: rules only)")
    parser.add_argument(
        "--queries", type=Path, metavar="FILE", help="text file with one query per line; shows the best pages for each"
    )
    parser.add_argument(
        "--semantic",
        action="store_true",
        help="compare the pages with each other: duplicates in other words, off-topic and unreachable pages, several "
        "pages for one query, missing links, topics",
    )
    parser.add_argument(
        "--encoder",
        metavar="MODEL",
        help="encoder that compares the pages: minilm, a model's folder, or a run trained with task=rank; implies "
        "--semantic, and downloads nothing (default: --run if it embeds pages, otherwise BM25)",
    )
    parser.add_argument(
        "--old",
        metavar="SITE",
        help="folder of an earlier version of the site; suggests redirects for its pages (implies --semantic)",
    )
    parser.add_argument(
        "--search_console",
        type=Path,
        metavar="EXPORT",
        help="export of Google Search Console, .csv or .zip: shows clicks and positions beside the scores, and several "
        "pages that Google showed for one query (implies --semantic; without --queries, its queries are used)",
    )
    parser.add_argument(
        "--labels",
        type=Path,
        metavar="FILE",
        help="write queries and pages with clicks to this .jsonl, with weights from clicks and position, as data of "
        "the task rank; needs --search_console with both columns",
    )
    parser.add_argument(
        "--keywords",
        default="",
        metavar="A,B|FILE",
        help="keywords for which the site should rank, each checked on the page that matches it best; or a .csv or "
        ".jsonl file with the columns page and keyword",
    )
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="output folder (default: seo/NAME)")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier report in that folder")
    parser.add_argument("--fetch", action="store_true", help="fetch from the web: SITE, or the URLs that it lists")
    parser.add_argument(
        "--crawl", action="store_true", help="follow the links of the URL SITE within its host; includes --fetch"
    )
    parser.add_argument(
        "--delay",
        type=float,
        default=1.0,
        metavar="S",
        help="seconds between requests of --crawl; a longer Crawl-delay in robots.txt takes precedence (default: 1)",
    )
    parser.add_argument(
        "--max_depth",
        type=int,
        default=20,
        metavar="N",
        help="maximum number of clicks from the start page to a page that --crawl reads (default: 20)",
    )
    parser.add_argument(
        "--base_url",
        metavar="URL",
        help="the URL at which a local SITE is served (default: the host that its canonical URLs or sitemap name)",
    )
    parser.add_argument(
        "--compare",
        type=Path,
        metavar="REPORT",
        help="folder of an earlier report; shows which findings are new, fixed or unchanged since then",
    )
    parser.add_argument(
        "--private_host",
        action="append",
        default=[],
        metavar="HOST",
        help="allow --fetch to connect to this host in the local network; repeatable",
    )
    parser.add_argument(
        "--most_pages", type=int, metavar="N", help="read at most this many pages (default: all; 1,000 with --fetch)"
    )
    parser.add_argument(
        "--label",
        help="sort pages by the predicted probability of this class, if the run predicts classes (default: the last)",
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:1 (default: auto)")
    options = parser.parse(argv)
    if options.most_pages is not None and options.most_pages < 1:
        raise ConfigError(f"--most_pages {options.most_pages}: expected at least 1")
    if not 0 <= options.delay <= 3600:
        raise ConfigError(f"--delay {options.delay}: expected 0 to 3600 seconds")
    if options.max_depth < 0:
        raise ConfigError(f"--max_depth {options.max_depth}: expected at least 0")
    if options.base_url is not None:
        options.base_url = _base_url(options.base_url, options.site)
    return options


def _base_url(url: str, site: str) -> str:
    """Checks --base_url and returns it with a slash at the end; raises ConfigError if it cannot be used."""
    if "://" in site:
        raise ConfigError("--base_url is for local files; a URL is its own base")
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in ("http", "https") and parts.hostname and not parts.query and not parts.fragment
        is_valid = is_valid and parts.username is None and (parts.port or 1) > 0
    except ValueError:
        is_valid = False
    if not is_valid:
        raise ConfigError(one_line(f"--base_url {url}: expected a URL such as https://www.example.com/"))
    return url if url.endswith("/") else f"{url}/"


def _limits(options: argparse.Namespace) -> Limits | None:
    from unisono.recipes.seo.site.crawling.crawler import MAX_PAGES, Limits

    return Limits(options.most_pages or MAX_PAGES, options.max_depth, options.delay) if options.crawl else None


def _name_of(site: str) -> str:
    return site if "://" in site else Path(site).expanduser().resolve().name or "site"


def _counts(changes: Changes) -> str:
    parts = [(len(changes.new), "new"), (len(changes.fixed), "fixed"), (changes.num_remaining, "remaining")]
    parts += [(len(changes.gone), "on pages that were not read again")] if changes.gone else []
    return ", ".join(f"{number:,} {name}" for number, name in parts)


def _file_name(name: str) -> str:
    """Returns a folder name that is valid on every system."""
    host = urlsplit(name).hostname if "://" in name else None
    return re.sub(r"[^\w.-]+", "_", host or name).strip("._")[:80] or "site"


def _check_output(folder: Path, overwrite: bool) -> None:
    """Raises ConfigError for an unusable output folder, before the command spends up to an hour on reading the site."""
    from unisono.recipes.seo.site.report import FILES

    for path in (folder, *folder.parents):
        if path.exists() and not path.is_dir():
            raise ConfigError(f"--output {folder}: {path} is a file; pass a folder")
    existing = [name for name in FILES if (folder / name).exists()]
    if existing and not overwrite:
        raise ConfigError(f"{folder} already has a {existing[0]}; pass --overwrite, or another --output")


def _check_reached(name: str, findings: Findings) -> None:
    """Raises ConfigError if no page of the site can be read, because an empty report would look like a result."""
    if findings.pages and all(page.unreadable for page in findings.pages):
        count = len(findings.pages)
        which = "the page cannot be read" if count == 1 else f"none of the {count:,} pages can be read; the first one"
        raise ConfigError(one_line(f"{name}: {which}: {findings.pages[0].unreadable}; no report was written"))


def _queries(path: Path) -> list[str]:
    from unisono.recipes.seo.data.lines import lines_of

    if path.suffix.lower() in (".csv", ".tsv", ".jsonl", ".json"):
        raise ConfigError(f"--queries {path}: expected a text file with one query per line")
    lines = [" ".join(line.split()) for _, line in lines_of(path)]
    if not any(lines):
        raise ConfigError(f"--queries {path}: it contains no query; write one per line")
    return [query for query in dict.fromkeys(lines) if query]


def _export(options: argparse.Namespace) -> SearchConsole | None:
    if options.labels and not options.search_console:
        raise ConfigError("--labels writes pairs from clicks; pass --search_console FILE")
    if options.labels and options.labels.exists() and not options.overwrite:
        raise ConfigError(f"{options.labels} already exists; pass --overwrite, or another --labels")
    if not options.search_console:
        return None
    from unisono.recipes.seo.data.search_console import read_search_console

    export = read_search_console(options.search_console)
    if options.labels and not export.pairs:
        raise ConfigError(one_line(f"--labels: {export.remarks[0]}"))
    return export


def _comparison(options: argparse.Namespace, export: SearchConsole | None) -> Comparison | None:
    """Returns the encoder, the old site and the export to compare pages with; None if no option needs them."""
    if not (options.semantic or options.encoder or options.old or export):
        return None
    from unisono.recipes.seo.site.analysis import Comparison
    from unisono.recipes.seo.site.pages import open_site

    old = open_site(options.old) if options.old else None
    return Comparison(_encoder(options), old, export)


def _encoder(options: argparse.Namespace) -> SiteEncoder | None:
    place = options.encoder
    if place is None:
        task = _task_of(options.run) if options.run is not None else "score"
        if task != "rank":
            return None
        place = str(options.run)
    elif not Path(place).expanduser().is_dir() and place != "minilm":
        raise ConfigError(f"--encoder {place}: no such folder; unisono seo downloads no models")
    from unisono.recipes.seo.trained import open_encoder

    encoder = open_encoder(place)
    if encoder is None and options.encoder is not None:
        raise ConfigError(f"--encoder {place}: a cross-encoder computes no embeddings; pass minilm")
    return None if encoder is None else encoder.to(usable_device(options.device))


def _task_of(run: Path) -> str | None:
    """Returns the task of a run; None if the folder holds no run, such as a model's folder. minilm counts as "rank"."""
    from unisono.observe.folder import RunFolder

    if str(run) == "minilm":
        return "rank"
    config = (RunFolder.read(run) or {}).get("config", {})
    return config.get("task") if isinstance(config, dict) else None


def _trained_model(options: argparse.Namespace, queries: Sequence[str]) -> Model:
    """Loads the model of a run or of a model folder, as a ranker if there are queries and as a scorer otherwise."""
    run: Path = options.run
    if not run.is_dir() and str(run) != "minilm":
        raise ConfigError(f"--run {run}: no such folder; unisono seo downloads no models")
    from unisono.recipes.seo.site.analysis import Model
    from unisono.recipes.seo.trained import open_ranker, open_scorer

    device = usable_device(options.device)
    task = _task_of(run) if str(run) != "minilm" else None
    if task == "rank" and not queries:
        raise ConfigError(f"--run {run} ranks pages for queries; pass --queries FILE, with one query per line")
    if task == "rank" or (task != "score" and queries):
        ranker = open_ranker(run).to(device)
        embedded = ranker.embed(queries, "query") if ranker.embeds else None

        def rank(queries: Sequence[str], texts: Sequence[str]) -> NDArray[np.floating[Any]]:
            if embedded is None:
                return ranker.scores(queries, texts).numpy()
            return (embedded @ ranker.embed(texts, "page").T).numpy()

        return Model(f"{run} ({ranker.description})", rank=rank)
    scorer = open_scorer(run).to(device)
    names = scorer.names
    if options.label is not None and options.label not in names:
        reason = f"the classes of the run are {', '.join(names)}" if names else "the run predicts numbers, not classes"
        raise ConfigError(f"--label {options.label}: {reason}")
    shown = names.index(options.label) if options.label is not None else len(names) - 1

    def score(texts: Sequence[str]) -> list[tuple[float, str]]:
        scores = scorer.scores(texts).tolist()
        if not names:
            return [(value, "") for value in scores]
        return [(row[shown], names[row.index(max(row))]) for row in scores]

    prefix = f"the probability of {names[shown]!r} by " if names else ""
    return Model(f"{prefix}{run} ({scorer.description})", score=score)
