"""The task snippet: writes a page's title or description, compared with the page's first sentence."""

from __future__ import annotations

import itertools
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from seo_models import both_folder, decoder_folder
from unisono.data.noise import Noise
from unisono.engine.recipe import Work
from unisono.errors import ConfigError
from unisono.recipes.seo.metrics.rouge import copied_numbers, cut, lead_of, longest_common, rouge_l
from unisono.recipes.seo.models.encoder import pad
from unisono.recipes.seo.models.generate import UNSEEN, write
from unisono.recipes.seo.settings import Config
from unisono.recipes.seo.tasks.snippet import Snippet, text_metrics

THINGS = ("apples", "bridges", "clocks", "doors", "engines", "forests", "gardens", "houses")
PLACES = ("Rome", "Oslo", "Lima", "Cairo")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


def pages(folder: Path, number: int = 32) -> Path:
    """Pages whose titles name their topic and place."""
    rows = [
        {
            "text": f"Welcome, {number % 9} times. This page is about {thing} in {place}. "
            + "It goes on for a while. " * (1 + number % 4),
            "title": f"{thing.capitalize()} of {place}",
        }
        for number in range(number)
        for thing, place in [(THINGS[number % 8], PLACES[number // 8 % 4])]
    ]
    path = folder / "pages.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prepared(folder: Path, model: str | Path = "tiny", **further: Any) -> Snippet:
    settings = {"max_length": 48, "target_length": 12, "num_eval": 4, **further}
    task = Snippet(Config(task="snippet", model_name=str(model), data_path=str(pages(folder)), **settings))
    task.folder = folder / "prepared"
    task.prepare(Work(task.folder))
    return task


def noise(number: int) -> Noise:
    return Noise(0, torch.arange(number))


def trained(task: Snippet, steps: int, learning_rate: float = 3e-3) -> Any:
    model = task.model()
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], learning_rate)
    data = task.dataset("train")
    for step in range(steps):
        batch = task.collate([data[(step * 8 + number) % len(data)] for number in range(8)])
        loss = task.loss(model, batch, noise(8))
        optimizer.zero_grad()
        (loss.total / loss.count).backward()
        optimizer.step()
    return model.eval()


# Measures ----------------------------------------------------------------------------------------------------------


def test_rouge_l_is_the_fraction_of_words_in_the_longest_common_subsequence() -> None:
    assert rouge_l("police kill the gunman", "police killed the gunman") == 0.75
    assert rouge_l("the gunman kill police", "police killed the gunman") == 0.5  # Lin's example: the order counts
    assert rouge_l("The CAT, sat!", "the cat sat") == 1.0
    assert rouge_l("", "the cat") == rouge_l("a dog", "the cat") == 0.0
    assert rouge_l("a b", "a b c d") == pytest.approx(2 * (1.0 * 0.5) / 1.5)
    assert rouge_l("東京の天気", "東京の地図") == pytest.approx(0.6)


def test_the_longest_common_subsequence_matches_brute_force() -> None:
    from itertools import combinations

    random = np.random.default_rng(0)
    for _ in range(20):
        first, second = ([str(value) for value in random.integers(0, 3, size)] for size in random.integers(0, 7, 2))
        ours = {some for size in range(len(first) + 1) for some in combinations(first, size)}
        theirs = {some for size in range(len(second) + 1) for some in combinations(second, size)}
        assert longest_common(first, second) == max(len(some) for some in ours & theirs)


def test_numbers_that_are_not_on_the_page_count_as_invented() -> None:
    page = "Since 1998 it has 3.5 million users and 12 offices."
    assert copied_numbers("3.5 million users since 1998", page) == (2, 2)
    assert copied_numbers("5 million users since 1999", page) == (0, 2)
    assert copied_numbers("many users", page) == (0, 0)


def test_the_lead_is_the_first_sentence() -> None:
    assert lead_of("  Version 2.0 is out.\nGet it now. ") == "Version 2.0 is out."
    assert lead_of("no end at\n all") == "no end at all"
    assert lead_of("") == ""
    assert cut("one two three", 8) == "one two"
    assert cut("one two", 7) == "one two"
    assert cut("abcdefgh", 3) == "abc"


def test_a_snippet_is_compared_with_the_lead() -> None:
    result = text_metrics("Apples of Rome", "Apples grow in Rome since 1900. More.", "Apples of Rome", "title")
    assert result["rouge_l"] == (1.0, 1)
    assert 0 < result["rouge_l_lead"][0] < 1
    assert result["fits"] == result["fits_lead"] == (1.0, 1)
    assert result["numbers_copied"] == (0, 0)
    assert result["numbers_copied_lead"] == (1, 1)
    assert text_metrics("x" * 61, "Page.", "Page", "title")["fits"] == (0.0, 1)
    assert text_metrics("x" * 61, "Page.", "Page", "description")["fits"] == (1.0, 1)
    assert text_metrics("", "Page.", "Page", "title")["fits"] == (0.0, 1)  # an empty text fits


# The loss ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tiny", "decoder"])
def test_the_loss_of_a_batch_is_the_sum_of_those_of_its_pages(tmp_path: Path, kind: str) -> None:
    model_name: Any = "tiny" if kind == "tiny" else decoder_folder(tmp_path / "model")
    task = prepared(tmp_path, model_name)
    model, data = task.model().double().eval(), task.dataset("train")
    items = [data[number] for number in (0, 1, 2, 3, 7)]
    with torch.no_grad():
        together = task.loss(model, task.collate(items), noise(5))
        alone = [task.loss(model, task.collate([item]), noise(1)) for item in items]
    assert (
        float(together.count) == sum(float(loss.count) for loss in alone) == sum(len(item["target"]) for item in items)
    )
    # T5 casts to float32 in its norms.
    assert float(together.total) == pytest.approx(sum(float(loss.total) for loss in alone), rel=1e-6)


def test_the_loss_of_a_decoder_is_that_of_transformers(tmp_path: Path) -> None:
    task = prepared(tmp_path, decoder_folder(tmp_path / "model"))
    model: Any = task.model().eval()
    item = task.dataset("train")[3]
    prompt = task._prompt(item["page"])
    ids = torch.from_numpy(np.concatenate([prompt, item["target"]]).astype(np.int64))[None]
    labels = ids.clone()
    labels[:, : len(prompt)] = UNSEEN
    with torch.no_grad():
        theirs = model(input_ids=ids, labels=labels).loss
        ours = task.loss(model, task.collate([item]), noise(1))
    assert float(ours.total / ours.count) == pytest.approx(float(theirs), rel=1e-5)


@pytest.mark.parametrize("length", [3, 8])  # 8: no padding after it
def test_the_loss_of_an_encoder_and_decoder_is_that_of_transformers(tmp_path: Path, length: int) -> None:
    task = prepared(tmp_path, both_folder(tmp_path / "model"))
    model: Any = task.model().eval()
    item = task.dataset("train")[3] | {"target": np.arange(20, 20 + length)}
    ids, labels = (torch.from_numpy(item[name].astype(np.int64))[None] for name in ("page", "target"))
    with torch.no_grad():
        theirs = model(input_ids=ids, labels=labels).loss
        ours = task.loss(model, task.collate([item]), noise(1))
    assert float(ours.total / ours.count) == pytest.approx(float(theirs), rel=1e-5)


# The data ----------------------------------------------------------------------------------------------------------


def test_held_out_pages_are_not_used_for_training(tmp_path: Path) -> None:
    task = prepared(tmp_path)
    train, held_out = task.dataset("train"), task.dataset("eval")
    assert (len(train), len(held_out)) == (28, 4)
    rows = [tuple(data[number]["page"]) for data in (train, held_out) for number in range(len(data))]
    assert len(set(rows)) == 32
    written = [task.tokenizer.decode(held_out[number]["target"], skip_special_tokens=True) for number in range(4)]
    assert written == [true for _, true in task._held_out]


def test_identical_pages_are_in_the_same_split(tmp_path: Path) -> None:
    lines = [{"text": f"page {number % 16} is about many things", "title": f"title {number}"} for number in range(32)]
    (tmp_path / "twice.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    task = Snippet(
        Config(task="snippet", model_name="tiny", data_path=str(tmp_path / "twice.jsonl"), num_eval=5, max_length=48)
    )
    task.folder = tmp_path / "prepared"
    task.prepare(Work(task.folder))
    train, held_out = (task.dataset(split) for split in ("train", "eval"))
    sides = [{tuple(data[number]["page"]) for number in range(len(data))} for data in (train, held_out)]
    assert not sides[0] & sides[1] and len(held_out) == 10


def test_a_stop_request_to_one_rank_does_not_leave_others_waiting(tmp_path: Path) -> None:
    """Whichever rank receives the stop request, both ranks stop at the same point."""
    data = pages(tmp_path)
    for when in (5, 4, 3, 2, 1):  # the first rank receives the request after this many checks
        ended = in_two_threads(data, tmp_path / f"stopped{when}", when)
        assert ended == ["stops", "stops"], (when, ended)
    assert in_two_threads(data, tmp_path / "goes on", 99) == ["goes on", "goes on"]


def in_two_threads(data: Path, folder: Path, when: int) -> list[Any]:
    together, output = threading.Barrier(2, timeout=10), [None, None]
    ended: list[Any] = [None, None]

    def rank(part: int) -> None:
        looks = itertools.count(1)

        def gather(value: Any) -> list[Any]:
            output[part] = value
            together.wait()
            result = list(output)
            together.wait()
            return result

        work = Work(folder, part, 2, lambda: part == 0 and next(looks) >= when, _gather=gather)
        task = Snippet(Config(task="snippet", model_name="tiny", data_path=str(data), num_eval=4))
        task.folder = folder
        try:
            task.prepare(work)
            ended[part] = "stops" if work.meet() else "goes on"
        except Exception as error:
            together.abort()
            ended[part] = error

    threads = [threading.Thread(target=rank, args=(part,)) for part in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ended


def test_two_processes_prepare_the_same_files_as_one(tmp_path: Path) -> None:
    one = prepared(tmp_path)
    pages_ = [list(one._pages[number]) for number in range(len(one._pages))]
    other = Snippet(one.config)
    other.folder = one.folder  # a second start finds everything prepared
    before = sorted(path.stat().st_mtime_ns for path in one.folder.rglob("*") if path.is_file())
    other.prepare(Work(other.folder))
    assert [list(other._pages[number]) for number in range(len(other._pages))] == pages_
    assert sorted(path.stat().st_mtime_ns for path in one.folder.rglob("*") if path.is_file()) == before


def test_pages_of_similar_length_are_batched_and_truncation_is_reported(tmp_path: Path) -> None:
    task = prepared(tmp_path, max_length=24, target_length=3)
    data = task.dataset("train")
    assert {data.shape(number) for number in range(len(data))} == {64}
    assert any("pages are longer than max_length 24 tokens and were truncated" in remark for remark in task.remarks)
    assert any("titles are longer than target_length 3 tokens and were truncated" in remark for remark in task.remarks)
    assert max(len(data[number]["target"]) for number in range(len(data))) == 3
    assert all(data[number]["target"][-1] == task.tokenizer.eos_token_id for number in range(len(data)))


def test_an_encoder_is_rejected_before_any_data_is_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="minilm cannot generate text"):
        prepared(tmp_path, "minilm")
    assert not (tmp_path / "prepared").exists()


def test_holding_out_too_many_samples_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"num_eval 32: .* has 32 distinct pages; some must remain"):
        prepared(tmp_path, num_eval=32)


