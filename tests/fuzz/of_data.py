"""Readers of datasets: tar shards, tables, learning histories, features and labels."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fuzz.reader import Reader, write
from unisono.errors import UnisonoError
from unisono.recipes.common.bad_files import BadMedia

# ---- tar shards ----


def _write_tar(folder: Path) -> None:
    with tarfile.open(folder / "0.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        for number in range(4):
            for field, data in (("txt", b"sample" * (1 + 40 * number)), ("cls", b"1")):
                info = tarfile.TarInfo(f"{'long/' * 30 if number == 2 else ''}{number:04d}.{field}")
                info.size, info.pax_headers = len(data), {"comment": "é"} if number == 1 else {}
                tar.addfile(info, io.BytesIO(data))


def _with_checksums(name: str, content: bytes) -> bytes:
    """Corrects the checksum of every header of a tar file."""
    blocks = bytearray(content)
    for start in range(0, len(blocks) - 511, 512):
        block = blocks[start : start + 512]
        if block[257:262] == b"ustar":
            block[148:156] = b" " * 8
            blocks[start + 148 : start + 156] = f"{sum(block):06o}\0 ".encode()
    return bytes(blocks)


def _read_tar(folder: Path) -> None:
    from unisono.datasets.tar_shards import TarShards

    _all_items(TarShards(folder / "0.tar", index_dir=folder / "index"))


def _all_items(data: Any) -> None:
    for index in range(min(len(data), 200)):
        data[index]


def _write_indexed(folder: Path) -> None:
    _write_tar(folder)
    _read_tar(folder)


def _read_indexed(folder: Path) -> None:
    """Reads with an index that somebody else has left in a shared folder; the stamps of the files are the same."""
    _read_tar(folder)


# ---- Parquet and Arrow ----


def _table() -> Any:
    import pyarrow as pa

    return pa.table(
        {
            "id": list(range(40)),
            "text": [f"row {number}" for number in range(40)],
            "list": [[number] * (number % 3) for number in range(40)],
            "nested": [{"a": number / 2, "b": None} for number in range(40)],
            "kind": pa.array(["x", "y"] * 20).dictionary_encode(),
        }
    )


def _write_parquet(folder: Path) -> None:
    from pyarrow import parquet

    parquet.write_table(_table(), folder / "0.parquet", row_group_size=10)


def _write_arrow(folder: Path) -> None:
    import pyarrow as pa

    rows = _table().drop_columns(["kind"])
    with pa.ipc.new_file(folder / "0.arrow", rows.schema) as writer:
        writer.write_table(rows, max_chunksize=10)


def _write_stream(folder: Path) -> None:
    import pyarrow as pa

    rows = _table().drop_columns(["kind"])
    with pa.ipc.new_stream(folder / "0.arrow", rows.schema) as writer:
        writer.write_table(rows, max_chunksize=10)


def _read_parquet(folder: Path) -> None:
    from unisono.datasets.parquet_rows import ParquetRows

    _all_items(ParquetRows(folder / "0.parquet", index_dir=folder / "index"))


def _read_arrow(folder: Path) -> None:
    from unisono.datasets.arrow_rows import ArrowRows

    _all_items(ArrowRows(folder / "0.arrow", index_dir=folder / "index"))


def _write_files(folder: Path) -> None:
    write({"tree/a/1.txt": "one", "tree/a/2.txt": "two", "tree/b/3.txt": "three"})(folder)
    _read_files(folder)


def _read_files(folder: Path) -> None:
    from unisono.datasets.files import Files

    _all_items(Files(folder / "tree", index_dir=folder / "index"))


# ---- darkroom ----

_TASKS = [1, 3]


def _write_histories(folder: Path) -> None:
    import torch

    from unisono.recipes.darkroom.data.histories import write_histories
    from unisono.recipes.darkroom.rooms import Darkroom
    from unisono.recipes.darkroom.sources import SOURCES
    from unisono.recipes.darkroom.sources.source import run_learners

    room = Darkroom(3, 4)
    histories = run_learners(SOURCES["explorer"], room, torch.tensor(_TASKS), 2, 20, seed=1)
    write_histories(folder / "histories.hdf5", histories, room, source="explorer", seed=1)


def _read_histories(folder: Path) -> None:
    from unisono.recipes.darkroom.data.histories import read_histories
    from unisono.recipes.darkroom.rooms import Darkroom

    read_histories(folder / "histories.hdf5", Darkroom(3, 4), _TASKS, 2, 20)


def _read_darkroom_yaml(folder: Path) -> None:
    from unisono.config.file import read_file
    from unisono.recipes.darkroom.foreign_config import translate

    translate(dict(read_file(folder / "ad_dr.yaml")), "ad_dr.yaml")


_DARKROOM_YAML = """\
model: AD
alg: q
alg_seed: 1
tf_n_embd: 64
tf_n_layer: 4
tf_n_head: 4
tf_dropout: 0.1
train_batch_size: 512
lr: 0.001
beta1: 0.9
max_grad_norm: 10
n_transit: 40
env: darkroom
"""

# ---- clips ----

_QV = [
    {
        **{"qid": number, "query": "a cat jumps", "vid": f"v{number}", "duration": 10, "relevant_clip_ids": [0, 3]},
        **{"relevant_windows": [[0, 2], [6, 8]], "saliency_scores": [[1, 2, 3], [4, 4, 4]]},
        **{"pred_saliency_scores": [0.1, 0.2, 0.3, 0.4, 0.5], "pred_relevant_windows": [[0, 2, 0.9], [6, 8, 0.1]]},
    }
    for number in range(3)
]
_LINES = "".join(json.dumps(each) + "\n" for each in _QV)


def _write_labels(folder: Path) -> None:
    csv = "video,start,end,score\nv0.npy,0,4,0.5\nv1.npy,0:00:02,0:00:06.5,1\nv0.npy,4,6,\n"
    write({"labels.csv": csv})(folder)
    for number in range(2):
        np.save(folder / f"v{number}.npy", np.random.default_rng(number).random((10, 4), dtype=np.float32))


def _labels(folder: Path, name: str) -> None:
    from unisono.recipes.clips.data.labels import read_labels

    for video in read_labels(folder / name, 2.0):
        assert video.name


def _write_qv(folder: Path) -> None:
    write({"labels.jsonl": _LINES})(folder)
    for number in range(3):
        np.savez(folder / f"v{number}.npz", features=np.ones((5, 4), np.float32))


def _write_hisum(folder: Path) -> None:
    import h5py

    with h5py.File(folder / "labels.h5", "w") as file:
        for number in range(3):
            group = file.create_group(f"video_{number}")
            group["features"] = np.ones((6, 4), np.float32) * number
            group["gtscore"] = np.linspace(0, 1, 6)
    (folder / "first.h5").write_bytes((folder / "labels.h5").read_bytes())


def _read_hisum(folder: Path) -> None:
    from unisono.recipes.clips.data.labels import read_labels

    for video in read_labels(folder / "labels.h5", 2.0):
        for file in vars(video).values():
            if hasattr(file, "clips"):
                file.clips(2.0)


def _write_features(folder: Path) -> None:
    import h5py

    rows = np.random.default_rng(0).random((10, 4), dtype=np.float32)
    np.save(folder / "a.npy", rows)
    np.savez(folder / "b.npz", features=rows)
    np.savez_compressed(folder / "c.npz", features=rows)
    with h5py.File(folder / "d.h5", "w") as file:
        file.create_dataset("features", data=rows, chunks=(5, 4), compression="gzip")


def _read_features(folder: Path) -> None:
    from unisono.recipes.clips.data.feature_files import FeatureFile

    failed: BadMedia | None = None
    for name in ("a.npy", "b.npz", "c.npz", "d.h5"):
        try:
            FeatureFile(folder / name, seconds=1.0).clips(2.0)
        except BadMedia as error:
            failed = error
    if failed is not None:
        raise failed


def _read_qv(folder: Path) -> None:
    from unisono.recipes.clips.metrics.qvhighlights import read_ground_truth, read_predictions, read_windows

    failed: UnisonoError | None = None
    readers: list[Callable[[Path], Any]] = [
        read_predictions,
        read_ground_truth,
        lambda file: read_windows(file, "relevant_windows", 2),
        lambda file: read_windows(file, "pred_relevant_windows", 3),
    ]
    for reader in readers:
        try:
            reader(folder / "labels.jsonl")
        except UnisonoError as error:
            failed = error
    if failed is not None:
        raise failed


# ---- seo ----


def _rows(*rows: dict[str, Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def _read_labelled(folder: Path) -> None:
    from unisono.recipes.seo.data.labelled import read_labelled

    [file] = [file for file in folder.iterdir() if file.suffix in (".csv", ".jsonl")]
    read_labelled(file, leave_out_bad=True)


def _read_ranking(folder: Path) -> None:
    from unisono.recipes.seo.data.ranking_sets.ranking import read_ranking

    ranking = read_ranking(folder, leave_out_bad=True)
    list(ranking.queries()), list(ranking.pages())


def _read_prompts(folder: Path) -> None:
    from unisono.recipes.wan_distill.data.prompts import read_prompts

    read_prompts(str(folder / "prompts.txt"), "data_path")


_H5_WORDS = (b"\x89HDF\r\n\x1a\n", b"TREE", b"SNOD", b"HEAP", b"OHDR", b"FRHP", b"BTHD", b"\xff" * 8)
_CSV_WORDS = (b'"', b",", b'""', b'"\n', b"\t", b"text,label\n", b"=cmd|' /C calc'!A0,", b"\x00,", b"1e400,", b";")
_H5_RUNS = (UnisonoError, BadMedia)

READERS = [
    Reader(
        "tar_shard",
        "unisono.datasets.tar_members",
        _write_tar,
        _read_tar,
        words=(b"../../outside/secret.txt", b"ustar\x0000", b"30 path=../outside/secret.txt\n", b"GNU.sparse.map=1"),
        mended=_with_checksums,
    ),
    Reader("tar_index", "unisono.datasets.index", _write_indexed, _read_indexed, damaged=("index/*",)),
    Reader("parquet", "unisono.datasets.row_groups", _write_parquet, _read_parquet),
    Reader("arrow_file", "unisono.datasets.arrow_rows", _write_arrow, _read_arrow),
    Reader("arrow_stream", "unisono.datasets.arrow_rows", _write_stream, _read_arrow),
    Reader("files_index", "unisono.datasets.files", _write_files, _read_files, damaged=("index/*",)),
    Reader(
        "histories",
        "unisono.recipes.darkroom.data.history_file",
        _write_histories,
        _read_histories,
        words=_H5_WORDS,
    ),
    Reader(
        "darkroom_config",
        "unisono.recipes.darkroom.foreign_config",
        write({"ad_dr.yaml": _DARKROOM_YAML}),
        _read_darkroom_yaml,
    ),
    Reader(
        "csv_labels",
        "unisono.recipes.clips.data.label_formats",
        _write_labels,
        lambda folder: _labels(folder, "labels.csv"),
        damaged=("labels.csv",),
        words=(*_CSV_WORDS, b"v0.npy,-1,4,2\n", b"v1.npy,0:60:99,1e9,nan\n"),
    ),
    Reader(
        "qvhighlights_labels",
        "unisono.recipes.clips.data.labels",
        _write_qv,
        lambda folder: _labels(folder, "labels.jsonl"),
        damaged=("labels.jsonl",),
    ),
    Reader(
        "hisum_labels",
        "unisono.recipes.clips.data.label_formats",
        _write_hisum,
        _read_hisum,
        errors=_H5_RUNS,
        damaged=("labels.h5",),
        words=_H5_WORDS,
    ),
    Reader(
        "features",
        "unisono.recipes.clips.data.feature_files",
        _write_features,
        _read_features,
        errors=_H5_RUNS,
        words=(*_H5_WORDS, b"'descr': '|O'", b"(10, 40000000000)", b"PK\x01\x02", b"PK\x05\x06"),
    ),
    Reader(
        "qvhighlights_results",
        "unisono.recipes.clips.metrics.qvhighlights",
        write({"labels.jsonl": _LINES}),
        _read_qv,
    ),
    Reader(
        "labelled_csv",
        "unisono.recipes.seo.data.tables",
        write({"table.csv": 'text,label\n"a page, with commas",good\nanother page,poor\nthird,good\n'}),
        _read_labelled,
        words=_CSV_WORDS,
    ),
    Reader(
        "labelled_jsonl",
        "unisono.recipes.seo.data.labelled",
        write({"table.jsonl": _rows(*({"text": f"page {number}", "label": number / 2} for number in range(5)))}),
        _read_labelled,
    ),
    Reader(
        "beir",
        "unisono.recipes.seo.data.ranking_sets.beir",
        write(
            {
                "corpus.jsonl": _rows(*({"_id": f"d{n}", "title": "t", "text": f"page {n}"} for n in range(4))),
                "queries.jsonl": _rows(*({"_id": f"q{n}", "text": f"query {n}"} for n in range(4))),
                "qrels/train.tsv": "query-id\tcorpus-id\tscore\n" + "".join(f"q{n}\td{n}\t1\n" for n in range(4)),
            }
        ),
        _read_ranking,
        words=_CSV_WORDS,
    ),
    Reader(
        "marco",
        "unisono.recipes.seo.data.ranking_sets.marco",
        write(
            {
                "collection.tsv": "".join(f"{n}\tpage {n}\n" for n in range(4)),
                "queries.train.tsv": "".join(f"{n}\tquery {n}\n" for n in range(4)),
                "qrels.train.tsv": "".join(f"{n}\t0\t{n}\t1\n" for n in range(4)),
            }
        ),
        _read_ranking,
        words=_CSV_WORDS,
    ),
    Reader(
        "ranking_table",
        "unisono.recipes.seo.data.ranking_sets.by_texts",
        write(
            {
                "train.jsonl": _rows(
                    *({"query": f"q {n}", "positive": f"p {n}", "negatives": [f"n {n}"]} for n in range(4))
                )
            }
        ),
        _read_ranking,
    ),
    Reader(
        "prompts",
        "unisono.recipes.wan_distill.data.prompts",
        write({"prompts.txt": "a red ball\na blue ball\n"}),
        _read_prompts,
    ),
]
