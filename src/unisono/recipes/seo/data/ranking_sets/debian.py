"""Descriptions of Debian packages: real text for ranking that every machine with apt can download.

A package has a one-line synopsis, which is the query, and a long description, which is the page. apt-get downloads them
from the machine's own sources into a separate folder, so the machine's lists do not change. The packages differ between
days and distributions; keep the downloaded file if you want to compare metrics.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from unisono.engine.recipe import Work
from unisono.errors import ConfigError, UserError
from unisono.recipes.common.cache_files import write_cache_file
from unisono.recipes.common.tree import one_line
from unisono.recipes.seo.data.bad_rows import BadRows
from unisono.recipes.seo.data.ranking_sets.by_texts import Example, ranking_by_texts
from unisono.recipes.seo.data.ranking_sets.ranking import Ranking

PACKAGES_FILE = "debian-packages.jsonl.gz"

MIN_LENGTH = 300
"""Minimum length of a description in characters; shorter ones add little to the synopsis."""

# Descriptions that agree in this many characters at the beginning (libfoo1, libfoo-dev) count as the same.
_SAME = 200
_TIMEOUT_S = 600
_WORD = re.compile(r"\w+")
# Disables the programs that the system runs after it updates its own package lists.
_NO_HOOKS = (
    "#clear APT::Update::Pre-Invoke;\n#clear APT::Update::Post-Invoke;\n#clear APT::Update::Post-Invoke-Success;\n"
)


class Package(NamedTuple):
    """The description of a package."""

    name: str
    section: str
    synopsis: str
    body: str


def packages(folder: Path, remark: Callable[[str], None] = lambda text: None) -> list[Package]:
    """Returns packages with distinct descriptions, sorted by name; downloads and stores them on the first call."""
    path = folder / PACKAGES_FILE
    if not path.is_file():
        remark("downloading the descriptions of Debian's packages with apt-get (about 16 MB)")
        downloaded = _download(folder)
        lines = "".join(json.dumps(package, ensure_ascii=False) + "\n" for package in downloaded)
        write_cache_file(path, gzip.compress(lines.encode(), mtime=0))
        remark(f"stored {len(downloaded):,} packages in {path}")
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            return [Package(*(str(each) for each in json.loads(line))) for line in file]
    except (OSError, EOFError, ValueError, TypeError):
        raise ConfigError(one_line(f"{path}: damaged; remove it to download it again")) from None


def read_debian(folder: Path, *, hard: bool = False, work: Work | None = None) -> Ranking:
    """Returns the packages as a ranking data set; `hard` removes the words of a query from its page.

    `Ranking.sections` is the section of each page: candidates of one section are harder to distinguish. If `work` is
    passed, all processes must call this function, and one of them downloads the packages.
    """
    if work is not None:
        if len(work.share([0])):
            packages(folder, work.message)
        work.meet()
    described = packages(folder)
    if hard:
        described = [without_shared_words(package) for package in described]
    names = sorted({package.section for package in described})
    number = {name: index for index, name in enumerate(names)}
    ranking = ranking_by_texts(_Rows(folder / PACKAGES_FILE, described), ("train",), lambda text: None)
    sections = {package.body: number[package.section] for package in described}
    return replace(ranking, sections=np.array([sections[text] for _, text in ranking.pages()], np.int32))


def without_shared_words(package: Package) -> Package:
    """Removes the words of the synopsis from the description, ignoring case."""
    words = set(_WORD.findall(package.synopsis.lower()))
    left = _WORD.sub(lambda word: "" if word[0].lower() in words else word[0], package.body)
    return package._replace(body="\n".join(" ".join(line.split()) for line in left.split("\n")))


class _Rows(NamedTuple):
    path: Path
    packages: list[Package]

    def rows(self, bad: BadRows) -> Iterator[Example]:
        """Yields one row per package."""
        return (Example(package.synopsis, [package.body], []) for package in self.packages)


def _download(folder: Path) -> list[Package]:
    if shutil.which("apt-get") is None:
        raise ConfigError(
            f"data_path debian: apt-get is not installed; copy {PACKAGES_FILE} from a machine with apt to {folder}, "
            "or use your own data"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".apt-", dir=folder.resolve()) as own:
            _run_apt(Path(own))
            return _chosen(Path(own) / "lists")
    except OSError as error:
        raise UserError(
            f"{folder} cannot be written ({error.strerror}); free some space, or use another folder"
        ) from None


def _run_apt(own: Path) -> None:
    for name in ("lists/partial", "cache/archives/partial"):
        (own / name).mkdir(parents=True)
    (own / "apt.conf").write_text(_NO_HOOKS)
    options = {
        "Acquire::Languages": "en",
        "Acquire::GzipIndexes": "false",  # uncompressed files
        "Acquire::Retries": "3",
        "Dir::State::lists": f"{own}/lists",
        "Dir::Cache": f"{own}/cache",
    }
    flags = [flag for name, value in options.items() for flag in ("-o", f"{name}={value}")]
    command = ["apt-get", "-q", "-c", str(own / "apt.conf"), *flags, "update"]
    environ = os.environ | {"LC_ALL": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(command, env=environ, capture_output=True, timeout=_TIMEOUT_S, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(one_line(f"data_path debian: apt-get failed ({error})")) from None
    if not any((own / "lists").glob("*Translation-en")) and not any((own / "lists").glob("*_Packages")):
        errors = [line for line in done.stderr.decode("utf-8", "replace").splitlines() if line[:2] in ("E:", "W:")]
        why = errors[0][2:].strip() if errors else f"exit code {done.returncode}"
        raise ConfigError(one_line(f"data_path debian: apt-get downloaded nothing ({why}); it needs network access"))


def _chosen(lists: Path) -> list[Package]:
    """Returns the packages with long and distinct descriptions, sorted by name."""
    sections: dict[str, str] = {}
    described: dict[str, tuple[str, str]] = {}
    for path in sorted(lists.glob("*_Packages")):
        for fields in _stanzas(path):
            sections.setdefault(fields["Package"], fields.get("Section", "").rpartition("/")[2])
            _note(fields, fields.get("Description-en") or fields.get("Description", ""), described)
    for path in sorted(lists.glob("*Translation-en")):
        for fields in _stanzas(path):
            _note(fields, fields.get("Description-en", ""), described)
    chosen: dict[str, Package] = {}
    for name, (synopsis, body) in sorted(described.items()):
        chosen.setdefault(body[:_SAME], Package(name, sections.get(name) or "unknown", synopsis, body))
    if not chosen:
        raise ConfigError(
            "data_path debian: apt's lists have no long descriptions; make sure that it uses Debian's sources"
        )
    return sorted(chosen.values())


def _note(fields: dict[str, str], description: str, described: dict[str, tuple[str, str]]) -> None:
    synopsis, _, rest = description.partition("\n")
    # A line with a full stop separates paragraphs.
    paragraphs = (" ".join(part.split()) for part in re.split(r"^\.$", rest, flags=re.MULTILINE))
    body = "\n".join(paragraph for paragraph in paragraphs if paragraph)
    if synopsis.strip() and len(body) >= MIN_LENGTH:
        described.setdefault(fields["Package"], (" ".join(synopsis.split()), body))


def _stanzas(path: Path) -> Iterator[dict[str, str]]:
    """Yields the entries of an apt file. An empty line ends an entry; a leading blank marks a continuation line."""
    fields: dict[str, str] = {}
    name = ""
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        for line in file:
            line = line.rstrip("\r\n")
            if line[:1] in (" ", "\t"):
                if name:
                    fields[name] += "\n" + line[1:]
            elif line:
                name, _, value = line.partition(":")
                fields[name] = value.strip()
            else:
                if "Package" in fields:
                    yield fields
                fields, name = {}, ""
    if "Package" in fields:
        yield fields
