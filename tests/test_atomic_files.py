"""A file or folder written through atomic_files appears complete or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from unisono.atomic_files import atomic_file, atomic_folder, write_atomically


@pytest.mark.parametrize("one_writer", [False, True])
@pytest.mark.parametrize("durable", [False, True])
def test_a_file_is_replaced_atomically(tmp_path: Path, durable: bool, one_writer: bool) -> None:
    file = tmp_path / "a.json"
    for content in (b"first", "second", [b"th", b"ird"]):
        write_atomically(file, content, durable=durable, one_writer=one_writer)
    assert file.read_bytes() == b"third"
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_failed_write_keeps_the_old_file_and_leaves_nothing_behind(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text("old")
    with pytest.raises(ZeroDivisionError), atomic_file(file) as temporary:
        temporary.write_text("half")
        _ = 1 / 0
    with pytest.raises(OSError):
        write_atomically(tmp_path / "missing" / "a.json", b"x")
    assert file.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_link_at_the_temporary_name_is_not_followed(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("untouched")
    (tmp_path / ".a.json.new").symlink_to(mine)
    write_atomically(tmp_path / "a.json", "new", one_writer=True)
    assert mine.read_text() == "untouched" and (tmp_path / "a.json").read_text() == "new"


@pytest.mark.parametrize("has_links", [True, False])
def test_an_exclusive_write_never_replaces_a_file(
    tmp_path: Path, has_links: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    if not has_links:
        monkeypatch.setattr(os, "link", refuse)
    file = tmp_path / "clip.mp4"
    with atomic_file(file, overwrite=False) as temporary:
        temporary.write_text("first")
    with pytest.raises(FileExistsError), atomic_file(file, overwrite=False) as temporary:
        temporary.write_text("second")
    assert file.read_text() == "first"
    assert os.listdir(tmp_path) == ["clip.mp4"]


def test_a_folder_appears_only_when_it_is_complete(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    with atomic_folder(folder) as temporary:
        (temporary / "a").write_text("a")
        assert not folder.exists()
    with pytest.raises(OSError), atomic_folder(folder) as temporary:  # the folder is not empty, so it stays
        (temporary / "b").write_text("b")
    assert os.listdir(tmp_path) == ["out"] and os.listdir(folder) == ["a"]
