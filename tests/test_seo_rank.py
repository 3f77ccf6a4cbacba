"""seo, task rank: which queries and pages are compared, on any number of ranks, and the results of a run."""

from __future__ import annotations

import gzip
import itertools
import json
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.nn.functional import normalize
from torch.utils._python_dispatch import TorchDispatchMode

from command_line import unisono
from many_runs import Outcome, Run, largest_difference, many_runs
from seo_data import write_ranking
from seo_models import encoder_folder
from unisono import train
from unisono.checkpoint.find import step_folder
from unisono.checkpoint.load import load_whole
from unisono.engine.export import export_run, load_trained
from unisono.engine.recipe import Work
from unisono.errors import ConfigError
from unisono.recipes.seo.data.ranking_sets.debian import PACKAGES_FILE
from unisono.recipes.seo.data.ranking_sets.ranking import read_ranking
from unisono.recipes.seo.models.groups import _cut, grouped
from unisono.recipes.seo.recipe import Seo
from unisono.recipes.seo.settings import Config
from unisono.recipes.seo.tasks.bi_encoder import Pairs, _among, contrastive, key_of
from unisono.recipes.seo.tasks.cross_encoder import pairing_of
from unisono.recipes.seo.tasks.matching import (
    default_num_eval,
    few_held_out_remarks,
    hold_out,
    load,
    match,
    save,
    with_candidates,
)

# Groups -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [1, 2, 3, 5])
@pytest.mark.parametrize("size", [1, 2, 4, 7])
def test_texts_are_grouped_so_that_padding_is_minimal(size: int, number: int) -> None:
    lengths = np.sort(np.random.default_rng(size * 10 + number).integers(3, 200, size))

    def area(parts: list[tuple[int, int]]) -> int:
        return sum((stop - start) * int(lengths[stop - 1]) for start, stop in parts if stop > start)

    parts = _cut(lengths, number)
    assert len(parts) == number and [place for part in parts for place in range(*part)] == list(range(size))
    if number <= size:
        ways = itertools.combinations(range(1, size), number - 1)
        assert area(parts) == min(area(list(itertools.pairwise((0, *cuts, size)))) for cuts in ways)


@pytest.mark.parametrize("number", [2, 3, 4])
def test_texts_of_few_distinct_lengths_are_grouped_so_that_padding_is_minimal(number: int) -> None:
    lengths = np.sort(np.random.default_rng(number).integers(3, 9, 12))
    parts = _cut(lengths, number)
    ways = itertools.combinations(range(1, 12), number - 1)
    areas = [
        sum((stop - start) * int(lengths[stop - 1]) for start, stop in itertools.pairwise((0, *cuts, 12)))
        for cuts in ways
    ]
    assert sum((stop - start) * int(lengths[stop - 1]) for start, stop in parts if stop > start) == min(areas)


def test_grouping_a_large_batch_is_fast() -> None:
    lengths = np.sort(np.random.default_rng(0).integers(5, 256, 8192))
    began = time.process_time()
    assert len(_cut(lengths, 4)) == 4
    assert time.process_time() - began < 0.5  # takes 6 s if each pair of texts is compared


@pytest.mark.parametrize("number", [1, 3, 9])
def test_results_of_grouped_texts_are_in_the_order_of_the_texts(number: int) -> None:
    texts = [np.full(length, length, dtype=np.int32) for length in (5, 90, 3, 17, 60, 9)]
    groups = grouped(texts, 0, number)
    assert len(groups.ids) == number  # always, even with fewer texts: a sharded model gathers per group
    result = groups.through(lambda ids, mask: (ids * mask).sum(1) / mask.sum(1))
    assert result.tolist() == [5, 90, 3, 17, 60, 9]