# Writing -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [both_folder, decoder_folder])
def test_batched_generation_equals_single_calls_of_transformers(tmp_path: Path, make: Any) -> None:
    task = prepared(tmp_path, make(tmp_path / "model"))
    model: Any = trained(task, 6)
    own = model.generation_config
    rows = [task._pages[number][: 12 + number] for number in range(20)]
    prompts = rows if task._reads_first else [task._prompt(row) for row in rows]
    written = write(model, task.tokenizer, prompts, 8)
    assert model.generation_config is own
    for prompt, text in zip(prompts, written, strict=True):
        ids, mask = pad([prompt], task.tokenizer.pad_token_id, multiple=1)
        made = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=8, do_sample=False)[0]
        made = made if task._reads_first else made[len(prompt) :]
        assert " ".join(task.tokenizer.decode(made, skip_special_tokens=True).split()) == text


@pytest.mark.parametrize("kind", ["tiny", "decoder"])
def test_a_trained_model_writes_better_snippets_than_the_lead(tmp_path: Path, kind: str) -> None:
    model_name: Any = "tiny" if kind == "tiny" else decoder_folder(tmp_path / "model", width=64)
    task = prepared(tmp_path, model_name)
    model = trained(task, 120)
    task.before_evaluation(model)
    data = task.dataset("eval")
    with torch.no_grad():
        metrics = task.evaluate(model, task.collate([data[number] for number in range(4)]), noise(4))
    means = {name: float(total) / float(count) for name, (total, count) in metrics.items()}
    assert means["rouge_l"] > means["rouge_l_lead"] + 0.3
    assert means["fits"] == 1
    assert "numbers_copied" not in metrics  # the text has no numbers, so there is no fraction
    assert metrics["rouge_l"][1] == 4
    shown = task.preview(model, 1)
    assert shown is not None
    assert task._held_out[0][1] in shown["titles.txt"]


