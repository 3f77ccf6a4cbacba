"""Readers of foreign bytes survive damaged files: a short form of `make fuzz`, with the same cases every time."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from fuzz.campaign import Result, fuzz
from fuzz.table import READERS

pytestmark = pytest.mark.timeout(900)  # of the whole fixture, on a busy machine

_NAMES = [reader.name for reader in READERS]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    return fuzz(_NAMES, tmp_path_factory.mktemp("fuzz"), examples=8)


@pytest.mark.parametrize("name", _NAMES)
def test_damaged_files_lead_to_the_documented_errors_only(results: dict[str, Result], name: str) -> None:
    assert not results[name].defects, "\n".join(results[name].defects)
    assert results[name].num_cases > 5


def test_every_reader_has_a_name_of_its_own_and_an_existing_module() -> None:
    assert len(set(_NAMES)) == len(_NAMES)
    for reader in READERS:
        importlib.import_module(reader.module)


def test_fuzzing_finds_every_kind_of_defect_and_goes_on_after_a_crash(tmp_path: Path) -> None:
    expected = {
        "raises": "KeyError",
        "several_lines": "several lines",
        "loops": "more than 0.5 s",
        "leaves": "opened secret.txt outside of the folder",
        "crashes": "the process ended with status -6",
        "allocates": "MemoryError",
        "rejects": None,
    }
    results = fuzz(list(expected), tmp_path, examples=5, table="fuzz.bad_readers")
    for name, words in expected.items():
        defects = results[name].defects
        assert (not defects) if words is None else len(defects) == 1 and words in defects[0], (name, defects)
        if words is not None:
            kept = tmp_path / "defects" / f"{name}-0" / "file"
            assert kept.read_bytes() != b"a valid file", "the damaged file is kept"