# Positives and negatives
# ------------------------------------------------------------------------------------------------


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Ten queries; the third has two pages, the fourth two hard negatives, one of which is the first query's page."""
    rows: list[dict[str, Any]] = [{"query": f"q{number}", "positive": f"page {number}"} for number in range(10)]
    rows.append({"query": "q2", "positive": "another page 2"})
    rows[3]["negative"] = ["page 0", "wrong page 3"]
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_held_out_queries_are_not_trained_on(table: Path, tmp_path: Path) -> None:
    data = read_ranking(table)
    train, held_out = hold_out(match(data), 3, None, "it")
    assert not set(train.queries.tolist()) & set(held_out.queries.tolist())
    assert len(train.queries) == 7 and len(held_out.queries) == 3
    assert set(held_out.relevant.tolist()) <= set(held_out.candidates.tolist())
    save(tmp_path / "kept", "eval", held_out)
    kept = load(tmp_path / "kept", "eval")
    assert kept.judged() == held_out.judged()
    with pytest.raises(ConfigError, match="num_eval 10: it has 10 queries"):
        hold_out(match(data), 10, None, "it")


def test_candidates_include_all_relevant_pages(table: Path) -> None:
    whole = match(read_ranking(table))
    _, held_out = hold_out(whole, 2, 5, "it")
    assert len(held_out.candidates) == 5 and set(held_out.relevant.tolist()) <= set(held_out.candidates.tolist())
    assert len(with_candidates(whole, None).candidates) == 12


class Letters(list[Any]):
    """Texts as numbers."""

    @property
    def lengths(self) -> Any:
        return np.array([len(each) for each in self])


def test_a_pair_contains_its_negatives_and_all_relevant_pages(table: Path) -> None:
    data = read_ranking(table)
    pages = Letters(np.array([number, 7]) for number in range(data.num_pages))
    queries = Letters(np.array([number]) for number in range(data.num_queries))
    pairs = Pairs(queries, pages, match(data), 3)  # type: ignore[arg-type]
    assert len(pairs) == 11
    by_query: dict[int, list[Any]] = {}
    for place in range(len(pairs)):
        by_query.setdefault(int(pairs[place].query[0]), []).append(pairs[place])
    assert len(by_query[2]) == 2 and all(
        set(pair.relevant.tolist()) == {*by_query[2][0].relevant} for pair in by_query[2]
    )
    assert [len(tokens) for tokens in by_query[3][0].negatives] == [2, 2, 0]  # two negatives, and an empty one
    assert [len(tokens) for tokens in by_query[5][0].negatives] == [0, 0, 0]
    for pair in (by_query[3][0], by_query[5][0]):
        there = [int(tokens[0]) if len(tokens) else -2 for tokens in pair.negatives]
        assert pair.negative_numbers == there and not set(there) & set(pair.relevant.tolist())


# The loss -----------------------------------------------------------------------------------------------------------


def rows(size: int = 4, negatives: int = 0) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(size)
    result = {name: normalize(torch.randn(size, 6, generator=random).double(), dim=-1) for name in ("query", "page")}
    result |= {"query_keys": torch.arange(size), "page_keys": 100 + torch.arange(size), "numbers": torch.arange(size)}
    result["relevant"] = torch.arange(size)[:, None]
    if negatives:
        vectors = torch.randn(size, negatives, 6, generator=random).double()
        result["negative"] = normalize(vectors, dim=-1)
        result["negative_keys"] = 500 + torch.arange(size * negatives).view(size, negatives)
        result["negative_numbers"] = 900 + torch.arange(size * negatives).view(size, negatives)
    return result


def by_hand(given: dict[str, torch.Tensor], wrong: dict[int, list[torch.Tensor]], scale: float = 20.0) -> float:
    total = 0.0
    for place, query in enumerate(given["query"]):
        right = scale * query @ given["page"][place]
        others = torch.stack([scale * query @ each for each in wrong[place]])
        total += float(torch.logsumexp(torch.cat([right[None], others]), 0) - right)
    return total


def test_each_query_is_compared_with_all_pages() -> None:
    inputs = rows()
    wrong = {place: [inputs["page"][other] for other in range(4) if other != place] for place in range(4)}
    loss = contrastive(inputs, 20.0)
    assert loss.count == 4 and float(loss.total) == pytest.approx(by_hand(inputs, wrong), rel=1e-12)


