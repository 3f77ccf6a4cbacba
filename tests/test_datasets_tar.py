"""Tar shards: random access to every sample, an index that is built once, and files that cannot be trusted."""

from __future__ import annotations

import gzip
import os
import pickle
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from command_line import environment
from ranks import run_ranks
from shards import BLOCK, content, header, padded, write_shards, write_tar
from unisono.data.loader import Cursor, Loader
from unisono.data.order import Order
from unisono.datasets import TarShards
from unisono.datasets.locks import locked
from unisono.datasets.read_ahead import ReadAhead
from unisono.datasets.sources import RangeReader, Source
from unisono.errors import UserError
from unisono.settings import DataSettings

END = bytes(2 * BLOCK)


class Counting(RangeReader):
    """Records which ranges are read."""

    ranges: list[tuple[str, int, int]]

    def read(self, source: Source, start: int, count: int) -> bytes:
        self.ranges.append((source.url, start, count))
        return super().read(source, start, count)


def opened(folder: Path, shards: Any, **options: Any) -> TarShards:
    return TarShards(shards, index_dir=folder / "index", **options)


def raw(path: Path, *parts: bytes) -> Path:
    path.write_bytes(b"".join(parts))
    return path


@pytest.mark.parametrize("tar_format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_every_sample_of_every_format_is_read_by_its_number(tmp_path: Path, tar_format: int) -> None:
    write_shards(tmp_path / "shards", [5, 1, 12], tar_format)
    data = opened(tmp_path, tmp_path / "shards")
    assert len(data) == 18 and data.block_starts.tolist() == [0, 5, 6]
    for number in np.random.default_rng(0).permutation(18).tolist():
        expected = {"__key__": f"{number:06d}", "txt": content(number), "cls": str(number).encode()}
        assert data[number] == expected
    for outside in (18, -1):
        with pytest.raises(IndexError, match="18 samples"):
            data[outside]


@pytest.mark.parametrize("tar_format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_names_of_any_length_folders_and_several_dots(tmp_path: Path, tar_format: int) -> None:
    long = "a" * 150 + "/" + "b" * 150 + "/ü"
    members = [(f"{long}.JPG", b"1"), (f"{long}.seg.png", b"2"), ("./x/7.txt", b"3"), ("x/8.0/7.txt", b"4")]
    write_tar(tmp_path / "a.tar", members, tar_format)
    data = opened(tmp_path, tmp_path / "a.tar")
    assert list(data) == [
        {"__key__": long, "jpg": b"1", "seg.png": b"2"},
        {"__key__": "x/7", "txt": b"3"},
        {"__key__": "x/8.0/7", "txt": b"4"},
    ]


def test_a_sample_is_read_in_one_range_and_its_row_has_8_bytes(tmp_path: Path) -> None:
    [path] = write_shards(tmp_path / "shards", [50])
    data = opened(tmp_path, path)
    reader = Counting()
    original, reader.ranges, data._reader = data._reader, [], reader
    assert data[30]["txt"] == content(30)
    [(url, _, count)] = reader.ranges
    assert url == str(path) and count == 2 * BLOCK + len(padded(content(30))) + BLOCK
    data._reader = original
    rows = next((tmp_path / "index").rglob("rows.npy"))
    assert rows.stat().st_size <= 50 * 8 + 128
    assert len(pickle.dumps(data)) < 2000 and pickle.loads(pickle.dumps(data))[49]["cls"] == b"49"


def test_fields_and_transform(tmp_path: Path) -> None:
    write_shards(tmp_path / "shards", [3])
    assert opened(tmp_path, tmp_path / "shards", fields=["cls"])[1] == {"__key__": "000001", "cls": b"1"}
    assert opened(tmp_path, tmp_path / "shards", transform=len)[1] == 3
    with pytest.raises(UserError, match="'000002' has no field 'png', only txt, cls"):
        opened(tmp_path, tmp_path / "shards", fields=["png"])[2]


def test_patterns_name_shards_in_their_order(tmp_path: Path) -> None:
    paths = [str(path) for path in write_shards(tmp_path / "shards", [1] * 12)]

    def named(pattern: Any) -> list[str]:
        return [shard.url for shard in opened(tmp_path, pattern).shards]

    folder = f"{tmp_path}/shards"
    assert named(f"{folder}/*.tar") == named(folder) == named(Path(folder)) == paths
    assert named(f"{folder}/{{003..005}}.tar") == paths[3:6]
    assert named(f"{folder}/00{{9,2}}.tar") == [paths[9], paths[2]]
    assert named([f"{folder}/{{010..011}}.tar", paths[0]]) == [*paths[10:], paths[0]]
    for pattern, message in (
        ([paths[0], f"{folder}/*.tar"], "listed twice"),
        (f"{folder}/{{005..003}}.tar", "not a range"),
        (f"{folder}/{{0..99999999}}.tar", "more than 100,000 files"),
        (f"{folder}/*.zip", "no files match"),
        (f"{folder}/{{011..012}}.tar", "012.tar cannot be read"),
        ([], "no files were given"),
    ):
        with pytest.raises(UserError, match=message):
            named(pattern)


def test_members_that_are_no_files_or_have_unsafe_names_are_left_out_and_nothing_is_written(tmp_path: Path) -> None:
    inside = tmp_path / "shards"
    inside.mkdir()
    with tarfile.open(inside / "a.tar", "w", format=tarfile.PAX_FORMAT, pax_headers={"path": "global"}) as tar:
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE):
            info = tarfile.TarInfo("bad.txt")
            info.type, info.linkname = kind, "/etc/passwd"
            tar.addfile(info)
    hostile = [
        *(
            header(name, 2) + padded(b"no")
            for name in ("/etc/x.txt", "../x.txt", "a/../../x.txt", "__m__/x.txt", "x.", ".x")
        ),
        header("sparse.txt", 2, b"S", extended=b"\1") + bytes(BLOCK) + padded(b"no"),
        header("good.txt", 4) + padded(b"good"),
    ]
    raw(inside / "b.tar", *hostile, END)
    before = sorted(tmp_path.rglob("*"))
    data = opened(tmp_path, [inside / "a.tar", inside / "b.tar"])
    assert list(data) == [{"__key__": "good", "txt": b"good"}]
    assert [path for path in sorted(tmp_path.rglob("*")) if "index" not in path.parts[-4:]][:3] == before[:3]
    assert not list(tmp_path.rglob("x*")) and not (tmp_path.parent / "x.txt").exists()


BROKEN = {
    "no end marker": ([header("a.txt", 1), padded(b"a")], "truncated: at byte 1024"),
    "cut in a header": ([header("a.txt", 1), padded(b"a"), header("b.txt")[:100]], "truncated: at byte 1024"),
    "cut in a file": ([header("a.txt", 4000), padded(b"a")], "'a.txt' would end at byte 4512"),
    "huge": ([header("a.txt", 8**11 - 1), END], "would end at byte 8589935103"),
    "huger": ([header("a.txt", length=b"\x80" + b"\xff" * 11), END], "would end at byte"),
    "negative": ([header("a.txt", length=b"\xff" * 12), END], "negative size"),
    "no number": ([header("a.txt", length=b"99999999999\0"), END], "no valid size"),
    "no tar": ([b"hello" * 300], "at byte 0 there is no tar header"),
    "checksum": ([header("a.txt", 1).replace(b"a.txt", b"b.txt"), padded(b"a"), END], "no tar header"),
    "gzip": ([gzip.compress(bytes(9000))], "compressed with gzip"),
    "a long name": ([header("x", 2**21, b"L"), bytes(2**21), END], "extension header has 2097152 bytes"),
    "many extensions": ([(header("x", 1, b"L") + padded(b"n")) * 40, END], "more than 16 extension headers"),
    "pax": ([header("x", 9, b"x"), padded(b"999 a=b\n"), END], "damaged pax header"),
    "pax size": ([header("x", 12, b"x"), padded(b"12 size=-99\n"), header("a.txt"), END], "no valid size"),
    "pax number": ([header("x", 9, b"x"), padded("٣ a=b\n".encode()), END], "damaged pax header"),
    "twice": ([(header("a.txt", 1) + padded(b"a")) * 2, END], "two files with the extension .txt"),
    "torn": ([header("a.txt"), header("b.txt"), header("a.cls"), END], "are not adjacent"),
    "empty": ([END], "no samples found in 1 file"),
    "nothing": ([], "truncated"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_shard_is_one_line(tmp_path: Path, case: str) -> None:
    parts, message = BROKEN[case]
    path = raw(tmp_path / "a.tar", *parts)
    with pytest.raises(UserError, match=message) as caught:
        opened(tmp_path, path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_folder_a_fifo_and_a_missing_file_are_one_line(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.tar")
    (tmp_path / "folder.tar").mkdir()
    for path, message in ((tmp_path / "fifo.tar", "not a file"), (tmp_path / "none.tar", "cannot be read")):
        with pytest.raises(UserError, match=message):
            opened(tmp_path, path)
    with pytest.raises(UserError, match="no files match"):
        opened(tmp_path, tmp_path / "folder.tar")


def test_only_shards_that_changed_are_indexed_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = write_shards(tmp_path / "shards", [4, 5, 6])
    before = opened(tmp_path, tmp_path / "shards")
    assert "indexed 3 files" in capsys.readouterr().err
    opened(tmp_path, tmp_path / "shards")
    assert capsys.readouterr().err == ""
    write_tar(paths[1], [("new.txt", b"1"), ("newer.txt", b"2")])
    after = opened(tmp_path, tmp_path / "shards")
    assert "1 file of 3 changed or are new" in capsys.readouterr().err
    assert [sample["__key__"] for sample in after][3:7] == ["000003", "new", "newer", "000009"]
    assert before[0] and before[14]  # its index is still there
    with pytest.raises(UserError, match=r"001\.tar has changed"):
        before[5]


def test_a_build_that_failed_or_was_killed_continues(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = write_shards(tmp_path / "shards", [40] * 30)
    complete = paths[-1].read_bytes()
    paths[-1].write_bytes(complete[:-10_000])
    with pytest.raises(UserError, match="truncated"):
        opened(tmp_path, tmp_path / "shards")
    paths[-1].write_bytes(complete)
    assert len(opened(tmp_path, tmp_path / "shards")) == 1200
    assert "indexed 1 file" in capsys.readouterr().err

    arguments = f"{str(tmp_path / 'shards')!r}, index_dir={str(tmp_path / 'other')!r}"
    code = f"from unisono.datasets import TarShards; TarShards({arguments})"
    process = subprocess.Popen([sys.executable, "-c", code], env=environment(), stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("other/*/parts/*.npy")) and process.poll() is None and time.monotonic() < deadline:
        pass
    process.send_signal(signal.SIGKILL)
    process.communicate()
    data = TarShards(tmp_path / "shards", index_dir=tmp_path / "other")
    assert [sample["cls"] for sample in data] == [str(number).encode() for number in range(1200)]
    assert not list(tmp_path.glob("*/*/parts"))


@pytest.mark.parametrize("damage", ["rows.npy", "counts.npy"])
def test_a_damaged_index_is_built_again(tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str) -> None:
    write_shards(tmp_path / "shards", [40] * 3)
    opened(tmp_path, tmp_path / "shards")
    file = next((tmp_path / "index").rglob(damage))
    file.write_bytes(file.read_bytes()[:-5])
    capsys.readouterr()
    assert opened(tmp_path, tmp_path / "shards")[119]["cls"] == b"119"
    assert "indexed 3 files" in capsys.readouterr().err


def one_rank(folder: str) -> list[Any]:
    import contextlib
    import io

    with contextlib.redirect_stderr(io.StringIO()) as said:
        data = TarShards(f"{folder}/shards", index_dir=f"{folder}/index")
    return [len(data), said.getvalue().count("indexed")]


def test_ranks_that_start_together_build_the_index_once(tmp_path: Path) -> None:
    write_shards(tmp_path / "shards", [20] * 10)
    results = run_ranks("one_rank", __file__, 3, {"folder": str(tmp_path)})
    assert [size for size, _ in results] == [200] * 3 and sum(said for _, said in results) == 1


@pytest.mark.parametrize("has_locks", [True, False])
def test_processes_that_find_a_damaged_index_together_all_get_a_good_one(tmp_path: Path, has_locks: bool) -> None:
    write_shards(tmp_path / "shards", [20] * 6)
    opened(tmp_path, tmp_path / "shards")
    code = (
        "import sys, fcntl; from unisono.datasets import TarShards\n"
        f"{'' if has_locks else 'fcntl.flock = lambda *_: (_ for _ in ()).throw(OSError(37))'}\n"
        f"for line in sys.stdin: print([int(x['cls']) for x in TarShards({str(tmp_path / 'shards')!r}, "
        f"index_dir={str(tmp_path / 'index')!r})] == list(range(120)), flush=True)"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", code], env=environment(), stdin=-1, stdout=-1, stderr=-1, text=True)
        for _ in range(3)
    ]
    try:
        for _ in range(12):
            file = next((tmp_path / "index").glob("*/[0-9a-f]*/rows.npy"))
            file.write_bytes(file.read_bytes()[:-5])
            for process in processes:
                assert process.stdin is not None
                process.stdin.write("go\n")
                process.stdin.flush()
            for process in processes:
                assert process.stdout is not None
                assert process.stdout.readline() == "True\n"
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_a_lock_ends_with_its_block_although_a_process_was_forked_meanwhile(tmp_path: Path) -> None:
    with locked(tmp_path / "lock"):
        child = os.fork()
        if child == 0:  # pragma: no cover
            time.sleep(60)
            os._exit(0)
    try:
        started = time.monotonic()
        with locked(tmp_path / "lock"):
            assert time.monotonic() - started < 5
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_forked_process_can_read_while_a_thread_of_its_parent_connects(tmp_path: Path) -> None:
    write_shards(tmp_path / "shards", [3])
    data = opened(tmp_path, tmp_path / "shards")
    with data._reader._lock:
        child = os.fork()
        if child == 0:  # pragma: no cover
            signal.alarm(10)
            os._exit(0 if data[2]["cls"] == b"2" else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_random_access_does_not_map_the_index_into_memory(tmp_path: Path) -> None:
    write_shards(tmp_path / "shards", [200])
    data = opened(tmp_path, tmp_path / "shards")
    assert [data[number]["cls"] for number in (199, 0)] == [b"199", b"0"]
    assert "rows.npy" not in Path("/proc/self/maps").read_text()
    file = next((tmp_path / "index").rglob("rows.npy"))
    os.truncate(file, 300)
    with pytest.raises(UserError, match="was truncated while it was in use"):
        data[150]


def test_announced_samples_are_read_ahead_by_the_system(tmp_path: Path) -> None:
    [path] = write_shards(tmp_path / "shards", [4000])
    data = opened(tmp_path, path)
    offsets = [int(data._index.locate(index)[1][0]) * BLOCK for index in (3000, 2000)]
    with path.open("rb") as file:

        def is_cached(offset: int) -> bool:
            try:
                return os.preadv(file.fileno(), [bytearray(1)], offset, os.RWF_NOWAIT) == 1
            except BlockingIOError:
                return False

        os.fsync(file.fileno())
        for _ in range(50):  # pages that are still being written or read cannot be removed yet
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            if not any(map(is_cached, offsets)):
                break
            time.sleep(0.1)
        else:
            pytest.skip("this file system keeps everything in memory")
        data.about_to_read([3000, 2000])
        deadline = time.monotonic() + 30
        while not all(map(is_cached, offsets)):
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_read_ahead_is_limited_and_follows_the_reader() -> None:
    advised: list[int] = []

    def advise(index: int) -> int:
        advised.append(index)
        return 12 * 2**20

    forgotten: list[int] = []
    ahead = ReadAhead(advise, forgotten.append)
    ahead.announce([5, 6, 7, 8, 9, 5])
    assert advised == [5, 6, 7]  # 36 MiB
    ahead.is_read(100)  # was not announced
    ahead.is_read(5)
    assert advised == [5, 6, 7, 8]
    ahead.is_read(8)  # 6 and 7 could not be read
    assert advised == [5, 6, 7, 8, 9, 5] and forgotten == [5, 6, 7, 8]
    for _ in range(4):
        ahead.is_read(200)  # another loader, to which these samples mean nothing
    ahead.announce([20, 21, 22, 23])
    assert advised[-3:] == [20, 21, 22]
    copy = pickle.loads(pickle.dumps(ReadAhead(abs, abs)))
    copy.announce([5])
    copy.is_read(5)


class Announced:
    """Returns the announced samples instead of data."""

    def __init__(self) -> None:
        self.announced: list[int] = []

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> list[int]:
        return list(self.announced)

    def about_to_read(self, indices: list[int]) -> None:
        self.announced += indices
        assert indices[0] < 30, "an error here must not end the worker"


@pytest.mark.parametrize("workers", [0, 1])
def test_a_worker_announces_samples_long_before_it_reads_them(workers: int) -> None:
    cursor = Cursor(start=0, end=40, global_batch=10, micro_batch=5, rank=0, world=1)
    order, settings = Order(40, 0, shuffle=False), DataSettings(num_workers=workers)
    loader = Loader(Announced(), list, order, cursor, settings, pin=False)  # type: ignore[arg-type]
    announced = [len(micro.data[0]) for micro in loader]
    loader.close()
    assert announced == ([5, 10, 15, 20, 25, 30, 35, 40] if workers == 0 else [40] * 8)


def test_an_index_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    write_shards(tmp_path / "shards", [2])
    (tmp_path / "index").write_text("a file")
    with pytest.raises(UserError, match="pass another index_dir"):
        opened(tmp_path, tmp_path / "shards")
