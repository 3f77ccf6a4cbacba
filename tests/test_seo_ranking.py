"""Ranking metrics follow the field's definitions, do not depend on the number of ranks, and come with baselines."""

from __future__ import annotations

import copy
import math
import pickle
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from unisono.engine.recipe import Work
from unisono.recipes.seo.metrics import baselines as lexical
from unisono.recipes.seo.metrics.baselines import BM25, TfIdf, baselines, by_chance, words_of
from unisono.recipes.seo.metrics.ranking import TopPages

PAGES = [
    "a fast compiler for the C language, and nothing else",
    "play chess against the computer, or against a friend",
    "the chess engine plays chess by the rules of chess",
    "Statistik für Anfänger: größer, schneller, weiter",
    "fonts, fonts and more fonts",
    "",
    "chess problems for friends of the Café",
]


def measured(scores: list[list[float]], judged: dict[int, dict[int, float]], keep: int = 100) -> dict[str, float]:
    top = TopPages(judged, len(scores), keep)
    top.update(torch.tensor(scores), torch.arange(len(scores[0])))
    return top.compute()


def random_case(seed: int, num_queries: int = 30, num_pages: int = 400) -> tuple[torch.Tensor, dict]:
    rng = np.random.default_rng(seed)
    scores = torch.from_numpy(rng.standard_normal((num_queries, num_pages)).astype(np.float32))
    judged = {
        query: {int(page): float(rng.integers(1, 4)) for page in rng.choice(num_pages, rng.integers(1, 20), False)}
        for query in range(num_queries)
    }
    for query, grades in judged.items():  # some of the relevant pages are found
        scores[query, list(grades)[:3]] += 3
    return scores, judged


def test_a_small_ranking_matches_a_hand_calculation() -> None:
    # Ranking: 2, 0, 1, 3. For query 0, page 0 is second; for query 1, page 3 (grade 1) is last and page 2 (grade 3)
    # first.
    metrics = measured([[0.8, 0.5, 0.9, 0.1]] * 2, {0: {0: 1}, 1: {2: 3, 3: 1}}, keep=10)
    assert metrics["MRR@10"] == pytest.approx((1 / 2 + 1) / 2)
    # The gains are the grades, and the ideal order is 3, 1.
    ideal = 3 + 1 / math.log2(3)
    assert metrics["NDCG@10"] == pytest.approx((1 / math.log2(3) + (3 + 1 / math.log2(5)) / ideal) / 2)
    assert metrics["Recall@1"] == pytest.approx((0 + 1 / 2) / 2)
    assert metrics["Recall@10"] == 1
    assert "Recall@100" not in metrics  # unknown if only ten pages are kept


def test_a_page_below_the_cutoff_counts_as_missed() -> None:
    scores = [[float(-page) for page in range(30)]]
    metrics = measured(scores, {0: {5: 1, 20: 1, 999: 1}}, keep=10)
    assert metrics["Recall@10"] == pytest.approx(1 / 3)
    assert metrics["NDCG@10"] == pytest.approx((1 / math.log2(7)) / (1 + 1 / math.log2(3) + 1 / 2))


def test_queries_without_a_relevant_page_are_not_in_the_mean() -> None:
    assert measured([[1.0, 0.0]] * 3, {0: {0: 1}, 1: {0: 0}})["MRR@10"] == 1
    assert measured([[1.0, 0.0]], {}) == {}


def test_a_page_with_a_nan_score_is_ignored() -> None:
    assert measured([[math.nan, 0.0, -math.inf]], {0: {0: 1}})["Recall@100"] == 0
    assert measured([[math.nan, 0.0, -math.inf]], {0: {2: 1}})["MRR@10"] == 1 / 2


def test_metrics_equal_those_of_sentence_transformers() -> None:
    evaluation = pytest.importorskip("sentence_transformers.evaluation")
    scores, judged = random_case(3)
    binary = {query: dict.fromkeys(grades, 1.0) for query, grades in judged.items()}
    top = TopPages(binary, len(scores))
    top.update(scores, torch.arange(scores.shape[1]))
    evaluator = evaluation.InformationRetrievalEvaluator(
        queries={str(query): "q" for query in judged},
        corpus={str(page): "p" for page in range(scores.shape[1])},
        relevant_docs={str(query): {str(page) for page in grades} for query, grades in judged.items()},
        mrr_at_k=[10],
        ndcg_at_k=[10],
        accuracy_at_k=[1],
        precision_recall_at_k=[1, 10, 100],
        map_at_k=[10],
    )
    result = [
        [{"corpus_id": str(page), "score": float(score)} for page, score in enumerate(row)] for row in scores.tolist()
    ]
    theirs = evaluator.compute_metrics(result)
    ours = top.compute()
    assert ours["MRR@10"] == pytest.approx(theirs["mrr@k"][10])
    assert ours["NDCG@10"] == pytest.approx(theirs["ndcg@k"][10])
    for cut in (1, 10, 100):
        assert ours[f"Recall@{cut}"] == pytest.approx(theirs["recall@k"][cut])