def test_hard_negatives_are_shared_by_all_queries() -> None:
    inputs = rows(negatives=2)
    hard = list(inputs["negative"].flatten(0, 1))
    wrong = {place: [inputs["page"][other] for other in range(4) if other != place] + hard for place in range(4)}
    assert float(contrastive(inputs, 20.0).total) == pytest.approx(by_hand(inputs, wrong), rel=1e-12)


@pytest.mark.parametrize("same", ["page", "query", "judged", "negative", "known", "nothing"])
def test_relevant_pages_are_not_used_as_negatives(same: str) -> None:
    inputs = rows(negatives=1)
    hard = list(inputs["negative"].flatten(0, 1))
    wrong = {place: [inputs["page"][other] for other in range(4) if other != place] + hard for place in range(4)}
    if same == "page":  # queries 0 and 2 have the same page
        inputs["page_keys"][2] = inputs["page_keys"][0]
    elif same == "query":
        inputs["query_keys"][2] = inputs["query_keys"][0]
    elif same == "judged":  # the page of query 2 is also relevant for query 0
        inputs["relevant"] = torch.tensor([[0, 2], [1, -1], [2, -1], [3, -1]])
    elif same == "negative":  # the negative of query 3 is the page of query 0
        inputs["negative_keys"][3] = inputs["page_keys"][0]
    elif same == "known":  # the negative of query 3 is another page that is relevant for query 0
        inputs["relevant"] = torch.tensor([[0, 903], [1, -1], [2, -1], [3, -1]])
    else:  # query 3 has no negative; the padding must not count
        inputs["negative_keys"][3] = -1
    if same in ("page", "query", "judged"):
        wrong[0] = [inputs["page"][1], inputs["page"][3], *hard]
    if same in ("page", "query"):
        wrong[2] = [inputs["page"][1], inputs["page"][3], *hard]
    if same in ("negative", "known"):
        wrong[0] = [*wrong[0][:3], *hard[:3]]
    if same == "nothing":
        wrong = {place: [*each[:3], *hard[:3]] for place, each in wrong.items()}
    assert float(contrastive(inputs, 20.0).total) == pytest.approx(by_hand(inputs, wrong), rel=1e-12)


def test_the_loss_can_be_symmetric() -> None:
    inputs = rows()
    turned = inputs | {"query": inputs["page"], "page": inputs["query"]}
    one, other = (float(contrastive(each, 20.0).total) for each in (inputs, turned))
    assert float(contrastive(inputs, 20.0, both_ways=True).total) == pytest.approx((one + other) / 2, rel=1e-12)


@pytest.mark.parametrize("both_ways", [False, True])
def test_the_losses_of_ranges_of_queries_add_up(both_ways: bool) -> None:
    """Also their gradients. A page that is relevant for a query hides it one way only, so both masks are needed."""
    inputs = rows(size=7, negatives=2)
    inputs["relevant"] = torch.tensor([[0, 2], [1, 5], [2, -1], [3, -1], [4, 0], [5, -1], [6, 1]])
    vectors = [inputs[name].requires_grad_() for name in ("query", "page", "negative")]
    whole = contrastive(inputs, 20.0, both_ways=both_ways)
    expected = torch.autograd.grad(whole.total, vectors)
    parts = [contrastive(inputs, 20.0, both_ways=both_ways, anchors=slice(*ends)) for ends in [(0, 3), (3, 4), (4, 7)]]
    assert sum(part.total.item() for part in parts) == pytest.approx(whole.total.item(), rel=1e-14)
    assert sum(part.count for part in parts) == whole.count == 7
    assert sum(part.metrics["first_right"] for part in parts) == whole.metrics["first_right"]
    torch.testing.assert_close(torch.autograd.grad(sum(part.total for part in parts), vectors), expected)


def test_only_equal_texts_have_equal_keys() -> None:
    texts = [np.arange(length, dtype=np.int32) for length in range(1, 300)]
    assert len({key_of(text) for text in texts}) == len(texts)
    assert key_of(np.array([1, 2], dtype=np.int64)) == key_of(np.array([1, 2], dtype=np.int32))


