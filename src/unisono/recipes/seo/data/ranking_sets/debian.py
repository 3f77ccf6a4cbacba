"""Descriptions of Debian's packages: real text for ranking, that every machine with apt can get.

Each package has one line that says what it is, and a description of some paragraphs; the line is a query, and the
description the page that answers it. They are fetched by apt-get itself, from the machine's own sources, into a folder
of ours: the lists of the machine stay as they are. What apt knows changes with time and distribution, so figures belong
to the packages of one day: keep the file that is written.
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
from pathlib import Path
from typing import NamedTuple

import numpy as np

from unisono.engine.recipe import Work
from unisono.errors import ConfigError, UserError
from unisono.recipes.common.cache_files import write_cache_file
from unisono.recipes.common.tree import one_line
from unisono.recipes.seo.data.bad_rows import BadRows
from unisono.recipes.seo.data.ranking_sets.by_texts import Example, ranking_by_texts
from unisono.recipes.seo.data.ranking_sets.ranking import Ranking, Remark

KEPT = "debian-packages.jsonl.gz"

SHORTEST = 300
"""Characters of a description; what is shorter says little more than its line."""

_SAME = 200  # libfoo1, libfoo-dev and libfoo-doc begin alike and differ in the last sentence: one of them is kept
_MOST_S = 600
_WORD = re.compile(r"\w+")
# Programs that a system runs after each update (of its own lists, of which ours are none).
_NO_HOOKS = (
    "#clear APT::Update::Pre-Invoke;\n#clear APT::Update::Post-Invoke;\n#clear APT::Update::Post-Invoke-Success;\n"
)


class Package(NamedTuple):
    """What is told of a package."""

    name: str
    section: str
    synopsis: str
    body: str


def packages(folder: Path, remark: Callable[[str], None] = lambda text: None) -> list[Package]:
    """The packages with a description of their own, in order of their names; fetched once, and kept in the folder."""
    kept = folder / KEPT
    if not kept.is_file():
        remark("descriptions of Debian's packages are fetched with apt-get (about 16 MB)")
        found = _fetched(folder)
        lines = "".join(json.dumps(package, ensure_ascii=False) + "\n" for package in found)
        write_cache_file(kept, gzip.compress(lines.encode(), mtime=0))
        remark(f"{len(found):,} packages, kept in {kept}")
    try:
        with gzip.open(kept, "rt", encoding="utf-8") as file:
            return [Package(*(str(each) for each in json.loads(line))) for line in file]
    except (OSError, EOFError, ValueError, TypeError):
        raise ConfigError(one_line(f"{kept}: damaged; remove it, and it is fetched again")) from None


def read_debian(folder: Path, *, hard: bool = False, work: Work | None = None) -> Ranking:
    """The packages as a ranking; `hard`: without the words that a query shares with its page.

    `Ranking.sections` says to which section each page belongs: candidates of one section are harder to tell apart. Of
    several processes, which must all call it with their `work`, one fetches.
    """
    if work is not None:
        if len(work.share([0])):
            packages(folder, work.message)
        work.meet()
    found = packages(folder)
    if hard:
        found = [without_shared_words(package) for package in found]
    names = sorted({package.section for package in found})
    number = {name: index for index, name in enumerate(names)}
    ranking = ranking_by_texts(_Rows(folder / KEPT, found), ("train",), lambda text: None)
    sections = {package.body: number[package.section] for package in found}
    parts = np.array([sections[text] for _, text in ranking.pages()], np.int32)
    return ranking.with_sections(parts)


def without_shared_words(package: Package) -> Package:
    """The hard form: words of the line are taken out of the description, whatever their case."""
    words = set(_WORD.findall(package.synopsis.lower()))
    left = _WORD.sub(lambda word: "" if word[0].lower() in words else word[0], package.body)
    return package._replace(body="\n".join(" ".join(line.split()) for line in left.split("\n")))


class _Rows(NamedTuple):
    path: Path
    found: list[Package]

    def rows(self, bad: BadRows, remark: Remark) -> Iterator[Example]:
        """One row for each."""
        return (Example(package.synopsis, [package.body], []) for package in self.found)


def _fetched(folder: Path) -> list[Package]:
    if shutil.which("apt-get") is None:
        raise ConfigError(
            f"data_path debian: there is no apt-get on this machine; copy {KEPT} from one that has it into {folder}, "
            "or give data of your own"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".apt-", dir=folder.resolve()) as own:
            _run_apt(Path(own))
            return _chosen(Path(own) / "lists")
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error.strerror}); make room, or use another folder") from None


def _run_apt(own: Path) -> None:
    for name in ("lists/partial", "cache/archives/partial"):
        (own / name).mkdir(parents=True)
    (own / "apt.conf").write_text(_NO_HOOKS)
    options = {
        "Acquire::Languages": "en",
        "Acquire::GzipIndexes": "false",  # plain files; the others need a program to be read
        "Acquire::Retries": "3",
        "Dir::State::lists": f"{own}/lists",
        "Dir::Cache": f"{own}/cache",
    }
    words = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    command = ["apt-get", "-q", "-c", str(own / "apt.conf"), *words, "update"]
    environ = os.environ | {"LC_ALL": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(command, env=environ, capture_output=True, timeout=_MOST_S, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(one_line(f"data_path debian: apt-get did not end well ({error})")) from None
    if not any((own / "lists").glob("*Translation-en")) and not any((own / "lists").glob("*_Packages")):
        told = [line for line in done.stderr.decode("utf-8", "replace").splitlines() if line[:2] in ("E:", "W:")]
        why = told[0][2:].strip() if told else f"apt-get ended with {done.returncode}"
        raise ConfigError(one_line(f"data_path debian: apt-get got no lists ({why}); it needs its sources, by network"))


def _chosen(lists: Path) -> list[Package]:
    """Packages whose description is long enough and begins like no other, in order of their names."""
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
        raise ConfigError("data_path debian: apt's lists have no long descriptions; are its sources those of Debian?")
    return sorted(chosen.values())


def _note(fields: dict[str, str], description: str, described: dict[str, tuple[str, str]]) -> None:
    synopsis, _, rest = description.partition("\n")
    # Paragraphs are separated by a line with a stop.
    paragraphs = (" ".join(part.split()) for part in re.split(r"^\.$", rest, flags=re.MULTILINE))
    body = "\n".join(paragraph for paragraph in paragraphs if paragraph)
    if synopsis.strip() and len(body) >= SHORTEST:
        described.setdefault(fields["Package"], (" ".join(synopsis.split()), body))


def _stanzas(path: Path) -> Iterator[dict[str, str]]:
    """The entries of a file of apt: fields, whose further lines begin with a blank; an empty line ends an entry."""
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