def test_an_evaluation_counts_each_generated_text_once(tmp_path: Path) -> None:
    task = prepared(tmp_path)
    model, data = task.model().eval(), task.dataset("eval")
    task.before_evaluation(model)
    with torch.no_grad():
        whole = task.evaluate(model, task.collate([data[number] for number in range(4)]), noise(4))
        parts = [task.evaluate(model, task.collate([data[number]]), noise(1)) for number in (2, 0, 3, 1)]
    for name, (total, count) in whole.items():
        assert float(total) == pytest.approx(sum(float(part[name][0]) for part in parts if name in part), rel=1e-5)
        assert float(count) == sum(float(part[name][1]) for part in parts if name in part)


def test_an_exported_tiny_model_works_with_the_usual_calls(tmp_path: Path) -> None:
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    task = prepared(tmp_path, "tiny")
    task.export(task.model(), tmp_path / "out")
    reader = AutoTokenizer.from_pretrained(tmp_path / "out")
    writer: Any = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out")
    assert writer.generate(**reader("Doors in Oslo.", return_tensors="pt"), max_new_tokens=3).shape[0] == 1


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_an_exported_model_generates_the_same_in_transformers(tmp_path: Path, lora_rank: int) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    task = prepared(tmp_path, decoder_folder(tmp_path / "model"), lora_rank=lora_rank)
    model: Any = trained(task, 10)
    task.export(model, tmp_path / "out")
    again: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    reader = AutoTokenizer.from_pretrained(tmp_path / "out")
    content = json.loads((tmp_path / "out" / "snippet.json").read_text())
    page = "This page is about doors in Oslo."
    ids = reader(page + content["put_after_the_page"], return_tensors="pt")["input_ids"]
    made = again.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)[
        0, ids.shape[1] :
    ]
    ours = write(model, task.tokenizer, [task._prompt(np.array(reader(page)["input_ids"]))], 12)[0]
    assert " ".join(reader.decode(made, skip_special_tokens=True).split()) == ours
    assert (tmp_path / "out" / "adapter").is_dir() == bool(lora_rank)
