"""A score is learned only from labels, compared with baselines, and calibrated."""

from __future__ import annotations

import copy
import csv
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from command_line import lines, unisono
from unisono.data.noise import Noise
from unisono.data.order import Order
from unisono.data.shapes import Shapes
from unisono.engine.export import load_trained
from unisono.engine.recipe import Work
from unisono.errors import ConfigError, UserError
from unisono.recipes.seo.metrics import calibration as calibrating
from unisono.recipes.seo.metrics.calibration import Calibration, fit, fit_temperature
from unisono.recipes.seo.metrics.scores import Baselines, ScoreMetrics, class_metrics, number_metrics
from unisono.recipes.seo.settings import Config
from unisono.recipes.seo.tasks.score import Score

GOOD, BAD = ("clear", "fast", "useful", "short"), ("spam", "casino", "pills", "winner")
OTHER = ("page", "about", "the", "garden", "with", "water", "and", "stone", "under", "trees")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# The measures -------------------------------------------------------------------------------------------------------


def test_auc_and_f1_include_only_classes_that_occur() -> None:
    probabilities = np.array([[0.8, 0.1, 0.1], [0.2, 0.7, 0.1], [0.6, 0.3, 0.1], [0.1, 0.8, 0.1]])
    metrics = class_metrics(probabilities, np.array([0, 1, 0, 1]))
    assert metrics["AUC"] == metrics["F1"] == metrics["accuracy"] == 1
    # Everything predicted as 0: precision 3/4 and recall 1 of that class, nothing of the other.
    constant = class_metrics(np.tile([0.9, 0.1], (4, 1)), np.array([0, 0, 0, 1]))
    assert constant["F1"] == pytest.approx((2 * 3 / 7 + 0) / 2) and constant["AUC"] == 0.5
    assert "AUC" not in class_metrics(probabilities, np.zeros(4, int))


def test_a_constant_prediction_has_no_rank_correlation() -> None:
    assert number_metrics(np.zeros(5), np.arange(5.0)) == {"Spearman": 0, "RMSE": pytest.approx(np.sqrt(6))}


def test_calibration_error_matches_a_hand_calculation() -> None:
    probabilities = np.array([[0.9, 0.1], [0.9, 0.1], [0.35, 0.65], [0.3, 0.7]])
    labels = np.array([0, 1, 1, 1])
    # 0.9 occurs twice and is right once; 0.65 and 0.7 are in separate ranges, and right.
    expected = (2 * abs(0.9 - 0.5) + 0.35 + 0.3) / 4
    assert calibrating.expected_calibration_error(probabilities, labels) == pytest.approx(expected)
    rows = calibrating.reliability(probabilities, labels)
    assert [row["pages"] for row in rows] == [1, 1, 2]
    assert rows[-1]["accuracy"] == 0.5


def test_metrics_are_the_same_over_any_number_of_ranks() -> None:
    rng = np.random.default_rng(2)
    number = 101
    labels = torch.from_numpy(rng.integers(0, 3, number))
    logits = torch.from_numpy(rng.standard_normal((number, 3))).float() + 2 * torch.eye(3)[labels]
    lengths = torch.from_numpy(rng.integers(10, 500, number))
    baselines = Baselines.fit(lengths.numpy(), labels.numpy(), 3)

    def empty() -> ScoreMetrics:
        return ScoreMetrics(Calibration(names=["a", "b", "c"]), baselines)

    whole = empty()
    whole.update(torch.arange(number), logits, labels, lengths)
    result = whole.compute()
    assert {"AUC", "F1", "accuracy", "log_loss", "ECE", "ECE_calibrated"} <= result.keys()
    assert {"accuracy_majority", "F1_majority", "AUC_length", "log_loss_length"} <= result.keys()
    for ranks in (2, 3):
        parts = [empty() for _ in range(ranks)]
        for turn, batch in enumerate(torch.from_numpy(rng.permutation(number)).split(7)):
            parts[turn % ranks].update(batch, logits[batch], labels[batch], lengths[batch])
        parts[0].update(batch, logits[batch], labels[batch], lengths[batch])  # a page computed twice counts once
        merged = copy.deepcopy(parts[-1]).cpu()
        for part in parts[:-1]:
            merged.merge_state(pickle.loads(pickle.dumps(part)))
        assert merged.compute() == result
    whole.reset()
    assert not whole.update_called


