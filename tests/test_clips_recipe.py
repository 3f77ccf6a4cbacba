"""The recipe clips from end to end: real videos with sound, real ranks, scores of a whole video."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from many_runs import Outcome, Run, many_runs
from test_clips_cutting import made
from unisono.engine.export import load_trained
from unisono.engine.recipe import Work
from unisono.errors import ConfigError, UserError
from unisono.recipes.clips.checks import check_config
from unisono.recipes.clips.data import synthetic
from unisono.recipes.clips.data.datasets import shuffled, windows_of
from unisono.recipes.clips.data.splits import read_splits
from unisono.recipes.clips.loss import ranking_loss, score_loss
from unisono.recipes.clips.metrics.qvhighlights import main as evaluate
from unisono.recipes.clips.metrics.qvhighlights import read_predictions
from unisono.recipes.clips.model import Scorer, distance_buckets
from unisono.recipes.clips.predict import main as predict
from unisono.recipes.clips.recipe import Clips
from unisono.recipes.clips.scoring import logits_of, score, window_logits
from unisono.recipes.clips.settings import Config

RUN: dict[str, Any] = {
    **{"global_batch_size": 4, "batch_size": 4, "num_epochs": None, "max_steps": 30, "learning_rate": 2e-3},
    **{"warmup_steps": 5, "lr_schedule": "cosine", "num_workers": 0, "log_every": 1, "tensorboard": False},
    **{"eval_every": 15, "save_every": 15, "preview_every": -1, "num_eval": 4},
}
RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "2 ranks ddp": (2, {"strategy": "ddp", "batch_size": 2}),
    "2 ranks fsdp": (2, {"strategy": "fsdp", "batch_size": 2}),
    "shuffled": (1, {"shuffle_labels": True}),
    "windows": (1, {"window": 5, "max_steps": 3}),
    "sound and numbers": (1, {"use": "mel,stats", "max_steps": 3}),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small mirror set."""
    root = tmp_path_factory.mktemp("clips")
    synthetic.make(root / "videos", 20, num_clips=12)
    return root


@pytest.fixture(scope="module")
def runs(root: Path) -> dict[str, Outcome]:
    """All runs of this module, by name."""
    settings = {**RUN, "data_path": str(root / "videos"), "cache_dir": str(root / "cache")}
    run_list = [
        Run(name, f"runs/{name}", world, settings | changes, recipe="clips") for name, (world, changes) in RUNS.items()
    ]
    outcomes = many_runs(run_list, root)
    for name, outcome in outcomes.items():
        assert "error" not in outcome.main, (name, outcome.main)
    return outcomes


def test_the_model_learns_what_no_statistic_reveals(runs: dict[str, Outcome]) -> None:
    last = runs["one"].evaluations()[-1]
    assert last["eval/mAP"] >= 0.95
    for scorer in ("random", "centre", "earliest", "frame_difference", "loudness"):
        assert last[f"eval/mAP_{scorer}"] < 0.8
        assert last[f"eval/HIT@1_{scorer}"] <= 1
    assert last["eval/mAP"] > last["eval/mAP_frame_difference"] + 0.1


def test_shuffled_labels_teach_nothing(runs: dict[str, Outcome]) -> None:
    last = runs["shuffled"].evaluations()[-1]
    assert last["eval/mAP"] < 0.8
    assert last["eval/mAP"] < runs["one"].evaluations()[-1]["eval/mAP"] - 0.15


@pytest.mark.parametrize("name", ["2 ranks ddp", "2 ranks fsdp"])
def test_two_ranks_learn_like_one(name: str, runs: dict[str, Outcome]) -> None:
    torch.testing.assert_close(runs[name].losses()[:10], runs["one"].losses()[:10], rtol=2e-4, atol=1e-5)
    assert runs[name].evaluations()[-1]["eval/mAP"] >= 0.95


def test_long_videos_are_trained_on_in_windows(runs: dict[str, Outcome]) -> None:
    assert windows_of(12, 5) == [(0, 5), (2, 7), (4, 9), (6, 11), (7, 12)]
    assert windows_of(5, 5) == [(0, 5)]
    assert windows_of(3, 5) == [(0, 3)]
    assert runs["windows"].main["step"] == runs["sound and numbers"].main["step"] == 3