def test_many_known_pages_take_no_more_memory_than_the_scores() -> None:
    """Memory for a mask of [queries, pages], not of [queries, relevant, pages]."""
    size, known = 512, 32
    columns = torch.arange(size * known).view(size, known)
    most = 0

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal most
            made = function(*args, **(kwargs or {}))
            most = max(most, made.numel()) if isinstance(made, torch.Tensor) else most
            return made

    numbers = columns[:, 5].flip(0)
    with Largest():
        result = _among(columns, numbers)
    assert torch.equal(result, torch.eye(size, dtype=torch.bool).flip(1)) and most <= size * size


# Preparation ---------------------------------------------------------------------------------------------------


def prepared(folder: Path, **settings: Any) -> Any:
    recipe = Seo(Config(**{"model_name": "tiny", **settings}))
    recipe.prepare(Work(folder / "prepared"))
    return recipe.task


def write_beir(folder: Path, queries: list[str], splits: dict[str, list[int]]) -> Path:
    """A BEIR folder in which page n answers query n."""
    (folder / "qrels").mkdir(parents=True)
    pages = [{"_id": f"p{place}", "title": "", "text": f"all about {place}"} for place in range(len(queries))]
    query_rows = [{"_id": f"q{place}", "text": text} for place, text in enumerate(queries)]
    for name, rows_ in (("corpus", pages), ("queries", query_rows)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_))
    for split, numbers in splits.items():
        lines = ["query-id\tcorpus-id\tscore", *(f"q{place}\tp{place}\t1" for place in numbers)]
        (folder / "qrels" / f"{split}.tsv").write_text("\n".join(lines) + "\n")
    return folder


def test_a_held_out_query_with_another_id_is_not_trained_on(tmp_path: Path) -> None:
    texts = [f"query {place % 29}" for place in range(40)]  # eleven of the queries occur twice
    data = write_beir(tmp_path / "data", texts, {"train": list(range(40))})
    task = prepared(tmp_path, data_path=str(data), num_eval=20)
    train, held_out = ({texts[number] for number in task.matching(side).queries} for side in ("train", "eval"))
    assert train and not train & held_out
    assert any("excluded from training" in remark for remark in task.remarks)


def test_queries_in_both_splits_are_reported(tmp_path: Path) -> None:
    texts = [f"query {place % 30}" for place in range(40)]
    data = write_beir(tmp_path / "data", texts, {"train": list(range(30)), "test": list(range(27, 33))})
    task = prepared(tmp_path, data_path=str(data))
    assert any(
        remark.startswith("6 of 6 evaluation queries also occur in the training data") for remark in task.remarks
    )


def test_a_damaged_test_split_is_not_replaced_by_the_training_data(tmp_path: Path) -> None:
    texts = [f"query {place}" for place in range(40)]
    data = write_beir(tmp_path / "data", texts, {"train": list(range(30)), "test": list(range(30, 40))})
    with (data / "qrels" / "test.tsv").open("a") as file:
        file.write("q1\tnowhere\t1\n")
    with pytest.raises(ConfigError, match="nowhere"):
        prepared(tmp_path, data_path=str(data), eval_data_path=str(data))
    (data / "qrels" / "test.tsv").unlink()
    assert len(prepared(tmp_path, data_path=str(data), eval_data_path=str(data)).matching("eval").queries) == 30


def test_baselines_belong_to_the_current_held_out_set(table: Path, tmp_path: Path) -> None:
    """A run that resumes with another number of held-out queries or candidate pages."""
    for settings in ({"num_eval": 2}, {"num_eval": 4}, {"num_eval": 4, "rerank": 3}):
        values = {"data_path": str(table), "method": "cross", "num_candidates": 8, **settings}
        task, other = prepared(tmp_path, **values), prepared(tmp_path / str(len(settings)), **values)
        result = [np.load(each.folder / "found_by_words.npy") for each in (task, other)]
        assert np.array_equal(*result) and len(result[0]) == settings["num_eval"]
        assert task.baseline_metrics(1) == other.baseline_metrics(1)
        shutil.rmtree(tmp_path / str(len(settings)))


