"""seo with the input that users and sites really provide: one clear line for each problem, and no endless wait."""

from __future__ import annotations

import csv
import json
import os
import time
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors import SafetensorError

from unisono.engine import export as exporting
from unisono.engine.recipe import Work
from unisono.errors import ConfigError, UserError
from unisono.recipes.common.checks import check_range
from unisono.recipes.common.tree import Tree
from unisono.recipes.seo.data.labelled import read_labelled
from unisono.recipes.seo.data.pages import parse_page
from unisono.recipes.seo.data.site import pages_of
from unisono.recipes.seo.data.store import fill_texts, open_texts
from unisono.recipes.seo.models.folders import read_layout
from unisono.recipes.seo.models.tiny import train_tokenizer
from unisono.recipes.seo.recipe import Seo
from unisono.recipes.seo.settings import FOR, Config
from unisono.recipes.seo.tasks.bi_encoder import BiEncoder
from unisono.settings import Settings

# Settings -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("scale", float("nan")),
        ("max_length", 10**11),
        ("query_length", 10**20),
        ("target_length", 10**11),
        ("num_negatives", 10**6),
        ("lora_rank", 10**8),
        ("lora_dropout", 2.0),
        ("lora_dropout", -1.0),
        ("lora_alpha", float("nan")),
        ("lora_alpha", 0.0),
        ("data_path", ""),
    ],
)
def test_unusable_settings_are_rejected_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{name}: expected"):
        Seo(Config(**{"data_path": "x.csv", name: value}))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"task": "score", "method": "cross"}, "method only applies to task rank, but this run uses task score"),
        (
            {"task": "snippet", "num_negatives": 2},
            "num_negatives only applies to task rank, but this run uses task sn",
        ),
        (
            {"rerank": 9},
            "rerank only applies to task rank with method cross, but this run uses task rank with method bi",
        ),
        ({"method": "cross", "pooling": "cls"}, "pooling only applies to task rank with method bi"),
        ({"label": "class"}, "label only applies to task score"),
        ({"task": "score", "target_length": 9}, "target_length only applies to task snippet"),
    ],
)
def test_a_setting_of_another_task_is_refused(settings: dict[str, Any], told: str) -> None:
    recipe = Seo(Config(data_path="data.csv", **settings))  # as `unisono export` writes it
    with pytest.raises(ConfigError, match=f"^{told}"):
        recipe.check_settings(Settings())


def test_every_task_specific_setting_exists() -> None:
    assert set(FOR) <= {field.name for field in fields(Config)}


def test_nan_is_out_of_range() -> None:
    settings = SimpleNamespace(size=float("nan"))
    with pytest.raises(ConfigError):
        check_range(settings, {"size": 0}, {})
    with pytest.raises(ConfigError):
        check_range(settings, {}, {"size": 1})


# Queries and pages --------------------------------------------------------------------------------------------------


def _prepared(folder: Path, rows: list[tuple[str, str, str]], **more: Any) -> BiEncoder:
    data = folder / "data.jsonl"
    data.write_text("\n".join(json.dumps({"query": q, "positive": p, "negative": n}) for q, p, n in rows))
    task = BiEncoder(Config(data_path=str(data), model_name="tiny", **more))
    task.folder = folder / "prepared"
    task.prepare(Work(task.folder))
    return task


@pytest.mark.parametrize(
    "rows",
    [
        [("a query", "a page", "another")],
        [("a query", f"page {number}", "another") for number in range(5)],
        [(f"query {number}", "a page", "another") for number in range(5)],
    ],
    ids=["one row", "one query", "one page"],
)
def test_data_without_negatives_is_rejected(tmp_path: Path, rows: list[tuple[str, str, str]]) -> None:
    with pytest.raises(ConfigError, match="so there are no negatives"):
        _prepared(tmp_path, rows)
    _prepared(tmp_path, rows, num_negatives=1)


def test_one_query_per_step_has_no_negatives(tmp_path: Path) -> None:
    task = _prepared(tmp_path, [(f"query {number}", f"page {number}", "another") for number in range(5)])
    with pytest.raises(ConfigError, match="batch_size 1"):
        task.start_remark(1)
    assert "1 negative: the pages of the 1 other query" in str(task.start_remark(2))


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe"], ids=["empty", "cut", "garbage"])
def test_damaged_baselines_are_measured_again(tmp_path: Path, content: bytes) -> None:
    rows = [(f"query {number}", f"page {number}", "another") for number in range(40)]
    file = _prepared(tmp_path, rows).folder / "lines_beside.json"
    kept = json.loads(file.read_bytes())["found"]
    file.write_bytes(content)
    _prepared(tmp_path, rows)
    assert json.loads(file.read_bytes())["found"] == kept


@pytest.mark.parametrize("name", ["tokens.npy", "starts.npy"])
def test_tokens_of_the_right_size_with_wrong_content_are_damaged(tmp_path: Path, name: str) -> None:
    place = fill_texts(tmp_path, lambda: ["a", "b"], lambda texts: [[1, 2, 3] for _ in texts], "f" * 32, Work(tmp_path))
    assert len(open_texts(place)) == 2
    for content in (b"x" * (place / name).stat().st_size, _with_another_shape(place / name)):
        (place / name).write_bytes(content)
        with pytest.raises(UserError, match="damaged; remove that folder"):
            open_texts(place)


