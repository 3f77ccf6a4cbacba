"""Parquet and Arrow files, folders of files and datasets of Hugging Face are read by index, and survive damage."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from unisono.data.loader import Cursor, Loader
from unisono.data.order import Order
from unisono.data.windows import windows_of
from unisono.datasets import ArrowRows, Files, HuggingFace, ParquetRows
from unisono.errors import UserError
from unisono.settings import DataSettings

SIZES = [25, 7, 40]
SIZE = sum(SIZES)


def table(first: int, size: int) -> pa.Table:
    numbers = range(first, first + size)
    return pa.table({"id": list(numbers), "text": [f"row {number}" for number in numbers]})


def write(folder: Path, suffix: str) -> Path:
    folder.mkdir(exist_ok=True)
    first = 0
    for number, size in enumerate(SIZES):
        rows, path = table(first, size), folder / f"{number}{suffix.removeprefix('.stream')}"
        if suffix == ".parquet":
            parquet.write_table(rows, path, row_group_size=10)
        else:
            new = pa.ipc.new_file if suffix == ".arrow" else pa.ipc.new_stream
            with new(path, rows.schema) as writer:
                writer.write_table(rows, max_chunksize=10)
        first += size
    return folder


KINDS = {".parquet": ParquetRows, ".arrow": ArrowRows, ".stream.arrow": ArrowRows}


@pytest.mark.parametrize("suffix", KINDS)
def test_every_row_is_read_by_its_number_in_any_order_and_process(tmp_path: Path, suffix: str) -> None:
    data = KINDS[suffix](write(tmp_path / "rows", suffix), index_dir=tmp_path / "index", memory_bytes=500)
    assert len(data) == SIZE and data.block_starts.tolist() == [0, 10, 20, 25, 32, 42, 52, 62]
    for number in np.random.default_rng(0).permutation(SIZE).tolist():
        assert data[number] == {"id": number, "text": f"row {number}"}
    assert len(data._groups) < 4  # memory_bytes
    copy = pickle.loads(pickle.dumps(data))
    assert copy[71] == data[71] and len(pickle.dumps(data)) < 3000
    with pytest.raises(IndexError, match="72 rows"):
        data[SIZE]
    order = Order(SIZE, 1, windows=windows_of(data, 30))
    cursor = Cursor(start=0, end=SIZE, global_batch=8, micro_batch=4, rank=0, world=1)
    loader = Loader(data, list, order, cursor, DataSettings(num_workers=2), pin=False)
    read = [row["id"] for micro in loader for row in micro.data]
    loader.close()
    assert read == order.indices(np.arange(SIZE)).tolist() and sorted(read) == list(range(SIZE))


@pytest.mark.parametrize("suffix", KINDS)
def test_columns_and_transform(tmp_path: Path, suffix: str) -> None:
    folder = write(tmp_path / "rows", suffix)
    assert KINDS[suffix](folder, columns=["id"], index_dir=tmp_path / "index")[30] == {"id": 30}
    assert KINDS[suffix](folder, transform=len, index_dir=tmp_path / "index")[30] == 2


@pytest.mark.parametrize("suffix", KINDS)
def test_damaged_and_changed_files_are_one_line(tmp_path: Path, suffix: str) -> None:
    folder = write(tmp_path / "rows", suffix)
    data = KINDS[suffix](folder, index_dir=tmp_path / "index")
    first = sorted(folder.iterdir())[0]
    content = first.read_bytes()
    first.write_bytes(content[: len(content) // 2])
    for attempt in (lambda: data[0], lambda: KINDS[suffix](folder, index_dir=tmp_path / "index")):
        with pytest.raises(UserError) as caught:
            attempt()
        assert str(first) in str(caught.value) and "\n" not in str(caught.value)
    first.write_bytes(b"")
    with pytest.raises(UserError):
        KINDS[suffix](folder, index_dir=tmp_path / "index")


def test_files_of_a_tree_are_read_by_their_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "root"
    for name in ("a/1.txt", "a/2.txt", "b/c/ü.txt", "b/c/4.TXT", "5.txt", ".hidden/6.txt", "a/.7.txt"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    (root / "loop").symlink_to(root)
    os.mkfifo(root / "pipe.txt")

    def names(**options: Any) -> list[str]:
        return [sample["name"] for sample in Files(root, pattern="*.txt", index_dir=tmp_path / "index", **options)]

    assert names(read=False) == ["5.txt", "a/1.txt", "a/2.txt", "b/c/ü.txt"]
    data = Files(root, pattern="*.txt", index_dir=tmp_path / "index")
    assert [sample["data"].decode() for sample in data] == names()
    assert data.folders == ["", "a", "b/c"] and data[2]["folder"] == "a"
    assert data[3]["path"] == str(root / "b/c/ü.txt")
    assert pickle.loads(pickle.dumps(data))[1] == data[1] and len(pickle.dumps(data)) < 1000
    assert capsys.readouterr().err.count("indexed") == 1
    (root / "a/3.txt").write_text("new")
    assert names() == ["5.txt", "a/1.txt", "a/2.txt", "a/3.txt", "b/c/ü.txt"]
    assert capsys.readouterr().err.count("indexed") == 1
    for folder, message in ((tmp_path / "none", "not a folder"), (root / "loop" / "a", None)):
        if message:
            with pytest.raises(UserError, match=message):
                Files(folder, index_dir=tmp_path / "index")
    with pytest.raises(UserError, match=r"no files match \*\.jpg"):
        Files(root, pattern="*.jpg", index_dir=tmp_path / "index")


def test_a_hundred_thousand_files_take_few_bytes_each(tmp_path: Path) -> None:
    for folder in ("x", "y"):
        (tmp_path / "root" / folder).mkdir(parents=True)
        (tmp_path / "root" / folder / "0").touch()
        for number in range(1, 5000):
            os.link(tmp_path / "root" / folder / "0", tmp_path / "root" / folder / f"{number}")
    data = Files(tmp_path / "root", index_dir=tmp_path / "index")
    assert len(data) == 10_000
    size = sum(path.stat().st_size for path in (tmp_path / "index").rglob("*") if path.is_file())
    assert size < 10_000 * (8 + 4) + 1000


def test_a_dataset_of_hugging_face_is_read_by_row_loaded_or_by_its_files(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    folder = write(tmp_path / "rows", ".parquet")
    options: Any = {
        "data_files": {"train": [str(path) for path in sorted(folder.iterdir())]},
        "index_dir": tmp_path / "i",
    }
    loaded = HuggingFace("parquet", cache_dir=str(tmp_path / "cache"), **options)
    by_files = HuggingFace("parquet", streaming=True, **options)
    assert len(loaded) == len(by_files) == SIZE
    for number in (0, 71, 33):
        assert loaded[number] == by_files[number] == {"id": number, "text": f"row {number}"}
    assert pickle.loads(pickle.dumps(by_files))[5]["id"] == pickle.loads(pickle.dumps(loaded))[5]["id"] == 5
    assert by_files.block_starts.tolist()[:3] == [0, 10, 20] and not hasattr(loaded, "block_starts")
    assert HuggingFace(datasets.Dataset.from_dict({"a": [1, 2]}), transform=len)[1] == 1
    with pytest.raises(UserError, match="no split 'test'; it has train"):
        HuggingFace("parquet", streaming=True, split="test", **options)
    with pytest.raises(UserError, match="streaming=True"):
        HuggingFace(datasets.Dataset.from_dict({"a": [1]}).to_iterable_dataset())
    (tmp_path / "a.csv").write_text("a\n1\n")
    with pytest.raises(UserError, match=r"consists of \.csv files"):
        HuggingFace("csv", streaming=True, data_files=str(tmp_path / "a.csv"))