def test_hard_candidates_come_from_one_section(tmp_path: Path) -> None:
    body = "Words about the package {0} that go on and on, and nothing that another one would say of {0}. " * 4
    packages_ = [
        (f"package{place}", ("net", "math", "net")[place % 3], f"line {place}", body.format(f"thing{place}"))
        for place in range(60)
    ]
    lines = "".join(json.dumps(package) + "\n" for package in packages_)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / PACKAGES_FILE).write_bytes(gzip.compress(lines.encode()))
    values: dict[str, Any] = {"data_path": "debian", "hard_candidates": True, "cache_dir": str(tmp_path / "cache")}
    for num_candidates, result in ((None, 5), (30, 30), (50, 40)):
        task = prepared(tmp_path, **values, num_eval=5, num_candidates=num_candidates)
        sections = [packages_[number][1] for number in task.matching("eval").candidates.tolist()]
        assert len(sections) == result and set(sections) == {"net"}


def test_missing_negatives_are_not_announced(table: Path, tmp_path: Path) -> None:
    task = prepared(tmp_path, data_path=str(table), num_negatives=5, num_eval=1)
    assert task.num_negatives == 2 and "its page and 14 negatives" in task.start_remark(5)
    lines = [line for line in table.read_text().splitlines() if "negative" not in line]
    plain = tmp_path / "plain.jsonl"
    plain.write_text("\n".join(lines) + "\n")
    task = prepared(tmp_path / "plain", data_path=str(plain), num_negatives=5, num_eval=1)
    assert task.num_negatives == 0 and "the data has no hard negatives" in task.start_remark(5)


def test_unused_negatives_in_the_data_are_reported(table: Path, tmp_path: Path) -> None:
    task = prepared(tmp_path, data_path=str(table), num_negatives=0)
    assert task.num_negatives == 0 and "use --num_negatives 2 to add them" in task.start_remark(5)


@pytest.mark.parametrize(("total", "number"), [(4, 0), (60, 12), (250, 50), (999, 50), (3000, 150), (10**6, 1000)])
def test_small_datasets_hold_out_a_larger_fraction(total: int, number: int) -> None:
    assert default_num_eval(total) == number
    assert [bool(few_held_out_remarks(each, "queries")) for each in (0, 29, 30)] == [True, True, False]


def test_pages_are_ranked_in_float32_even_in_mixed_precision(pairs: Path, tmp_path: Path) -> None:
    task = prepared(tmp_path, data_path=str(pairs), num_eval=31)
    data, seen = task.dataset("eval"), list[torch.Tensor]()
    task.metrics["pages"].update = lambda scores, numbers: seen.append(scores)
    model = task.model().eval()
    batch = task.collate([data[place] for place in range(len(data))])
    for mixed in (False, True):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            task.before_evaluation(model)
            task.evaluate(model, batch, None)
    exact, rough = seen
    assert rough.dtype == torch.float32 and torch.allclose(exact, rough, atol=0.05)
    assert len(rough.unique()) > 0.9 * rough.numel()  # 8-bit cosines: only a few hundred distinct values


# Whole runs ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Synthetic texts: queries and pages use different words for the same things."""
    return write_ranking(tmp_path_factory.mktemp("made") / "pairs.jsonl", 400)