def test_the_length_baseline_learns_what_length_explains() -> None:
    rng = np.random.default_rng(3)
    lengths, other = rng.integers(10, 1000, 2000), rng.integers(10, 1000, 1000)
    long, chance = (lengths > 300).astype(int), rng.integers(0, 2, 2000)
    knows = Baselines.fit(lengths, long, 2).from_length(other)
    assert class_metrics(knows, (other > 300).astype(int))["AUC"] > 0.95
    guesses = Baselines.fit(lengths, chance, 2).from_length(other)
    assert class_metrics(guesses, rng.integers(0, 2, 1000))["AUC"] == pytest.approx(0.5, abs=0.06)
    numbers = Baselines.fit(lengths, np.sqrt(lengths)).from_length(other)[:, 0]
    assert number_metrics(numbers, np.sqrt(other))["Spearman"] > 0.95
    assert Baselines.fit(np.array([5, 5, 5]), np.array([0, 1, 1]), 2).from_length(np.array([1, 9])).shape == (2, 2)


# Calibration --------------------------------------------------------------------------------------------------------


def overconfident(number: int, factor: float) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(4)
    logits = rng.standard_normal((number, 3)) * 1.5
    labels = np.array([rng.choice(3, p=row) for row in calibrating.softmax(logits)])
    return logits * factor, labels


def test_temperature_undoes_overconfidence_and_changes_no_decision() -> None:
    logits, labels = overconfident(4000, factor=3)
    fitted = fit(logits, labels, Calibration(names=["a", "b", "c"]))
    assert fitted.temperature == pytest.approx(3, rel=0.1)
    assert fitted.measured["ECE_calibrated"] < 0.04 < fitted.measured["ECE"]
    assert fitted.measured["log_loss_calibrated"] < fitted.measured["log_loss"]
    assert fitted.measured["pages"] == 2000
    assert (fitted.probabilities(logits).argmax(1) == logits.argmax(1)).all()


def test_temperature_is_the_one_with_the_least_log_loss() -> None:
    logits, labels = overconfident(300, factor=0.5)
    fitted = fit_temperature(logits, labels)

    def loss(temperature: float) -> float:
        return calibrating.log_loss(calibrating.softmax(logits / temperature), labels)

    assert all(loss(fitted) <= loss(fitted * factor) for factor in (0.5, 0.9, 0.97, 1.03, 1.1, 2))
    assert fit_temperature(np.zeros((30, 2)), np.arange(30) % 2) == 1


def test_a_model_that_is_always_right_does_not_become_certain() -> None:
    labels = np.arange(100) % 2
    fitted = fit(np.eye(2)[labels] * 3, labels, Calibration(names=["a", "b"]))
    assert 0.95 < fitted.probabilities(np.array([[3.0, 0.0]]))[0, 0] < 0.99


def test_the_isotonic_curve_removes_a_bias() -> None:
    rng = np.random.default_rng(6)
    outputs = rng.standard_normal(1000)
    labels = 100 + 20 * np.tanh(2 * outputs) + rng.standard_normal(1000)
    fitted = fit(outputs, labels, Calibration(mean=100, std=20))
    assert fitted.measured["RMSE_calibrated"] < 2 < fitted.measured["RMSE"]


def test_calibration_works_with_few_pages_and_alternating_labels() -> None:
    plain = Calibration(names=["a", "b"])
    logits = np.tile([[0.0, 4.0], [4.0, 0.0]], (50, 1))
    labels = np.arange(100) % 2  # alternating labels: every other page has the same class
    assert fit(logits[:30], labels[:30], plain) is plain
    assert fit(logits, labels, plain).temperature > 5  # always wrong, so a higher temperature is always better
    assert fit(np.full((100, 2), np.nan), labels, plain) is plain


