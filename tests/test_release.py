"""What a release consists of: examples that can be copied, release notes, the list of dependencies and licences."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import unisono
from unisono.cli.main import main

ROOT = Path(__file__).parent.parent
RELEASE = ROOT / "release"
EXAMPLES = {path.parent.name: path.parent for path in ROOT.glob("examples/*/README.md")}


def files(folder: Path) -> dict[str, bytes]:
    found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in found.items()}


def tracked(folder: Path) -> dict[str, bytes]:
    """The files of an example, without what running it has left there."""
    names = {"__pycache__", "runs", "checkpoints", ".gitignore"}
    return {name: data for name, data in files(folder).items() if not names.intersection(Path(name).parts)}


def test_every_example_is_listed_with_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["examples"]) == 0
    rows = dict(re.findall(r"^(\w+) +(\S.+)$", capsys.readouterr().out, flags=re.MULTILINE))
    assert rows.keys() == EXAMPLES.keys() and rows["darkroom"] == "Algorithm Distillation"


@pytest.mark.parametrize("example", sorted(EXAMPLES))
def test_a_copied_example_is_complete(
    example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["examples", "copy", example.replace("_", "-")]) == 0
    copy = tmp_path / "examples" / example
    assert files(copy) == tracked(EXAMPLES[example]) and "README.md" in files(copy)
    for name in files(copy):
        assert os.access(copy / name, os.X_OK) is os.access(EXAMPLES[example] / name, os.X_OK), name
        assert (copy / name).stat().st_mode & stat.S_IWUSR
    assert [path.name for path in tmp_path.iterdir()] == ["examples"]
    assert str(Path("examples", example, "README.md")) in capsys.readouterr().out


def test_copying_an_example_never_touches_existing_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine, empty, link = tmp_path / "mine", tmp_path / "empty", tmp_path / "link"
    mine.mkdir()
    (mine / "README.md").write_text("mine")
    empty.mkdir()
    link.symlink_to(empty)
    for target in (mine, mine / "README.md", link, mine / "README.md" / "below"):
        assert main(["examples", "copy", "darkroom", str(target)]) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert str(target) in line
    assert files(tmp_path) == {"mine/README.md": b"mine"} and list(empty.iterdir()) == []
    assert main(["examples", "copy", "darkroom", str(empty)]) == 0 and (empty / "demo.yaml").is_file()


@pytest.mark.parametrize(
    "words, answer",
    [
        (["copy"], "name an example: "),
        (["copy", "darkrom"], "did you mean darkroom?"),
        (["copy", "../darkroom"], "there is no example '../darkroom'"),
        (["list", "darkroom"], "unexpected argument 'darkroom'"),
        (["show"], "invalid choice: 'show'"),
    ],
)
def test_a_wrong_request_for_an_example_is_one_line(
    words: list[str], answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["examples", *words]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert answer in line


def run(program: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, RELEASE / program, *words], capture_output=True, text=True)


def test_release_notes_are_the_section_of_the_changelog() -> None:
    done = run("notes.py")
    assert done.returncode == 0 and done.stdout.startswith("### Added") and "\n## " not in done.stdout
    assert done.stdout.strip() in (ROOT / "CHANGELOG.md").read_text()
    missing = run("notes.py", "0.0.0")
    assert missing.returncode != 0 and "has no section [0.0.0]" in missing.stderr
    sys.path.insert(0, str(RELEASE))
    try:
        from notes import notes
    finally:
        sys.path.pop(0)
    log = "# Log\n\n## [Unreleased]\n\n## [0.2.0] - 2027-01-01\n\nnew\n\n## [0.1.0] - 2026-12-01\n\nfirst\n"
    assert (notes("0.2.0", log), notes("0.1.0", log)) == ("new", "first")
    with pytest.raises(SystemExit, match="is empty"):
        notes("Unreleased", log)


def test_the_version_has_a_single_source() -> None:
    """Every other place that needs the version reads `__version__`."""
    assert re.fullmatch(r"\d+\.\d+\.\d+", unisono.__version__)
    places = [path for path in (ROOT / "src").rglob("*.py") if f'"{unisono.__version__}"' in path.read_text()]
    assert places == [ROOT / "src/unisono/__init__.py"]
    assert 'dynamic = ["version"]' in (ROOT / "pyproject.toml").read_text()


def test_the_list_of_dependencies_names_every_package_and_extra() -> None:
    sys.path.insert(0, str(RELEASE))
    try:
        from dependencies import NOT_FOR_USERS, PAGE, closure, direct, licence, project
    finally:
        sys.path.pop(0)
    requirements, text = project(), PAGE.read_text()
    named = text.partition("## Packages that unisono names")[2].partition("## Packages that these need")[0]
    listed = dict(re.findall(r"^\| ([\w.-]+) \| .*? \| (.+?) \| [^|]+ \|$", named, flags=re.MULTILINE))
    listed.pop("package", None)
    assert listed.keys() == direct(requirements).keys(), "run: python release/dependencies.py"
    sizes = set(re.findall(r"^\| `unisono(?:\[(\w+)\])?` ", text, flags=re.MULTILINE))
    assert sizes == requirements.keys() - set(NOT_FOR_USERS), "run: python release/dependencies.py"
    # The program reads real metadata: a package, what it needs, and licences in their three forms.
    everything = closure("", requirements)
    assert {"torch", "sympy", "mpmath"} <= everything.keys() and "unisono" not in everything
    assert "BSD" in licence(everything["jinja2"]) and "Apache" in licence(everything["safetensors"])
    unknown = [name for name, package in everything.items() if package and licence(package) == "not stated"]
    assert unknown == []