def test_a_video_is_scored_as_in_evaluation(runs: dict[str, Outcome], root: Path) -> None:
    recipe, model, _ = load_trained(root / "runs" / "one")
    recipe.prepare(Work(root / "runs" / "one" / "prepared"))
    data = recipe.dataset("eval")
    item, name = data[0], data._videos[0].source.name
    seconds_done: list[float] = []
    scored = score(recipe, model, root / "videos" / name, "cpu", seconds_done.append)  # type: ignore[arg-type]
    with torch.no_grad():
        kept = logits_of(model, {kind: item[kind][None] for kind in ("frames", "mel")}, 64)  # type: ignore[arg-type]
    np.testing.assert_allclose(scored.scores, torch.sigmoid(kept)[0].numpy(), atol=1e-5)
    assert scored.has_sound
    assert scored.duration == pytest.approx(24, abs=0.3)
    assert seconds_done == sorted(seconds_done) and seconds_done[-1] == scored.duration  # what the progress bar shows


def test_a_video_without_sound_is_scored_from_the_features_that_training_reads(root: Path, tmp_path: Path) -> None:
    made(tmp_path / "silent.mp4", sound=False)
    (tmp_path / "labels.csv").write_text("video,start,end,score\nsilent.mp4,2,4,1\n")
    recipe = Clips(Config(data_path=str(tmp_path), num_eval=0))
    recipe.prepare(Work(tmp_path / "prepared"))
    item = recipe.dataset("train")[0]
    assert not item["mel"].any()
    torch.manual_seed(0)
    model = recipe.model().eval()
    scored = score(recipe, model, tmp_path / "silent.mp4", "cpu")  # type: ignore[arg-type]
    with torch.no_grad():
        expected = torch.sigmoid(model({kind: item[kind][None] for kind in ("frames", "mel")}))[0]
    np.testing.assert_allclose(scored.scores, expected.numpy(), atol=1e-6)
    assert not scored.has_sound


def test_predictions_for_held_out_videos_are_written_in_the_qvhighlights_format(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"duration": 24, "relevant_clip_ids": [1], "saliency_scores": [[4, 4, 4]]}
    for split, numbers in (("train", range(3)), ("val", range(3, 5))):
        lines = [{"qid": f"q{n}", "vid": f"train_{n:04}.mp4", **settings} for n in numbers]
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    labels = {"data_path": str(tmp_path / "train.jsonl"), "eval_data_path": str(tmp_path / "val.jsonl")}
    more = {"media_path": str(root / "videos"), "cache_dir": str(root / "cache"), "num_eval": None, "max_steps": 1}
    many_runs([Run("qv", "qv", 1, RUN | labels | more, recipe="clips")], tmp_path)
    words = ["--run", str(tmp_path / "qv"), "--output", str(tmp_path / "P.jsonl")]
    assert predict(words) == 0
    result = read_predictions(tmp_path / "P.jsonl")
    assert {qid: len(scores) for qid, scores in result.items()} == {"q3": 12, "q4": 12}
    recipe, model, _ = load_trained(tmp_path / "qv")
    scored = score(recipe, model, root / "videos/train_0003.mp4", "cpu")  # type: ignore[arg-type]
    np.testing.assert_allclose(result["q3"], scored.scores, atol=1e-5)
    assert evaluate(["--predictions", words[-1], "--ground_truth", str(tmp_path / "val.jsonl")]) == 0
    assert json.loads(capsys.readouterr().out)["num_queries"] == 2
    with pytest.raises(ConfigError, match="not overwritten"):
        predict(words)