def test_calibration_survives_a_round_trip_and_a_damaged_file_is_rejected(tmp_path: Path) -> None:
    assert Calibration.read(tmp_path) is None
    logits, labels = overconfident(200, factor=2)
    fitted = fit(logits, labels, Calibration(names=["a", "b", "c"]))
    fitted.write(tmp_path)
    assert Calibration.read(tmp_path) == fitted
    for content in (
        "{",
        "[]",
        '{"temperature": 0}',
        '{"temperature": "1"}',
        '{"temperature": NaN}',
        '{"numbers": [1, 0], "becomes": [1, 2]}',
        '{"numbers": 3}',
        '{"names": [1]}',
    ):
        (tmp_path / "calibration.json").write_text(content)
        with pytest.raises(ConfigError, match=r"calibration\.json"):
            Calibration.read(tmp_path)


# The task -----------------------------------------------------------------------------------------------------------


def write_pages(file: Path, number: int, kind: str, seed: int = 0) -> Path:
    """Pages whose label depends on their words: three good or three bad ones, or the number of good ones."""
    rng = np.random.default_rng(seed)
    with file.open("w", newline="", encoding="utf-8") as out:
        writer = csv.writer(out)
        writer.writerow(["text", "label"])
        for _ in range(number):
            good = int(rng.choice([0, 3] if kind == "class" else 4))
            reported = [*rng.choice(GOOD, good), *rng.choice(BAD, 3 - good), *rng.choice(OTHER, rng.integers(2, 40))]
            rng.shuffle(reported)
            labels = {"class": "good" if good >= 2 else "spam", "number": 100.5 + 10 * good}
            writer.writerow([" ".join(reported), labels[kind]])
    return file


def prepared(folder: Path, **settings: Any) -> Score:
    task = Score(Config(task="score", model_name="tiny", **settings))
    (folder / "prepared").mkdir(exist_ok=True)
    task.prepare(Work(folder / "prepared"))
    return task


def trained(task: Score, steps: int) -> torch.nn.Module:
    torch.manual_seed(0)
    model, data = task.model(), task.dataset("train")
    assert data is not None
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    order = Order(len(data), 0)
    for step in range(steps):
        batch = task.collate([data[order[position]] for position in range(step * 32, step * 32 + 32)])
        loss = task.loss(model, batch, Noise(0, torch.arange(32)))
        optimizer.zero_grad()
        (loss.total / loss.count).backward()
        optimizer.step()
    return model.eval()


@torch.no_grad()
def evaluated(task: Score, model: torch.nn.Module) -> dict[str, float]:
    data = task.dataset("eval")
    assert data is not None
    for start in range(0, len(data), 16):
        items = [data[index] for index in range(start, min(start + 16, len(data)))]
        result = task.evaluate(model, task.collate(items), Noise(0, torch.arange(len(items))))
    return result["scores"].compute()


@pytest.fixture(scope="module")
def classes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Score, torch.nn.Module, Path]:
    folder = tmp_path_factory.mktemp("classes")
    task = prepared(folder, data_path=str(write_pages(folder / "pages.csv", 700, "class")), num_eval=120)
    return task, trained(task, 30), folder


def test_classes_are_learned_and_beat_the_baselines(classes: Any) -> None:
    task, model, _ = classes
    result = evaluated(task, model)
    assert result["AUC"] > 0.97
    assert result["accuracy"] > 0.9 > 0.7 > result["accuracy_majority"]
    assert result["AUC_length"] < 0.7
    assert "ECE_calibrated" in result


