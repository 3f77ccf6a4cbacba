"""Shards on a server: ranges of them are read, or whole shards through a cache that several processes share."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from command_line import TESTS, end, start, wait_until
from ranks import run_ranks
from shards import content, write_shards
from shards_recipe import recorded
from unisono.data.loader import Cursor, Loader
from unisono.data.order import Order
from unisono.data.windows import windows_of
from unisono.datasets import TarShards
from unisono.errors import UserError
from unisono.settings import DataSettings

pytest.importorskip("aiohttp")
SIZES = [20, 30, 10, 25]
SIZE = sum(SIZES)


class Server(ThreadingHTTPServer):
    """Serves a folder, with ranges and entity tags, and counts the bytes."""

    daemon_threads = True
    folder: Path
    sent = 0
    requests: list[str]
    down = False
    delay = 0.0  # seconds before an answer
    cut = 0  # number of answers that will be shorter than announced

    @property
    def url(self) -> str:
        return f"http://user:secret@127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.server.folder / self.path.partition("?")[0].lstrip("/")
        if not path.is_file():
            self.send_response(404)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        data, span = path.read_bytes(), self.headers.get("Range")
        start, stop = 0, len(data)
        if span:
            first, _, last = span.removeprefix("bytes=").partition("-")
            start, stop = int(first), min(int(last) + 1 if last else len(data), len(data))
        time.sleep(self.server.delay)
        if self.server.down:
            self.close_connection = True
            return
        self.send_response(206 if span else 200)
        if span:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(data)}")
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("ETag", f'"{path.stat().st_mtime_ns}"')
        self.send_header("Content-Length", str(stop - start))
        self.end_headers()
        if self.command == "GET":
            body = data[start:stop]
            if self.server.cut > 0:
                self.server.cut -= 1
                body = body[: len(body) // 2]
                self.close_connection = True
            self.server.sent += len(body)
            self.server.requests.append(path.name)
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    write_shards(tmp_path / "shards", SIZES)
    with ThreadingHTTPServer.__new__(Server) as here:
        here.__init__(("127.0.0.1", 0), Handler)  # type: ignore[misc]
        here.folder, here.requests = tmp_path / "shards", []
        thread = threading.Thread(target=here.serve_forever, daemon=True)
        thread.start()
        yield here
        here.shutdown()


def shards(server: Server, folder: Path, **options: Any) -> TarShards:
    return TarShards(f"{server.url}/{{000..003}}.tar?token=secret", index_dir=folder / "index", **options)


def test_samples_are_read_by_ranges_and_workers_can_do_it_too(server: Server, tmp_path: Path) -> None:
    data = shards(server, tmp_path)
    server.sent = 0
    assert data[33]["txt"] == content(33) and server.sent < 6000
    assert data[84]["cls"] == b"84" and pickle.loads(pickle.dumps(data))[5]["cls"] == b"5"
    stored = b"".join(path.read_bytes() for path in (tmp_path / "index").rglob("*") if path.is_file())
    assert b"secret" not in stored and "secret" not in repr(data._reader)
    loader = Loader(data, list, Order(SIZE, 0), cursor(), DataSettings(num_workers=2), pin=False)
    assert [int(row["cls"]) for micro in loader for row in micro.data] == Order(SIZE, 0).indices(np.arange(40)).tolist()
    loader.close()


def cursor(end: int = 40) -> Cursor:
    return Cursor(start=0, end=end, global_batch=8, micro_batch=4, rank=0, world=1)


def test_missing_and_changed_shards_are_one_line_without_secrets(server: Server, tmp_path: Path) -> None:
    for pattern in ("{003..004}.tar", "none.tar"):
        with pytest.raises(UserError, match=r"00\d?4?\.tar|none\.tar") as caught:
            TarShards(f"{server.url}/{pattern}?token=secret", index_dir=tmp_path / "index")
        assert "secret" not in str(caught.value) and "\n" not in str(caught.value)
    data = shards(server, tmp_path)
    write_shards(server.folder, [1] * 4)
    with pytest.raises((UserError, OSError)) as caught_later:
        data[61]
    assert "secret" not in str(caught_later.value)
    assert len(shards(server, tmp_path)) == 4


@pytest.mark.parametrize("cached", [False, True])
def test_the_error_of_a_shard_that_is_gone_does_not_reveal_its_whole_url(
    server: Server, tmp_path: Path, cached: bool
) -> None:
    data = shards(server, tmp_path, **({"cache_dir": tmp_path / "cache"} if cached else {}))
    for file in (*server.folder.glob("*.tar"), *(tmp_path / "cache").glob("*.file")):
        file.unlink()
    with pytest.raises((UserError, OSError), match=r"000\.tar.*FileNotFoundError") as caught:
        data[0]
    assert "=secret" not in "".join(traceback.format_exception(caught.value))  # a bad sample's traceback is stored


def test_a_cache_downloads_each_shard_once_and_stays_within_its_limit(server: Server, tmp_path: Path) -> None:
    sizes = sorted(path.stat().st_size for path in server.folder.iterdir())
    cache = tmp_path / "cache"
    data = shards(server, tmp_path, cache_dir=cache)
    assert sorted(server.requests) == [f"{number:03d}.tar" for number in range(4)]  # indexing filled the cache
    assert [sample["cls"] for sample in data] == [str(number).encode() for number in range(SIZE)]
    assert len(server.requests) == 4
    small = shards(server, tmp_path, cache_dir=tmp_path / "small", cache_bytes=sizes[-1] + sizes[0])
    for number in (0, 20, 50, 60, 0, 20):
        assert small[number]["txt"] == content(number)
        kept = [path.stat().st_size for path in (tmp_path / "small").glob("*.file")]
        assert 0 < sum(kept) <= sizes[-1] + sizes[0]
    with pytest.raises(UserError, match="cache_bytes 1000 is less than the largest shard"):
        shards(server, tmp_path, cache_dir=cache, cache_bytes=1000)


@pytest.mark.parametrize("damage", ["shorter", "other bytes"])
def test_a_damaged_copy_is_downloaded_again(server: Server, tmp_path: Path, damage: str) -> None:
    shards(server, tmp_path, cache_dir=tmp_path / "cache")[0]
    for copy in (tmp_path / "cache").glob("*.file"):
        size = copy.stat().st_size
        copy.write_bytes(b"x" * (size if damage == "other bytes" else size // 2))
    data = shards(server, tmp_path, cache_dir=tmp_path / "cache")
    assert [sample["txt"] for sample in data] == [content(number) for number in range(SIZE)]


def test_a_sample_without_a_field_does_not_download_its_shard_again(server: Server, tmp_path: Path) -> None:
    data = shards(server, tmp_path, cache_dir=tmp_path / "cache", fields=["png"])
    assert data._cache is not None
    before = len(server.requests)
    for _ in range(3):
        with pytest.raises(UserError, match="no field 'png'"):
            data[0]
    assert len(server.requests) == before


def test_announced_samples_are_fetched_at_the_same_time(server: Server, tmp_path: Path) -> None:
    data = shards(server, tmp_path)
    order, before = np.random.default_rng(0).permutation(SIZE).tolist(), len(server.requests)
    server.delay = 0.1
    started = time.monotonic()
    data.about_to_read(order)
    assert [int(data[index]["cls"]) for index in order] == order
    assert time.monotonic() - started < 0.6 * SIZE * server.delay
    assert len(server.requests) == before + SIZE  # each of them once
    server.delay = 0.0

    data.about_to_read(order[:4])
    child = os.fork()
    if child == 0:  # pragma: no cover
        signal.alarm(30)  # a copy in another process has no threads that fetch
        os._exit(0 if [int(data[index]["cls"]) for index in order] == order else 1)
    assert os.waitpid(child, 0)[1] == 0

    server.cut = 1
    data.about_to_read(order[4:6])
    assert int(data[order[4]]["cls"]) == order[4] and int(data[order[5]]["cls"]) == order[5]


def test_a_run_outlasts_a_server_that_is_down_for_a_while(tmp_path: Path) -> None:
    write_shards(tmp_path / "shards", SIZES)
    (tmp_path / "record").mkdir()

    def serving(port: int) -> Server:
        server = Server(("127.0.0.1", port), Handler)
        server.folder, server.requests, server.delay = tmp_path / "shards", [], 0.05
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return server

    server = serving(0)
    port = server.server_port
    words = [
        *("train", f"{TESTS / 'shards_recipe.py'}:OnShards", "--shards", f"http://127.0.0.1:{port}/{{000..003}}.tar"),
        *("--index_dir", tmp_path / "index", "--record", tmp_path / "record", "--output_dir", tmp_path / "run"),
        *("--nproc", 2, "--global_batch_size", 10, "--batch_size", 5, "--max_steps", 60, "--seed", 3),
    ]
    run = start(["-m", "unisono", *words], cwd=tmp_path, LAUNCH="0")
    indexed = sum(SIZES) + 40
    wait_until(lambda: len(server.requests) > indexed, "samples are read")
    server.down = True  # closes every connection, old and new ones
    server.shutdown()
    server.server_close()
    time.sleep(3.0)
    again = serving(port)
    ended = end(run)
    again.shutdown()
    again.server_close()
    assert ended.code == 0, ended.err
    assert "retrying for up to 120 s" in ended.err and "restart" not in ended.err
    stream = [number for step in recorded(tmp_path / "record") for number in step]
    assert stream == Order(SIZE, 3).indices(np.arange(600)).tolist()


def test_a_connection_that_breaks_is_an_error_and_leaves_no_half_file(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unisono.datasets.sources._PATIENCE_S", 0.5)
    data = shards(server, tmp_path, cache_dir=tmp_path / "cache")
    for copy in (tmp_path / "cache").glob("*.file"):
        copy.unlink()
    server.cut = 100
    with pytest.raises((UserError, OSError)):
        data[0]
    server.cut = 0
    assert not list((tmp_path / "cache").glob("*.file")) and data[0]["txt"] == content(0)


def test_shards_that_will_be_read_are_fetched_ahead(server: Server, tmp_path: Path) -> None:
    data = shards(server, tmp_path, cache_dir=tmp_path / "cache")
    for copy in (tmp_path / "cache").glob("*.file"):
        copy.unlink()
    server.requests.clear()
    loader = Loader(
        data, list, Order(SIZE, 0, windows=windows_of(data, 30)), cursor(), DataSettings(num_workers=0), pin=False
    )
    next(loader)
    deadline = time.monotonic() + 30
    while len(set(server.requests)) < 4 and time.monotonic() < deadline:
        time.sleep(0.02)
    loader.close()
    assert sorted(server.requests) == [f"{number:03d}.tar" for number in range(4)]


def read_in_turn(folder: str, url: str, limit: int) -> list[int]:
    rank = int(os.environ["RANK"])
    data = TarShards(
        f"{url}/{{000..003}}.tar", index_dir=f"{folder}/index", cache_dir=f"{folder}/cache", cache_bytes=limit
    )
    order = np.random.default_rng(rank).permutation(SIZE)
    return [int(data[int(number)]["cls"]) - int(number) for number in order]


def test_processes_share_a_cache_that_is_too_small_for_them(server: Server, tmp_path: Path) -> None:
    limit = max(path.stat().st_size for path in server.folder.iterdir()) + 1
    results = run_ranks("read_in_turn", __file__, 3, {"folder": str(tmp_path), "url": server.url, "limit": limit})
    assert results == [[0] * SIZE] * 3