def test_a_run_without_queries_says_what_to_train_with(runs: dict[str, Outcome], root: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no held-out queries with a qid"):
        predict(["--run", str(root / "runs/one"), "--output", str(tmp_path / "P.jsonl")])


def test_a_run_on_features_from_files_says_how_to_cut_videos(root: Path) -> None:
    recipe, model = Clips(Config(data_path="x", features="files")), Scorer({"features": (3,)}, 16, 1, 2, 0.0)
    with pytest.raises(UserError, match="train with --features builtin"):
        score(recipe, model, root / "videos" / "train_0000.mp4", "cpu")


def test_logits_of_overlapping_windows_are_averaged() -> None:
    torch.manual_seed(0)
    model = Scorer({"stats": (3,)}, 16, 1, 2, 0.0).eval()
    inputs = {"stats": torch.randn(2, 30, 3)}
    with torch.no_grad():
        whole, parts = logits_of(model, inputs, 64), logits_of(model, inputs, 10)
        torch.testing.assert_close(whole, model(inputs))
        assert parts.shape == whole.shape
        model.blocks = torch.nn.ModuleList()  # now clips do not affect each other, so windows cannot matter
        torch.testing.assert_close(logits_of(model, inputs, 10), model(inputs))
        assert window_logits(model, model.encode(inputs)[:, :1], 10).shape == (2, 1)


def test_distances_of_any_length_have_a_bucket() -> None:
    buckets = distance_buckets(torch.arange(-5000, 5001))
    assert (int(buckets.min()), int(buckets.max())) == (0, 32)
    assert distance_buckets(torch.tensor([-3, 0, 3])).tolist() == [13, 16, 19]
    assert (buckets.diff() >= 0).all()


@pytest.mark.parametrize(
    ("given", "expected"), [(torch.float64, torch.float64), (torch.bfloat16, torch.float32)], ids=["64 bit", "16 bit"]
)
def test_the_loss_is_as_exact_as_the_model_and_never_in_16_bit(given: torch.dtype, expected: torch.dtype) -> None:
    recipe = Clips(Config(data_path="mirror"))
    recipe.__dict__["_inputs"] = {"stats": (3,)}  # as if prepared
    model = Scorer({"stats": (3,)}, 16, 1, 2, 0.0).to(given)
    batch = {"stats": torch.randn(2, 5, 3), "scores": torch.rand(2, 5)}
    assert recipe.loss(model, batch, None).total.dtype == expected  # type: ignore[arg-type]


def test_clips_without_a_label_do_not_count() -> None:
    logits, scores = torch.tensor([[0.0, 2.0, -1.0]]), torch.tensor([[float("nan"), 1.0, 0.0]])
    known = score_loss(logits[:, 1:], scores[:, 1:], "bce")
    torch.testing.assert_close(score_loss(logits, scores, "bce"), known)
    torch.testing.assert_close(ranking_loss(logits, scores), ranking_loss(logits[:, 1:], scores[:, 1:]))
    torch.testing.assert_close(
        ranking_loss(logits[:, 1:], scores[:, 1:]), torch.nn.functional.softplus(torch.tensor([-3.0]))
    )
    assert torch.equal(score_loss(logits, torch.full((1, 3), float("nan")), "mse"), torch.zeros(1))


def test_shuffling_keeps_each_videos_scores() -> None:
    scores = [np.arange(8, dtype=np.float32), np.arange(5, dtype=np.float32)]
    mixed = shuffled(scores, 0)
    assert [sorted(each.tolist()) for each in mixed] == [each.tolist() for each in scores]
    assert any(not np.array_equal(*pair) for pair in zip(mixed, scores, strict=True))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"data_path": None}, "data_path is missing"),
        ({"width": 10, "heads": 4}, "not divisible by heads 4"),
        ({"use": "smell"}, "unknown input 'smell'"),
        ({"clip_seconds": 0.0}, "above 0"),
        ({"feature_seconds": 0.0}, "feature_seconds: expected a number above 0"),
        ({"feature_seconds": float("nan")}, "feature_seconds: expected a number above 0"),
        ({"positive_from": float("nan")}, "positive_from: expected"),
        ({"num_eval": 2, "eval_data_path": "x"}, "pass only one of them"),
        ({"window": 1}, "at least 2"),
    ],
)
def test_invalid_settings_are_rejected(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        check_config(Config(**{"data_path": "mirror", **changes}))


def test_all_labels_of_a_video_are_in_one_split(root: Path) -> None:
    train, held_out = read_splits(Config(data_path=str(root / "videos"), num_eval=3), root, print)
    assert (len(train), len(held_out)) == (17, 3)
    assert not {each.name for each in train} & {each.name for each in held_out}
    with pytest.raises(ConfigError, match="leaves none to train on"):
        read_splits(Config(data_path=str(root / "videos"), num_eval=20), root, print)


def test_a_run_without_held_out_videos_prints_a_note(root: Path, tmp_path: Path) -> None:
    lines = (root / "videos" / "labels.csv").read_text().splitlines()
    few = [line for line in lines if line.startswith(("video,", "train_0000", "train_0001", "train_0002"))]
    (tmp_path / "few.csv").write_text("\n".join(few) + "\n")
    paths = {"data_path": str(tmp_path / "few.csv"), "media_path": str(root / "videos")}
    remarks: list[str] = []
    train, held_out = read_splits(Config(**paths), root, remarks.append)
    assert (len(train), len(held_out)) == (3, 0)
    assert len(remarks) == 1 and "no video is held out" in remarks[0] and "--num_eval 1" in remarks[0]
    for chosen in (0, 1):
        read_splits(Config(**paths, num_eval=chosen), root, remarks.append)
    assert len(remarks) == 1
