"""Writes docs/dependencies.md: what each extra installs, its size, and the licence of every package.

python release/dependencies.py

Everything is read from the metadata of the packages that are installed with this Python; nothing is downloaded.
"""

from __future__ import annotations

import re
import sys
import tomllib
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/dependencies.md"
OURS = "unisono"
NOT_FOR_USERS = ("dev", "docs", "bench")  # these extras are for developers of unisono
SHORTEST_TEXT = 60  # a License field that is longer than this is the text of the licence, not its name


def project() -> dict[str, list[str]]:
    """The requirements of the package itself (name "") and of every extra, as pyproject.toml lists them."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {"": table["dependencies"], **table["optional-dependencies"]}


def direct(requirements: dict[str, list[str]]) -> dict[str, list[str]]:
    """The packages that pyproject.toml names, and the extras that name them."""
    named: dict[str, list[str]] = {}
    for extra, texts in requirements.items():
        for requirement in map(Requirement, texts):
            if canonicalize_name(requirement.name) != OURS:
                named.setdefault(canonicalize_name(requirement.name), []).append(extra)
    return dict(sorted(named.items()))


def closure(extra: str, requirements: dict[str, list[str]]) -> dict[str, Distribution | None]:
    """Everything that an extra installs, by name; None where a package is not installed here."""
    found: dict[str, Distribution | None] = {}
    seen: set[tuple[str, str]] = set()
    waiting = [Requirement(text) for text in requirements[extra]]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        for wanted in ("", *sorted(requirement.extras)):
            if (name, wanted) in seen:
                continue
            seen.add((name, wanted))
            if name == OURS:
                waiting += [Requirement(text) for text in requirements[wanted]] if wanted else []
                continue
            if name not in found:
                found[name] = installed(name)
            for text in (found[name].requires or []) if found[name] else []:  # type: ignore[union-attr]
                needed = Requirement(text)
                if needed.marker is None or needed.marker.evaluate({"extra": wanted}):
                    waiting.append(needed)
    return found


def installed(name: str) -> Distribution | None:
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


def size(package: Distribution | None) -> int:
    """Bytes of the files of an installed package, compiled Python files aside."""
    if package is None:
        return 0
    files = (Path(str(package.locate_file(file))) for file in package.files or [] if file.suffix != ".pyc")
    return sum(path.stat().st_size for path in files if path.is_file())


def licence(package: Distribution | None) -> str:
    """The name of a package's licence, from its metadata."""
    if package is None:
        return "not installed where this page was written"
    metadata = package.metadata
    expression = metadata.get("License-Expression")
    if expression:
        return str(expression)
    classifiers = [
        text.rpartition(" :: ")[2] for text in metadata.get_all("Classifier", []) if text.startswith("License ::")
    ]
    named = [text for text in classifiers if text != "OSI Approved"]
    if named:
        return "; ".join(named)
    text = " ".join((metadata.get("License") or "").split())
    return text if text and len(text) <= SHORTEST_TEXT else first_line_of_licence(package)


def first_line_of_licence(package: Distribution) -> str:
    """The first line of the licence file, for packages whose metadata names no licence."""
    for file in package.files or []:
        if re.search(r"(^|/)(LICEN[CS]E|COPYING)[^/]*$", str(file), flags=re.IGNORECASE):
            lines = Path(str(package.locate_file(file))).read_text(errors="replace").split("\n")
            titles = [line.strip(" #=\t") for line in lines if line.strip(" #=\t")]
            if titles:
                return titles[0][:SHORTEST_TEXT]
    return "not stated"


def page() -> str:
    """The whole page."""
    requirements = project()
    users = [extra for extra in requirements if extra not in NOT_FOR_USERS]
    parts = {extra: closure(extra, requirements) for extra in users}
    base = parts[""]
    torch = base.get("torch")
    lines = [
        "# Dependencies, sizes and licences",
        "",
        "`python release/dependencies.py` writes this page from the metadata of installed packages.",
        "",
        "## What each extra installs",
        "",
        f"Sizes on disk, on Linux with Python {sys.version_info.major}.{sys.version_info.minor} and torch "
        f"{torch.version if torch else '(not installed)'}. A CUDA build of torch, with its libraries, takes several GB "
        "more. The last column is what the extra adds to unisono without extras; what several extras share is counted "
        "in each of them.",
        "",
        "| `pip install` | packages it names | packages in all | size | adds |",
        "|---|---|---|---|---|",
    ]
    base_size = sum(map(size, base.values()))
    for extra in users:
        total = sum(map(size, {**base, **parts[extra]}.values()))
        names = ", ".join(sorted({canonicalize_name(Requirement(text).name) for text in requirements[extra]}))
        command = f"unisono[{extra}]" if extra else "unisono"
        adds = f"{(total - base_size) / 1e6:,.0f} MB" if extra else "–"
        lines.append(f"| `{command}` | {names} | {len({**base, **parts[extra]})} | {total / 1e6:,.0f} MB | {adds} |")
    lines += [
        "",
        "Extras for developers: `dev` (tests and linters), `docs` (this site), `bench` (libraries to compare with).",
        "",
        "## Packages that unisono names",
        "",
        "| package | version here | licence | named by |",
        "|---|---|---|---|",
    ]
    for name, extras in direct(requirements).items():
        named_by = ", ".join(extra or "unisono" for extra in extras)
        lines.append(row(name, installed(name), named_by))
    everything = {name: package for part in parts.values() for name, package in part.items()}
    lines += [
        "",
        "## Packages that these need",
        "",
        "What users' extras install in addition, with the CPU build of torch; the CUDA build needs NVIDIA's libraries, "
        "under NVIDIA's own licence.",
        "",
        "| package | version here | licence |",
        "|---|---|---|",
    ]
    for name in sorted(everything.keys() - direct(requirements).keys()):
        lines.append(row(name, everything[name]))
    return "\n".join(lines) + "\n"


def row(name: str, package: Distribution | None, *more: str) -> str:
    cells = [name, package.version if package else "–", licence(package).replace("|", "/"), *more]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    PAGE.write_text(page())
    print(PAGE.relative_to(ROOT))
