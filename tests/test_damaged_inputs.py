"""Damaged and hostile inputs that fuzzing or a review found: each gives a documented result or one clear line."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shards import write_shards
from unisono.datasets import Files, TarShards
from unisono.errors import ConfigError, UserError
from unisono.observe.watch.folder_of_runs import Runs
from unisono.observe.watch.terminal import show_once
from unisono.recipes.clips.data.feature_files import FeatureFile
from unisono.recipes.common.bad_files import BadMedia
from unisono.recipes.seo.site.analysis import analyse
from unisono.recipes.seo.site.crawling.crawler import Limits, crawl
from unisono.recipes.seo.site.fetching import Fetcher
from unisono.recipes.seo.site.pages import open_site
from unisono.recipes.seo.site.technical.structured import _items_of_json
from unisono.recipes.wan.models.weights import weight_files
from unisono.tuning.study import read_trials

NOT_A_URL = "http://[x/"
PAGE = "<html><head><title>A</title></head><body><p>A page.</p>{}</body></html>"


@contextmanager
def serving(answers: dict[str, tuple[int, str, str]]) -> Iterator[str]:
    """A web server with these answers: status, location or content type, and body."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, header, body = answers.get(self.path, (404, "text/plain", ""))
            self.send_response(status)
            self.send_header("Location" if 300 <= status < 400 else "Content-Type", header)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


def test_a_crawl_survives_redirects_and_sitemaps_that_are_no_urls() -> None:
    answers = {
        "/": (200, "text/html", PAGE.format('<a href="/other">b</a>')),
        "/other": (301, "//[x/", ""),
        "/robots.txt": (200, "text/plain", f"User-agent: *\nDisallow:\nSitemap: {NOT_A_URL}\n"),
    }
    fetcher = Fetcher(private_hosts=["127.0.0.1"])
    with serving(answers) as url:
        found = crawl(url, fetcher, Limits(), sleep=lambda seconds: None)
        assert found.pages() == [url] and found.visits[f"{url}other"].status == 301
    for path in ("/", "/robots.txt"):
        with serving({"/": (200, "text/html", PAGE), path: (302, "//[x/", "")}) as url:
            assert url in crawl(url, fetcher, Limits(), sleep=lambda seconds: None).visits


