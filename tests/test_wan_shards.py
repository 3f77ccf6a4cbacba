"""wan-flow on images and videos in tar shards: the same run as on a folder, and damaged shards in one line."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

import unisono
from command_line import losses
from command_line import unisono as command
from shards import write_tar
from unisono.engine.work import Work
from unisono.errors import UnisonoError, UserError
from unisono.recipes.common.bad_files import BadMedia
from unisono.recipes.wan.data.crop import Crop, local_media_of
from unisono.recipes.wan.data.shards import PackedSample, are_shards, read_shards
from unisono.recipes.wan.data.sources import Source, read_sources
from wan_models import save_data, save_pipelines

COMMON: dict[str, Any] = {
    **{"mixed_precision": "no", "compile": False, "num_workers": 0, "log_every": 1, "warmup_steps": 0, "fps": 8.0},
    **{"learning_rate": 1e-3, "num_frames": 9, "tensorboard": False, "global_batch_size": 4, "batch_size": 4},
    **{"max_steps": 3, "preview_every": -1, "eval_every": -1},
}


def pack(folder: Path, shards: Path) -> str:
    """Packs a folder into two shards, with captions as text in one and as JSON in the other; returns their pattern."""
    sources = read_sources(folder)
    shards.mkdir(parents=True)
    for shard, some in enumerate((sources[:3], sources[3:])):
        members = []
        for number, source in enumerate(some):
            assert source.media is not None and source.caption is not None
            caption = ("txt", source.caption) if shard else ("json", json.dumps({"caption": source.caption}))
            members += [
                (f"clips/{number:03d}{source.media.suffix}", source.media.read_bytes()),
                (f"clips/{number:03d}.{caption[0]}", caption[1].encode()),
            ]
        write_tar(shards / f"clips-{shard:03d}.tar", members)
    return f"{shards}/clips-{{000..001}}.tar"


def read(pattern: str, folder: Path, **options: Any) -> list[PackedSample]:
    report = options.pop("report", lambda text: None)
    work = Work(folder / "work")
    return read_shards(pattern, folder / "index", work, **{"leave_out_bad": False, "report": report, **options})


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("wan")
    save_pipelines(root)
    save_data(root / "data")
    return root


def test_a_run_on_shards_equals_the_run_on_the_folder_also_on_two_ranks_and_over_http(
    root: Path, tmp_path: Path
) -> None:
    pytest.importorskip("aiohttp")
    from test_datasets_remote import Handler, Server

    pattern = pack(root / "data", tmp_path / "shards")
    model = {"model_path": str(root / "2.1"), **COMMON}
    unisono.train("wan-flow", nproc=1, output_dir=str(tmp_path / "folder"), dataset_path=str(root / "data"), **model)
    expected = losses(tmp_path / "folder")
    cache = str(tmp_path / "cache")
    unisono.train("wan-flow", nproc=1, output_dir=str(tmp_path / "one"), dataset_path=pattern, cache_dir=cache, **model)
    assert losses(tmp_path / "one") == expected

    with Server(("127.0.0.1", 0), Handler) as server:
        server.folder, server.requests = tmp_path / "shards", []
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/clips-{{000..001}}.tar"
        flags = [word for name, value in {**model, "batch_size": 2}.items() for word in (f"--{name}", value)]
        ended = command(
            *("train", "wan-flow", *flags, "--nproc", 2, "--dataset_path", url, "--output_dir", "two"),
            *("--cache_dir", "remote"),
            cwd=tmp_path,
        )
        assert ended.code == 0, ended.err
        assert losses(tmp_path / "two") == pytest.approx(expected, rel=2e-5)
        total = sum(path.stat().st_size for path in (tmp_path / "shards").iterdir())
        assert server.sent < 3 * total  # once for the index, and once for the media
        server.shutdown()


def test_captions_and_media_are_those_of_the_folder(root: Path, tmp_path: Path) -> None:
    assert are_shards("s3://bucket/x.tar") and are_shards("x-{0..9}.tar") and not are_shards("./tar")
    sources = read_sources(root / "data")
    packed = read(pack(root / "data", tmp_path / "shards"), tmp_path)
    assert [sample.caption for sample in packed] == [source.caption for source in sources]
    assert packed[0].name == "clips-000/000000" and packed[3].name == "clips-001/000000"
    for sample, source in zip(packed, sources, strict=True):
        assert source.media is not None
        with local_media_of(Source(sample.name, None, sample.caption, packed=sample.media)) as path:
            assert path.read_bytes() == source.media.read_bytes() and path.suffix == source.suffix
        assert not path.parent.exists()


def test_bad_samples_are_one_line_and_can_be_left_out(tmp_path: Path) -> None:
    members = [
        *(("a.mp4", b"film"), ("a.txt", b" a cat ")),
        *(("b.mp4", b"film"),),
        *(("c.jpg", b"x"), ("c.json", b'{"text": 3}')),
        *(("d.jpg", b"x"), ("d.txt", b"\xff\xfe\xff")),
        *(("e.jpg", b"x"), ("e.json", b"[" * 5000)),
        *(("f.txt", b"no image"),),
        *(("g.png", b"x"), ("g.json", b'{"prompt": "a dog"}')),
    ]
    write_tar(tmp_path / "a.tar", members)
    with pytest.raises(UserError, match=r"a\.tar, sample 2 of it: has no caption.* \(3 more of 6 samples are bad\)"):
        read(str(tmp_path / "a.tar"), tmp_path)
    said: list[str] = []
    good = read(str(tmp_path / "a.tar"), tmp_path, leave_out_bad=True, report=said.append)
    assert [(sample.name, sample.caption) for sample in good] == [("a/000000", "a cat"), ("a/000005", "a dog")]
    assert said[0].startswith("skipped 4 of 6 samples")
    source = Source(good[0].name, None, "", packed=good[0].media)
    with pytest.raises(BadMedia, match=r"a\.tar, a/000000: cannot be read as a video"), local_media_of(source) as path:
        Crop(9).fit(path, 16)

    write_tar(tmp_path / "b.tar", [("a.mp4", b"film"), ("a.jpg", b"x"), ("a.txt", b"two")])
    with pytest.raises(UserError, match="'a' has mp4 and jpg; expected one image or video"):
        read(str(tmp_path / "b.tar"), tmp_path)
    write_tar(tmp_path / "c.tar", [("a.txt", b"text only")])
    with pytest.raises(UserError, match="no images or videos found in 1 file"):
        read(str(tmp_path / "c.tar"), tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"no_cache": True}, "no_cache: tar shards need the cache"),
        ({"masked_loss": True}, "masked_loss: tar shards need the cache"),
        ({"dataset_path": "s3://bucket/films"}, "expected tar shards, such as s3://bucket"),
        ({"dataset_path": "missing-{000..003}.tar"}, "missing-000.tar cannot be read"),
    ],
)
def test_what_shards_cannot_do_is_one_line(root: Path, tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    write_tar(tmp_path / "a.tar", [("a.jpg", b"x"), ("a.txt", b"a cat")])
    values = {"model_path": str(root / "2.1"), "dataset_path": str(tmp_path / "a.tar"), **COMMON, **changes}
    with pytest.raises(UnisonoError) as refused:
        unisono.train("wan-flow", nproc=1, output_dir=str(tmp_path / "run"), **values)
    assert refused.value.exit_code == 2 and words in str(refused.value) and "\n" not in str(refused.value)
