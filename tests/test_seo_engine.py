"""SEOConfig and AdvancedLLMSEOEngine: the known names, on one device and on two real ranks, with the same result."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, WeightedRandomSampler

from ranks import run_ranks
from unisono.devices import Gpu
from unisono.errors import ConfigError
from unisono.recipes.seo.front import (
    AdvancedLLMSEOEngine,
    DataLoaderConfig,
    DataLoaderManager,
    EarlyStopping,
    SEOConfig,
    SEODataset,
    rewriting,
)
from unisono.recipes.seo.front.data import texts_and_labels
from unisono.recipes.seo.front.devices import find_devices, precision, trainer_config
from unisono.recipes.seo.front.labels import Labels
from unisono.recipes.seo.front.meaningless import MEANINGLESS
from unisono.recipes.seo.front.metrics import of_classes, of_numbers, of_order
from unisono.recipes.seo.front.rewriting import proposals, says_nothing_new, sentences_of, titles
from unisono.recipes.seo.front.schedule import make_schedule
from unisono.recipes.seo.front.splits import folds, parts
from unisono.recipes.seo.site.text_rules import words_of

KNOWN = {
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
}
DISHES = ("bread", "soup", "rice", "beans", "cake", "eggs", "stew", "jam", "pasta", "fish", "plums")
TEXTS = [f"Cook {dish} for {9 + number} minutes, then let it rest." for number, dish in enumerate(DISHES)]
TEXTS += [f"Best {dish} deals! Buy {dish} now, {dish} sale." for dish in DISHES]
LABELS = [1] * len(DISHES) + [0] * len(DISHES)
EXACT = {"dtype": "float64", "tensorboard": False, "log_every": 1}


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    seen: list[Gpu] = []
    for room in ("multi_gpu.gpus", "multi_gpu.launch", "recipes.seo.front.devices"):
        monkeypatch.setattr(f"unisono.{room}.visible_gpus", lambda: seen)


def config(**fields: Any) -> SEOConfig:
    """A tiny model, in float64."""
    told = {
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
    return SEOConfig.from_dict({**told, **fields})


def losses(found: dict[str, Any]) -> list[float]:
    return [row[name] for row in found["history"] for name in ("train_loss", "val_loss")]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> AdvancedLLMSEOEngine:
    """An engine that has learned to tell cooking from selling."""
    before = Path.cwd()
    os.chdir(tmp_path_factory.mktemp("trained"))
    try:
        engine = AdvancedLLMSEOEngine(config(num_epochs=6, checkpoint_dir=str(Path.cwd() / "kept")))
        engine.train_with_early_stopping(*engine.create_training_dataloaders(TEXTS, LABELS))
    finally:
        os.chdir(before)
    return engine


# --- the config


def test_every_known_field_is_there_with_its_known_default() -> None:
    found = SEOConfig()
    assert {name: getattr(found, name) for name in KNOWN} == KNOWN
    assert all(getattr(found, name) == default for name, (default, _) in MEANINGLESS.items())
    assert len([name for name in MEANINGLESS if name.startswith("profile_")]) == 42


def test_fields_that_never_did_anything_are_refused_when_set_and_harmless_when_written_out() -> None:
    for name, (default, reason) in MEANINGLESS.items():
        SEOConfig(**{name: default})
        other = (
            not default if isinstance(default, bool) else ["x"] if isinstance(default, list | dict) else f"{default}x"
        )
        with pytest.raises(ConfigError, match=re.escape(f"{name}={other!r} would do nothing: {reason}")) as caught:
            SEOConfig(**{name: other})
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"multi_gpu_strategy": "distribute"}, "did you mean distributed"),
        ({"distributed_backend": "mpi"}, "distributed_backend: expected nccl or gloo"),
        ({"distributed_init_method": "file:///tmp/x"}, "expected env:// or tcp"),
        ({"distributed_init_method": "tcp://host"}, "an address and a port"),
        ({"distributed_master_port": "http"}, "an address and a port"),
        ({"distributed_rank": 2, "distributed_world_size": 2}, "distributed_rank 2 needs"),
        ({"num_gpus": 0}, "num_gpus: expected a whole number"),
        ({"batch_size": 0}, "batch_size"),
        ({"learning_rate": -1}, "learning_rate: expected a number above 0"),
        ({"learning_rate": float("nan")}, "learning_rate"),
        ({"lr_scheduler": "cosin"}, "did you mean cosine"),
        ({"mixed_precision_dtype": "int8"}, "mixed_precision_dtype"),
        ({"device": "mps"}, "mps is not built in"),
        ({"device": "cuda:1", "use_multi_gpu": True, "num_gpus": 2}, "is one GPU"),
        ({"early_stopping_mode": "max"}, "a larger val_loss is not better"),
        ({"early_stopping_monitor": "val_accuracy"}, "a smaller val_accuracy"),
        ({"use_gradient_accumulation": True}, "does not say over how many"),
        ({"gradient_accumulation_steps": 4, "effective_batch_size": 60}, "= 64 is not effective_batch_size 60"),
        ({"label": "words"}, "label: expected"),
        ({"settings": 3}, "settings: expected a dict"),
        ({"batchsize": 3}, "did you mean batch_size"),
    ],
)
def test_what_no_run_can_be_made_of_is_refused_in_one_line(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        SEOConfig.from_dict(fields)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "name", "value"),
    [
        ({"batch_size": 5}, "batch_size", 5),
        ({"batch_size": 5, "gradient_accumulation_steps": 3}, "global_batch_size", 15),
        ({"batch_size": 5, "effective_batch_size": 40, "use_gradient_accumulation": True}, "global_batch_size", 40),
        ({"learning_rate": 0.5}, "learning_rate", 0.5),
        ({"weight_decay": 0.5}, "weight_decay", 0.5),
        ({"max_grad_norm": 0.5}, "grad_clip", 0.5),
        ({"seed": 9}, "seed", 9),
        ({"distributed_backend": "gloo"}, "backend", "gloo"),
        ({"find_unused_parameters": True}, "find_unused_parameters", True),
        ({"gradient_as_bucket_view": True}, "gradient_as_bucket_view", True),
        ({"broadcast_buffers": False}, "broadcast_buffers", False),
        ({"bucket_cap_mb": 50}, "bucket_cap_mb", 50),
        ({"static_graph": True}, "static_graph", True),
        ({"dataloader_num_workers": 7}, "num_workers", 7),
        ({"dataloader_pin_memory": False}, "pin_memory", False),
        ({"dataloader_persistent_workers": False}, "persistent_workers", False),
        ({"lr_scheduler": "plateau"}, "scheduler_interval", "epoch"),
        ({"mixed_precision_dtype": "bfloat16"}, "mixed_precision", "bf16"),
        ({"sync_batch_norm": True}, "sync_batch_norm", True),
        ({"tensorboard_logging": False}, "tensorboard", False),
        ({"settings": {"ema_decay": 0.9}}, "ema_decay", 0.9),
    ],
)
def test_a_field_reaches_the_engine(fields: dict[str, Any], name: str, value: Any) -> None:
    told, plain = (
        trainer_config(each, find_devices(each), each.batch_size) for each in (SEOConfig(**fields), SEOConfig())
    )
    assert {**told.engine_settings(), **vars(told)}[name] == value
    assert {**plain.engine_settings(), **vars(plain)}.get(name) != value  # it is the field that did it


def test_gradient_checkpointing_trains_the_same_and_the_banner_has_the_user_s_words(
    capfd: pytest.CaptureFixture[str],
) -> None:
    found = []
    for fields in ({}, {"gradient_checkpointing": True}):
        engine = AdvancedLLMSEOEngine(config(num_epochs=1, **fields))
        told = trainer_config(engine.config, find_devices(engine.config), 3)
        assert told.activation_checkpointing is bool(fields)
        train, _ = engine.create_training_dataloaders(TEXTS, LABELS)
        found.append(engine.train_epoch(train)["train_loss"])
        engine.cleanup_multi_gpu()
    assert found[0] == pytest.approx(found[1], rel=1e-12)
    printed = capfd.readouterr().err
    assert printed.count("unisono: AdvancedLLMSEOEngine (tiny)") == 2 and "OwnModel" not in printed


@pytest.mark.parametrize(
    "setting, field",
    [("activation_checkpointing", "gradient_checkpointing"), ("grad_clip", "max_grad_norm"), ("gpus", "num_gpus")],
)
def test_a_setting_that_has_a_field_names_a_field_that_there_is(setting: str, field: str) -> None:
    with pytest.raises(ConfigError, match=rf"settings: {setting} has a field of its own here \({field}\)"):
        config(settings={setting: 1})
    assert hasattr(config(), field)


def test_a_config_file_holds_the_fields(tmp_path: Path) -> None:
    (tmp_path / "it.yaml").write_text("batch_size: 4\nuse_multi_gpu: true\nprofile_autocast: true\n")
    found = SEOConfig.from_file(tmp_path / "it.yaml")
    assert found.batch_size == 4 and SEOConfig.from_dict(found.to_dict()) == found
    for content, words in (("- 4\n", "is not a config file"), ("a: [", "cannot be read")):
        (tmp_path / "it.yaml").write_text(content)
        with pytest.raises(ConfigError, match=words):
            SEOConfig.from_file(tmp_path / "it.yaml")


# --- devices


def test_four_gpus_on_a_smaller_machine_are_one_warning_and_the_same_effective_batch(
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
    engine.synchronize_gpus()
    engine.cleanup_multi_gpu()


def test_dataparallel_falls_back_to_one_device_with_the_batch_that_was_asked_for() -> None:
    two = config(use_multi_gpu=True, num_gpus=2, effective_batch_size=None, save_checkpoints=False)
    engine, plain = AdvancedLLMSEOEngine(two), AdvancedLLMSEOEngine(config(use_multi_gpu=False, save_checkpoints=False))
    found = [each.train_with_early_stopping(*each.create_dataloaders(TEXTS, LABELS)) for each in (engine, plain)]
    assert losses(found[0]) == pytest.approx(losses(found[1]), abs=1e-12)
    assert engine.get_multi_gpu_status()["effective_batch_size"] == 6
    assert engine._setup_dataparallel_training.__doc__ and not engine.is_dataparallel and not engine.is_distributed


def test_which_devices_a_config_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    def gpus(number: int, capability: str = "9.0") -> None:
        there = [
            Gpu(each, f"GPU-{each}", "Large", 80 * 10**9, 79 * 10**9, capability=capability) for each in range(number)
        ]
        monkeypatch.setattr("unisono.recipes.seo.front.devices.visible_gpus", lambda: there)

    many = {"use_multi_gpu": True, "num_gpus": 4}
    gpus(4)
    found = find_devices(SEOConfig(**many))
    assert (found.strategy, found.num_gpus, found.note) == ("dataparallel", 4, None)
    told = trainer_config(SEOConfig(**many), found, 16)
    assert (told.num_gpus, told.strategy, told.global_batch_size, told.mixed_precision) == (
        4,
        "dataparallel",
        64,
        "bf16",
    )
    alone = find_devices(SEOConfig(**many, multi_gpu_strategy="distributed"))
    assert (alone.strategy, alone.num_gpus, alone.asked) == ("single", 1, 4)
    assert alone.note is not None and "torchrun --nproc_per_node=4" in alone.note
    assert find_devices(SEOConfig(**many, device="cpu")).num_gpus == 0
    assert find_devices(SEOConfig(**{**many, "use_multi_gpu": False})).num_gpus == 1
    one = trainer_config(SEOConfig(device="cuda:2"), find_devices(SEOConfig(device="cuda:2")), 16)
    assert (one.gpu_ids, one.num_gpus) == ([2], None)
    gpus(3)
    found = find_devices(SEOConfig(**many, multi_gpu_strategy="auto"))
    assert (found.strategy, found.num_gpus, found.asked) == ("dataparallel", 3, 4) and "3 GPUs" in str(found.note)
    gpus(1, "7.5")
    assert precision(SEOConfig(), find_devices(SEOConfig())) == "fp16"
    for off in (
        {"use_mixed_precision": False},
        {"mixed_precision_enabled": False},
        {"mixed_precision_dtype": "float32"},
    ):
        assert precision(SEOConfig(**off), find_devices(SEOConfig())) == "no"
    gpus(0)
    with pytest.raises(ConfigError, match="there is no GPU here"):
        AdvancedLLMSEOEngine(SEOConfig(device="cuda"))


# --- data


def test_texts_and_labels_that_cannot_be_are_refused() -> None:
    engine = AdvancedLLMSEOEngine(config())
    for texts, labels, words in (
        (["a", " "], [0, 1], "texts: number 1 is empty"),
        (["a", 3], [0, 1], "texts: number 1 is of type int"),
        (["a", "b"], [0], "labels: 1 of them for 2 texts"),
        (["a", "b"], [1, 1], "all are 1; nothing can be learned from one class"),
        (["a", "b"], [0.5, float("nan")], "labels: number 1 is nan"),
        (["a", "b"], None, "labels"),
    ):
        with pytest.raises(ConfigError, match=words):
            engine.train_epoch(SEODataset(texts, labels))
    with pytest.raises(ConfigError, match="metadata"):
        engine.create_cross_validation_dataloaders(TEXTS, LABELS, group_by="site", cv_strategy="group")
    with pytest.raises(ConfigError, match="is empty"):
        engine.train_epoch(SEODataset([], []))
    assert not list(Path.cwd().iterdir())


def test_a_data_set_has_what_it_was_given_and_invents_no_labels() -> None:
    engine = AdvancedLLMSEOEngine(config())
    data = engine.create_training_dataset(TEXTS, LABELS, "some", {"site": list("ab" * 11)})
    item = data[3]
    assert item["text"] == TEXTS[3] and item["labels"] == 1 and item["site"] == "b"
    assert item["input_ids"].dtype == torch.int64 and bool(item["attention_mask"].all())
    assert "labels" not in SEODataset(["a page"])[0]
    with pytest.raises(ConfigError, match="site: 1 of them"):
        SEODataset(TEXTS, LABELS, metadata={"site": ["a"]})
    manager = DataLoaderManager(DataLoaderConfig(batch_size=4, num_workers=0), engine.tokenizer, 8)
    manager.create_dataset("short", TEXTS, LABELS)
    batch = next(iter(manager.create_dataloader("short")))
    assert batch["input_ids"].shape == (4, 8) and batch["labels"].shape == (4,) and len(batch["text"]) == 4
    assert texts_and_labels(ConcatDataset([data, data]))[0] == TEXTS * 2
    with pytest.raises(ConfigError, match="no data set 'other'"):
        manager.create_dataloader("other")


def test_equal_texts_are_never_on_both_sides() -> None:
    texts = [f"text {number % 12}" for number in range(60)]
    sides = parts(60, [0.7, 0.3], 3, texts=texts)
    assert sorted(index for side in sides for index in side) == list(range(60)) and all(sides)
    assert not {texts[index] for index in sides[0]} & {texts[index] for index in sides[1]}
    for train, val in folds(60, 4, "kfold", 3, texts=texts):
        assert not {texts[index] for index in train} & {texts[index] for index in val}


def test_splits_have_their_share_of_each_class_and_nothing_twice() -> None:
    train, val, test = AdvancedLLMSEOEngine(config()).create_training_dataloaders_with_test(TEXTS, LABELS)
    found = [texts_and_labels(loader) for loader in (train, val, test)]
    assert sorted(text for texts, _ in found for text in texts) == sorted(TEXTS)
    assert [len(texts) for texts, _ in found] == [16, 3, 3]
    assert all(0 < sum(labels or []) < len(labels or []) for _, labels in found)
    assert [len(part) for part in parts(3, [0.7, 0.15, 0.15], 0)] == [1, 1, 1]
    assert parts(4, [0.5, 0.5], 0, in_order=True) == [[0, 1], [2, 3]]
    with pytest.raises(ConfigError, match="add up to 1"):
        parts(9, [0.7, 0.7], 0)


def test_folds_validate_each_text_once_and_keep_what_belongs_together() -> None:
    classes = [1] * 20 + [0] * 20
    for train, val in folds(40, 4, "stratified", 0, classes):
        assert sum(classes[index] for index in val) == 5 and len(val) == 10 and not set(train) & set(val)
    groups = [index // 5 for index in range(40)]
    for train, val in folds(40, 4, "group", 0, groups=groups):
        assert not {groups[index] for index in train} & {groups[index] for index in val}
    for strategy in ("stratified", "kfold", "group"):
        found = folds(40, 3, strategy, 1, classes, groups)
        assert sorted(index for _, val in found for index in val) == list(range(40))
    assert all(max(train) < min(val) for train, val in folds(10, 3, "timeseries", 0))
    with pytest.raises(ConfigError, match="3 texts cannot be cut into 5 folds"):
        folds(3, 5, "kfold", 0)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"drop_last": True}, "no text is left out"),
        ({"sampler": [1]}, "the same on any number of GPUs"),
        ({"seo_domain_split": True}, "group_by='domain'"),
        ({"use_cross_validation": True}, "train_cross_validation"),
        ({"cv_strategy": "some"}, "cv_strategy"),
        ({"batch_size": 0}, "batch_size"),
    ],
)
def test_a_loader_s_config_acts_or_refuses(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        DataLoaderConfig(**fields)


def test_a_loader_of_one_s_own_says_batch_and_order_and_a_strange_one_is_refused() -> None:
    engine = AdvancedLLMSEOEngine(config(effective_batch_size=None))
    data = SEODataset(TEXTS, LABELS)
    engine.train_epoch(DataLoader(data, batch_size=11))
    assert engine.get_multi_gpu_status()["effective_batch_size"] == 11
    strange = DataLoader(data, batch_size=2, sampler=WeightedRandomSampler([1.0] * 22, 22))
    with pytest.raises(ConfigError, match="WeightedRandomSampler"):
        engine.train_epoch(strange)
    with pytest.raises(ConfigError, match="items must be"):
        engine.train_epoch([1, 2, 3])
    pairs = list(zip(TEXTS, LABELS, strict=True))
    assert engine.evaluate_model(pairs) == engine.evaluate_model(data)


def test_labels_are_classes_or_numbers() -> None:
    words = Labels.of(["good", "bad", "good", "so so"])
    assert words.classes == ("bad", "good", "so so") and words.encode(["good"]) == [1]
    said = words.read(np.zeros((1, 3)))[0]
    assert said["seo_score"] is None and said["probabilities"]["bad"] == pytest.approx(1 / 3)
    stars = Labels.of([1, 2, 3] * 4)
    assert stars.read(np.array([[0.0, 0.0, 100.0]]))[0]["seo_score"] == pytest.approx(3)
    numbers = Labels.of([1.5, 2.5, 3.5])
    assert numbers.regression and numbers.read(np.array([numbers.encode([3.5])]))[0]["seo_score"] == pytest.approx(3.5)
    assert Labels.of(list(range(30))).regression and not Labels.of([0, 1] * 3, "class").regression
    assert Labels.of([torch.tensor(1), np.int64(0), True, False]).classes == (0, 1)
    assert Labels.from_json(json.loads(json.dumps(stars.to_json()))) == stars
    for broken in (None, {}, {"classes": [1], "mean": 0, "scale": 1}, {"classes": [], "mean": 0, "scale": 0}):
        with pytest.raises(ConfigError, match="cannot be read"):
            Labels.from_json(broken)
    with pytest.raises(ConfigError, match="none of the classes"):
        words.encode(["worse"])
    with pytest.raises(ConfigError, match="no number"):
        Labels.of(["a", "b"], "number")


# --- training


def test_micro_batches_change_nothing_and_the_loader_read_by_hand_is_whole() -> None:
    found = []
    for size in (6, 2):
        engine = AdvancedLLMSEOEngine(config(batch_size=size, save_checkpoints=False))
        train, val = engine.create_distributed_dataloaders(TEXTS, LABELS)
        assert len([text for batch in (*train, *val) for text in batch["text"]]) == len(TEXTS)
        found.append(losses(engine.train_with_early_stopping(train, val)))
    assert found[0] == pytest.approx(found[1], abs=1e-12)


@pytest.mark.parametrize(
    ("name", "told", "expected"),
    [
        ("constant", {}, [0.5, 1, 1, 1, 1, 1, 1, 1]),
        ("linear", {}, [0.5, 1, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]),
        ("cosine", {"cosine": {"eta_min": 1e-4}, "step": {"gamma": 9}}, None),
        ("exponential", {"gamma": 0.5}, [0.5, 1, 1, 1, 0.5, 0.5, 0.5, 0.5]),
        ("step", {"step_size": 1, "gamma": 0.1}, [0.5, 1, 1, 1, 0.1, 0.1, 0.1, 0.1]),
    ],
)
def test_a_schedule_counts_optimizer_steps(name: str, told: dict[str, Any], expected: list[float] | None) -> None:
    if expected is None:
        expected = [0.5, 1, *(0.1 + 0.9 * (1 + np.cos(np.pi * step / 6)) / 2 for step in range(6))]
    engine = AdvancedLLMSEOEngine(
        config(lr_scheduler=name, lr_scheduler_params=told, output_dir="run", save_checkpoints=False)
    )
    engine.train_with_early_stopping(SEODataset(TEXTS, LABELS), SEODataset(TEXTS, LABELS))
    rows = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert [row["lr"] / 1e-3 for row in rows if "lr" in row] == pytest.approx(expected)


def test_plateau_lowers_the_rate_when_the_validation_loss_stays() -> None:
    told = {"factor": 0.1, "patience": 0}
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule: Any = make_schedule(config(lr_scheduler="plateau", lr_scheduler_params=told), 4, 2)(optimizer)
    for loss in (1.0, 1.0):
        schedule.step(loss)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)
    engine = AdvancedLLMSEOEngine(config(lr_scheduler="plateau"))
    data = SEODataset(TEXTS, LABELS)
    assert engine.train_epoch(data, data)["learning_rate"] == 1e-3


@pytest.mark.parametrize(
    ("name", "told", "words"),
    [
        ("cosine", {"gamma": 1}, "cosine has no 'gamma'; it has T_max, eta_min"),
        ("linear", {"num_warmup_steps": 100}, "warmup_steps is a field of its own"),
        ("step", {"step_size": 0}, "at least 1 epoch"),
        ("cosine", {"cosin": {"eta_min": 1}}, "did you mean cosine"),
        ("exponential", {"gamma": "x"}, "expected a number"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(name: str, told: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_schedule(config(lr_scheduler=name, lr_scheduler_params=told), 4, 2)


def test_early_stopping_counts_epochs_without_improvement() -> None:
    stopping = EarlyStopping(patience=3, min_delta=0.001, monitor="val_loss", mode="min")
    said = [stopping(loss) for loss in (0.5, 0.4, 0.35, 0.35, 0.3495, 0.35)]
    assert said == [False] * 5 + [True] and stopping.best == 0.35 and stopping.best_epoch == 2
    stopping.reset()
    assert not stopping(9.0) and stopping.improved and not stopping(float("nan"))
    rising = EarlyStopping(patience=2, min_delta=0.01, monitor="val_accuracy", mode="max")
    assert [rising(value) for value in (0.7, 0.75, 0.75, 0.75)] == [False, False, False, True]
    with pytest.raises(ConfigError, match="mode"):
        EarlyStopping(mode="best")


def test_training_stops_early_and_ends_with_the_best_epoch() -> None:
    told = {"early_stopping_patience": 2, "early_stopping_min_delta": 100, "num_epochs": 9}
    engine = AdvancedLLMSEOEngine(config(**told))
    train, val = engine.create_training_dataloaders(TEXTS, LABELS)
    found = engine.train_with_early_stopping(train, val)
    assert found["epochs_completed"] == 3 and found["early_stopping_triggered"] and found["best_epoch"] == 0
    assert engine.evaluate_model(val)["loss"] == pytest.approx(found["history"][0]["val_loss"], abs=1e-12)
    assert found["history"][2]["val_loss"] != found["history"][0]["val_loss"]
    assert Path(found["checkpoint"]) == Path("checkpoints/best_model") and engine.get_training_status()["epochs"] == 1
    nothing_kept = AdvancedLLMSEOEngine(config(**told, save_checkpoints=False))
    found = nothing_kept.train_with_early_stopping(train, val)
    assert found["checkpoint"] is None
    assert nothing_kept.evaluate_model(val)["loss"] == pytest.approx(found["history"][2]["val_loss"], abs=1e-12)
    with pytest.raises(ConfigError, match="needs a val_loader"):
        engine.train_with_early_stopping(train)
    with pytest.raises(ConfigError, match="max_epochs"):
        engine.train_with_early_stopping(train, val, max_epochs=0)


def test_accuracy_can_be_watched_and_the_training_loss_too() -> None:
    told = {"early_stopping_monitor": "val_accuracy", "early_stopping_mode": "max", "early_stopping_patience": 1}
    engine = AdvancedLLMSEOEngine(config(**told, num_epochs=20, early_stopping_min_delta=0.0, save_checkpoints=False))
    found = engine.train_with_early_stopping(SEODataset(TEXTS, LABELS), SEODataset(TEXTS, LABELS))
    assert found["early_stopping_triggered"] and found["best_val_accuracy"] == max(
        row["val_accuracy"] for row in found["history"]
    )
    plain = AdvancedLLMSEOEngine(config(early_stopping_monitor="train_loss", checkpoint_dir="other"))
    found = plain.train_with_early_stopping(SEODataset(TEXTS, LABELS))
    assert found["best_val_loss"] is None and found["best_train_loss"] == found["history"][1]["train_loss"]
    with pytest.raises(ConfigError, match="labels are numbers"):
        AdvancedLLMSEOEngine(config(**told)).train_epoch(SEODataset(TEXTS, [each / 7 for each in range(22)]))


def test_a_run_that_goes_on_repeats_no_epoch_and_keeps_its_best() -> None:
    train, val = SEODataset(TEXTS[::2], LABELS[::2]), SEODataset(TEXTS[1::2], LABELS[1::2])
    whole = AdvancedLLMSEOEngine(config(num_epochs=3, lr_scheduler="constant"))
    expected = whole.train_with_early_stopping(train, val)
    told = config(num_epochs=3, lr_scheduler="constant", output_dir="run", checkpoint_dir="kept")
    engine = AdvancedLLMSEOEngine(told)
    for _ in range(2):
        engine.train_epoch(train, val)
    engine.cleanup_multi_gpu()
    again = AdvancedLLMSEOEngine(told)
    found = again.train_with_early_stopping(train, val)
    assert losses(found) == pytest.approx(losses(expected), abs=1e-12)
    assert again.get_training_status()["samples"] == len(train)
    with pytest.raises(ConfigError, match="other texts than the run in run began with"):
        again.train_epoch(val)
    again.cleanup_multi_gpu()


def test_other_texts_go_on_with_the_weights_as_they_are() -> None:
    engine = AdvancedLLMSEOEngine(config())
    first, second = SEODataset(TEXTS[::2], LABELS[::2]), SEODataset(TEXTS[1::2], LABELS[1::2])
    engine.train_epoch(first)
    model = engine.seo_model
    engine.train_epoch(SEODataset(list(TEXTS[::2]), list(LABELS[::2])))  # the same texts, loaded again
    assert engine.get_training_status()["steps"] == 4
    engine.train_epoch(second)
    assert engine.seo_model is model and engine.get_training_status()["epochs"] == 3
    with pytest.raises(ConfigError, match="none of the classes"):
        engine.train_epoch(SEODataset(["a", "b"], ["x", "y"]))


def test_numbers_are_learned_in_their_own_unit() -> None:
    minutes = [1000.0 + 10 * number for number in range(11)] + [10.0 * number + 0.5 for number in range(11)]
    engine = AdvancedLLMSEOEngine(config(num_epochs=9, lr_scheduler="constant", save_checkpoints=False))
    data = SEODataset(TEXTS, minutes)
    engine.train_with_early_stopping(data, data)
    found = engine.evaluate_model(data)
    assert found["rmse"] < found["baseline_rmse"] / 4 and found["spearman"] > 0.7
    assert engine.analyze_seo_score(TEXTS[0])["seo_score"] == pytest.approx(1000, abs=300)


def test_cross_validation_trains_a_model_for_each_fold_and_leaves_the_engine_alone() -> None:
    engine = AdvancedLLMSEOEngine(config())
    found = engine.train_cross_validation(TEXTS, LABELS, num_folds=2, max_epochs=2)
    assert [row["num"] for row in found["folds"]] == [11, 11] and found["mean"]["baseline_accuracy"] < 0.6
    assert found["mean"]["accuracy"] == pytest.approx(np.mean([row["accuracy"] for row in found["folds"]]))
    assert engine.seo_model is None and Path("checkpoints/fold_2/best_model").is_dir()
    loaders = engine.create_cross_validation_dataloaders(TEXTS, LABELS, cv_folds=2, cv_repeats=2)
    assert len(loaders) == 4
    other = AdvancedLLMSEOEngine(config(checkpoint_dir="other"))
    again = other.train_cross_validation(loaders[:2])
    assert again["mean"]["accuracy"] == pytest.approx(found["mean"]["accuracy"])
    with pytest.raises(ConfigError, match="labels: none"):
        engine.train_cross_validation(TEXTS)


def test_texts_over_the_limit_are_cut_and_counted_and_a_warm_up_that_is_too_long_is_noted(
    capfd: pytest.CaptureFixture[str],
) -> None:
    long = [text + " and more" * 40 for text in TEXTS[:3]] + TEXTS[3:]
    AdvancedLLMSEOEngine(config(warmup_steps=100)).train_epoch(SEODataset(long, LABELS))
    said = capfd.readouterr().err
    assert "3 of 22 texts are longer than max_length 32" in said
    assert "warmup_steps 100 are more than the 8 steps" in said


def test_a_lora_of_the_real_minilm_trains_few_weights_and_the_head() -> None:
    told = {"model_name": "minilm", "use_lora": True, "num_epochs": 1, "enable_autograd_anomaly": True}
    engine = AdvancedLLMSEOEngine(SEOConfig(**told, max_length=32, dataloader_num_workers=0, warmup_steps=1))
    asyncio.run(engine.initialize_models())
    assert engine.tokenizer is not None
    engine.train_epoch(SEODataset(TEXTS[::4], LABELS[::4]))
    assert engine.seo_model is not None
    named = {name: weight.requires_grad for name, weight in engine.seo_model.named_parameters()}
    trained = [name for name, trains in named.items() if trains]
    assert any("lora_A" in name for name in trained) and any("classifier" in name for name in trained)
    sizes = [weight.numel() for weight in engine.seo_model.parameters()]
    few = sum(weight.numel() for weight in engine.seo_model.parameters() if weight.requires_grad)
    assert few < 0.1 * sum(sizes)
    with pytest.raises(ConfigError, match="use_lora=False trains all of it"):
        AdvancedLLMSEOEngine(config(use_lora=True)).train_epoch(SEODataset(TEXTS, LABELS))
    with pytest.raises(ConfigError, match="there is no such folder"):
        AdvancedLLMSEOEngine(SEOConfig(model_name="./nowhere")).train_epoch(SEODataset(TEXTS, LABELS))


def test_the_seed_names_the_new_weights() -> None:
    def first(seed: int) -> torch.Tensor:
        engine = AdvancedLLMSEOEngine(config(seed=seed))
        torch.manual_seed(torch.randint(1000, (1,)).item())
        engine._learner.need_model(Labels((0, 1)), TEXTS)
        assert engine.seo_model is not None
        return next(engine.seo_model.parameters()).detach().clone()

    assert torch.equal(first(1), first(1)) and not torch.equal(first(1), first(2))


# --- checkpoints


def test_a_checkpoint_is_taken_up_by_another_engine_for_analysing_and_for_training() -> None:
    train, val = SEODataset(TEXTS[::2], LABELS[::2]), SEODataset(TEXTS[1::2], LABELS[1::2])
    told = config(num_epochs=3, checkpoint_dir="kept")
    engine = AdvancedLLMSEOEngine(told)
    expected = [engine.train_epoch(train, val)]
    assert engine.save_checkpoint("first.pt") == Path("kept/first.pt")
    score = engine.analyze_seo_score(TEXTS[0])["seo_score"]
    expected += [engine.train_epoch(train, val) for _ in range(2)]
    other = AdvancedLLMSEOEngine(told)
    assert other.load_checkpoint("./kept/first.pt")["epochs"] == 1
    assert other.analyze_seo_score(TEXTS[0])["seo_score"] == pytest.approx(score, abs=1e-6)  # read in 32 bit
    found = [other.train_epoch(train, val) for _ in range(2)]
    assert [row["epoch"] for row in found] == [1, 2]
    assert [row["val_loss"] for row in found] == pytest.approx([row["val_loss"] for row in expected[1:]], abs=1e-12)
    other.load_checkpoint("first.pt")  # in the middle of a run, from the same folder
    assert other.train_epoch(train, val)["val_loss"] == pytest.approx(expected[1]["val_loss"], abs=1e-12)
    files = {path.suffix for path in Path("kept").rglob("*") if path.is_file()}
    assert files == {".json", ".safetensors"}


def test_checkpoints_that_do_not_belong_are_refused_and_nothing_of_the_user_s_is_overwritten() -> None:
    engine = AdvancedLLMSEOEngine(config())
    with pytest.raises(ConfigError, match="nothing to save yet"):
        engine.save_checkpoint("x")
    engine.train_epoch(SEODataset(TEXTS, LABELS))
    Path("checkpoints").mkdir()
    Path("checkpoints/mine.pt").write_bytes(b"years of work")
    Path("checkpoints/folder").mkdir()
    Path("checkpoints/folder/notes.txt").write_text("mine")
    for name, words in (("mine.pt", "is a file"), ("folder", "holds notes.txt")):
        with pytest.raises(ConfigError, match=words):
            engine.save_checkpoint(name)
    assert Path("checkpoints/mine.pt").read_bytes() == b"years of work"
    place = engine.save_checkpoint("good")
    with pytest.raises(ConfigError, match="no checkpoint of this engine"):
        engine.load_checkpoint("folder")
    with pytest.raises(ConfigError, match="was saved with max_length=32"):
        AdvancedLLMSEOEngine(config(max_length=40)).load_checkpoint(place)
    words = AdvancedLLMSEOEngine(config())
    words.train_epoch(SEODataset(TEXTS, ["good" if label else "bad" for label in LABELS]))
    with pytest.raises(ConfigError, match="other labels"):
        words.load_checkpoint(place)
    other = AdvancedLLMSEOEngine(config())
    other.train_epoch(SEODataset(["quite another text", "and another one"] * 2, [0, 1] * 2))
    with pytest.raises(ConfigError, match="another tokenizer"):
        other.save_checkpoint("good")
    for content in (b"{", b"[]", b'{"labels": 3}', b"\xff" * 10):
        (place / "seo.json").write_bytes(content)
        with pytest.raises(ConfigError):
            AdvancedLLMSEOEngine(config()).load_checkpoint(place)


# --- figures


def test_the_figures_are_those_of_scikit_learn() -> None:
    from scipy.stats import spearmanr
    from sklearn import metrics

    draw = np.random.default_rng(0)
    for classes in (2, 4):
        truth, found = draw.integers(classes, size=50).tolist(), draw.integers(classes, size=50).tolist()
        mine = of_classes(truth, found)
        assert mine["accuracy"] == pytest.approx(metrics.accuracy_score(truth, found))
        assert mine["cohen_kappa"] == pytest.approx(metrics.cohen_kappa_score(truth, found))
        for name, function in (("precision", metrics.precision_score), ("recall", metrics.recall_score)):
            assert mine[f"{name}_weighted"] == pytest.approx(function(truth, found, average="weighted"))
        assert mine["f1_weighted"] == pytest.approx(metrics.f1_score(truth, found, average="weighted"))
        assert mine["f1_macro"] == pytest.approx(metrics.f1_score(truth, found, average="macro"))
        assert ("seo_f1" in mine) == (classes == 2)
    assert of_classes([1, 1, 0], [0, 0, 0])["baseline_accuracy"] == pytest.approx(2 / 3)
    truth, said = draw.normal(size=40), draw.normal(size=40)
    numbers = of_numbers(truth.tolist(), said.tolist())
    assert numbers["r2"] == pytest.approx(metrics.r2_score(truth, said))
    assert numbers["mae"] == pytest.approx(metrics.mean_absolute_error(truth, said))
    assert numbers["max_error"] == pytest.approx(metrics.max_error(truth, said))
    assert numbers["spearman"] == pytest.approx(spearmanr(truth, said).statistic)
    gains, scores = draw.integers(4, size=30).astype(float), draw.integers(6, size=30).astype(float)  # with ties
    order = of_order(gains.tolist(), scores.tolist())
    for cut in (5, 10, 20):
        assert order[f"ndcg_{cut}"] == pytest.approx(metrics.ndcg_score([gains], [scores], k=cut))
    assert order["baseline_ndcg_10"] == pytest.approx(metrics.ndcg_score([gains], [np.zeros(30)], k=10))


def test_the_engine_gives_them_under_their_known_names() -> None:
    engine = AdvancedLLMSEOEngine(config())
    assert engine.evaluate_seo_classification([1, 0, 1], [1, 0, 0])["seo_recall"] == 0.5
    assert engine.evaluate_seo_regression([1.0, 2.0], [1.0, 4.0])["mape"] == 0.5
    assert engine.evaluate_seo_ranking([3, 2, 1], [0.9, 0.8, 0.1], task_type="x")["ndcg_5"] == pytest.approx(1)
    pages = ["<h1>Title</h1><p>Content</p>", "<html lang=en><title>Bread</title><h1>Bread</h1><h1>Again</h1>"]
    found = engine.evaluate_seo_content_quality(["Content", "Bread"], pages, ["bread"])
    assert found["learned"] is False and len(found["checks"]) == 2 and min(found["num_failed"]) > 0
    assert any(check["name"] == "title" and not check["passed"] for check in found["checks"][0])
    assert engine.evaluate_seo_content_quality(["Content"])["share_passed"] == 0.0
    for call in (
        lambda: engine.evaluate_seo_classification([1], []),
        lambda: engine.evaluate_seo_ranking([-1.0], [1.0]),
        lambda: engine.evaluate_seo_content_quality(["a"], []),
        lambda: engine.evaluate_model(SEODataset(TEXTS, LABELS)),
    ):
        with pytest.raises(ConfigError):
            call()


# --- analysing


def test_there_is_no_score_before_training_and_it_says_so_with_the_checks_beside_it() -> None:
    engine = AdvancedLLMSEOEngine(SEOConfig(seo_keywords=["bread"]))
    found = engine.analyze_seo_score("Bread is baked from flour.")
    assert found["seo_score"] is None and "not trained yet" in found["reason"]
    assert [check["name"] for check in found["checks"]] == ["text length", "readability", "keyword: bread"]
    assert engine.tokenizer is None  # nothing was loaded for it
    for bad in ("", "  "):
        with pytest.raises(ConfigError, match="the text is empty"):
            engine.analyze_seo_score(bad)
    with pytest.raises(ConfigError, match="expected a list"):
        engine.batch_analyze("a text")
    with pytest.raises(ConfigError, match="keywords"):
        engine.analyze_seo_score("a text", [""])


def test_the_learned_score_tells_pages_apart_that_it_has_not_seen(trained: AdvancedLLMSEOEngine) -> None:
    cooking, selling = "Cook lentils for 30 minutes, then let it rest.", "Best lentils deals! Buy lentils now, sale."
    both = trained.batch_analyze([cooking, selling], "lentils")
    assert both[0]["seo_score"] > 0.5 > both[1]["seo_score"] and both[0]["label"] == 1 and both[0]["reason"] is None
    assert both[0]["seo_score"] == pytest.approx(trained.analyze_seo_score(cooking)["seo_score"], abs=1e-9)
    assert sum(both[0]["probabilities"].values()) == pytest.approx(1)
    assert both[0]["keywords"] == ["lentils"]


PAGE = """Our mill has stood by the river Aare since 1872. Anna Keller runs it with 3 helpers.

