"""House rules: file sizes, links, file names in the docs, CI, and a fast `--help`."""

from __future__ import annotations

import ast
import html
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "unisono"
MODULES = sorted(PACKAGE.rglob("*.py"))
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])
COMMAND = "import sys; from unisono.cli.main import main; sys.exit(main())"


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=ROOT)


def test_the_own_model_example_is_at_most_60_lines() -> None:
    assert len((ROOT / "examples/own_model/recipe.py").read_text().splitlines()) <= 60


def test_the_own_model_example_learns_on_two_ranks(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    recipe = "examples/own_model/recipe.py:TwoMoons"
    result = run_python(COMMAND, "train", recipe, "--nproc", "2", "--output_dir", str(folder))
    assert result.returncode == 0, result.stderr
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["eval/correct"] for line in lines if "eval/correct" in line][-1] > 0.97
    [preview] = (folder / "previews").rglob("*boundary.txt")
    assert set(preview.read_text()) == {".", "#", "\n"}
    # The README's picture shows the same run: the same lines of the banner and the same last line.
    picture = html.unescape(re.sub("<[^>]+>", "\n", (ROOT / "docs/images/train.svg").read_text())).replace("\xa0", " ")
    labels = [line.split("  ")[0] for line in result.stderr.splitlines() if re.match(r"[a-z ]+  ", line)]
    last = result.stderr.splitlines()[-1].replace(str(folder), "runs/moons")
    assert len(labels) > 8 and last.startswith("done after step 320"), result.stderr
    assert [text for text in (*labels, last) if text not in picture] == [], "run: python docs/picture.py"


def test_no_module_is_longer_than_400_lines() -> None:
    lengths = {name(path): len(path.read_text().splitlines()) for path in MODULES}
    assert {path: length for path, length in lengths.items() if length > 400} == {}


def test_every_folder_of_the_package_is_a_package() -> None:
    assert [name(folder) for folder in {path.parent for path in MODULES} if not (folder / "__init__.py").exists()] == []


def test_every_module_has_a_docstring() -> None:
    assert [name(path) for path in MODULES if not ast.get_docstring(ast.parse(path.read_text()))] == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_local_links_of_a_page_are_valid(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    targets = re.findall(r"\]\(<?([^)\s>]+)", text) + re.findall(r"(?:src|href)=\"([^\"]+)\"", text)
    local = [target.split("#")[0] for target in targets if not re.match(r"[a-z]+:|#", target)]
    assert [target for target in local if not (page.parent / target).exists()] == []


def test_files_and_names_in_the_architecture_exist() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    mentions = re.findall(r"`([\w./]+/[\w.]*\.py)(?:: (\w+))?[^`]*`", text)
    assert len(mentions) > 60
    missing = []
    for file, symbol in mentions:
        path = next((root / file for root in (PACKAGE, ROOT) if (root / file).is_file()), None)
        if path is None or not re.search(rf"\b{symbol}\b", path.read_text()):
            missing.append((file, symbol))
    assert missing == []


def test_the_layout_in_contributing_is_the_import_contract() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    expected = [name for layer in contracts[0]["layers"] for name in layer.split(" | ")]
    table = (ROOT / "CONTRIBUTING.md").read_text().partition("## Layout")[2].partition("##")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert [name for row in rows for name in re.findall(r"`(\w+)(?:/|\.py)`", row)] == expected


TARGETS = ("test", "docs", "package", "faults-quick", "test-slow")


@pytest.mark.parametrize("failing", [None, *TARGETS])
def test_ci_runs_everything_fails_if_one_fails_and_ends_with_the_line_of_pytest(
    failing: str | None, tmp_path: Path
) -> None:
    (tmp_path / ".ci").mkdir()
    (tmp_path / "bin").mkdir()
    shutil.copy(ROOT / ".ci/run", tmp_path / ".ci/run")
    recipes = dict.fromkeys(TARGETS, "@echo done")
    recipes |= {"test": "@echo '== 7 passed in 1.25s =='", "test-slow": "@echo '== 3 passed in 65.00s (0:01:05) =='"}
    if failing in ("test", "test-slow"):
        recipes[failing] = "@echo '== 1 failed, 6 passed in 9.00s =='; exit 1"
    elif failing:
        recipes[failing] = "@exit 1"
    lines = (f"{name}:\n\t@echo ran {name}\n\t{command}\n" for name, command in recipes.items())
    (tmp_path / "Makefile").write_text("".join(lines))
    (tmp_path / "bin/dpkg").write_text("#!/bin/sh\n")  # everything is installed
    (tmp_path / "bin/dpkg").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    done = subprocess.run([tmp_path / ".ci/run"], capture_output=True, text=True, env=environment)
    assert (done.returncode == 0) is (failing is None), done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("ran ")] == [f"ran {name}" for name in TARGETS]
    expected = "1 failed, 6 passed in 9.00s" if failing in ("test", "test-slow") else "7 passed in 1.25s"
    assert expected in done.stdout.splitlines()[-1]