@pytest.mark.parametrize("tied", [False, True])
def test_any_number_of_ranks_and_any_order_of_pages_gives_the_same_metrics(tied: bool) -> None:
    scores, judged = random_case(4)
    if tied:
        scores = scores.round()  # hundreds of pages share a score
    whole = TopPages(judged, len(scores))
    whole.update(scores, torch.arange(scores.shape[1]))
    rng = np.random.default_rng(0)
    for ranks in (1, 2, 3, 5):
        parts = [TopPages(judged, len(scores)) for _ in range(ranks + 1)]  # the last one has no page at all
        for number, batch in enumerate(np.array_split(rng.permutation(scores.shape[1]), 23)):
            pages = torch.from_numpy(batch)
            parts[number % ranks].update(scores[:, pages], pages)
        merged = pickle.loads(pickle.dumps(parts[-1]))  # as received from another rank
        for part in parts[:-1]:
            merged.merge_state(copy.deepcopy(part).cpu())
        assert torch.equal(merged.pages(), whole.pages())
        assert merged.compute() == whole.compute()


def test_ties_do_not_favour_the_pages_that_come_first() -> None:
    # A collapsed model gives every page the same score, and the relevant pages have the lowest numbers.
    num_queries, num_pages = 50, 1000
    judged = {query: {query: 1.0} for query in range(num_queries)}
    by_luck = by_chance(judged, num_pages)["MRR@10"]
    assert measured([[0.5] * num_pages] * num_queries, judged)["MRR@10"] < by_luck + 0.03
    assert sum(1 / place for place in range(1, 11)) / num_queries > by_luck + 0.05  # with ties broken by page number


def test_scores_of_query_page_pairs_can_be_added_one_by_one() -> None:
    scores, judged = random_case(5, num_queries=7, num_pages=60)
    whole = TopPages(judged, 7, keep=20)
    whole.update(scores, torch.arange(60))
    single = TopPages(judged, 7, keep=20)
    pairs = torch.cartesian_prod(torch.arange(7), torch.arange(60))[torch.randperm(420)]
    for batch in pairs.split(33):
        queries, pages = batch.unbind(1)
        single.update(scores[queries, pages][:, None], pages[:, None], queries)
    assert torch.equal(single.pages(), whole.pages())


def test_memory_does_not_grow_with_the_pages_and_reset_forgets_them() -> None:
    top = TopPages({0: {3: 1}}, 2, keep=10)
    for start in range(0, 5000, 500):
        top.update(torch.rand(2, 500, dtype=torch.bfloat16), torch.arange(start, start + 500))
    assert top._best.shape == (2, 10)
    assert top.update_called
    top.reset()
    assert not top.update_called
    assert top.pages().eq(-1).all()


def test_words_are_split_in_any_language() -> None:
    assert words_of("C++ and R: the Größe of x_1, 2.5") == ["c", "and", "r", "the", "größe", "of", "x_1", "2", "5"]
    assert words_of("cafe\u0301") == words_of("CAFÉ")
    assert words_of("検索エンジン") == list("検索エンジン")


@pytest.mark.parametrize("sublinear", [False, True])
def test_tfidf_equals_scikit_learns_cosine_similarity(sublinear: bool) -> None:
    text = pytest.importorskip("sklearn.feature_extraction.text")
    reference = text.TfidfVectorizer(token_pattern=r"(?u)\w+", sublinear_tf=sublinear)
    pages = reference.fit_transform(PAGES)
    ours = TfIdf(PAGES, sublinear)
    for query in ("chess for friends", "FONTS fonts the", "größer Compiler unknown", "nothing known: qwertz", ""):
        target = (reference.transform([query]) @ pages.T).toarray()[0]
        if query.startswith("nothing known"):
            assert target.max() > 0
        np.testing.assert_allclose(ours.scores(query), target, atol=1e-6)