@pytest.fixture(scope="module")
def runs(pairs: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    root = tmp_path_factory.mktemp("runs")
    common = {"data_path": str(pairs), "model_name": "tiny", "cache_dir": str(root / "cache"), "dtype": "float64"}
    common |= {"global_batch_size": 14, "max_steps": 3, "eval_every": 3, "num_eval": 31, "num_workers": 0}
    common |= {"disable_dropout": True, "log_every": 1, "tensorboard": False, "lr_schedule": "constant"}
    cross = {"method": "cross", "num_negatives": 2, "rerank": 12}
    new = {"padding": "none"} if transformers.__version__ >= "5" else {}
    layouts = {
        "one": (1, {"batch_size": 14}),
        "two": (2, {"batch_size": 3, "length_groups": 2}),
        "three": (3, {"batch_size": 5, "strategy": "fsdp", "length_groups": 7}),
        "unpadded": (
            2,
            {"batch_size": 4, "activation_checkpointing": True, "strategy": "fsdp", "num_workers": 1} | new,
        ),
        "cross one": (1, cross | {"batch_size": 14}),
        "cross two": (2, cross | {"batch_size": 3, "length_groups": 2}),
    }
    return many_runs(
        [Run(name, name, world, common | each, recipe="seo") for name, (world, each) in layouts.items()], root
    )


@pytest.mark.parametrize(
    ("one", "other"), [("one", "two"), ("one", "three"), ("one", "unpadded"), ("cross one", "cross two")]
)
def test_ranks_micro_batches_and_groups_do_not_change_the_run(one: str, other: str, runs: dict[str, Outcome]) -> None:
    first, second = runs[one], runs[other]
    assert first.main.get("status") == second.main.get("status") == "done", (first.main, second.main)
    torch.testing.assert_close(second.losses(), first.losses(), rtol=0, atol=1e-10)
    assert largest_difference(first.weights(), second.weights()) < 1e-10
    (a,), (b,) = first.evaluations(), second.evaluations()
    assert a == pytest.approx(b, abs=1e-9)
    assert {
        f"eval/{name}{line}"
        for name in ("MRR@10", "NDCG@10", "Recall@10")
        for line in ("", "_random", "_tfidf", "_bm25")
    } <= set(a)


@pytest.mark.slow
def test_a_cross_encoder_evaluates_no_more_pairs_at_once_than_a_step_trains(pairs: Path, tmp_path: Path) -> None:
    words = ["train", "seo", "--data_path", pairs, "--model_name", "tiny", "--method", "cross", "--num_eval", "110"]
    words += ["--rerank", "100", "--max_steps", "1", "--num_workers", "0", "--output_dir", "run"]
    ended = unisono(*map(str, words), cwd=tmp_path)
    assert ended.code == 0, ended.err
    config = json.loads((tmp_path / "run/run.json").read_text())["config"]
    assert config["eval_batch_size"] * config["rerank"] == 400 and config["batch_size"] == 64


@pytest.mark.slow
def test_a_trained_model_ranks_better_than_word_overlap(tmp_path: Path) -> None:
    """From the command line with two processes, exported to a folder that sentence-transformers loads."""
    pairs = write_ranking(tmp_path / "pairs.jsonl", 1200)
    words = ["train", "seo", "--data_path", pairs, "--model_name", "tiny", "--nproc", "2", "--batch_size", "32"]
    words += ["--max_steps", "60", "--learning_rate", "2e-3", "--num_eval", "40", "--num_workers", "0"]
    words += ["--output_dir", "run"]
    ended = unisono(*map(str, words), cwd=tmp_path)
    assert ended.code == 0, ended.err
    assert "each query is compared with its page and 63 negatives" in ended.err + ended.out
    last = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[-1])
    assert last["eval/MRR@10"] > 0.75 > 0.6 > last["eval/MRR@10_bm25"] > 0.3 > last["eval/MRR@10_random"]
    assert unisono("export", "run", "out", cwd=tmp_path).code == 0

    from sentence_transformers import SentenceTransformer

    from unisono.recipes.seo.trained import open_ranker

    texts = ["All about badego. Here one reads pimane.", "badego fisu"]
    theirs = torch.from_numpy(SentenceTransformer(str(tmp_path / "out"), device="cpu").encode(texts))
    torch.testing.assert_close(open_ranker(tmp_path / "run").embed(texts), theirs, rtol=0, atol=1e-5)


