"""SEOConfig and AdvancedLLMSEOEngine, on one device and on two real ranks, with the same result."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from ranks import run_ranks
from unisono.devices import Gpu
from unisono.errors import ConfigError
from unisono.recipes.seo.front import AdvancedLLMSEOEngine, SEOConfig
from unisono.recipes.seo.front.classifier import encode, labels_of
from unisono.recipes.seo.front.devices import find_devices, precision, trainer_config
from unisono.recipes.seo.front.rewriting import adds_nothing, proposals, sentences_of
from unisono.recipes.seo.front.texts import fold_texts, split_texts, texts_and_labels
from unisono.recipes.seo.metrics.calibration import Calibration
from unisono.recipes.seo.site.text_rules import words_of

ORIGINAL_FIELDS = {
    "use_multi_gpu": False,
    "multi_gpu_strategy": "dataparallel",
    "num_gpus": 1,
    "distributed_backend": "nccl",
    "distributed_init_method": "env://",
    "distributed_world_size": 1,
    "distributed_rank": 0,
    "distributed_master_addr": "localhost",
    "distributed_master_port": "12355",
    "sync_batch_norm": False,
    "find_unused_parameters": False,
    "gradient_as_bucket_view": False,
    "broadcast_buffers": True,
    "bucket_cap_mb": 25,
    "static_graph": False,
    "batch_size": 16,
}
DISHES = ("bread", "soup", "rice", "beans", "cake", "eggs", "stew", "jam", "pasta", "fish", "plums")
TEXTS = [f"Cook {dish} for {9 + number} minutes, then let it rest." for number, dish in enumerate(DISHES)]
TEXTS += [f"Best {dish} deals! Buy {dish} now, {dish} sale." for dish in DISHES]
LABELS = [1] * len(DISHES) + [0] * len(DISHES)
EXACT = {"dtype": "float64", "tensorboard": False, "log_every": 1}


@pytest.fixture(autouse=True)
def own_folder_without_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for room in ("multi_gpu.gpus", "multi_gpu.launch", "recipes.seo.front.devices"):
        monkeypatch.setattr(f"unisono.{room}.visible_gpus", lambda: [])


def config(**fields: Any) -> SEOConfig:
    """A tiny model, in float64."""
    values = {
        "model_name": "tiny",
        "use_lora": False,
        "max_length": 32,
        "batch_size": 3,
        "effective_batch_size": 6,
        "learning_rate": 1e-3,
        "num_epochs": 2,
        "warmup_steps": 2,
        "dataloader_num_workers": 0,
        "rank_model": None,
        "settings": EXACT,
    }
    return SEOConfig.from_dict({**values, **fields})


def loaders(engine: AdvancedLLMSEOEngine, texts: list[str] = TEXTS, labels: Any = LABELS, **options: Any) -> Any:
    return engine.create_training_dataloaders(texts, labels, **options)


def losses(result: dict[str, Any]) -> list[float]:
    return [row[name] for row in result["history"] for name in ("train_loss", "val_loss")]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> AdvancedLLMSEOEngine:
    """An engine trained to distinguish cooking from selling."""
    before = Path.cwd()
    os.chdir(tmp_path_factory.mktemp("trained"))
    try:
        engine = AdvancedLLMSEOEngine(config(num_epochs=6, checkpoint_dir=str(Path.cwd() / "kept")))
        engine.train_with_early_stopping(*loaders(engine))
    finally:
        os.chdir(before)
    return engine


# The config -----------------------------------------------------------------------------------------------------------


def test_every_field_and_method_of_the_original_document_exists() -> None:
    assert {name: getattr(SEOConfig(), name) for name in ORIGINAL_FIELDS} == ORIGINAL_FIELDS
    for name in (
        *("_setup_multi_gpu_training", "_setup_dataparallel_training", "_setup_distributed_training"),
        *("_wrap_model_for_multi_gpu", "_wrap_model_dataparallel", "_wrap_model_distributed"),
        *("create_distributed_dataloaders", "synchronize_gpus", "get_multi_gpu_status", "cleanup_multi_gpu"),
    ):
        assert callable(getattr(AdvancedLLMSEOEngine, name))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"multi_gpu_strategy": "distribute"}, "did you mean distributed"),
        ({"distributed_backend": "mpi"}, "distributed_backend: expected nccl, gloo"),
        ({"distributed_init_method": "file:///tmp/x"}, "expected env:// or tcp"),
        ({"distributed_init_method": "tcp://host"}, "an address and a port"),
        ({"distributed_master_port": "http"}, "an address and a port"),
        ({"distributed_rank": 2, "distributed_world_size": 2}, "distributed_rank 2 must be below"),
        ({"num_gpus": 0}, "num_gpus: expected a whole number"),
        ({"batch_size": 0}, "batch_size"),
        ({"learning_rate": -1}, "learning_rate: expected a number above 0"),
        ({"learning_rate": float("nan")}, "learning_rate"),
        ({"learning_rate": 10**400}, "learning_rate: expected a number above 0"),
        ({"batch_size": None}, "batch_size: expected a value, got None"),
        ({"model_name": 5}, "model_name: expected text, got 5"),
        ({"use_multi_gpu": "yes"}, "use_multi_gpu: expected True or False, got 'yes'"),
        ({"lr_scheduler": "cosin"}, "did you mean cosine"),
        ({"mixed_precision_dtype": "int8"}, "mixed_precision_dtype"),
        ({"gradient_accumulation_steps": 4, "effective_batch_size": 60}, "= 64 is not effective_batch_size 60"),
        ({"label": "words"}, "label: expected"),
        ({"settings": 3}, "settings: expected a dict"),
        ({"batchsize": 3}, "unknown field batchsize of SEOConfig; did you mean batch_size"),
        ({"use_diffusion": False}, "unknown field use_diffusion of SEOConfig"),  # this field never had an effect
        ({"settings": {"activation_checkpointing": True}}, "has its own field here, gradient_checkpointing"),
    ],
)
def test_an_invalid_config_is_rejected_in_one_line(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        SEOConfig.from_dict(fields)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("config", [5, {}, "config.json"])
def test_an_engine_takes_only_an_seo_config(config: Any) -> None:
    with pytest.raises(ConfigError, match=f"config: expected an SEOConfig, got {type(config).__name__}"):
        AdvancedLLMSEOEngine(config)


@pytest.mark.parametrize(
    ("fields", "name", "value"),
    [
        ({"batch_size": 5}, "batch_size", 5),
        ({"batch_size": 5, "gradient_accumulation_steps": 3}, "global_batch_size", 15),
        ({"effective_batch_size": 40}, "global_batch_size", 40),
        ({"learning_rate": 0.5}, "learning_rate", 0.5),
        ({"seed": 9}, "seed", 9),
        ({"distributed_backend": "gloo"}, "backend", "gloo"),
        ({"find_unused_parameters": True}, "find_unused_parameters", True),
        ({"gradient_as_bucket_view": True}, "gradient_as_bucket_view", True),
        ({"broadcast_buffers": False}, "broadcast_buffers", False),
        ({"bucket_cap_mb": 50}, "bucket_cap_mb", 50),
        ({"static_graph": True}, "static_graph", True),
        ({"dataloader_num_workers": 7}, "num_workers", 7),
        ({"gradient_checkpointing": True}, "activation_checkpointing", True),
        ({"mixed_precision_dtype": "bfloat16"}, "mixed_precision", "bf16"),
        ({"sync_batch_norm": True}, "sync_batch_norm", True),
        ({"settings": {"ema_decay": 0.9}}, "ema_decay", 0.9),
        ({"settings": {"weight_decay": 0.5}}, "weight_decay", 0.5),
    ],
)
def test_a_field_reaches_the_engine(fields: dict[str, Any], name: str, value: Any) -> None:
    changed, default = (trainer_config(each, find_devices(each)) for each in (SEOConfig(**fields), SEOConfig()))
    assert {**changed.engine_settings(), **vars(changed)}[name] == value
    assert {**default.engine_settings(), **vars(default)}.get(name) != value


def test_gradient_checkpointing_trains_the_same_and_the_banner_names_the_engine(
    capfd: pytest.CaptureFixture[str],
) -> None:
    results = []
    for fields in ({}, {"gradient_checkpointing": True}):
        engine = AdvancedLLMSEOEngine(config(num_epochs=1, **fields))
        results.append(engine.train_epoch(loaders(engine)[0])["train_loss"])
        engine.cleanup_multi_gpu()
    assert results[0] == pytest.approx(results[1], rel=1e-12)
    printed = capfd.readouterr().err
    assert printed.count("unisono: AdvancedLLMSEOEngine (tiny)") == 2 and "OwnModel" not in printed


def test_a_config_file_contains_the_fields(tmp_path: Path) -> None:
    (tmp_path / "it.yaml").write_text("batch_size: 4\nuse_multi_gpu: true\n")
    read = SEOConfig.from_file(tmp_path / "it.yaml")
    assert read.batch_size == 4 and SEOConfig.from_dict(read.to_dict()) == read


def test_a_config_is_read_without_importing_torch() -> None:
    code = "import sys; from unisono.recipes.seo.front import SEOConfig; SEOConfig(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# Devices --------------------------------------------------------------------------------------------------------------


def test_four_gpus_on_a_smaller_machine_give_one_note_and_the_same_effective_batch(
    capfd: pytest.CaptureFixture[str],
) -> None:
    engine = AdvancedLLMSEOEngine(
        SEOConfig(
            use_multi_gpu=True,
            multi_gpu_strategy="distributed",
            num_gpus=4,
            distributed_backend="nccl",
            distributed_master_addr="192.168.1.100",
            distributed_master_port="12355",
            find_unused_parameters=True,
            bucket_cap_mb=50,
        )
    )
    engine._setup_multi_gpu_training()
    assert capfd.readouterr().err.count("note:") == 1
    status = engine.get_multi_gpu_status()
    assert status["effective_batch_size"] == 64 and status["gradient_accumulation_steps"] == 4
    assert (status["strategy"], status["num_gpus"], status["device"], status["world_size"]) == ("single", 0, "cpu", 1)
    assert (status["requested_strategy"], status["requested_gpus"]) == ("distributed", 4)
    assert status["precision"] == "float32" and status["memory"]["cpu"]["allocated"] > 2**20
    engine._setup_dataparallel_training(2)
    assert engine.get_multi_gpu_status()["requested_gpus"] == 2
    engine.synchronize_gpus()
    engine.cleanup_multi_gpu()


def test_data_parallel_on_one_device_trains_with_the_requested_batch() -> None:
    two = config(use_multi_gpu=True, num_gpus=2, effective_batch_size=None, save_checkpoints=False)
    engines = AdvancedLLMSEOEngine(two), AdvancedLLMSEOEngine(config(save_checkpoints=False))
    results = [engine.train_with_early_stopping(*loaders(engine)) for engine in engines]
    assert losses(results[0]) == pytest.approx(losses(results[1]), abs=1e-12)
    assert engines[0].get_multi_gpu_status()["effective_batch_size"] == 6
    assert not engines[0].is_dataparallel and not engines[0].is_distributed


def test_which_devices_a_config_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    def gpus(number: int, capability: str = "9.0") -> None:
        present = [
            Gpu(each, f"GPU-{each}", "Large", 80 * 10**9, 79 * 10**9, capability=capability) for each in range(number)
        ]
        monkeypatch.setattr("unisono.recipes.seo.front.devices.visible_gpus", lambda: present)

    many = {"use_multi_gpu": True, "num_gpus": 4}
    gpus(4)
    devices = find_devices(SEOConfig(**many))
    assert (devices.strategy, devices.num_gpus, devices.note) == ("dataparallel", 4, None)
    settings = trainer_config(SEOConfig(**many), devices)
    assert (settings.num_gpus, settings.strategy, settings.global_batch_size) == (4, "dataparallel", 64)
    assert settings.mixed_precision == "bf16"
    alone = find_devices(SEOConfig(**many, multi_gpu_strategy="distributed"))
    assert (alone.strategy, alone.num_gpus, alone.num_requested) == ("single", 1, 4)
    assert alone.note is not None and "torchrun --nproc_per_node=4" in alone.note
    assert find_devices(SEOConfig(num_gpus=4)).num_gpus == 1
    gpus(3)
    devices = find_devices(SEOConfig(**many, multi_gpu_strategy="auto"))
    assert (devices.strategy, devices.num_gpus, devices.num_requested) == ("dataparallel", 3, 4)
    assert "3 GPUs" in str(devices.note)
    gpus(1, "7.5")
    assert precision(SEOConfig(), find_devices(SEOConfig())) == "fp16"
    for off in ({"use_mixed_precision": False}, {"mixed_precision_dtype": "float32"}):
        assert precision(SEOConfig(**off), find_devices(SEOConfig())) == "no"


# Data -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("texts", "labels", "message"),
    [
        (["a", " "], [0, 1], "texts: number 1 is empty"),
        (["a", 3], [0, 1], "texts: number 1 is of type int"),
        (["a", "b"], [0], "labels: got 1 for 2 texts"),
        (["a", "b"], None, "labels: got 0 for 2 texts"),
        ([], [], "texts is empty"),
        (["a", "b", "c"], [1, 1, 1], "all 3 labels are '1'"),
        (["a", "b", "c"], [0.5, 1.5, float("nan")], "labels: number . is nan"),
        (["a", "a"], [0, 1], "at least 2 distinct texts"),
    ],
)
def test_invalid_texts_and_labels_are_rejected(texts: list[Any], labels: Any, message: str) -> None:
    engine = AdvancedLLMSEOEngine(config())
    with pytest.raises(ConfigError, match=message):
        engine.train_epoch(*loaders(engine, texts, labels))
    assert not list(Path.cwd().iterdir())


def test_only_loaders_of_the_engine_are_accepted() -> None:
    engine = AdvancedLLMSEOEngine(config())
    for loader in ([("a", 1)], DataLoader([1, 2])):  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="train_loader: expected a loader from create_training_dataloaders"):
            engine.train_epoch(loader)  # type: ignore[arg-type]


def test_equal_texts_are_in_the_same_split_and_no_text_is_lost() -> None:
    texts = [f"text {number % 12}" for number in range(60)]
    splits = [split_texts(texts, [0] * 60, 0.3, 3), *fold_texts(texts, [0.5] * 60, 4, 3)]
    for train, val in splits:
        assert sorted([*train, *val]) == list(range(60)) and train and val
        assert not {texts[index] for index in train} & {texts[index] for index in val}


def test_splits_and_folds_have_the_same_share_of_each_class() -> None:
    texts, classes = [f"text {number}" for number in range(40)], ["a"] * 20 + ["b"] * 20
    train, val = split_texts(texts, classes, 0.25, 0)
    assert len(val) == 10 and sum(classes[index] == "a" for index in val) == 5 and len(train) == 30
    folds = fold_texts(texts, classes, 4, 0)
    assert sorted(index for _, val in folds for index in val) == list(range(40))
    assert all(sum(classes[index] == "a" for index in val) == 5 for _, val in folds)
    assert [len(part) for part in split_texts(texts[:3], [0, 1, 2], 0.2, 0)] == [2, 1]  # one text per class
    for num_folds in (1, 50):
        with pytest.raises(ConfigError, match="num_folds"):
            fold_texts(texts, classes, num_folds, 0)
    with pytest.raises(ConfigError, match="val_split"):
        split_texts(texts, classes, 1.5, 0)


def test_labels_can_be_classes_or_numbers() -> None:
    words = labels_of(["good", "bad", "good", "so so", "bad", "so so"], "auto")
    assert words.names == ["bad", "good", "so so"] and encode(["good"], words) == [1]
    assert labels_of([torch.tensor(1), np.int64(0), True, False], "auto").names == ["0", "1"]
    numbers = labels_of([1.5, 2.5, 3.5], "auto")
    assert not numbers.names and numbers.values(np.array(encode([3.5], numbers))) == pytest.approx(3.5)
    assert not labels_of(list(range(30)), "auto").names and labels_of([0, 1] * 3, "class").names == ["0", "1"]
    with pytest.raises(ConfigError, match="the classes are bad, good, so so"):
        encode(["worse"], words)
    with pytest.raises(ConfigError, match="is not a number"):
        labels_of(["a", "b"], "number")


# Training -------------------------------------------------------------------------------------------------------------


def test_micro_batches_change_nothing_and_the_loaders_contain_every_text() -> None:
    results = []
    for size in (6, 2):
        engine = AdvancedLLMSEOEngine(config(batch_size=size, save_checkpoints=False))
        train, val = engine.create_distributed_dataloaders(TEXTS, LABELS)
        assert sorted(text for batch in (*train, *val) for text in batch["text"]) == sorted(TEXTS)
        results.append(losses(engine.train_with_early_stopping(train, val)))
    assert results[0] == pytest.approx(results[1], abs=1e-12)


@pytest.mark.parametrize("name", ["constant", "linear", "cosine"])
def test_the_schedule_counts_optimizer_steps(name: str) -> None:
    engine = AdvancedLLMSEOEngine(config(lr_scheduler=name, output_dir="run", save_checkpoints=False))
    engine.train_with_early_stopping(*loaders(engine))
    rows = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    left = np.array([4, 3, 2, 1]) / 4  # loss of the four steps after warm-up
    decay = {"constant": np.ones(4), "linear": left, "cosine": (1 + np.cos(np.pi * (1 - left))) / 2}[name]
    assert [row["lr"] / 1e-3 for row in rows if "lr" in row] == pytest.approx([0.5, 1, *decay])


def test_training_stops_early_and_ends_with_the_best_epoch() -> None:
    fields = {"early_stopping_patience": 2, "early_stopping_min_delta": 100, "num_epochs": 9}
    engine = AdvancedLLMSEOEngine(config(**fields))
    train, val = loaders(engine)
    result = engine.train_with_early_stopping(train, val)
    assert result["epochs_completed"] == 3 and result["early_stopping_triggered"] and result["best_epoch"] == 0
    assert engine.evaluate_model(val)["loss"] == pytest.approx(result["history"][0]["val_loss"], abs=1e-6)
    assert result["history"][2]["val_loss"] != result["history"][0]["val_loss"]
    assert Path(result["checkpoint"]) == Path("checkpoints/best_model")
    unsaved = AdvancedLLMSEOEngine(config(**fields, save_checkpoints=False))
    result = unsaved.train_with_early_stopping(train, val)
    assert result["checkpoint"] is None
    assert unsaved.evaluate_model(val)["loss"] == pytest.approx(result["history"][2]["val_loss"], abs=1e-6)
    with pytest.raises(ConfigError, match="max_epochs"):
        engine.train_with_early_stopping(train, val, max_epochs=0)


def test_a_resumed_run_repeats_no_epoch_and_keeps_its_best() -> None:
    whole = AdvancedLLMSEOEngine(config(num_epochs=3))
    train, val = loaders(whole)
    expected = whole.train_with_early_stopping(train, val)
    settings = config(num_epochs=3, output_dir="run", checkpoint_dir="kept")
    engine = AdvancedLLMSEOEngine(settings)
    train, val = loaders(engine)
    for _ in range(2):
        engine.train_epoch(train, val)
    engine.cleanup_multi_gpu()
    again = AdvancedLLMSEOEngine(settings)
    train, val = loaders(again)
    result = again.train_with_early_stopping(train, val)
    assert losses(result) == pytest.approx(losses(expected), abs=1e-12)
    with pytest.raises(ConfigError, match="differ from those of the run in run"):
        again.train_epoch(val)
    again.cleanup_multi_gpu()


def test_training_on_new_texts_starts_from_the_current_weights() -> None:
    engine = AdvancedLLMSEOEngine(config())
    first, second = loaders(engine, val_split=0.5)
    engine.train_epoch(first)
    model = engine.seo_model
    engine.train_epoch(second)
    assert engine.seo_model is model and engine._training.classifier.num_epochs == 2
    with pytest.raises(ConfigError, match="the classes are 0, 1"):
        engine.train_epoch(loaders(engine, ["a", "b", "c", "d"], ["x", "y"] * 2)[0])


def test_predicted_numbers_have_the_unit_of_the_labels() -> None:
    minutes = [1000.0 + 10 * number for number in range(11)] + [10.0 * number + 0.5 for number in range(11)]
    engine = AdvancedLLMSEOEngine(config(num_epochs=9, lr_scheduler="constant", save_checkpoints=False))
    train, val = loaders(engine, labels=minutes)
    engine.train_with_early_stopping(train, val)
    metrics = engine.evaluate_model(train)
    assert metrics["rmse"] < metrics["baseline_rmse"] / 4 and metrics["spearman"] > 0.7
    assert engine.analyze_seo_score(TEXTS[0])["seo_score"] == pytest.approx(1000, abs=300)


def test_cross_validation_trains_a_model_for_each_fold_and_leaves_the_engine_unchanged() -> None:
    engine = AdvancedLLMSEOEngine(config())
    result = engine.train_cross_validation(TEXTS, LABELS, num_folds=2, max_epochs=2)
    assert [row["num"] for row in result["folds"]] == [11, 11] and result["mean"]["baseline_accuracy"] < 0.6
    assert result["mean"]["accuracy"] == pytest.approx(np.mean([row["accuracy"] for row in result["folds"]]))
    assert engine.seo_model is None and Path("checkpoints/fold_2/best_model").is_dir()


def test_truncated_texts_and_a_warm_up_that_is_too_long_are_noted(capfd: pytest.CaptureFixture[str]) -> None:
    long = [text + " and more" * 40 for text in TEXTS]
    engine = AdvancedLLMSEOEngine(config(warmup_steps=100))
    engine.train_epoch(loaders(engine, long)[0])
    printed = capfd.readouterr().err
    assert "18 of 18 texts are longer than max_length 32" in printed
    assert "warmup_steps 100 exceeds the 6 steps" in printed


def test_a_lora_of_minilm_trains_few_weights_and_the_head() -> None:
    engine = AdvancedLLMSEOEngine(SEOConfig(num_epochs=1, max_length=32, dataloader_num_workers=0, warmup_steps=1))
    engine.train_epoch(loaders(engine, TEXTS[::4], LABELS[::4])[0])
    assert engine.seo_model is not None
    trained = {name: weight for name, weight in engine.seo_model.named_parameters() if weight.requires_grad}
    assert any("lora_A" in name for name in trained) and any("classifier" in name for name in trained)
    num_trained = sum(weight.numel() for weight in trained.values())
    assert num_trained < 0.1 * sum(weight.numel() for weight in engine.seo_model.parameters())
    with pytest.raises(ConfigError, match="set use_lora=False"):
        loaders(AdvancedLLMSEOEngine(config(use_lora=True)))
    with pytest.raises(ConfigError, match="there is no such folder"):
        loaders(AdvancedLLMSEOEngine(SEOConfig(model_name="./nowhere")))


def test_the_seed_determines_the_new_weights() -> None:
    def first_weight(seed: int) -> torch.Tensor:
        engine = AdvancedLLMSEOEngine(config(seed=seed))
        torch.manual_seed(torch.randint(1000, (1,)).item())
        model = engine._training.classifier.build(Calibration(names=["0", "1"]), TEXTS)
        return next(model.parameters()).detach().clone()

    assert torch.equal(first_weight(1), first_weight(1)) and not torch.equal(first_weight(1), first_weight(2))


# Checkpoints ----------------------------------------------------------------------------------------------------------


def test_another_engine_continues_from_a_checkpoint() -> None:
    settings = config(num_epochs=3, checkpoint_dir="kept")
    engine = AdvancedLLMSEOEngine(settings)
    train, val = loaders(engine)
    expected = [engine.train_epoch(train, val)]
    assert engine.save_checkpoint("first.pt") == Path("kept/first.pt")
    score = engine.analyze_seo_score(TEXTS[0])["seo_score"]
    expected += [engine.train_epoch(train, val) for _ in range(2)]
    other = AdvancedLLMSEOEngine(settings)
    assert other.load_checkpoint("./kept/first.pt")["epochs"] == 1
    assert other.analyze_seo_score(TEXTS[0])["seo_score"] == pytest.approx(score, abs=1e-6)
    continued = [other.train_epoch(train, val) for _ in range(2)]
    assert [row["epoch"] for row in continued] == [1, 2]
    assert [row["val_loss"] for row in continued] == pytest.approx([row["val_loss"] for row in expected[1:]], abs=1e-12)
    other.load_checkpoint("first.pt")  # in the middle of a run, from the same folder
    assert other.train_epoch(train, val)["val_loss"] == pytest.approx(expected[1]["val_loss"], abs=1e-12)
    assert {path.suffix for path in Path("kept").rglob("*") if path.is_file()} == {".json", ".safetensors"}


def test_foreign_checkpoints_are_rejected_and_no_file_of_the_user_is_overwritten() -> None:
    engine = AdvancedLLMSEOEngine(config())
    with pytest.raises(ConfigError, match="nothing to save yet"):
        engine.save_checkpoint("x")
    engine.train_epoch(loaders(engine)[0])
    Path("checkpoints").mkdir()
    Path("checkpoints/mine.pt").write_bytes(b"years of work")
    Path("checkpoints/folder").mkdir()
    Path("checkpoints/folder/notes.txt").write_text("mine")
    for name, message in (("mine.pt", "mine.pt exists"), ("folder", "contains notes.txt")):
        with pytest.raises(ConfigError, match=message):
            engine.save_checkpoint(name)
    assert Path("checkpoints/mine.pt").read_bytes() == b"years of work"
    saved = engine.save_checkpoint("good")
    with pytest.raises(ConfigError, match="is not a checkpoint of this engine"):
        engine.load_checkpoint("folder")
    with pytest.raises(ConfigError, match="was saved with max_length=32"):
        AdvancedLLMSEOEngine(config(max_length=40)).load_checkpoint(saved)
    words = AdvancedLLMSEOEngine(config())
    words.train_epoch(loaders(words, labels=["good" if label else "bad" for label in LABELS])[0])
    with pytest.raises(ConfigError, match="different labels"):
        words.load_checkpoint(saved)
    other = AdvancedLLMSEOEngine(config())
    other.train_epoch(loaders(other, [f"quite another text {number}" for number in range(4)], [0, 1] * 2)[0])
    with pytest.raises(ConfigError, match="another tokenizer"):
        other.save_checkpoint("good")
    for content in (b"{", b"[]", b'{"labels": 3}', b"\xff" * 10):
        (saved / "seo.json").write_bytes(content)
        with pytest.raises(ConfigError):
            AdvancedLLMSEOEngine(config()).load_checkpoint(saved)


# Analysis -------------------------------------------------------------------------------------------------------------


def test_before_training_analysis_returns_only_rule_based_checks() -> None:
    engine = AdvancedLLMSEOEngine(SEOConfig())
    analysis = engine.analyze_seo_score("Bread is baked from flour.", ["bread"])
    assert analysis["seo_score"] is None and "not trained yet" in analysis["reason"]
    assert [check["name"] for check in analysis["checks"]] == ["text length", "readability", "keyword: bread"]
    with pytest.raises(ConfigError, match="keywords"):
        engine.analyze_seo_score("a text", [""])
    with pytest.raises(ConfigError, match="no model to evaluate"):
        tiny = AdvancedLLMSEOEngine(config())
        tiny.evaluate_model(loaders(tiny)[1])


def test_the_learned_score_separates_new_pages(trained: AdvancedLLMSEOEngine) -> None:
    cooking = trained.analyze_seo_score("Cook lentils for 30 minutes, then let it rest.", "lentils")
    selling = trained.analyze_seo_score("Best lentils deals! Buy lentils now, sale.")
    assert cooking["seo_score"] > 0.5 > selling["seo_score"] and cooking["label"] == 1 and cooking["reason"] is None
    assert sum(cooking["probabilities"].values()) == pytest.approx(1)


PAGE = """Our mill has stood by the river Aare since 1872. Anna Keller runs it with 3 helpers.