Visitors are welcome on Saturdays. Rye bread keeps fresh for 9 days when it is stored in a wooden box. \
Our mill has stood by the river Aare since 1872.

The stones turn slowly, which keeps the flour cool; the flour keeps its taste that way, and it is sifted twice \
before Anna Keller fills it into 25 kg bags for the bakers of the whole valley."""


def test_changes_say_nothing_new() -> None:
    made = list(proposals(PAGE, ["how long does rye bread keep"]))
    assert {each.kind for each in made} == {"repetition", "answer first", "split"}
    for each in made:
        assert says_nothing_new(PAGE, each.text) and each.text != PAGE
        assert set(re.findall(r"\d+|Keller|Aare", each.text)) == {"1872", "3", "9", "25", "Keller", "Aare"}
        assert each.text.count("\n\n") == 2
    first = next(each for each in made if each.kind == "answer first").text
    assert first.startswith("Rye bread keeps fresh for 9 days")
    assert not says_nothing_new("Rye bread.", "Rye bread. Rye bread.") and not says_nothing_new("9 days", "10 days")
    assert list(proposals("Short and good.", ["rye bread"])) == []


def test_sentences_that_lean_on_others_stay_where_they_are() -> None:
    for text in (
        "We bake. A starter is fed daily. It makes rye bread sour.",  # what makes it sour?
        "We bake. The rye bread is sour. It keeps for days.",  # what keeps?
        "- our mill\n- rye bread\n- open on Saturdays",  # a list
    ):
        assert not [each for each in proposals(text, ["rye bread"]) if each.kind == "answer first"]
    assert sentences_of("Dr. Keller sells 2.5 kg. She bakes at 4 a.m. daily.") == [
        "Dr. Keller sells 2.5 kg.",
        "She bakes at 4 a.m. daily.",
    ]
    numbers = "The bag holds 5 kg of rye flour. The bag holds 9 kg of rye flour."
    assert not list(proposals(numbers, ["rye"]))  # alike, and not the same


def test_titles_are_the_text_s_own_words() -> None:
    found = titles(PAGE + " Rye bread: how long it keeps.", ["rye bread"])
    assert found and all(len(title) <= 60 and title in PAGE + " Rye bread: how long it keeps." for title in found)


def test_a_text_of_equal_or_many_sentences_is_not_compared_pair_by_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    alike = rewriting._alike
    monkeypatch.setattr(rewriting, "_alike", lambda *words: compared.append(1) or alike(*words))
    engine = AdvancedLLMSEOEngine(config())
    equal = "Boil the kettle with vinegar for twenty minutes. "
    [change] = engine.optimize_content(equal * 5000, ["descale a kettle"])["changes"]
    assert change["kind"] == "repetition" and "4,999 times" in change["why"]
    different = " ".join(f"Kettle w{n} boils for v{n} minutes in a kitchen with u{n} windows." for n in range(2000))
    assert not engine.optimize_content(different, ["descale a kettle"])["changes"]
    assert len(compared) < 100_000, "two million pairs"


def test_sentences_that_say_nearly_the_same_are_found_whatever_words_they_share() -> None:
    base = [
        "we",
        "fill",
        "the",
        "old",
        "kettle",
        "with",
        "water",
        "and",
        "strong",
        "vinegar",
        "then",
        "boil",
        "it",
        "twice",
        "before",
        "we",
        "rinse",
        "it",
        "with",
        "care",
    ]
    for left_out in range(len(base)):
        twin = [word for place, word in enumerate(base) if place != left_out]
        text = f"{' '.join(base).capitalize()}. {' '.join(twin).capitalize()}."
        assert [made.kind for made in proposals(text, [])] == ["repetition"], base[left_out]


@pytest.mark.parametrize("text, said", [(12345, "expected a string, got 12345 of type int"), (" ", "is empty")])
def test_what_is_no_text_is_not_called_empty(text: Any, said: str) -> None:
    engine = AdvancedLLMSEOEngine(config())
    for ask in (engine.analyze_seo_score, engine.optimize_content):
        with pytest.raises(ConfigError, match=said):
            ask(text, ["a keyword"])


def test_half_a_character_is_read_as_an_unknown_one(trained: AdvancedLLMSEOEngine) -> None:
    whole, half = (trained.analyze_seo_score(f"Cook bread {sign}")["seo_score"] for sign in ("?", "\ud800"))
    assert whole == half
    trained.optimize_content("Cook \ud800 bread.", ["bread"])
    engine = AdvancedLLMSEOEngine(config(num_epochs=1))
    train, _ = engine.create_training_dataloaders(["Cook \ud800 bread.", *TEXTS], [1, *LABELS])
    assert engine.train_epoch(train)["train_loss"] > 0


def test_optimizing_with_the_real_ranker_never_lowers_its_score_and_adds_no_word() -> None:
    engine = AdvancedLLMSEOEngine(config(rank_model="minilm"))
    found = engine.optimize_content(PAGE, ["how long does rye bread keep"])
    assert found["improvement"] == found["optimized_score"] - found["original_score"] > 0.01
    kept = [change for change in found["changes"] if change["kept"]]
    assert kept and all(change["score_after"] >= change["score_before"] - 1e-6 for change in kept)
    assert not set(words_of(found["optimized_content"])) - set(words_of(PAGE))
    assert found["optimized_content"].count("rye") <= PAGE.count("rye") and "minilm" in found["scored_by"]
    assert "rye bread" in found["optimized_content"].casefold() and "keywords" in found

    async def waited() -> Any:
        return await engine.optimize_content(PAGE + " Rye bread: how long it keeps.", "rye bread")

    assert asyncio.run(waited())["titles"][0]["title"] == "Rye bread: how long it keeps"
    for call in (lambda: engine.optimize_content(" ", "x"), lambda: engine.optimize_content(PAGE)):
        with pytest.raises(ConfigError):
            call()


def test_a_change_that_the_model_likes_less_is_shown_and_not_kept(trained: AdvancedLLMSEOEngine) -> None:
    class LikesLong:
        told = "in this test"

        def scores(self, queries: list[str], pages: list[str]) -> torch.Tensor:
            return torch.tensor([[float(len(page)) for page in pages]])

    engine = AdvancedLLMSEOEngine(config(rank_model="x"))
    engine._analysis._ranker = LikesLong()
    found = engine.optimize_content(PAGE, ["rye bread"])
    by_kind = {change["kind"]: change["kept"] for change in found["changes"]}
    assert by_kind["repetition"] is False and by_kind["answer first"] is True
    assert found["optimized_content"].count("1872") == 2
    unscored = AdvancedLLMSEOEngine(config()).optimize_content(PAGE, ["rye bread"])
    assert unscored["optimized_content"] == PAGE and unscored["improvement"] is None and unscored["changes"]
    assert "not trained yet" in unscored["scored_by"]
    learned = trained.optimize_content(PAGE, ["rye bread"])
    assert learned["improvement"] >= -1e-6 and learned["scored_by"] == "the score that this engine has learned"


# --- two real ranks


def everything_on_two_ranks(folder: str, port: int) -> dict[str, Any]:
    """Runs in each rank: with what a launcher says, and by hand without one."""
    os.chdir(folder)
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {"refused": []}
    two = {"use_multi_gpu": True, "multi_gpu_strategy": "distributed", "num_gpus": 2, "effective_batch_size": None}
    for fields in ({"use_multi_gpu": False}, {"multi_gpu_strategy": "dataparallel"}):
        try:
            AdvancedLLMSEOEngine(config(**{**two, **fields}))
        except ConfigError as error:
            found["refused"].append(str(error))
    engine = AdvancedLLMSEOEngine(config(**two, checkpoint_dir="two"))
    train, val = engine.create_distributed_dataloaders(TEXTS, LABELS)
    found["read"] = [text for batch in (*train, *val) for text in batch["text"]]
    found["losses"] = losses(engine.train_with_early_stopping(train, val))
    found["evaluated"] = engine.evaluate_model(val)["loss"]
    status = engine.get_multi_gpu_status()
    found["status"] = [status[name] for name in ("strategy", "world_size", "rank", "is_distributed", "backend")]
    found["batch"] = status["effective_batch_size"]
    wrapped = engine._wrap_model_for_multi_gpu()
    found["wrapped"] = type(wrapped).__name__
    if status["rank"] == 0:  # one process alone
        found["score"] = engine.analyze_seo_score(TEXTS[0])["seo_score"]
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
        own = other.create_distributed_dataloaders(TEXTS, LABELS)
        found[name] = losses(other.train_with_early_stopping(*own))
        found["asked"] = other.get_multi_gpu_status()["requested_gpus"]
    found["folds"] = engine.train_cross_validation(TEXTS, LABELS, num_folds=2, max_epochs=1)["mean"]["loss"]
    engine.load_checkpoint("one/best_model")
    found["taken up"] = engine.train_epoch(train, val)["val_loss"]
    engine.cleanup_multi_gpu()
    found["clean"] = [engine.is_distributed, torch.distributed.is_initialized()]
    try:
        engine.train_epoch(train, val)
    except ConfigError as error:
        found["refused"].append(str(error))
    rank = int(os.environ["RANK"])
    told = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith(("RANK", "WORLD", "TORCHEL"))}
    by_hand = {
        **two,
        "distributed_world_size": 2,
        "distributed_rank": rank,
        "distributed_init_method": f"tcp://127.0.0.1:{port}",
    }
    hand = AdvancedLLMSEOEngine(config(**by_hand, save_checkpoints=False))
    found["by hand"] = losses(hand.train_with_early_stopping(*hand.create_distributed_dataloaders(TEXTS, LABELS)))
    hand.cleanup_multi_gpu()
    os.environ.update(told)  # where the test looks for them
    return found


def test_two_ranks_train_evaluate_and_save_like_one_device() -> None:
    one = AdvancedLLMSEOEngine(config(checkpoint_dir="one", num_epochs=2))
    train, val = one.create_distributed_dataloaders(TEXTS, LABELS)
    expected = losses(one.train_with_early_stopping(train, val))
    folds_ = one.train_cross_validation(TEXTS, LABELS, num_folds=2, max_epochs=1)["mean"]["loss"]
    after = one.train_epoch(train, val)["val_loss"]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    both = run_ranks("everything_on_two_ranks", __file__, 2, {"folder": str(Path.cwd()), "port": port})
    assert sorted(both[0]["read"] + both[1]["read"]) == sorted(TEXTS)
    for rank, found in enumerate(both):
        for name in ("losses", "buckets", "four", "by hand"):
            assert found[name] == pytest.approx(expected, abs=1e-12), name
        assert found["evaluated"] == pytest.approx(expected[-1], abs=1e-12)
        assert found["folds"] == pytest.approx(folds_, abs=1e-12)
        assert found["taken up"] == pytest.approx(after, abs=1e-12)  # what one device has saved
        assert found["status"] == ["distributed", 2, rank, True, "gloo"] and found["batch"] == 6
        assert found["wrapped"] == "DistributedDataParallel" and found["asked"] == 4
        assert found["clean"] == [False, False]
        assert "use_multi_gpu is False" in found["refused"][0] and "from one process" in found["refused"][1]
        assert "make another engine" in found["refused"][2]
    again = AdvancedLLMSEOEngine(config())
    again.load_checkpoint("two/best_model")  # what two ranks have saved
    assert again.evaluate_model(val)["loss"] == pytest.approx(expected[-1], abs=1e-6)
    assert again.analyze_seo_score(TEXTS[0])["seo_score"] == pytest.approx(both[0]["score"], abs=1e-6)


def test_a_config_is_read_without_waiting_for_torch() -> None:
    import subprocess
    import sys

    code = "import sys; from unisono.recipes.seo.front import SEOConfig; SEOConfig(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
