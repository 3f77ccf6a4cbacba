"""The metrics match values computed by hand, follow the benchmark's rules, and give chance for random scores."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unisono.errors import ConfigError
from unisono.recipes.clips.metrics import baselines
from unisono.recipes.clips.metrics.highlights import (
    average_precision,
    hit_at_1,
    interpolated_average_precision,
    kendall_tau,
    of_video,
    segment_means,
    spearman_rho,
    top_share_precision,
)
from unisono.recipes.clips.metrics.qvhighlights import main, qvhighlights
from unisono.recipes.clips.metrics.retrieval import THRESHOLDS, average_precisions, moment_retrieval


def test_average_precision_of_a_small_list_matches_a_hand_calculation() -> None:
    # Sorted by score: 1 0 0 1 1, so the precision at the positives is 1, 2/4 and 3/5.
    marks, scores = [1, 0, 0, 1, 1], [0.9, 0.8, 0.7, 0.6, 0.5]
    assert average_precision(marks, scores) == pytest.approx((1 + 2 / 4 + 3 / 5) / 3)
    # Interpolated: the best precision at that recall or a higher one, so 2/4 counts as 3/5.
    assert interpolated_average_precision(marks, scores) == pytest.approx((1 + 3 / 5 + 3 / 5) / 3)


def test_the_order_of_the_list_does_not_matter() -> None:
    rng = np.random.default_rng(0)
    marks, scores = rng.random(50) < 0.3, rng.integers(0, 8, 50) / 8
    mixed = rng.permutation(50)
    for measure in (average_precision, interpolated_average_precision):
        assert measure(marks[mixed], scores[mixed]) == measure(marks, scores)


def test_clips_of_equal_score_form_one_point() -> None:
    marks, scores = [1, 0, 1, 0], [0.9, 0.5, 0.5, 0.5]
    assert average_precision(marks, scores) == pytest.approx((1 + 2 / 4) / 2)
    # Three positives at one score are one point of the benchmark's curve, not three.
    assert interpolated_average_precision([1, 1, 1, 1, 0, 0], [0.9, 0.5, 0.5, 0.5, 0.5, 0.5]) == pytest.approx(
        (1 + 4 / 6) / 2
    )
    assert interpolated_average_precision([1, 0, 0, 1], [0.3] * 4) == 0.5


def test_no_or_only_positives_give_the_benchmarks_values() -> None:
    assert interpolated_average_precision([0, 0], [0.1, 0.2]) == 0
    assert interpolated_average_precision([1, 1], [0.1, 0.2]) == 1
    assert math.isnan(average_precision([0, 0], [0.1, 0.2]))


def test_average_precision_equals_torchmetrics() -> None:
    torch = pytest.importorskip("torch")
    reference = pytest.importorskip("torchmetrics.functional.classification").binary_average_precision
    rng = np.random.default_rng(1)
    for _ in range(20):
        marks, scores = rng.random(40) < 0.4, rng.integers(0, 20, 40) / 20
        target = float(reference(torch.from_numpy(scores), torch.from_numpy(marks.astype(int))))
        assert average_precision(marks, scores) == pytest.approx(target, abs=1e-6)


def test_random_scores_give_about_the_fraction_of_positives() -> None:
    rng = np.random.default_rng(2)
    marks = np.arange(1000) % 5 == 0
    result = [(average_precision(marks, rng.random(1000)), hit_at_1(marks, rng.random(1000))) for _ in range(400)]
    precision, hits = np.mean(result, axis=0)
    assert precision == pytest.approx(0.2, abs=0.01)
    assert hits == pytest.approx(0.2, abs=0.06)


def test_the_first_of_equal_scores_is_the_hit() -> None:
    assert hit_at_1([0, 1], [0.5, 0.5]) == 0 and hit_at_1([1, 0], [0.5, 0.5]) == 1


def test_rank_correlations_match_a_hand_calculation() -> None:
    # Of 6 pairs, (1,2) is inverted and the other five are in order.
    assert kendall_tau([1, 2, 3, 4], [2, 1, 3, 4]) == pytest.approx((5 - 1) / 6)
    assert spearman_rho([1, 2, 3, 4], [2, 1, 3, 4]) == pytest.approx(1 - 6 * 2 / (4 * 15))
    # One tie in the truth leaves 5 pairs, all in order, so τ-b is 5 / √(5·6).
    assert kendall_tau([1, 1, 2, 3], [1, 2, 3, 4]) == pytest.approx(5 / math.sqrt(30))
    assert spearman_rho([1, 1, 2, 3], [1, 2, 3, 4]) == pytest.approx(np.corrcoef([1.5, 1.5, 3, 4], [1, 2, 3, 4])[0, 1])
    assert kendall_tau([3, 2, 1], [1, 2, 3]) == spearman_rho([3, 2, 1], [1, 2, 3]) == -1
    for measure in (kendall_tau, spearman_rho):
        assert measure([1, 2, 3], [0.5, 0.5, 0.5]) == 0
        assert math.isnan(measure([1, 1, 1], [1, 2, 3]))
        assert measure([1, math.nan, 2, 3], [1, 9, 2, 3]) == pytest.approx(1)


def test_segments_are_means_over_time() -> None:
    assert segment_means([1, 2, 3, 4, 5, 6, 7], 1.0).tolist() == [3, 6.5]
    # Clips of 2 s in segments of 5 s: half of the third clip lies in each segment.
    assert segment_means([0, 0, 1, 1, 1], 2.0) == pytest.approx([0.2, 1])
    assert segment_means([0, math.nan, 1, math.nan, math.nan, math.nan], 2.0)[0] == pytest.approx(1 / 3)
    assert math.isnan(segment_means([0, math.nan, 1, math.nan, math.nan, math.nan], 2.0)[2])


def test_the_positives_are_the_best_fraction_of_segments() -> None:
    truth = np.repeat([0.1, 0.9, 0.5, 0.8], 5)
    assert top_share_precision(truth, truth, 0.5, 1.0) == 1
    assert top_share_precision(truth, -truth, 0.5, 1.0) == pytest.approx((1 / 3 + 2 / 4) / 2)
    assert top_share_precision(truth, -truth, 0.15, 1.0) == pytest.approx(1 / 4)  # one at least
    assert math.isnan(top_share_precision([1, 2], [1, 2], 0.5, 2.0))
    rng = np.random.default_rng(3)
    curve = rng.random(4000)
    for share in (0.5, 0.15):
        got = np.mean([top_share_precision(curve, rng.random(4000), share, 1.0) for _ in range(20)])
        assert got == pytest.approx(share, abs=0.02)


def test_a_perfect_scorer_is_perfect_and_unlabelled_clips_do_not_count() -> None:
    truth = np.array([0, 0, 1, 0.6, math.nan, 0, 0.2, 0, 0, 1, 0.7, 0.1])
    measured = of_video(truth, np.nan_to_num(truth, nan=5.0))
    assert {name: round(value, 9) for name, value in measured.items()} == dict.fromkeys(measured, 1.0)
    assert of_video(np.zeros(9), np.arange(9))["mAP"] != of_video(np.zeros(9), np.arange(9))["mAP"]  # NaN


def test_non_finite_scores_are_ranked_last() -> None:
    truth = np.array([0, 1.0, 0, 0, 0, 0, 0, 0])
    measured = of_video(truth, np.full(8, math.nan))
    assert measured["mAP"] == 1 / 8 and measured["HIT@1"] == 0 and measured["kendall_tau"] == 0
    assert of_video(truth, [0, 0.5, math.nan, 0, 0, math.inf, 0, 0])["mAP"] == 1


def query(qid: Any, clips: list[int], rows: list[list[int]], duration: float = 10) -> dict[str, Any]:
    return {
        "qid": qid,
        "query": "x",
        "duration": duration,
        "vid": "v",
        "relevant_clip_ids": clips,
        "saliency_scores": rows,
    }


def written(path: Path, lines: list[Any]) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_qvhighlights_metrics_match_a_hand_calculation() -> None:
    # Five clips, three annotators: the first marks clip 1, the second 1 and 2, the third none.
    saliency = np.array([[0, 0, 0], [4, 4, 3], [2, 4, 0], [0, 0, 0], [0, 0, 0]], float)
    scores = [0.1, 0.5, 0.3, 0.9, 0.2]  # order: 3 1 2 4 0
    got = qvhighlights({1: scores}, {1: saliency})
    # One positive at rank 2: 1/2. Two at ranks 2 and 3: both count 2/3. None: 0.
    assert got == {"mAP": round(100 * (1 / 2 + 2 / 3 + 0) / 3, 2), "HIT@1": 0}
    assert qvhighlights({1: [0, 0, 1, 0, 0]}, {1: saliency})["HIT@1"] == 100  # one annotator is enough
    assert qvhighlights({1: [0, 0.5, 0.4]}, {1: saliency})["mAP"] == pytest.approx(66.67)  # missing scores are 0
    # A highest score after the end of the video counts as a miss, and has no other effect.
    assert qvhighlights({1: [0, 0.5, 0.4, 0, 0, 9]}, {1: saliency}) == {"mAP": 66.67, "HIT@1": 0}


def test_the_evaluation_runs_alone_and_prints_json(tmp_path: Path) -> None:
    truth = written(tmp_path / "G.jsonl", [query(1, [1, 2], [[4, 4, 3], [2, 4, 0]]), query("b", [0], [[3, 2, 2]], 9.9)])
    guess = [{"qid": "b", "pred_saliency_scores": [1, 0, 0, 0]}, {"qid": 1, "pred_saliency_scores": [0, 1, 0.5, 0, 0]}]
    command = [sys.executable, "-m", "unisono.recipes.clips.metrics", "--predictions"]
    words = [written(tmp_path / "P.jsonl", guess), "--ground_truth", truth]
    done = subprocess.run([*command, *words], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    # Query 1: 1, 1 and 0; query b: no annotator gave 4.
    assert (result["mAP"], result["HIT@1"], result["num_queries"]) == (33.33, 50, 2)
    assert result["by_level"]["Fair"] == {"mAP": 100, "HIT@1": 100}
    refused = subprocess.run([*command, truth, "--ground_truth", truth], capture_output=True, text=True, cwd=tmp_path)
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1 and "pred_saliency_scores" in refused.stderr


def windows(*rows: tuple[float, ...]) -> np.ndarray:
    return np.array(rows, float).reshape(len(rows), -1)


def test_moment_retrieval_metrics_match_a_hand_calculation() -> None:
    marked = {"a": windows((0, 10), (20, 60)), "b": windows((100, 140))}
    output = {
        # 20 to 50 is 30 of 40 seconds: IoU 0.75; 0 to 10 is exact; 50 to 60 is 10 of 40.
        "a": windows((20, 50, 0.9), (50, 60, 0.8), (0, 10, 0.7)),
        "b": windows((110, 150, 0.5)),  # 30 of 50 seconds: 0.6
    }
    result = moment_retrieval(output, marked)
    # Query a: hits at ranks 1 and 3 up to 0.75: (1 + 2/3) / 2; above only at rank 3: (1/3) / 2. Query b: 1 up to 0.6.
    low, high = (1 + 2 / 3) / 2, (1 / 3) / 2
    assert result["mAP@0.5"] == round(100 * (low + 1) / 2, 2) and result["mAP@0.75"] == round(100 * low / 2, 2)
    assert result["mAP"] == round(100 * ((6 * low + 4 * high) / 10 + 3 / 10) / 2, 2)
    assert (result["R1@0.5"], result["R1@0.7"]) == (100, 50)
    # Alone, the short window of a is found at rank 3; the two long ones are found up to 0.75 and 0.6.
    assert result["short_mAP"] == round(100 / 3, 2) and result["middle_mAP"] == 0
    assert result["long_mAP"] == round(100 * (6 / 10 + 3 / 10) / 2, 2)


def test_a_labelled_window_matches_once_and_ten_predictions_count() -> None:
    marked = {1: windows((0, 10))}
    assert moment_retrieval({1: windows((0, 10, 0.9), (0, 10, 0.8))}, marked)["mAP"] == 100
    assert moment_retrieval({1: windows((50, 60, 0.9), (0, 10, 0.8))}, marked)["mAP"] == 50
    many = [(50.0 + place, 60.0, 0.1) for place in range(10)]
    assert moment_retrieval({1: windows(*many, (0, 10, 0.9))}, marked)["mAP"] == 0
    assert moment_retrieval({1: windows(*many[:9], (0, 10, 0.9))}, marked)["mAP"] == 100  # by score, not by position
    assert moment_retrieval({1: windows(*many[:9], (0, 10, 0.9))}, marked)["R1@0.5"] == 0  # by position, not by score
    assert moment_retrieval({1: np.zeros((0, 3))}, marked)["mAP"] == 0


def by_brute_force(predicted: np.ndarray, marked: np.ndarray, threshold: float) -> float:
    """Brute force: the area under the interpolated precision-recall curve, computed second by second."""
    seconds = [set(range(round(start * 8), round(end * 8))) for start, end, *_ in marked]
    taken: set[int] = set()
    curve = [(0.0, 0.0)]
    for rank, (start, end, _) in enumerate(sorted(predicted[:10].tolist(), key=lambda row: -row[2]), 1):
        mine = set(range(round(start * 8), round(end * 8)))
        shares = [(len(mine & each) / len(mine | each), place) for place, each in enumerate(seconds)]
        for share, place in sorted(shares, reverse=True):
            if share >= threshold and place not in taken:
                taken.add(place)
                break
        curve.append((len(taken) / len(marked), len(taken) / rank))
    area = 0.0
    for (before, _), (recall, _) in pairwise(curve):
        area += (recall - before) * max(precision for there, precision in curve if there >= recall)
    return area


def test_moment_retrieval_is_the_area_under_the_interpolated_curve() -> None:
    draw = np.random.default_rng(0)
    for _ in range(60):
        starts = draw.integers(0, 800, draw.integers(1, 6)) / 8  # eighths of a second: exact as binary numbers
        marked = np.stack([starts, starts + draw.integers(8, 320, len(starts)) / 8], axis=1)
        near = marked[draw.integers(0, len(marked), draw.integers(1, 14))]
        moved = np.sort((near + draw.integers(-50, 51, near.shape) / 8).clip(0), axis=1)
        moved[:, 1] += 0.125
        predicted = np.concatenate([moved, draw.permutation(len(moved))[:, None] / 20], axis=1)
        expected = [by_brute_force(predicted, marked, threshold) for threshold in THRESHOLDS]
        assert average_precisions(predicted, marked).tolist() == pytest.approx(expected, abs=1e-12)


def test_windows_are_evaluated_with_or_without_scores(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    truth = written(tmp_path / "G", [{**query(1, [0], [[4, 4, 4]]), "relevant_windows": [[0, 2]]}])
    both = {**GOOD, "pred_relevant_windows": [[0, 2, 0.5]]}
    alone = {"qid": 1, "pred_relevant_windows": [[4, 6, 0.5], [0, 2, 0.4]]}
    for line, keys, expected in ((both, {"mAP", "HIT@1", "by_level"}, 100), (alone, set(), 50)):
        main(["--predictions", written(tmp_path / f"P{expected}", [line]), "--ground_truth", truth])
        stdout = json.loads(capsys.readouterr().out)
        assert stdout.keys() == {"num_queries", "moment_retrieval", *keys}
        assert stdout["moment_retrieval"]["mAP"] == expected
    for number, rows in enumerate(([[0, 2]], [[4, 2, 0.5]], [[0, math.nan, 1]], "0 2 1")):
        wrong = written(tmp_path / f"W{number}", [{"qid": 1, "pred_relevant_windows": rows}])
        with pytest.raises(ConfigError, match=r"line 1: pred_relevant_windows"):
            main(["--predictions", wrong, "--ground_truth", truth])
    missing = written(tmp_path / "M", [query(1, [0], [[4, 4, 4]])])
    with pytest.raises(ConfigError, match="relevant_windows must be a list"):
        main(["--predictions", str(tmp_path / "P50"), "--ground_truth", missing])


GOOD = {"qid": 1, "pred_saliency_scores": [0.5] * 5}


@pytest.mark.parametrize(
    ("predictions", "truth", "said"),
    [
        ([], [query(1, [0], [[4, 4, 4]])], "has no line for 1"),
        ([GOOD, {**GOOD, "qid": 2}], [query(1, [0], [[4, 4, 4]])], "not in the ground truth: 2"),
        ([GOOD, GOOD], [query(1, [0], [[4, 4, 4]])], "line 2: qid 1 already occurs"),
        ([{"qid": 1, "pred_saliency_scores": [math.nan]}], [query(1, [0], [[4, 4, 4]])], "finite"),
        ([{"qid": 1, "pred_saliency_scores": ["a"]}], [query(1, [0], [[4, 4, 4]])], "finite"),
        ([GOOD], [query(1, [5], [[4, 4, 4]])], "0 to 4"),
        ([GOOD], [query(1, [-1], [[4, 4, 4]])], "0 to 4"),
        ([GOOD], [query(1, [0, 1], [[4, 4, 4]])], "one entry for each"),
        ([GOOD], [query(1, [0, 1], [[4, 4, 4], [4, 4]])], "one number per annotator"),
        ([GOOD], [query(1, [0], [[4, 4, 4]], 0)], "duration"),
        ([GOOD], [query(1, [0], [[4, 4, 4]], 1e300)], "duration"),
        ([GOOD], [], "no query"),
        ([GOOD], [[1]], "not a JSON object"),
        ([GOOD], [{**query(1, [0], [[4, 4, 4]]), "qid": [1]}], "qid must be"),
    ],
)
def test_mismatched_files_are_rejected_in_one_line(
    predictions: list[Any], truth: list[Any], said: str, tmp_path: Path
) -> None:
    words = ["--predictions", written(tmp_path / "P", predictions), "--ground-truth", written(tmp_path / "G", truth)]
    with pytest.raises(ConfigError, match=said) as told:
        main(words)
    assert "\n" not in str(told.value)


def test_files_that_are_not_jsonl_are_rejected_in_one_line(tmp_path: Path) -> None:
    truth = written(tmp_path / "G", [query(1, [0], [[4, 4, 4]])])
    for number, content in enumerate((b"{", b"\xff\xfe\x00", b"[" * 100_000)):
        (tmp_path / f"P{number}").write_bytes(json.dumps(GOOD).encode() + b"\n\n" + content)
        with pytest.raises(ConfigError, match=f"P{number}, line 3: not JSON"):
            main(["--predictions", str(tmp_path / f"P{number}"), "--ground_truth", truth])
    with pytest.raises(ConfigError, match="cannot be read"):
        main(["--predictions", str(tmp_path / "none"), "--ground_truth", truth])


NAMES = ("luma", "frame_difference", "loudness")


def test_baselines_score_by_their_statistic() -> None:
    stats = np.array([[5, 0.1, 0], [5, 0.4, 0], [5, 0.2, 0], [5, 0.3, 0]], np.float16)
    by = {kind: baselines.scores(kind, stats, NAMES, video="a.mp4") for kind in baselines.KINDS}
    assert all(result.shape == (4,) and np.isfinite(result).all() for result in by.values())
    assert np.argsort(by["frame_difference"]).tolist() == [0, 2, 3, 1] and np.ptp(by["frame_difference"]) == 1
    assert by["loudness"].tolist() == [0, 0, 0, 0]  # no sound
    assert by["centre"][1] == by["centre"][2] > by["centre"][0] == by["centre"][3]
    assert all(sooner > later for sooner, later in pairwise(by["earliest"]))
    assert (
        baselines.kinds_for(["f0"]) == ("random", "centre", "earliest")
        and baselines.kinds_for(NAMES) == baselines.KINDS
    )


def test_random_scores_depend_on_the_video_only() -> None:
    stats = np.zeros((1000, 3), np.float16)
    one, again, other = (baselines.scores("random", stats, NAMES, video=name) for name in ("a", "a", "b"))
    assert (one == again).all() and (one != other).any()
    assert one.mean() == pytest.approx(0.5, abs=0.05) and 0 <= one.min() <= one.max() < 1
    assert len(baselines.scores("frame_difference", np.zeros((0, 3), np.float16), NAMES)) == 0