def test_a_loras_checkpoints_do_not_contain_base_weights(pairs: Path, tmp_path: Path) -> None:
    """In 3 steps, or 2 and 1 with a resume, also as a cross-encoder with a new head; rejects other base weights."""
    base = encoder_folder(tmp_path / "base")
    common: dict[str, Any] = {"data_path": str(pairs), "model_name": str(base), "cache_dir": str(tmp_path / "cache")}
    common |= {
        "lora_rank": 2,
        "batch_size": 6,
        "num_eval": 20,
        "num_workers": 0,
        "tensorboard": False,
        "max_length": 40,
    }
    common |= {"query_length": 16, "save_every": 1, "learning_rate": 1e-2, "lr_schedule": "constant", "nproc": 1}
    for method in ("bi", "cross"):
        at_once, in_two = tmp_path / f"{method} at once", tmp_path / f"{method} in two"
        reported = common | {"method": method, "num_negatives": 2 if method == "cross" else 0}
        train("seo", **reported, max_steps=3, output_dir=str(at_once))
        for steps in (2, 3):
            train("seo", **reported, max_steps=steps, output_dir=str(in_two))
        kept = load_whole(in_two / "checkpoints" / step_folder(3), "model.")
        assert kept and all("lora_" in name or "modules_to_save" in name for name in kept), list(kept)
        export_run(at_once, tmp_path / f"{method} one")
        export_run(in_two, tmp_path / f"{method} two")
        one, two = (load_file(tmp_path / f"{method} {which}/model.safetensors") for which in ("one", "two"))
        assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
        before, name = load_file(base / "model.safetensors"), "encoder.layer.0.attention.self.query.weight"
        [after] = (weight for key, weight in one.items() if key.endswith(name))
        assert not torch.equal(before[name], after)
    weights = load_file(base / "model.safetensors")
    save_file({name: 1.1 * weight for name, weight in weights.items()}, base / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match="this run's LoRA was trained with different base weights"):
        train("seo", **reported, max_steps=4, output_dir=str(in_two))
    with pytest.raises(ConfigError, match="this run's LoRA was trained with different base weights"):
        export_run(in_two, tmp_path / "other")


@pytest.mark.parametrize("cache", [None, "cache"])
def test_a_runs_tokens_are_reused_from_any_current_folder(
    cache: str | None, pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    common: dict[str, Any] = {"data_path": str(pairs), "model_name": "tiny", "num_workers": 0, "nproc": 1}
    train("seo", **common, cache_dir=cache, max_steps=1, batch_size=4, tensorboard=False, output_dir="run")
    monkeypatch.chdir("/")
    if cache is None:
        (tmp_path / "run").rename(tmp_path / "moved")
    recipe: Any = load_trained(tmp_path / ("run" if cache else "moved"))[0]
    assert len(recipe.task.texts("pages")[0]) and len(recipe.task.texts("eval_queries")[0])


def test_text_pairs_are_joined_like_the_tokenizer_joins_them(pairs: Path, tmp_path: Path) -> None:
    recipe = Seo(Config(data_path=str(pairs), model_name="tiny", method="cross", num_eval=10))
    recipe.prepare(Work(tmp_path))
    tokenizer: Any = recipe.task.tokenizer  # type: ignore[attr-defined]
    apart = [
        np.array(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in ("one two", "three four five")
    ]
    both = tokenizer("one two", "three four five")
    ids, types = pairing_of(tokenizer).joined(*apart)
    assert ids.tolist() == both["input_ids"] and types.tolist() == both["token_type_ids"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--data_path", "nowhere.csv"], "nowhere.csv"),
        ([], "data_path: expected data"),
        (["--data_path", "pairs.jsonl", "--model_name", "tiny", "--num_eval", "400"], "num_eval 400"),
        (["--data_path", "pairs.jsonl", "--scale", "0"], "scale: expected at least"),
        (["--data_path", "pairs.jsonl", "--strategy", "dp"], "strategy dp"),
        (
            ["--data_path", "pairs.jsonl", "--model_name", "tiny", "--hard_candidates"],
            "hard_candidates only applies to",
        ),
        (["--data_path", "pairs.jsonl", "--task", "guess"], "task"),
        (["--data_path", "pairs.jsonl", "--rerank", "101"], "rerank: expected at most 100"),
    ],
)
def test_invalid_settings_are_rejected_in_one_line(words: list[str], said: str, pairs: Path, tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").write_bytes(pairs.read_bytes())
    ended = unisono("train", "seo", *words, "--output_dir", "run", "--max_steps", "1", cwd=tmp_path)
    assert ended.code == 2 and said in ended.err and "Traceback" not in ended.err, ended.err
    assert len(ended.err.strip().splitlines()) == 1, ended.err