def test_bm25_matches_a_hand_calculation() -> None:
    result = BM25(PAGES, k1=0.9, b=0.4).scores("chess chess unknown")
    lengths = [len(words_of(page)) for page in PAGES]
    idf = math.log(1 + (7 - 3 + 0.5) / (3 + 0.5))
    for page, count in ((1, 1), (2, 3), (6, 1)):
        norm = 0.9 * (1 - 0.4 + 0.4 * lengths[page] / (sum(lengths) / 7))
        assert result[page] == pytest.approx(2 * idf * count / (count + norm), rel=1e-6)
    assert result[[0, 3, 4, 5]].max() == 0


def made(num_pages: int) -> tuple[list[str], list[str], dict[int, dict[int, float]]]:
    rng = np.random.default_rng(1)
    words = np.array([f"w{number}" for number in range(300)])
    pages = [" ".join(rng.choice(words, 12)) for _ in range(num_pages)]
    queries = [" ".join(rng.choice(page.split(), 5)) for page in pages[:40]]
    return queries, pages, {query: {query: 1.0} for query in range(40)}


def test_lexical_baselines_find_pages_that_share_words_and_random_ranking_does_not() -> None:
    queries, pages, judged = made(500)
    result = baselines(queries, pages, judged)
    assert result["tfidf"]["MRR@10"] > 0.9
    assert result["bm25"]["MRR@10"] > 0.9
    assert result["random"]["MRR@10"] == pytest.approx(sum(1 / place for place in range(1, 11)) / 500)
    # A page that shares no word with the query is never found, however few pages there are.
    assert baselines(["nowhere"], ["some words"], {0: {0: 1.0}})["bm25"]["MRR@10"] == 0


def test_random_rankings_have_the_predicted_mean_metrics() -> None:
    judged = {query: {0: 1.0, 1: 2.0, 2: 0.0} for query in range(4000)}
    metrics = measured(np.random.default_rng(0).random((4000, 30)).tolist(), judged)
    for name, expected in by_chance(judged, 30).items():
        assert metrics[name] == pytest.approx(expected, abs=0.015)


def test_baselines_computed_in_blocks_on_several_ranks_equal_those_of_one_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queries, pages, judged = made(103)
    whole = baselines(queries, pages, judged)
    monkeypatch.setattr(lexical, "_BLOCK", 10)
    monkeypatch.setattr(lexical, "_MAX_SCORES", 70)  # seven queries at once
    in_blocks = baselines(queries, lambda: iter(pages), judged)
    for name in ("tfidf", "bm25"):
        assert in_blocks[name] == pytest.approx(whole[name])
    assert two_ranks(queries, pages, judged) == in_blocks


def two_ranks(queries: list[str], pages: list[str], judged: dict[int, dict[int, float]]) -> dict[str, dict[str, float]]:
    """Runs baselines() on two simulated ranks that take turns, each computed before the other gathers its result."""
    output: list[list[bytes]] = [[], []]

    class Ended(Exception):
        pass

    def run(rank: int) -> dict[str, dict[str, float]] | None:
        place = iter(range(9))

        def gather(value: object) -> list[object]:
            turn = next(place)
            if turn == len(output[rank]):
                output[rank].append(pickle.dumps(value))
            if turn == len(output[1 - rank]):
                raise Ended
            return [pickle.loads(output[0][turn]), pickle.loads(output[1][turn])]

        try:
            return baselines(queries, pages, judged, Work(Path(), _part=rank, _parts=2, _gather=gather))
        except Ended:
            return None

    results = [run(turn % 2) for turn in range(6)]
    first, second = results[-2:]
    assert first is not None and first == second
    return first


def test_a_stop_request_ends_the_baselines_without_results() -> None:
    queries, pages, judged = made(60)
    assert baselines(queries, pages, judged, Work(Path(), _asked_to_stop=lambda: True)) == {}


def test_with_more_relevant_pages_random_rankings_score_higher() -> None:
    expected = [by_chance({0: dict.fromkeys(range(count), 1.0)}, 50)["MRR@10"] for count in range(1, 50)]
    assert all(less < more for less, more in pairwise(expected))
    assert by_chance({0: dict.fromkeys(range(50), 1.0)}, 50)["MRR@10"] == 1