def test_a_site_whose_files_name_what_is_no_url_is_analysed(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(PAGE)
    (tmp_path / "robots.txt").write_text(f"User-agent: *\nDisallow:\nSitemap: {NOT_A_URL}\n")
    (tmp_path / "_redirects").write_text(f"/old {NOT_A_URL}\n{NOT_A_URL} /page.html\n")
    assert len(analyse(open_site(str(tmp_path))).pages) == 1


def test_a_sitemap_from_the_web_may_list_what_is_no_url() -> None:
    sitemap = '<urlset xmlns="http://www.sitemaps.org/schemas/sitemap/0.9">{}</urlset>'
    entries = "".join(f"<url><loc>{url}</loc></url>" for url in (NOT_A_URL, "http://127.0.0.1/a"))
    with serving({"/sitemap.xml": (200, "application/xml", sitemap.format(entries))}) as url:
        site = open_site(f"{url}sitemap.xml", Fetcher(private_hosts=["127.0.0.1"]))
        assert [name for name, _ in site.pages] == ["http://127.0.0.1/a"]


def test_json_ld_of_nested_lists_is_read_at_any_depth() -> None:
    nested: list[object] = []
    for _ in range(5000):  # Python 3.12 parses JSON that is nested deeper than its own functions may be
        nested = [nested]
    assert [item.types for item in _items_of_json({"@type": "Article", "a": nested}, 0)] == [("Article",)]


@pytest.mark.parametrize(
    "counts", [b"", b"\x93NUMPY\x01\x00\x10\x00{'descr': 'X99'}", b"\x93NUMPY\x01\x00\x04\x00((((", b"x"]
)
def test_a_damaged_index_is_built_again(tmp_path: Path, counts: bytes) -> None:
    write_shards(tmp_path / "data", [3])
    before = len(TarShards(tmp_path / "data", index_dir=tmp_path / "index"))
    [file] = tmp_path.glob("index/*/*/counts.npy")
    file.write_bytes(counts)
    assert len(TarShards(tmp_path / "data", index_dir=tmp_path / "index")) == before


def test_an_index_that_asks_for_terabytes_is_one_line(tmp_path: Path) -> None:
    write_shards(tmp_path / "data", [3])
    TarShards(tmp_path / "data", index_dir=tmp_path / "index")
    [file] = tmp_path.glob("index/*/*/rows.npy")
    rows = np.load(file)
    rows[1, 1] = 2**32 - 1
    np.save(file, rows)
    with pytest.raises(UserError, match=r"000\.tar"):
        TarShards(tmp_path / "data", index_dir=tmp_path / "index")[1]


def test_an_index_of_files_cannot_lead_out_of_their_folder(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "aaaaaaaaaaa").write_text("good")
    (tmp_path / "secret").write_text("secret")
    index = tmp_path / "index"
    assert Files(tmp_path / "data", index_dir=index)[0]["data"] == b"good"
    [names] = index.glob("*/*/names.npy")
    np.save(names, np.frombuffer(b"/../secret!", np.uint8))
    with pytest.raises(UserError, match="is damaged; delete this folder"):
        Files(tmp_path / "data", index_dir=index)[0]
    names.write_bytes(b"")
    with pytest.raises(UserError, match="is damaged; delete this folder"):
        Files(tmp_path / "data", index_dir=index)


def test_damaged_compressed_features_are_bad_media(tmp_path: Path) -> None:
    file = tmp_path / "a.npz"
    np.savez_compressed(file, features=np.random.default_rng(0).random((50, 8)))
    content = bytearray(file.read_bytes())
    stream = 30 + int.from_bytes(content[26:28], "little") + int.from_bytes(content[28:30], "little")
    content[stream : stream + 8] = b"\xff" * 8
    file.write_bytes(content)
    with pytest.raises(BadMedia, match="cannot be read as features"):
        FeatureFile(file).rows()


def test_an_index_of_weights_that_lists_nothing_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "diffusion_pytorch_model.safetensors.index.json").write_text('{"weight_map": {}}')
    with pytest.raises(ConfigError, match="lists no weights"):
        weight_files(tmp_path)
    (tmp_path / "diffusion_pytorch_model.safetensors.index.json").write_text('{"weight_map": {"a": "b\\nc"}}')
    with pytest.raises(ConfigError, match="lacks b c; copy") as error:
        weight_files(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.timeout(60)
def test_watching_once_ends_although_the_last_line_is_incomplete(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.json").write_text('{"recipe": "Made"}')
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\n{"step": 2, "lo')
    show_once(Runs([tmp_path]))
    assert "Made" in capsys.readouterr().out


@pytest.mark.parametrize(
    "damage", [{"search": None}, {"trials": "3"}, {"command": [1]}, {"direction": "up"}, {"search": {"a": 1}}]
)
def test_a_damaged_study_is_one_line(tmp_path: Path, damage: dict[str, Any]) -> None:
    record = {"kind": "study", "recipe": "a", "objective": "loss", "direction": "minimize", "search": {"a": "1..2"}}
    record |= {"trials": 3, "command": ["unisono"]}
    (tmp_path / "study.db").write_bytes(b"not a database" * 100)
    (tmp_path / "study.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match=r"cannot be read \(DatabaseError") as error:
        read_trials(tmp_path)
    assert "\n" not in str(error.value)
    (tmp_path / "study.json").write_text(json.dumps({**record, **damage}))
    with pytest.raises(UserError, match=r"study\.json is damaged"):
        read_trials(tmp_path)