@pytest.mark.parametrize("passes", [True, False])
def test_ci_runs_failed_tests_once_more(passes: bool, tmp_path: Path) -> None:
    for folder in (".ci", "bin", ".venv/bin"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(ROOT / ".ci/run", tmp_path / ".ci/run")
    recipes = dict.fromkeys(TARGETS, "@echo '== 7 passed in 1.25s =='")
    recipes["test"] = "@echo '== 1 failed, 6 passed in 9.00s =='; exit 1"
    (tmp_path / "Makefile").write_text("".join(f"{name}:\n\t{command}\n" for name, command in recipes.items()))
    again = "1 passed in 2.00s" if passes else "1 failed in 2.00s"
    for program, script in (("bin/dpkg", ""), (".venv/bin/python", f"echo '== {again} =='\nexit {int(not passes)}\n")):
        (tmp_path / program).write_text(f"#!/bin/sh\n{script}")
        (tmp_path / program).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    done = subprocess.run([tmp_path / ".ci/run"], capture_output=True, text=True, env=environment)
    assert (done.returncode == 0) is passes and again in done.stdout.splitlines()[-1], done.stdout


def shipped_files() -> list[Path]:
    single = [ROOT / path for path in ("Makefile", "pyproject.toml", ".ci/run", ".pre-commit-config.yaml")]
    folders = [
        path for folder in ("src", "docs", "examples", "benchmarks", "release") for path in (ROOT / folder).rglob("*")
    ]
    readable = {".py", ".md", ".toml", ".yaml", ".yml", ".json", ".jsonl", ".sh", ".txt", ".html", ".svg", ".csv", ""}
    return [path for path in [*PAGES, *single, *folders] if path.is_file() and path.suffix in readable]


def test_no_file_contains_a_path_of_a_developers_machine() -> None:
    machine_path = re.compile(r"(?<![\w.}*-])/(work|root|home|opt|Users)/")
    hits = {name(path): machine_path.findall(path.read_text()) for path in shipped_files()}
    assert {path: paths for path, paths in hits.items() if paths} == {}


def test_the_setup_does_not_choose_a_package_index() -> None:
    for path in ("Makefile", "pyproject.toml", ".ci/run"):
        assert not re.search(r"index-url|find-links|trusted-host|://", (ROOT / path).read_text()), path


def test_the_declared_command_exists() -> None:
    module, _, function = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"][
        "unisono"
    ].partition(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_import_unisono_does_not_import_torch() -> None:
    result = run_python("import sys, unisono; print('torch' in sys.modules)")
    assert result.stdout.strip() == "False", result.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"]], ids=" ".join)
def test_help_does_not_import_torch(arguments: list[str]) -> None:
    at_exit = "import atexit, sys; atexit.register(lambda: print('torch' in sys.modules, file=sys.stderr)); "
    result = run_python(at_exit + COMMAND, *arguments)
    assert result.returncode == 0 and result.stdout, result.stderr
    assert result.stderr.splitlines()[-1:] == ["False"], result.stderr


def test_help_takes_less_than_half_a_second() -> None:
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        result = run_python(COMMAND, "--help")
        seconds.append(time.perf_counter() - start)
        assert result.returncode == 0 and result.stdout, result.stderr
    assert min(seconds) < 0.5  # the other processes had to share the machine


def test_pages_show_the_figures_that_were_measured() -> None:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        from figures import PAGES, with_figures
    finally:
        sys.path.pop(0)
    for page in PAGES:
        assert with_figures(page) == page.read_text(), "run: python benchmarks/figures.py"


def test_a_broken_pipe_of_a_run_is_a_failure() -> None:
    """It may be a connection to another rank; a broken stdout is not an error (test_cli)."""
    broken = (
        "from unisono.cli import main as m\nimport sys\ndef broken(words): raise BrokenPipeError\nm._run = broken\n"
    )
    result = run_python(broken + "sys.exit(m.main())", "train", "darkroom")
    assert result.returncode == 3 and result.stderr
