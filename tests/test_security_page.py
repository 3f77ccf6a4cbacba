"""The threat model names tests and modules that exist, and is linked where people look for it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from fuzz.table import READERS

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs/security.md").read_text()
TESTS = sorted(set(re.findall(r"`(tests/\w+\.py)::(\w+)`", PAGE)))
FILES = sorted(set(re.findall(r"`((?:src|tests)/[\w/]+\.py)`", PAGE)))


@pytest.mark.parametrize("file, name", TESTS)
def test_every_named_test_exists(file: str, name: str) -> None:
    functions = {node.name for node in ast.parse((ROOT / file).read_text()).body if isinstance(node, ast.FunctionDef)}
    assert name in functions and name.startswith("test_")


def test_every_named_module_exists() -> None:
    assert len(TESTS) > 25 and len(FILES) > 20
    assert [file for file in FILES if not (ROOT / file).is_file()] == []


def test_every_boundary_has_a_test() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("|") and "src/unisono" in line]
    assert len(rows) > 15
    assert [row for row in rows if "tests/" not in row] == []


def test_the_page_is_linked() -> None:
    for file in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "mkdocs.yml"):
        assert "security.md" in (ROOT / file).read_text(), file
    assert "(dependencies.md)" in PAGE


def test_every_package_that_reads_foreign_bytes_is_fuzzed() -> None:
    fuzzed = {reader.module.rpartition(".")[0] for reader in READERS}
    named = {file.removeprefix("src/").removesuffix(".py").replace("/", ".") for file in FILES if "recipes/" in file}
    packages = {module.rpartition(".")[0] for module in named} - {"unisono.recipes.wan.models"}
    assert packages <= fuzzed, packages - fuzzed