def _with_another_shape(path: Path) -> bytes:
    array = np.load(path)
    return path.read_bytes().replace(f"({len(array)},)".encode(), f"({len(array) - 1},)".encode())


def test_tokenizer_training_is_fast_on_an_endless_word() -> None:
    begun = time.monotonic()
    tokenizer = train_tokenizer(["some words", "data:image/png;base64," + "iVBORw0KGgo" * 30_000, "w" * 300_000])
    assert time.monotonic() - begun < 10
    assert tokenizer("some words")["input_ids"]


@pytest.mark.parametrize(
    ("labels", "told"),
    [
        (["1e299", "1.5", "2.5"], r"line 2.*below 1e15"),
        (["0.0", "1e-310", "2e-310"], "or nearly so"),
        (["1.5", "1.5", "1.5"], "all 3 labels are 1.5;"),
    ],
)
def test_non_finite_and_huge_labels_are_rejected(tmp_path: Path, labels: list[str], told: str) -> None:
    table = tmp_path / "table.csv"
    table.write_text("text,label\n" + "".join(f"page {number},{label}\n" for number, label in enumerate(labels)))
    with pytest.raises(ConfigError, match=told):
        read_labelled(table, kind="number")


def test_long_fields_are_read_and_other_readers_keep_their_limit(tmp_path: Path) -> None:
    table, usual = tmp_path / "table.csv", 131_072
    csv.field_size_limit(usual)  # python's own
    table.write_text("text,label\n" + "".join(f"{'word ' * 50_000},{label}\n" for label in ("1.5", "2.5")))
    assert len(read_labelled(table).texts) == 2
    assert csv.field_size_limit() == usual


# Sites --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("between", [" ", "/", '="1" ', '="1"'])
def test_a_tag_with_a_hundred_thousand_attributes_is_not_parsed(between: str) -> None:
    begun = time.monotonic()
    page = parse_page(f'<p>text<a x=">" {between.join(f"a{number}" for number in range(100_000))}>link</a>', "a.html")
    assert page.problems == ["not HTML: a tag has over 5,000 parts"]
    assert time.monotonic() - begun < 10


def test_long_attributes_and_unclosed_quotes_are_read_as_before() -> None:
    words = "word " * 20_000
    assert parse_page(f"<title>T</title><img alt=\"{words}\" src=x><p data-x='{words}'>text", "a.html").text == "text"
    begun = time.monotonic()
    parse_page('<a "' * 100_000 + "<b '" * 100_000, "b.html")
    assert time.monotonic() - begun < 10


def test_a_link_to_itself_is_not_a_page(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text("<p>text")
    (tmp_path / "loop.html").symlink_to("loop.html")
    (tmp_path / "nowhere.html").symlink_to("not_there.html")
    assert [name for name, _ in pages_of(tmp_path)] == ["page.html"]
    assert "loop.html" not in Tree(tmp_path)


def test_a_list_of_files_has_a_size_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unisono.recipes.seo.data.site._MAX_BYTES", 1000)
    (tmp_path / "page.html").write_text("<p>text")
    (tmp_path / "list.txt").write_text("page.html\n" * 200)
    with pytest.raises(ConfigError, match="expected a list of files"):
        pages_of(tmp_path / "list.txt")


# Models and folders -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [5, [{}], {"a": 1}])
def test_an_invalid_pooling_is_reported(tmp_path: Path, mode: Any) -> None:
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": mode}))
    (tmp_path / "modules.json").write_text(json.dumps([{"type": "x.Pooling", "path": "1_Pooling"}]))
    with pytest.raises(ConfigError, match="its pooling mode"):
        read_layout(tmp_path, "m")


def test_prompts_of_any_kind_are_read(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text("[]")
    values = {"prompts": {"query": "q: "}, "default_prompt_name": ["x"]}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(values))
    assert read_layout(tmp_path, "m").prompts == {"query": "q: ", "page": ""}


@pytest.mark.parametrize("error", [SafetensorError("No space left on device"), OSError(28, os.strerror(28))])
def test_an_export_to_a_full_disk_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    class Full:
        def export(self, model: Any, folder: Path) -> None:
            raise error

    monkeypatch.setattr(exporting, "load_trained", lambda *_, **__: (Full(), None, "weights"))
    with pytest.raises(UserError, match=r"cannot be written \(No space left on device\); free some space"):
        exporting.export_run(tmp_path / "run", tmp_path / "out")


def test_an_output_folder_whose_prepared_is_a_file_is_refused_and_left_alone(tmp_path: Path) -> None:
    from command_line import unisono

    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "prepared").write_text("mine")
    (tmp_path / "data.csv").write_text("query,positive\n" + "".join(f"q {n},page {n}\n" for n in range(9)))
    flags = ["--model_name=tiny", "--data_path=data.csv", "--output_dir=run", "--max_steps=1", "--gpus=0"]
    ended = unisono("train", "seo", *flags, cwd=tmp_path)
    assert ended.code == 2
    assert "prepared cannot be created (File exists); choose another --output_dir" in ended.err
    assert "Traceback" not in ended.err
    assert (tmp_path / "run" / "prepared").read_text() == "mine"