def test_an_exported_classifier_loads_with_the_same_outputs(classes: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    task, model, folder = classes
    # As in `unisono export`: from the run folder, without the data.
    again = Score(task.config)
    again.folder = folder / "prepared"
    again.export(model, tmp_path / "out")
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert loaded.config.id2label == {0: "good", 1: "spam"}
    texts = ["fast clear useful water", "casino winner pills and stone under trees"]
    with torch.no_grad():
        inputs = tokenizer(texts, padding=True, return_tensors="pt")
        logits = loaded(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
        ours = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
    torch.testing.assert_close(logits, ours)
    assert [loaded.config.id2label[int(number)] for number in logits.argmax(1)] == ["good", "spam"]
    calibration = Calibration.read(tmp_path / "out")
    assert calibration is not None and calibration.names == ["good", "spam"]
    assert calibration.temperature != 1
    assert calibration.measured["reliability"]
    with pytest.raises(UserError, match="already"):
        again.export(model, tmp_path / "out")


def test_export_calibrates_as_the_evaluation_does(classes: Any) -> None:
    task, model, _ = classes
    result = evaluated(task, model)
    assert task.calibration(model).measured["ECE_calibrated"] == pytest.approx(result["ECE_calibrated"], abs=1e-5)


def test_loss_is_a_sum_that_padding_does_not_change(classes: Any) -> None:
    task, model, _ = classes
    data = task.dataset("train")
    items = [data[index] for index in range(12)]
    assert len({len(item["ids"]) for item in items}) > 5
    with torch.no_grad():
        whole = task.loss(model, task.collate(items), Noise(0, torch.arange(12)))
        single = [task.loss(model, task.collate([item]), Noise(0, torch.arange(1))) for item in items]
    assert whole.count == 12
    assert float(whole.total) == pytest.approx(sum(float(loss.total) for loss in single), rel=1e-5)
    assert int(whole.metrics["accuracy"]) == sum(int(loss.metrics["accuracy"]) for loss in single)


def test_two_ranks_give_the_metrics_of_one_process(tmp_path: Path) -> None:
    file = write_pages(tmp_path / "pages.csv", 200, "number")
    words = ["train", "seo", "--task", "score", "--model_name", "tiny", "--data_path", file, "--num_eval", 51]
    words += ["--nproc", 2, "--global_batch_size", 16, "--max_steps", 3, "--num_workers", 0, "--eval_batch_size", 8]
    ended = unisono(*words, "--output_dir", tmp_path / "run", cwd=tmp_path, OMP_NUM_THREADS="1")
    assert ended.code == 0, ended.err
    reported = [line for line in lines(tmp_path / "run") if "eval/RMSE" in line][-1]
    again = prepared(tmp_path, data_path=str(file), num_eval=51)
    _, model, _ = load_trained(tmp_path / "run")
    for name, value in evaluated(again, model).items():
        assert reported[f"eval/{name}"] == pytest.approx(value, abs=1e-4), name


def test_pages_of_similar_length_are_batched_together(classes: Any) -> None:
    task, _, _ = classes
    data = task.dataset("train")
    groups = Shapes(data, Order(len(data), 0)).groups(range(256))
    assert 1 < len(groups) <= 4
    for group in groups:
        lengths = [len(data[Order(len(data), 0)[position]]["ids"]) for position in group.positions]
        assert max(lengths) <= group.shape
        assert group.shape == 32 or min(lengths) > group.shape // 2
    longest = task.collate([data[index] for index in range(8)])["ids"].shape[1]
    assert longest - max(len(data[index]["ids"]) for index in range(8)) < 8


def test_numbers_are_standardised_for_training_and_returned_in_the_labels_unit(tmp_path: Path) -> None:
    task = prepared(tmp_path, data_path=str(write_pages(tmp_path / "pages.csv", 700, "number")), num_eval=120)
    kept = json.loads((tmp_path / "prepared" / "calibration.json").read_text())
    assert kept["mean"] == pytest.approx(115.5, abs=1.5) and kept["std"] == pytest.approx(11, abs=1)
    model = trained(task, 50)
    result = evaluated(task, model)
    assert result["Spearman"] > 0.85 > 0.4 > result["Spearman_length"]
    assert result["RMSE"] < 0.6 * result["RMSE_mean"]
    assert result["RMSE_mean"] == pytest.approx(11, abs=1.5)
    task.export(model, tmp_path / "out")
    calibration = Calibration.read(tmp_path / "out")
    assert calibration is not None and calibration.numbers
    values = calibration.values(np.array([-1.5, 0.0, 1.5]))
    assert 95 < values[0] < values[1] < values[2] < 135
    assert json.loads((tmp_path / "out" / "config.json").read_text())["problem_type"] == "regression"


def test_held_out_pages_are_not_trained_on_even_if_a_text_occurs_twice(tmp_path: Path) -> None:
    file = write_pages(tmp_path / "pages.csv", 60, "class")
    rows = file.read_text().splitlines()
    file.write_text("\n".join([*rows, *rows[1:], *rows[1:]]) + "\n")
    task = prepared(tmp_path, data_path=str(file), num_eval=20)
    tokens = {
        split: {item["ids"].tobytes() for item in map(task.dataset(split).__getitem__, range(len(task.dataset(split))))}
        for split in ("train", "eval")
    }
    assert len(tokens["eval"]) == 20
    assert len(task.dataset("eval")) == 60
    assert not tokens["train"] & tokens["eval"]


def test_a_separate_evaluation_set_uses_the_same_classes(tmp_path: Path) -> None:
    train = write_pages(tmp_path / "train.csv", 80, "class")
    held_out = write_pages(tmp_path / "held_out.csv", 40, "class", seed=1)
    task = prepared(tmp_path, data_path=str(train), eval_data_path=str(held_out))
    assert len(task.dataset("train")) == 80 and len(task.dataset("eval")) == 40
    with held_out.open() as file:
        expected = [["good", "spam"].index(row["label"]) for row in csv.DictReader(file)]
    assert task.dataset("eval").labels.tolist() == expected
    strange = tmp_path / "strange.csv"
    strange.write_text("text,label\n" + "some words,good\nother words,awful\n" * 5)
    with pytest.raises(ConfigError, match="'awful' does not occur in data_path"):
        prepared(tmp_path, data_path=str(train), eval_data_path=str(strange))


def test_pages_in_both_splits_are_reported(tmp_path: Path) -> None:
    data = write_pages(tmp_path / "pages.csv", 60, "class")
    task = prepared(tmp_path, data_path=str(data), eval_data_path=str(data))
    assert "60 of 60 evaluation pages also occur in the training data" in task.remarks


def test_long_pages_are_cut_and_counted(tmp_path: Path) -> None:
    task = prepared(tmp_path, data_path=str(write_pages(tmp_path / "pages.csv", 80, "class")), max_length=16)
    assert max(len(task.dataset("train")[index]["ids"]) for index in range(64)) == 16
    assert any("only 16 pages are held out" in remark for remark in task.remarks)
    assert any("were truncated" in remark for remark in task.remarks)


@pytest.mark.parametrize(
    ("settings", "content", "told"),
    [
        ({"data_path": None}, None, "columns text and label"),
        ({}, "text,label\n" + "words,same\nother,same\n" * 10, "all 20 labels are"),
        ({}, "text,label\n" + "words,3.5\nother,3.5\n" * 10, "all 20 labels are"),
        ({"num_eval": 60}, None, "has 60 distinct pages; some must remain"),
        ({"num_eval": 59}, None, "all remaining labels are the same"),
    ],
)
def test_unusable_training_data_is_rejected(tmp_path: Path, settings: Any, content: str | None, told: str) -> None:
    file = write_pages(tmp_path / "pages.csv", 60, "class")
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=told):
        prepared(tmp_path, **({"data_path": str(file)} | settings))
    assert not list((tmp_path / "prepared").iterdir())


def test_a_run_does_not_resume_with_other_classes(tmp_path: Path) -> None:
    file = write_pages(tmp_path / "pages.csv", 60, "class")
    prepared(tmp_path, data_path=str(file))
    prepared(tmp_path, data_path=str(file))
    file.write_text(file.read_text().replace("spam\n", "rubbish\n"))
    with pytest.raises(ConfigError, match="began with good, spam"):
        prepared(tmp_path, data_path=str(file))