Visitors are welcome on Saturdays. Rye bread keeps fresh for 9 days when it is stored in a wooden box. \
Our mill has stood by the river Aare since 1872.

The stones turn slowly, which keeps the flour cool; the flour keeps its taste that way, and it is sifted twice \
before Anna Keller fills it into 25 kg bags for the bakers of the whole valley."""


def test_rewriting_adds_no_words() -> None:
    changes = list(proposals(PAGE, ["how long does rye bread keep"]))
    assert {change.kind for change in changes} == {"repetition", "answer first", "split"}
    for change in changes:
        assert adds_nothing(PAGE, change.text) and change.text != PAGE
        assert set(re.findall(r"\d+|Keller|Aare", change.text)) == {"1872", "3", "9", "25", "Keller", "Aare"}
        assert change.text.count("\n\n") == 2
    first = next(change for change in changes if change.kind == "answer first").text
    assert first.startswith("Rye bread keeps fresh for 9 days")
    assert not adds_nothing("Rye bread.", "Rye bread. Rye bread.") and not adds_nothing("9 days", "10 days")
    assert list(proposals("Short and good.", ["rye bread"])) == []


def test_sentences_that_refer_to_other_sentences_are_not_moved() -> None:
    for text in (
        "We bake. A starter is fed daily. It makes rye bread sour.",  # what makes it sour?
        "We bake. The rye bread is sour. It keeps for days.",  # what keeps?
        "- our mill\n- rye bread\n- open on Saturdays",  # a list
    ):
        assert not [change for change in proposals(text, ["rye bread"]) if change.kind == "answer first"]
    assert sentences_of("Dr. Keller sells 2.5 kg. She bakes at 4 a.m. daily.") == [
        "Dr. Keller sells 2.5 kg.",
        "She bakes at 4 a.m. daily.",
    ]
    assert not list(proposals("The bag holds 5 kg of rye flour. The bag holds 9 kg of rye flour.", ["rye"]))


@pytest.mark.timeout(60)
def test_rewriting_thousands_of_sentences_is_fast() -> None:
    engine = AdvancedLLMSEOEngine(config())
    equal = "Boil the kettle with vinegar for twenty minutes. "
    [change] = engine.optimize_content(equal * 5000, ["descale a kettle"])["changes"]
    assert change["kind"] == "repetition" and "4,999 times" in change["why"]
    different = " ".join(f"Kettle w{n} boils for v{n} minutes in a kitchen with u{n} windows." for n in range(5000))
    assert not engine.optimize_content(different, ["descale a kettle"])["changes"]


@pytest.mark.parametrize("text, message", [(12345, "expected a string, got 12345 of type int"), (" ", "is empty")])
def test_a_value_that_is_not_a_text_is_rejected(text: Any, message: str) -> None:
    engine = AdvancedLLMSEOEngine(config())
    for method in (engine.analyze_seo_score, engine.optimize_content):
        with pytest.raises(ConfigError, match=message):
            method(text, ["a keyword"])


def test_a_lone_surrogate_is_read_as_an_unknown_character(trained: AdvancedLLMSEOEngine) -> None:
    whole, half = (trained.analyze_seo_score(f"Cook bread {sign}")["seo_score"] for sign in ("?", "\ud800"))
    assert whole == half
    trained.optimize_content("Cook \ud800 bread.", ["bread"])
    engine = AdvancedLLMSEOEngine(config(num_epochs=1))
    train, _ = loaders(engine, ["Cook \ud800 bread.", *TEXTS], [1, *LABELS])
    assert engine.train_epoch(train)["train_loss"] > 0


def test_optimizing_with_the_real_ranker_never_lowers_the_score_and_adds_no_word() -> None:
    engine = AdvancedLLMSEOEngine(config(rank_model="minilm"))
    result = engine.optimize_content(PAGE, ["how long does rye bread keep"])
    assert result["improvement"] == result["optimized_score"] - result["original_score"] > 0.01
    kept = [change for change in result["changes"] if change["kept"]]
    assert kept and all(change["score_after"] >= change["score_before"] - 1e-6 for change in kept)
    assert not set(words_of(result["optimized_content"])) - set(words_of(PAGE))
    assert result["optimized_content"].count("rye") <= PAGE.count("rye") and "minilm" in result["scored_by"]
    with pytest.raises(ConfigError, match="target_keywords is empty"):
        engine.optimize_content(PAGE, [])


def test_a_change_that_lowers_the_score_is_listed_and_reverted(trained: AdvancedLLMSEOEngine) -> None:
    class PrefersLong:
        def scores(self, queries: list[str], pages: list[str]) -> torch.Tensor:
            return torch.tensor([[float(len(page)) for page in pages]])

    engine = AdvancedLLMSEOEngine(config(rank_model="x"))
    engine._ranker = PrefersLong()
    result = engine.optimize_content(PAGE, ["rye bread"])
    kept = {change["kind"]: change["kept"] for change in result["changes"]}
    assert kept["repetition"] is False and kept["answer first"] is True
    assert result["optimized_content"].count("1872") == 2
    unscored = AdvancedLLMSEOEngine(config()).optimize_content(PAGE, ["rye bread"])
    assert unscored["optimized_content"] == PAGE and unscored["improvement"] is None and unscored["changes"]
    assert "not trained yet" in unscored["scored_by"]
    learned = trained.optimize_content(PAGE, ["rye bread"])
    assert learned["improvement"] >= -1e-6 and learned["scored_by"] == "the classifier trained by this engine"


# Two real ranks -------------------------------------------------------------------------------------------------------


def train_on_two_ranks(folder: str, port: int) -> dict[str, Any]:
    """Runs in each rank, started by a launcher and then by hand."""
    os.chdir(folder)
    warnings.simplefilter("ignore")
    result: dict[str, Any] = {"errors": []}
    two = {"use_multi_gpu": True, "multi_gpu_strategy": "distributed", "num_gpus": 2, "effective_batch_size": None}
    for fields in ({"use_multi_gpu": False}, {"multi_gpu_strategy": "dataparallel"}):
        try:
            AdvancedLLMSEOEngine(config(**{**two, **fields}))
        except ConfigError as error:
            result["errors"].append(str(error))
    engine = AdvancedLLMSEOEngine(config(**two, checkpoint_dir="two"))
    train, val = engine.create_distributed_dataloaders(TEXTS, LABELS)
    result["read"] = [text for batch in (*train, *val) for text in batch["text"]]
    result["losses"] = losses(engine.train_with_early_stopping(train, val))
    result["evaluated"] = engine.evaluate_model(val)["loss"]
    status = engine.get_multi_gpu_status()
    result["status"] = [status[name] for name in ("strategy", "world_size", "rank", "is_distributed", "backend")]
    result["batch"] = status["effective_batch_size"]
    result["wrapped"] = type(engine._wrap_model_for_multi_gpu()).__name__
    if status["rank"] == 0:  # one process alone
        result["score"] = engine.analyze_seo_score(TEXTS[0])["seo_score"]
    engine.synchronize_gpus()
    for name, fields in {
        "buckets": {
            "bucket_cap_mb": 0.01,
            "gradient_as_bucket_view": True,
            "broadcast_buffers": False,
            "find_unused_parameters": True,
            "multi_gpu_strategy": "auto",
            "distributed_backend": "gloo",
        },
        "four": {"static_graph": True, "sync_batch_norm": True, "num_gpus": 4, "effective_batch_size": 6},
    }.items():
        other = AdvancedLLMSEOEngine(config(**{**two, **fields}, save_checkpoints=False))
        result[name] = losses(other.train_with_early_stopping(*other.create_distributed_dataloaders(TEXTS, LABELS)))
        result["requested"] = other.get_multi_gpu_status()["requested_gpus"]
    result["folds"] = engine.train_cross_validation(TEXTS, LABELS, num_folds=2, max_epochs=1)["mean"]["loss"]
    engine.load_checkpoint("one/best_model")
    result["continued"] = engine.train_epoch(train, val)["val_loss"]
    engine.cleanup_multi_gpu()
    result["clean"] = [engine.is_distributed, torch.distributed.is_initialized()]
    try:
        engine.train_epoch(train, val)
    except ConfigError as error:
        result["errors"].append(str(error))
    rank = int(os.environ["RANK"])
    launcher = {
        name: os.environ.pop(name) for name in list(os.environ) if name.startswith(("RANK", "WORLD", "TORCHEL"))
    }
    by_hand = {
        **two,
        "distributed_world_size": 2,
        "distributed_rank": rank,
        "distributed_init_method": f"tcp://127.0.0.1:{port}",
    }
    hand = AdvancedLLMSEOEngine(config(**by_hand, save_checkpoints=False))
    result["by hand"] = losses(hand.train_with_early_stopping(*hand.create_distributed_dataloaders(TEXTS, LABELS)))
    hand.cleanup_multi_gpu()
    os.environ.update(launcher)  # where the test expects them
    return result


def test_two_ranks_train_evaluate_and_save_like_one_device() -> None:
    one = AdvancedLLMSEOEngine(config(checkpoint_dir="one", num_epochs=2))
    train, val = one.create_distributed_dataloaders(TEXTS, LABELS)
    expected = losses(one.train_with_early_stopping(train, val))
    folds = one.train_cross_validation(TEXTS, LABELS, num_folds=2, max_epochs=1)["mean"]["loss"]
    after = one.train_epoch(train, val)["val_loss"]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    both = run_ranks("train_on_two_ranks", __file__, 2, {"folder": str(Path.cwd()), "port": port})
    assert sorted(both[0]["read"] + both[1]["read"]) == sorted(TEXTS)
    for rank, result in enumerate(both):
        for name in ("losses", "buckets", "four", "by hand"):
            assert result[name] == pytest.approx(expected, abs=1e-12), name
        assert result["evaluated"] == pytest.approx(expected[-1], abs=1e-6)
        assert result["folds"] == pytest.approx(folds, abs=1e-6)
        assert result["continued"] == pytest.approx(after, abs=1e-12)  # continues from the checkpoint of one device
        assert result["status"] == ["distributed", 2, rank, True, "gloo"] and result["batch"] == 6
        assert result["wrapped"] == "DistributedDataParallel" and result["requested"] == 4
        assert result["clean"] == [False, False]
        assert "use_multi_gpu is False" in result["errors"][0] and "from one process" in result["errors"][1]
        assert "create a new engine" in result["errors"][2]
    again = AdvancedLLMSEOEngine(config())
    again.load_checkpoint("two/best_model")  # of two ranks
    assert again.evaluate_model(val)["loss"] == pytest.approx(expected[-1], abs=1e-6)
    assert again.analyze_seo_score(TEXTS[0])["seo_score"] == pytest.approx(both[0]["score"], abs=1e-6)
    assert texts_and_labels(val, "val")[0]
