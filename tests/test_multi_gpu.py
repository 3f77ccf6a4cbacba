"""unisono.multi_gpu: a user's own model, data and loop give the same result on one device and on several."""

from __future__ import annotations

import copy
import inspect
import json
import os
import pickle
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, WeightedRandomSampler, default_collate

import command_line
from ranks import run_ranks
from unisono import Loss, multi_gpu
from unisono.checkpoint.shards import write_shards
from unisono.cluster.environment import World
from unisono.cluster.signals import BetweenCalls, StopRequest
from unisono.data.order import Order, Strides
from unisono.devices import Gpu, visible_gpus
from unisono.errors import ConfigError, RecipeError, UserError
from unisono.multi_gpu import (
    DataParallelTrainer,
    DistributedDataParallelTrainer,
    MultiGPUConfig,
    MultiGPUTrainingManager,
    OptimizedDataParallel,
    TrainingError,
    benchmark_multi_gpu_performance,
    cleanup_distributed_training,
    get_gpu_info,
    get_optimal_batch_size,
    launch_distributed_training,
    launch_multi_gpu_training,
    load_weights,
    select_optimal_gpus,
    setup_distributed_training,
)
from unisono.multi_gpu.gpus import take_devices
from unisono.observe.report.page import status_of
from unisono.observe.report.read import read_run
from unisono.optim.adafactor import Adafactor
from unisono.optim.low_bit_adamw import LowBitAdamW

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

NUM, BATCH = 20, 6  # the last batch of an epoch has 2 samples
EXACT = {"dtype": "float64", "tensorboard": False}
KNOWN = {
    "num_gpus": None,
    "gpu_ids": None,
    "min_memory_gb": 4.0,
    "strategy": "auto",
    "backend": "nccl",
    "world_size": None,
    "rank": None,
    "local_rank": None,
    "master_addr": "localhost",
    "master_port": "12355",
    "pin_memory": True,
    "num_workers": 4,
    "persistent_workers": True,
    "find_unused_parameters": False,
    "broadcast_buffers": True,
    "bucket_cap_mb": 25,
    "gradient_as_bucket_view": False,
    "static_graph": False,
    "memory_efficient_find_unused_parameters": False,
}


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for room in ("gpus", "launch", "benchmark"):
        monkeypatch.setattr(f"unisono.multi_gpu.{room}.visible_gpus", lambda: [])


def create_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))


def create_datasets() -> tuple[Dataset[Any], Dataset[Any]]:
    draw = torch.Generator().manual_seed(2)
    x = torch.randn(NUM + 10, 3, generator=draw)
    y = (x[:, 0] * x[:, 1] > 0).long()
    return TensorDataset(x[:NUM], y[:NUM]), TensorDataset(x[NUM:], y[NUM:])


def config(**fields: Any) -> MultiGPUConfig:
    fields = {"num_workers": 0, "global_batch_size": BATCH, "settings": EXACT, **fields}
    return MultiGPUConfig(**fields)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.9)


def halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def make(settings: MultiGPUConfig, **more: Any) -> Any:
    """A trainer of the tiny model."""
    more = {"optimizer": sgd, "scheduler": halving, **more}
    return MultiGPUTrainingManager(settings).create_trainer(create_model(), *create_datasets(), **more)


def losses(trainer: Any, epochs: int, first: int = 0) -> list[float]:
    actual: list[float] = []
    for epoch in range(first, first + epochs):
        actual += [trainer.train_epoch(epoch)["train_loss"], trainer.validate(epoch)["val_loss"]]
    return actual


def by_hand(epochs: int) -> list[float]:
    """The same training, in plain PyTorch."""
    model = create_model().double()
    (x, y), (vx, vy) = (data.tensors for data in create_datasets())  # type: ignore[attr-defined]
    optimizer = sgd(model.parameters())
    actual = []
    for epoch in range(epochs):
        order, total = Order(NUM, seed=0), 0.0
        indices = [order[epoch * NUM + offset] for offset in range(NUM)]
        for start in range(0, NUM, BATCH):
            batch = indices[start : start + BATCH]
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x[batch].double()), y[batch])
            loss.backward()
            optimizer.step()
            total += loss.item() * len(batch)
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
        actual += [total / NUM, nn.functional.cross_entropy(model(vx.double()), vy).item()]
    return actual


# --- one device


def test_an_epoch_equals_a_hand_written_loop() -> None:
    with make(config()) as trainer:
        assert losses(trainer, 3) == pytest.approx(by_hand(3), abs=1e-12)
        assert trainer.strategy == "single" and trainer.world_size == 1
        assert [row["epoch"] for row in trainer.history] == [0, 1, 2]


@pytest.mark.parametrize(
    "how",
    [
        {"batch_size": 2},
        {"batch_size": 1},
        {"num_workers": 1, "persistent_workers": False},
        {"num_workers": 2},
        {"activation_checkpointing": True},
        {"strategy": "distributed"},
        {"settings": {**EXACT, "inject": "oom@rank0:step2,oom@rank0:step5"}},
    ],
)
def test_micro_batches_workers_and_out_of_memory_do_not_change_the_run(how: dict[str, Any]) -> None:
    with make(config(output_dir="run", **how)) as trainer:
        assert losses(trainer, 2) == pytest.approx(by_hand(2), abs=1e-12)
    events = Path("run/events.jsonl").read_text()
    assert events.count('"kind": "oom"') == (2 if "settings" in how else 0)
    cleanup_distributed_training()


def test_the_trainers_accept_loaders_datasets_and_objects() -> None:
    train, val = create_datasets()
    model = create_model()
    optimizer = sgd(model.parameters())
    scheduler = halving(optimizer)
    loader = DataLoader(train, batch_size=BATCH, shuffle=True)
    settings = config(global_batch_size=None)
    wrapped = OptimizedDataParallel(model)
    assert wrapped.get_device_memory_usage()["cpu"]["allocated"] > 2**20
    trainer: Any = DataParallelTrainer(
        model=wrapped,
        config=settings,
        train_loader=loader,
        val_loader=DataLoader(val, batch_size=4),
        optimizer=optimizer,
        scheduler=scheduler,
        loss_fn=nn.CrossEntropyLoss(),
    )
    expected = by_hand(2)
    assert losses(trainer, 2) == pytest.approx(expected, abs=1e-12)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05) and optimizer.state  # the user's own optimizer object
    assert trainer.get_memory_stats()["cpu"]["total"] > 2**30
    stats = trainer.get_performance_stats()
    assert stats["samples"] == 2 * NUM and stats["samples_per_second"] > 0 and stats["steps"] == 8
    assert stats["train_loss"] == pytest.approx(expected[2]) and stats["best_val_loss"] == pytest.approx(
        min(expected[1::2])
    )
    trainer.close()
    with DistributedDataParallelTrainer(
        create_model(), settings, train, val, batch_size=BATCH, optimizer=sgd, scheduler=halving
    ) as other:
        assert losses(other, 2) == pytest.approx(expected, abs=1e-12)
    cleanup_distributed_training()


def test_a_loader_without_shuffling_keeps_the_order_of_the_data() -> None:
    class Noted(Dataset[Any]):
        def __init__(self) -> None:
            self.read: list[int] = []

        def __len__(self) -> int:
            return 5

        def __getitem__(self, index: int) -> Any:
            self.read.append(index)
            return torch.ones(3), 1

    data = Noted()
    loader = DataLoader(data, batch_size=2)
    with DataParallelTrainer(create_model(), config(global_batch_size=None), loader) as trainer:
        trainer.train_epoch(0)
        assert trainer.validate(0) == {}
    assert data.read == [0, 1, 2, 3, 4]


# --- losses

WEIGHTS = torch.tensor([1.0, 3.0])


@pytest.mark.parametrize(
    "loss_fn",
    [
        nn.CrossEntropyLoss(weight=WEIGHTS, ignore_index=0),
        nn.CrossEntropyLoss(ignore_index=1, label_smoothing=0.1),
        nn.CrossEntropyLoss(reduction="none"),
        lambda out, y: Loss(nn.functional.cross_entropy(out, y, reduction="sum"), len(y)),
        lambda out, y: (
            (nn.functional.cross_entropy(out[y == 1], y[y == 1]), (y == 1).sum())
            if (y == 1).any()
            else (out.sum() * 0, 0)
        ),
        nn.functional.cross_entropy,
    ],
)
def test_a_mean_over_micro_batches_is_the_mean_over_the_batch(loss_fn: Any) -> None:
    loss_fn = copy.deepcopy(loss_fn).double() if isinstance(loss_fn, nn.Module) else loss_fn
    actual = []
    for size in (BATCH, 1):
        with make(config(batch_size=size), loss_fn=loss_fn) as trainer:
            actual.append(losses(trainer, 2))
    assert actual[0] == pytest.approx(actual[1], abs=1e-12)


def test_the_reported_loss_is_torchs_mean_over_weighted_targets() -> None:
    loss_fn = nn.CrossEntropyLoss(weight=WEIGHTS.double())
    x, y = create_datasets()[1].tensors  # type: ignore[attr-defined]
    with make(config(batch_size=3), loss_fn=loss_fn) as trainer:
        before = loss_fn(create_model().double()(x.double()), y).item()
        assert trainer.validate(0)["val_loss"] == pytest.approx(before, abs=1e-12)


class Gives(nn.Module):
    """A model that takes named inputs and computes its own loss, like those of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
        logits = self.layer(x)
        return {"logits": logits, "loss": None if labels is None else nn.functional.cross_entropy(logits, labels)}


class Named(Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return {"x": torch.full((3,), float(index)), "labels": index % 2}


def test_a_model_in_double_precision_is_trained_in_it(capfd: pytest.CaptureFixture[str]) -> None:
    train, val = create_datasets()
    plain = config(settings={"tensorboard": False})
    model = create_model().double()
    trainer = MultiGPUTrainingManager(plain).create_trainer(model, train, val, optimizer=sgd, scheduler=halving)
    with trainer:
        assert losses(trainer, 2) == pytest.approx(by_hand(2), abs=1e-12)
    assert {weight.dtype for weight in model.parameters()} == {torch.float64}
    assert "float64" in capfd.readouterr().err


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_model_in_16_bit_is_trained_in_32_bit_with_a_note(
    dtype: torch.dtype, capfd: pytest.CaptureFixture[str]
) -> None:
    plain = config(settings={"tensorboard": False})
    with MultiGPUTrainingManager(plain).create_trainer(create_model().to(dtype), *create_datasets()) as trainer:
        trainer.train_epoch(0)
    stderr = capfd.readouterr().err
    assert f"the weights are {str(dtype)[6:]}; they are trained as float32" in stderr and "mixed_precision=" in stderr


@pytest.mark.parametrize(("shuffle", "workers"), [(False, 0), (True, 0), (True, 1)])
def test_drop_last_of_a_loader_takes_effect(shuffle: bool, workers: int) -> None:
    data, seen = create_datasets()[0], []

    class Noting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = create_model()

        def forward(self, x: Tensor) -> Tensor:
            seen.append(x.detach().float())
            return self.inner(x)

    loader = DataLoader(data, batch_size=BATCH, shuffle=shuffle, drop_last=True)
    plain = MultiGPUConfig(num_workers=workers, settings=EXACT)
    with DataParallelTrainer(Noting(), plain, loader) as trainer:
        for epoch in range(8):
            trainer.train_epoch(epoch)
        assert trainer.get_performance_stats()["steps"] == 8 * (NUM // BATCH)
    assert [len(batch) for batch in seen] == [BATCH] * 8 * (NUM // BATCH)
    for epoch in range(8):  # no sample occurs twice in an epoch
        rows = torch.cat(seen[epoch * 3 : (epoch + 1) * 3])
        assert len(torch.unique(rows, dim=0)) == 18
    x = torch.stack([data[index][0] for index in range(NUM)])
    if shuffle:  # different samples are dropped each time
        assert len(torch.unique(torch.cat(seen), dim=0)) == NUM
    else:
        assert torch.equal(torch.cat(seen[:3]), x[:18]) and torch.equal(torch.cat(seen[3:6]), x[:18])


def test_dropping_all_samples_is_rejected() -> None:
    loader = DataLoader(create_datasets()[0], batch_size=64, drop_last=True)
    with pytest.raises(ConfigError, match="the dataset has only 20 samples and the batch size is 64"):
        DataParallelTrainer(create_model(), config(global_batch_size=None), loader)


def test_a_smaller_batch_size_in_the_config_takes_effect_and_the_run_stays_the_same(
    capfd: pytest.CaptureFixture[str],
) -> None:
    seen: list[int] = []
    mine = config(batch_size=BATCH)
    with make(mine, loss_fn=lambda out, y: (seen.append(len(y)), nn.functional.cross_entropy(out, y))[1]) as trainer:
        first = losses(trainer, 1)
        assert max(seen) == BATCH
        capfd.readouterr()
        mine.batch_size //= 2  # as users' loops do after running out of memory
        seen.clear()
        rest = [trainer.train_epoch(1)["train_loss"]]
        assert max(seen) == BATCH // 2
        rest += [trainer.validate(1)["val_loss"]]
        stderr = capfd.readouterr().err
    assert first + rest == pytest.approx(by_hand(2), abs=1e-12)
    other = config()
    trainer = MultiGPUTrainingManager(other).create_trainer(create_model(), *create_datasets(), batch_size=BATCH)
    with trainer:
        trainer.train_epoch(0)
        other.batch_size = 2
        trainer.train_epoch(1)
    assert "batch_size changed from 32 to 2: from now on a micro-batch has at most 2 samples" in capfd.readouterr().err
    assert "batch_size changed from 6 to 3: from now on a micro-batch has at most 3 samples" in stderr
    assert "effective batch stays 6" in stderr


def test_batches_can_be_dicts_and_models_can_return_their_own_loss() -> None:
    torch.manual_seed(0)
    model = Gives()
    with MultiGPUTrainingManager(config()).create_trainer(copy.deepcopy(model), Named(), Named()) as trainer:
        own = trainer.validate(0)["val_loss"]

    def from_logits(output: Any, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output["logits"], target)

    with MultiGPUTrainingManager(config()).create_trainer(model, Named(), Named(), loss_fn=from_logits) as trainer:
        assert trainer.validate(0)["val_loss"] == pytest.approx(own, abs=1e-12)


def test_floating_point_targets_default_to_the_mean_squared_error() -> None:
    x = torch.randn(12, 3)
    model = nn.Linear(3, 1)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    with MultiGPUTrainingManager(config()).create_trainer(model, data, data) as trainer:
        mean = nn.functional.mse_loss(model(x.double()), x.sum(1, keepdim=True).double()).item()
        assert trainer.validate(0)["val_loss"] == pytest.approx(mean, abs=1e-12)


# --- optimizers and schedulers


def test_a_step_scheduler_is_stepped_after_every_step() -> None:
    seen: list[float] = []

    def linear(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

    settings = config(scheduler_interval="step", output_dir="run", settings={**EXACT, "log_every": 1})
    with make(settings, scheduler=linear) as trainer:
        trainer.train_epoch(0)
    for line in Path("run/metrics.jsonl").read_text().splitlines():
        seen.append(json.loads(line)["lr"])
    assert seen == pytest.approx([0.2, 0.1, 0.2 / 3, 0.05])


def test_a_scheduler_with_a_users_function_continues_after_a_checkpoint() -> None:
    def linear(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch))

    with make(config(output_dir="whole"), scheduler=linear) as trainer:
        expected = losses(trainer, 3)
    with make(config(), scheduler=linear) as trainer:
        losses(trainer, 1)
        trainer.save_checkpoint(0, "kept")
    with make(config(), scheduler=linear) as trainer:
        trainer.load_checkpoint("kept")
        assert losses(trainer, 2, first=1) == pytest.approx(expected[2:], abs=1e-12)


def test_a_scheduler_that_watches_the_loss_gets_the_validation_loss() -> None:
    def plateau(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, patience=0, factor=0.1, threshold=1e9, threshold_mode="abs"
        )

    with make(config(), scheduler=plateau) as trainer:
        trainer.train_epoch(0)
        assert trainer.get_performance_stats()["learning_rate"] == pytest.approx(0.2)
        trainer.validate(0)
        losses(trainer, 1, first=1)
        assert trainer.get_performance_stats()["learning_rate"] == pytest.approx(0.02)


@pytest.mark.parametrize("optimizer", [None, "sgd", torch.optim.Adam])
def test_optimizers_by_name_by_class_and_by_default(optimizer: Any) -> None:
    with make(config(learning_rate=0.05), optimizer=optimizer, scheduler=None) as trainer:
        before = trainer.validate(0)["val_loss"]
        trainer.train_epoch(0)
        assert trainer.validate(0)["val_loss"] != before
        assert trainer.get_performance_stats()["learning_rate"] == 0.05


@pytest.mark.parametrize(("fields", "rate"), [({}, 1.0), ({"learning_rate": 0.5}, 0.5)])
def test_prodigy_by_name_has_its_own_default_rate(fields: dict[str, Any], rate: float) -> None:
    with make(config(**fields), optimizer="prodigy", scheduler=None) as trainer:
        assert trainer.get_performance_stats()["learning_rate"] == rate


def test_settings_that_a_named_optimizer_replaces_are_errors() -> None:
    with pytest.raises(ConfigError, match="averages the weights itself"):
        make(config(settings={**EXACT, "ema_decay": 0.9}), optimizer="schedule_free_adamw", scheduler=None)


@pytest.mark.parametrize(
    "optimizer", [Adafactor, lambda model: LowBitAdamW(model.parameters(), bits=8, lr=0.05)], ids=["class", "instance"]
)
def test_unisonos_optimizers_update_the_shards(optimizer: Any) -> None:
    model = create_model()
    optimizer = optimizer if isinstance(optimizer, type) else optimizer(model)
    manager = MultiGPUTrainingManager(config(strategy="sharded", num_gpus=0, learning_rate=0.05))
    with manager.create_trainer(model, *create_datasets(), optimizer=optimizer) as trainer:
        before = trainer.validate(0)["val_loss"]
        trainer.train_epoch(0)
        assert trainer.strategy == "sharded" and trainer.validate(0)["val_loss"] != before
    cleanup_distributed_training()


# --- checkpoints


def test_a_save_after_load_checkpoint_replaces_the_checkpoint_of_the_same_step() -> None:
    model = create_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)

    def saved_in_epoch_1(trainer: Any) -> dict[str, torch.Tensor]:
        trainer.train_epoch(1)
        trainer.save_checkpoint(1, "second")
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}

    with MultiGPUTrainingManager(config()).create_trainer(model, *create_datasets(), optimizer=optimizer) as trainer:
        trainer.train_epoch(0)
        trainer.save_checkpoint(0, "first")
        abandoned = saved_in_epoch_1(trainer)
        trainer.load_checkpoint("first")
        optimizer.param_groups[0]["lr"] = 0.01
        kept = saved_in_epoch_1(trainer)
        trainer.train_epoch(2)
        trainer.load_checkpoint("second")
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, kept[name]) and not torch.equal(tensor, abandoned[name])
    assert [path.name for path in Path("second").iterdir()] == ["step_00000008"]


def test_the_loop_of_the_guide_saves_the_best_model_and_resumes_from_it() -> None:
    manager = MultiGPUTrainingManager(config(batch_size=32))
    trainer = manager.create_trainer(create_model(), *create_datasets(), optimizer=sgd, learning_rate=0.1)
    best_loss, best_epoch = float("inf"), -1
    for epoch in range(3):
        train_metrics = trainer.train_epoch(epoch)
        val_metrics = trainer.validate(epoch)
        assert set(train_metrics) == {"train_loss"}
        if val_metrics["val_loss"] < best_loss:
            best_loss, best_epoch = val_metrics["val_loss"], epoch
            trainer.save_checkpoint(epoch, "best_model.pth")
    trainer.train_epoch(3)
    assert trainer.load_checkpoint("best_model.pth") == best_epoch
    assert trainer.validate(9)["val_loss"] == pytest.approx(best_loss, abs=1e-12)
    files = sorted(path.name for path in Path("best_model.pth").rglob("*") if path.is_file())
    assert files == ["manifest.json", "shard-00001-of-00001.safetensors", "state.json"]  # one, without pickle
    weights = load_weights("best_model.pth")
    assert set(weights) == set(create_model().state_dict())
    trainer.close()


def test_train_returns_when_its_last_checkpoint_is_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def slowly(*given: Any, **named: Any) -> Any:
        time.sleep(0.5)
        return write_shards(*given, **named)

    monkeypatch.setattr("unisono.checkpoint.save.write_shards", slowly)
    manager = MultiGPUTrainingManager(config(output_dir="run"))
    with manager.create_trainer(create_model(), *create_datasets()):
        manager.train(1, save_path=None)
        assert load_weights("run")


def test_progress_covers_the_whole_run_if_its_length_is_known(capfd: pytest.CaptureFixture[str]) -> None:
    steps = -(-NUM // BATCH)
    with make(config(settings={**EXACT, "log_every": 1})) as trainer:
        trainer.train(3, save_path=None)
        err = capfd.readouterr().err
    reported = [(int(step), int(total)) for step, total in re.findall(r"^step (\d+)/(\d+) ", err, re.MULTILINE)]
    assert reported == [(n, 3 * steps) for n in range(1, 3 * steps + 1)] and "in this epoch" not in err
    with make(config(settings={**EXACT, "log_every": 1})) as trainer:
        trainer.train_epoch(0)
        reported = capfd.readouterr().err
        assert f"step {steps}/{steps}" in reported and " left in this epoch" in reported, (
            "a loop of one's own may go on"
        )


def test_the_banner_shows_the_steps_of_an_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    with make(config()):
        printed = " ".join("".join(capsys.readouterr()).split())
    assert f"steps {-(-NUM // BATCH)} in an epoch" in printed


def test_attention_avoids_cudnn_with_a_custom_collate_function() -> None:
    enabled = torch.backends.cuda.cudnn_sdp_enabled
    seen = set()

    def noting(said: Tensor, wanted: Tensor) -> Tensor:
        seen.add(enabled())  # type: ignore[no-untyped-call]
        return nn.functional.cross_entropy(said, wanted)

    before = enabled()  # type: ignore[no-untyped-call]
    for collate, expected in ((None, before), (default_collate, before), (lambda items: default_collate(items), False)):
        seen.clear()
        with make(config(), collate_fn=collate, loss_fn=noting) as trainer:
            trainer.train_epoch(0)
        assert seen == {expected} and enabled() == before  # type: ignore[no-untyped-call]


def test_another_trainer_continues_from_a_checkpoint_exactly() -> None:
    with make(config()) as trainer:
        losses(trainer, 1)
        trainer.save_checkpoint(0, "one")
    with make(config(batch_size=2, global_batch_size=None)) as other:  # another batch size, but the run keeps its own
        assert other.load_checkpoint("one") == 0
        assert losses(other, 2, first=1) == pytest.approx(by_hand(3)[2:], abs=1e-12)
        other.save_checkpoint(2, "one")
        assert len(list(Path("one").glob("step_*"))) == 2  # a checkpoint of another run must not be deleted
        other.load_checkpoint("one")
        assert other.get_performance_stats()["steps"] == 12


def test_a_checkpoint_that_does_not_fit_leaves_the_optimizer_as_it_was() -> None:
    wider = nn.Sequential(create_model(), nn.Identity())  # the same weights under other names
    with MultiGPUTrainingManager(config()).create_trainer(wider, *create_datasets(), optimizer=sgd) as other:
        other.save_checkpoint(-1, "other_model")  # before its optimizer has any state
    with make(config()) as trainer:
        losses(trainer, 1)
        with pytest.raises(UserError, match="does not match this run"):
            trainer.load_checkpoint("other_model")
        assert losses(trainer, 1, first=1) == pytest.approx(by_hand(2)[2:], abs=1e-12)


def test_a_checkpoint_cannot_be_saved_into_another_runs_folder() -> None:
    with make(config(output_dir="run")) as trainer:
        losses(trainer, 2)
    before = sorted(path.name for path in Path("run/checkpoints").glob("step_*"))
    kept = pytest.raises(UserError, match="contains the checkpoints of a run")
    with make(config(output_dir="run")) as trainer, kept:
        trainer.save_checkpoint(1, "run/checkpoints")
    assert before and sorted(path.name for path in Path("run/checkpoints").glob("step_*")) == before


def test_a_checkpoint_from_before_training_restarts_from_the_beginning() -> None:
    with make(config()) as trainer:
        trainer.save_checkpoint(-1, "beginning")
        losses(trainer, 2)
        assert trainer.load_checkpoint("beginning") == -1
        assert losses(trainer, 2) == pytest.approx(by_hand(2), abs=1e-12)


def test_a_resumed_run_of_a_users_loop_repeats_no_epoch() -> None:
    with make(config(output_dir="run")) as trainer:
        first = losses(trainer, 2)
    with make(config(output_dir="run")) as trainer:
        assert losses(trainer, 4) == pytest.approx(by_hand(4), abs=1e-12)
        assert trainer.get_performance_stats()["samples"] == 2 * NUM
    assert first == pytest.approx(by_hand(2), abs=1e-12)


def test_the_best_of_an_earlier_start_stays_the_best(capfd: pytest.CaptureFixture[str]) -> None:
    """The loop of the guide after a restart: its best loss is infinite again, and all weights are newer."""

    def loop(epochs: int, place: str = "best_model.pth") -> list[float]:
        actual, best = [], float("inf")
        with make(config(output_dir="run"), optimizer=growing) as trainer:
            for epoch in range(epochs):
                trainer.train_epoch(epoch)
                actual.append(trainer.validate(epoch)["val_loss"])
                if actual[-1] < best:
                    best = actual[-1]
                    trainer.save_checkpoint(epoch, place)
        return actual

    first = loop(3)
    assert first[0] == min(first), "it gets worse, or this tests nothing"
    best = load_weights("best_model.pth")
    again = loop(4)
    assert again[:3] == first
    kept = load_weights("best_model.pth")
    assert all(torch.equal(kept[name], best[name]) for name in best)
    with make(config(), optimizer=growing) as trainer:
        assert trainer.load_checkpoint("best_model.pth") == 0
        assert trainer.validate(9)["val_loss"] == pytest.approx(first[0], abs=1e-12)
    capfd.readouterr()
    loop(4, "another.pth")
    assert "an earlier start trained epoch 0" in capfd.readouterr().err and not Path("another.pth").exists()


def test_train_returns_no_checkpoint_that_does_not_exist() -> None:
    def trained(epochs: int) -> Any:
        with make(config(output_dir="run"), optimizer=growing) as trainer:
            return trainer.train(epochs, save_path=".")["checkpoint"]

    assert trained(2) == trained(3) == "best_model.pth"
    shutil.rmtree("best_model.pth")
    assert trained(4) is None


def growing(parameters: Any) -> torch.optim.Optimizer:
    """A loss that gets worse in every epoch."""
    return torch.optim.SGD(parameters, lr=0.5, maximize=True)


def test_a_checkpoint_returns_the_last_completed_epoch_or_the_saved_number() -> None:
    with make(config(output_dir="run")) as trainer:
        losses(trainer, 1)
        trainer.save_checkpoint(0, "first.pth")
        losses(trainer, 2, first=1)
        trainer.save_checkpoint(30, "as I count.pth")
    steps = sorted(Path("run/checkpoints").glob("step_*"))
    with make(config()) as trainer:
        actual = [trainer.load_checkpoint(path) for path in ("first.pth", "run", steps[0], steps[1], "as I count.pth")]
    assert actual == [0, 2, 0, 1, 30]


def test_an_epoch_that_is_trained_again_is_reported(capfd: pytest.CaptureFixture[str]) -> None:
    with make(config(output_dir="run")) as trainer:
        losses(trainer, 2, first=1)
    with make(config()) as trainer:
        begin = trainer.load_checkpoint("run") + 1
        trainer.train_epoch(begin)
        assert begin == 3 and "train_epoch" not in capfd.readouterr().err
        trainer.train_epoch(0)
        trainer.train_epoch(0)
    assert capfd.readouterr().err.count("epoch 3 is already trained") == 1


def test_the_report_of_a_loop_that_ended_says_so() -> None:
    with make(config(output_dir="run")) as trainer:
        losses(trainer, 1)
    assert status_of(read_run(Path("run")))[0] == "done"


class Interrupting(Dataset[Any]):
    """Sends a signal when a certain number of samples was read."""

    def __init__(self, at: int) -> None:
        self.left, self.data = at, create_datasets()[0]

    def __len__(self) -> int:
        return NUM

    def __getitem__(self, index: int) -> Any:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return self.data[index]


def test_a_signal_in_the_middle_of_an_epoch_saves_and_the_next_start_finishes_it() -> None:
    before = signal.getsignal(signal.SIGTERM)
    manager = MultiGPUTrainingManager(config(output_dir="run"))
    val = create_datasets()[1]
    more = {"optimizer": sgd, "scheduler": halving}
    trainer = manager.create_trainer(create_model(), Interrupting(NUM + 8), val, **more)
    losses(trainer, 1)
    with pytest.raises(SystemExit) as stopped:
        trainer.train_epoch(1)
    assert stopped.value.code == 75
    assert signal.getsignal(signal.SIGTERM) is before
    with make(config(output_dir="run")) as other:
        assert losses(other, 2) == pytest.approx(by_hand(2), abs=1e-12)
        assert 0 < other.get_performance_stats()["samples"] < NUM


SIGNALLED = """
import os, signal, sys, torch
from torch import nn
from torch.utils.data import TensorDataset
from unisono.multi_gpu import MultiGPUConfig, MultiGPUTrainingManager

x = torch.randn(8, 3)
config = MultiGPUConfig(num_workers=0, batch_size=4, output_dir="run", settings={"tensorboard": False})
trainer = MultiGPUTrainingManager(config).create_trainer(nn.Linear(3, 1), TensorDataset(x, x[:, :1]))
for epoch in range(4):
    trainer.train_epoch(epoch)
    print("epoch", epoch, flush=True)
    if epoch == 1 and sys.argv[1] == "signal":
        os.kill(os.getpid(), signal.SIGTERM)
        print("still here", flush=True)
"""


def test_a_signal_between_epochs_saves_and_the_next_start_continues() -> None:
    Path("script.py").write_text(SIGNALLED)
    first = command_line.end(command_line.start(["script.py", "signal"], cwd=Path.cwd()))
    assert first.code == 75, first.err
    assert first.out == "epoch 0\nepoch 1\n" and "to continue" in first.err
    second = command_line.end(command_line.start(["script.py", "go on"], cwd=Path.cwd()))
    assert second.code == 0 and second.out.endswith("epoch 3\n"), second.err
    steps = [json.loads(line)["step"] for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert max(steps) == 8  # two steps in each of four epochs, none twice


def test_a_signal_between_calls_leaves_the_users_handlers_alone() -> None:
    caught: list[int] = []
    with BetweenCalls(StopRequest("plain"), lambda: True):
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGUSR1, lambda number, frame: caught.append(number))
    try:
        with make(config(output_dir="run")) as trainer:
            trainer.train_epoch(0)
            os.kill(os.getpid(), signal.SIGUSR1)
            trainer.train_epoch(1)
        assert caught == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def test_a_signal_while_a_checkpoint_is_saved_stops_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with make(config(output_dir="run")) as trainer:
        trainer.train_epoch(0)
        save = trainer._engine.save_to
        monkeypatch.setattr(trainer._engine, "save_to", lambda to: (os.kill(os.getpid(), signal.SIGTERM), save(to))[1])
        with pytest.raises(SystemExit) as stopped:
            trainer.save_checkpoint(0, "mine")
    assert stopped.value.code == 75 and list(Path("mine").glob("step_*"))


def test_no_file_of_the_user_is_overwritten() -> None:
    Path("best_model.pth").write_bytes(b"years of work")
    Path("folder").mkdir()
    Path("folder/notes.txt").write_text("mine")
    with make(config()) as trainer:
        trainer.train_epoch(0)
        with pytest.raises(UserError, match=r"best_model.pth is a file"):
            trainer.save_checkpoint(0, "best_model.pth")
        with pytest.raises(UserError, match=r"folder contains notes.txt"):
            trainer.save_checkpoint(0, "folder")
        with pytest.raises(UserError, match="no_such does not exist"):
            trainer.load_checkpoint("no_such")
    assert Path("best_model.pth").read_bytes() == b"years of work"


def test_damaged_epoch_logs_in_a_checkpoint_do_no_harm() -> None:
    with make(config()) as trainer:
        trainer.train_epoch(0)
        recipe = trainer._recipe
        recipe.recall(
            {"epochs": [{"epoch": "x"}, 3], "total": "many", "rates": ["fast"], "schedules": [{"step": 1}, 2]}
        )
        assert recipe.log.epochs == [] and recipe.log.total == 0.0
        recipe.recall([1])
        trainer.train_epoch(1)
        assert callable(recipe._scheduler.step)


# --- config


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lr": 0.1}, "it is learning_rate here"),
        ({"sampler": None}, "the sample order is the same on any number of GPUs"),
        ({"max_bad_samples": 3}, r'settings=\{"max_bad_samples": …\}'),
    ],
)
def test_names_from_other_libraries_and_from_the_engine_get_a_suggestion(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MultiGPUConfig(**fields)


def test_strategies_have_the_names_of_the_command_line() -> None:
    actual = [MultiGPUConfig(strategy=name).strategy for name in ("dp", "ddp", "DistributedDataParallel", "fsdp")]
    assert actual == ["dataparallel", "distributed", "distributed", "sharded"]


@pytest.mark.parametrize(
    ("scheduler", "message"),
    [
        (torch.optim.lr_scheduler.StepLR, r"is the class StepLR.*lambda optimizer: StepLR"),
        (sgd(create_model().parameters()), "SGD is an optimizer"),
        (halving(sgd(create_model().parameters())), "of another optimizer"),
    ],
)
def test_a_scheduler_that_would_do_nothing_is_refused(scheduler: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(config(), scheduler=scheduler)


def test_a_batch_without_a_target_is_rejected_before_the_forward_pass() -> None:
    data = [{"x": torch.randn(3), "answer": torch.tensor(1)} for _ in range(8)]
    manager = MultiGPUTrainingManager(config())
    loss = nn.functional.cross_entropy
    trainer = manager.create_trainer(create_model(), data, loss_fn=loss)  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match="the batch has only x, answer; name the target labels"), trainer:
        trainer.train_epoch(0)


def test_data_without_indexing_is_rejected() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(())

    with pytest.raises(UserError, match=r"the train dataset \(Stream\) cannot be indexed"):
        MultiGPUTrainingManager(config()).create_trainer(create_model(), Stream())


def test_a_batch_larger_than_the_data_gives_no_remark(capfd: pytest.CaptureFixture[str]) -> None:
    with make(config(global_batch_size=4 * NUM)) as trainer:
        trainer.train_epoch(0)
        assert trainer.get_performance_stats()["samples"] == NUM
    assert "continues into the next epoch" not in capfd.readouterr().err


def test_an_unknown_field_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match="unknown field batchsize of MultiGPUConfig; did you mean batch_size"):
        MultiGPUConfig(batchsize=3)  # type: ignore[call-arg]
    whole = config(batch_size=3)
    assert pickle.loads(pickle.dumps(copy.deepcopy(whole))) == whole
    assert "batch_size" in inspect.signature(MultiGPUConfig).parameters  # as a notebook shows it


def test_every_field_of_the_original_module_exists_with_its_default() -> None:
    actual = MultiGPUConfig()
    assert {name: getattr(actual, name) for name in KNOWN} == KNOWN


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"strategy": "distribute"}, "did you mean distributed"),
        ({"backend": "mpi"}, "backend: expected nccl, gloo"),
        ({"memory_efficient_find_unused_parameters": True}, "PyTorch has no such option"),
        ({"num_gpus": -1}, "num_gpus: expected a whole number"),
        ({"num_gpus": 2, "gpu_ids": [0]}, "contradicts"),
        ({"gpu_ids": [0, 0]}, "gpu_ids: expected distinct"),
        ({"rank": 2, "world_size": 2}, "rank 2 needs a larger world_size than 2"),
        ({"batch_size": 0}, "batch_size: expected"),
        ({"master_port": "http"}, "master_port"),
        ({"scheduler_interval": "week"}, "scheduler_interval"),
        ({"settings": {"gpus": "2"}}, "num_gpus or gpu_ids"),
    ],
)
def test_fields_without_effect_are_rejected_with_the_reason(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        MultiGPUConfig(**fields)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"optimizer": sgd([nn.Parameter(torch.zeros(1))])}, "weights of another model"),
        ({"optimizer": 3}, "optimizer: expected"),
        ({"scheduler": 3}, "scheduler: expected"),
        ({"loss_fn": nn.CrossEntropyLoss}, r"CrossEntropyLoss\(\)"),
        ({"loss_fn": 0.5}, "loss_fn: expected a function"),
        ({"learning_rat": 0.1}, "did you mean learning_rate"),
        ({"mixed_precision": "int4"}, "mixed_precision"),
    ],
)
def test_unusable_arguments_are_rejected_before_anything_is_written(more: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        make(config(), **more)
    assert not list(Path.cwd().iterdir())


def test_data_that_cannot_be_ordered_is_refused() -> None:
    train, _ = create_datasets()
    weighted = DataLoader(train, batch_size=2, sampler=WeightedRandomSampler([1.0] * NUM, NUM))
    with pytest.raises(ConfigError, match="WeightedRandomSampler"):
        DataParallelTrainer(create_model(), config(), weighted)
    with pytest.raises(RecipeError, match="empty"):
        DataParallelTrainer(create_model(), config(), TensorDataset(torch.zeros(0, 3)))
    with pytest.raises(RecipeError, match="model: expected"):
        DataParallelTrainer("resnet", config(), train)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="create_trainer"):
        MultiGPUTrainingManager().train(1)


def test_training_that_cannot_continue_raises_a_runtime_error() -> None:
    with pytest.raises(RuntimeError) as caught, make(config(), loss_fn=lambda out, y: out.sum() * float("nan")) as it:
        it.train_epoch(0)
    assert isinstance(caught.value, TrainingError) and "learning_rate" in str(caught.value)


def test_a_config_file_contains_the_fields_of_the_config(tmp_path: Path) -> None:
    (tmp_path / "it.yaml").write_text("batch_size: 4\nstrategy: single\n")
    assert MultiGPUConfig.from_file(tmp_path / "it.yaml").batch_size == 4
    (tmp_path / "it.yaml").write_text("batchsize: 4\n")
    with pytest.raises(ConfigError, match="did you mean batch_size"):
        MultiGPUConfig.from_file(tmp_path / "it.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        MultiGPUConfig.from_file(tmp_path / "none.yaml")


# --- GPUs

TWO_GPUS = [
    Gpu(0, "GPU-a", "Small", 8 * 10**9, 3 * 10**9, capability="8.6"),
    Gpu(1, "GPU-b", "Large", 80 * 10**9, 70 * 10**9, capability="9.0"),
]


def test_get_gpu_info_describes_the_gpus_and_the_ones_with_most_free_memory_are_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert get_gpu_info() == {"count": 0, "devices": [], "memory": {}, "capabilities": {}}
    assert select_optimal_gpus(num_gpus=4, min_memory_gb=8.0) == []
    monkeypatch.setattr("unisono.multi_gpu.gpus.visible_gpus", lambda: TWO_GPUS)
    info = get_gpu_info()
    assert info["count"] == 2 and info["capabilities"] == {0: "8.6", 1: "9.0"}
    assert info["devices"][0]["memory_allocated"] == 5 * 10**9 and info["memory"][1]["total"] == 80 * 10**9
    assert {"id", "name", "memory_total", "memory_allocated", "compute_capability"} <= set(info["devices"][0])
    assert select_optimal_gpus() == [1] and select_optimal_gpus(1, 1.0) == [1] and select_optimal_gpus(2, 1.0) == [0, 1]


def test_which_gpus_a_process_takes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    free = [Gpu(number, f"GPU-{number}", "Large", 80 * 10**9, 79 * 10**9) for number in range(3)]
    monkeypatch.setattr("unisono.multi_gpu.gpus.visible_gpus", lambda: free)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # of the locks
    plain, rank = World("plain"), World(launcher="torchrun", rank=1, size=2, local_rank=1, local_size=2)
    all_of_them = take_devices(MultiGPUConfig(), "auto", plain)
    assert all_of_them.strategy == "dp" and all_of_them.requested == 3 and "torchrun" in all_of_them.remarks[0]
    assert all_of_them.environ is not None
    assert all_of_them.environ["CUDA_VISIBLE_DEVICES"] == "GPU-0,GPU-1,GPU-2"
    del all_of_them  # releases the GPUs
    two = take_devices(MultiGPUConfig(gpu_ids=[0, 2]), "dp", plain)
    assert two.environ is not None and two.environ["CUDA_VISIBLE_DEVICES"] == "GPU-0,GPU-2"
    del two
    one = take_devices(MultiGPUConfig(num_gpus=1), "auto", plain)
    assert (one.strategy, one.requested, one.environ, one.device) == ("auto", 1, None, "GPU-0")
    del one
    fewer = take_devices(MultiGPUConfig(num_gpus=4), "dp", plain)
    assert "accumulation keeps the effective batch" in fewer.remarks[0]
    del fewer
    fewer = take_devices(MultiGPUConfig(num_gpus=4), "dp", plain, global_batch=6)
    assert fewer.remarks[0].endswith("a step still takes 6 samples")
    del fewer
    ddp = take_devices(MultiGPUConfig(gpu_ids=[1, 2]), "ddp", plain)
    assert (ddp.requested, ddp.device) == (2, "GPU-1") and "accumulation keeps" in ddp.remarks[-1]
    mine = take_devices(MultiGPUConfig(gpu_ids=[1, 2]), "ddp", rank)
    assert mine.environ is not None and mine.environ["CUDA_VISIBLE_DEVICES"] == "GPU-1,GPU-2"
    assert take_devices(MultiGPUConfig(num_gpus=0), "auto", plain).gpus == "0"
    with pytest.raises(UserError, match="no GPU has 90 GB of free memory"):
        take_devices(MultiGPUConfig(min_memory_gb=90), "auto", plain)


def test_a_missing_gpu_id_is_rejected_and_a_missing_number_keeps_the_batch() -> None:
    with pytest.raises(ConfigError, match="this machine has no GPU"):
        make(config(gpu_ids=[0]))
    with make(config(num_gpus=4, batch_size=2, global_batch_size=None)) as trainer:
        assert trainer.get_performance_stats()["global_batch_size"] == 8


def test_the_banner_explains_missing_devices_and_the_chosen_strategy(
    capsys: pytest.CaptureFixture[str],
) -> None:
    train, _ = create_datasets()
    settings = config(strategy="dataparallel", num_gpus=4, global_batch_size=None)
    with DataParallelTrainer(create_model(), settings, DataLoader(train, batch_size=BATCH)) as trainer:
        assert trainer.get_performance_stats()["global_batch_size"] == BATCH
    printed = "".join(capsys.readouterr())
    assert "single (dp on one device is the same as single)" in printed and "as requested" not in printed
    assert f"only the CPU; a step still takes {BATCH} samples" in printed and "accumulation keeps" not in printed
    with make(settings):
        assert "only the CPU; accumulation keeps the effective batch" in "".join(capsys.readouterr())


def test_the_batch_size_that_fits_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (data, _) = create_model(), create_datasets()
    before = copy.deepcopy(model.state_dict())
    # Per sample, the graph stores its 3 inputs, 8 hidden values and 2 log probabilities (float32), and its class.
    for megabytes in (1, 2):
        monkeypatch.setattr("unisono.multi_gpu.benchmark.free_host_memory", lambda free=megabytes * 10**6: free)
        size = get_optimal_batch_size(model, dataset=data, loss_fn=nn.CrossEntropyLoss(), max_batch_size=10**6)
        assert 4_000 * megabytes < size < 6_000 * megabytes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(weight.grad is None for weight in model.parameters())
    assert get_optimal_batch_size(model, dataset=data, max_batch_size=16) == 16
    assert get_optimal_batch_size(model, 0, memory_per_sample=1e-4) == 9  # 1 MB minus weights, 0.1 MB each
    with pytest.raises(ConfigError, match="memory_per_sample"):
        get_optimal_batch_size(model, memory_per_sample=0)


def test_a_benchmark_leaves_the_model_and_the_folder_alone() -> None:
    model, (data, _) = create_model(), create_datasets()
    before = copy.deepcopy(model.state_dict())
    measurement = benchmark_multi_gpu_performance(model, data, config(batch_size=4), steps=3, warmup_steps=1)
    assert measurement["samples"] == 3 * BATCH
    assert measurement["samples_per_second"] == pytest.approx(3 * BATCH / measurement["training_time"])
    assert (
        measurement["gpu_utilization"]["gpu_info"]["count"] == 0 and measurement["memory"]["cpu"]["max_allocated"] > 0
    )
    assert measurement["single_device"]["samples_per_second"] > 0 and measurement["speedup"] == 1.0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not list(Path.cwd().iterdir())


def test_a_benchmark_of_one_process_reports_that_it_measures_one_device(capsys: pytest.CaptureFixture[str]) -> None:
    model, (data, _) = create_model(), create_datasets()
    measurement = benchmark_multi_gpu_performance(model, data, config(world_size=2), steps=2, warmup_steps=1)
    assert measurement["num_devices"] == 1 and measurement["devices_asked_for"] == 2
    stderr = capsys.readouterr().err
    assert "world_size is 2" in stderr and "one device" in stderr and "torchrun --nproc_per_node=2" in stderr


# --- two real ranks


def everything_on_two_ranks(folder: str, port: int) -> dict[str, Any]:
    """Runs in each rank: first without a launcher, then with a launcher's variables."""
    os.chdir(folder)
    rank = int(os.environ["RANK"])
    values = {
        name: os.environ.pop(name) for name in list(os.environ) if name.startswith(("RANK", "WORLD", "TORCHELASTIC"))
    }
    actual: dict[str, Any] = {}
    setup_distributed_training(rank, 2, "127.0.0.1", port)
    actual["group"] = torch.distributed.get_world_size()
    result = launch_distributed_training(
        rank, 2, create_model, create_datasets, config(), epochs=2, optimizer=sgd, scheduler=halving, save_path="hand"
    )
    actual["by hand"] = [row[name] for row in result["history"] for name in ("train_loss", "val_loss")]
    cleanup_distributed_training()
    actual["clean"] = "RANK" not in os.environ and not torch.distributed.is_initialized()
    os.environ.update(values)
    torch.manual_seed(rank)  # each rank starts with different weights
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    if rank == 0:
        model.load_state_dict(create_model().state_dict())
    trainer: Any = DistributedDataParallelTrainer(
        model, config(), *create_datasets(), batch_size=3, optimizer=sgd, scheduler=halving
    )
    actual["distributed"] = losses(trainer, 3)
    actual["epoch"] = trainer.train_epoch(3) and trainer.load_checkpoint("one_device.pth")
    actual["taken up"] = losses(trainer, 1, first=1)
    stats = trainer.get_performance_stats()
    actual["stats"] = [stats["strategy"], stats["world_size"], stats["num_devices"]]
    try:
        trainer.save_checkpoint(0, "a_file.pth")
    except UserError as error:
        actual["refused"] = str(error)
    trainer.close()
    tiny = {"bucket_cap_mb": 0.001, "gradient_as_bucket_view": True}
    for name, fields in {"sharded": {"strategy": "sharded"}, "auto": tiny, "static": {"static_graph": True}}.items():
        model = create_model()
        optimizer = sgd(model.parameters())
        more = {"optimizer": optimizer, "scheduler": halving(optimizer)}
        with MultiGPUTrainingManager(config(**fields)).create_trainer(model, *create_datasets(), **more) as trainer:
            actual[name] = losses(trainer, 3)
            actual[f"{name} strategy"] = trainer.strategy
            if name == "sharded":
                trainer.save_checkpoint(2, "sharded.pth")
    measured = benchmark_multi_gpu_performance(create_model(), create_datasets()[0], config(), steps=2, warmup_steps=1)
    actual["devices"] = [measured["num_devices"], measured["single_device"]["num_devices"]]
    actual["speeds"] = [measured["samples_per_second"], measured["single_device"]["samples_per_second"]]
    return actual


def test_two_ranks_train_like_one_device_whatever_the_strategy() -> None:
    Path("a_file.pth").write_bytes(b"mine")
    with make(config(strategy="dataparallel")) as trainer:
        expected = losses(trainer, 1)
        trainer.save_checkpoint(0, "one_device.pth")
        expected += losses(trainer, 2, first=1)
    assert expected == pytest.approx(by_hand(3), abs=1e-12)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    both = run_ranks("everything_on_two_ranks", __file__, 2, {"folder": str(Path.cwd()), "port": port})
    for actual in both:
        assert actual["group"] == 2 and actual["clean"]
        assert actual["by hand"] == pytest.approx(expected[:4], abs=1e-12)
        for name, strategy in (("sharded", "sharded"), ("auto", "distributed"), ("static", "distributed")):
            assert actual[name] == pytest.approx(expected, abs=1e-12)
            assert actual[f"{name} strategy"] == strategy
        assert actual["distributed"] == pytest.approx(expected, abs=1e-12)
        assert actual["epoch"] == 0 and actual["taken up"] == pytest.approx(expected[2:4], abs=1e-12)
        assert actual["stats"] == ["distributed", 2, 2]
        assert "a_file.pth is a file" in actual["refused"]
        assert actual["devices"] == [2, 1] and actual["speeds"] == both[0]["speeds"]
    with make(config()) as trainer:  # a checkpoint sharded over two ranks, loaded on one device
        assert trainer.load_checkpoint("sharded.pth") == 2
        assert trainer.validate(2)["val_loss"] == pytest.approx(expected[5], abs=1e-12)


@pytest.mark.parametrize("deaths", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_launched_ranks_survive_the_death_of_one_and_the_run_is_the_same(deaths: int) -> None:
    inject = {"inject": "kill@rank1:step6"} if deaths else {}
    settings = config(world_size=2, output_dir="run", settings={**EXACT, **inject})
    more = {"loss_fn": nn.CrossEntropyLoss(), "optimizer": sgd, "scheduler": halving, "save_path": "best"}
    actual = launch_multi_gpu_training(create_model, create_datasets, settings, epochs=3, **more)
    history = [row[name] for row in actual["history"] for name in ("train_loss", "val_loss")]
    assert history == pytest.approx(by_hand(3), abs=1e-12)
    assert actual["best_epoch"] == min(range(3), key=lambda epoch: history[2 * epoch + 1])
    assert Path(actual["checkpoint"]) == Path.cwd() / "best/best_model.pth" and load_weights(actual["checkpoint"])
    events = [json.loads(line) for line in Path("run/events.jsonl").read_text().splitlines()]
    assert [event["kind"] for event in events].count("restart") == deaths
    assert all(event["world"] == 2 for event in events if event["kind"] in ("start", "resume"))


def test_functions_that_other_processes_cannot_import_train_on_one_device(capsys: pytest.CaptureFixture[str]) -> None:
    more = {"optimizer": sgd, "scheduler": halving, "save_path": None}
    settings = config(world_size=2)
    actual = launch_multi_gpu_training(lambda: create_model(), create_datasets, settings, epochs=1, **more)
    assert actual["history"][0]["train_loss"] == pytest.approx(by_hand(1)[0], abs=1e-12)
    assert "cannot be imported by other processes" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="model_fn"):
        launch_multi_gpu_training(create_model(), create_datasets, settings, epochs=1)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="epochs"):
        launch_multi_gpu_training(create_model, create_datasets, settings, epochs=0)


def test_listing_gpus_does_not_import_torch() -> None:
    code = "import sys; from unisono.multi_gpu import get_gpu_info, MultiGPUConfig; get_gpu_info(); MultiGPUConfig(); "
    result = subprocess.run([sys.executable, "-c", code + "sys.exit('torch' in sys.modules)"], check=False)
    assert result.returncode == 0
    assert all(hasattr(multi_gpu, name) for name in multi_gpu.__all__)


def test_steps_that_end_with_an_epoch_add_up() -> None:
    for epoch, batch in ((20, 6), (5, 8), (12, 4), (7, 1)):
        strides = Strides(batch, epoch)
        position, ends = 0, [0]
        for _ in range(3 * -(-epoch // batch)):
            position = strides.end(position)
            ends.append(position)
        assert position == 3 * epoch
        for start, here in enumerate(ends):
            for steps, there in enumerate(ends[start:]):
                assert strides.after(here, steps) == there and strides.between(here, there) == steps


# --- on a GPU


@pytest.fixture
def real_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for room in ("gpus", "launch", "benchmark"):
        monkeypatch.setattr(f"unisono.multi_gpu.{room}.visible_gpus", visible_gpus)


@on_a_gpu
@pytest.mark.parametrize("strategy", ["auto", "dataparallel", "distributed", "sharded"])
def test_a_gpu_trains_like_the_cpu(strategy: str, real_gpus: None) -> None:
    with make(config(num_gpus=1, strategy=strategy, min_memory_gb=0.1)) as trainer:
        assert losses(trainer, 2) == pytest.approx(by_hand(2), abs=1e-9)
        assert trainer.get_memory_stats()["gpu_0"]["max_allocated"] > 0
    cleanup_distributed_training()


@on_a_gpu
def test_the_largest_batch_that_fits_a_gpu_is_found_by_trials(real_gpus: None) -> None:
    torch.cuda.set_per_process_memory_fraction(0.02)
    try:
        wide = nn.Sequential(nn.Linear(3, 2**18), nn.Tanh(), nn.Linear(2**18, 2))
        size = get_optimal_batch_size(wide, dataset=create_datasets()[0], max_batch_size=4096)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert 32 < size < 4096 and next(wide.parameters()).device.type == "cpu"
    info = get_gpu_info()
    assert info["count"] >= 1 and "." in info["devices"][0]["compute_capability"]
    measurement = benchmark_multi_gpu_performance(create_model(), create_datasets()[0], MultiGPUConfig(num_workers=0))
    assert measurement["memory"]["gpu_0"]["max_allocated"] > 0


@on_a_gpu
def test_every_name_works_on_a_gpu(real_gpus: None) -> None:
    """Every strategy name gives the losses of plain PyTorch on one GPU."""
    assert select_optimal_gpus(num_gpus=1, min_memory_gb=0.1) == [0]
    settings, expected = config(num_gpus=1, min_memory_gb=0.1, global_batch_size=None), by_hand(3)
    train, val = create_datasets()
    model = create_model().double()
    wrapped, optimizer = OptimizedDataParallel(model), sgd(model.parameters())
    loaders = {"train_loader": DataLoader(train, batch_size=BATCH, shuffle=True), "val_loader": DataLoader(val, 4)}
    more = {"optimizer": optimizer, "scheduler": halving(optimizer), "loss_fn": nn.CrossEntropyLoss()}
    trainer: Any = DataParallelTrainer(model=wrapped, config=settings, **loaders, **more)
    values = losses(trainer, 2)
    trainer.save_checkpoint(1, "two.pth")
    assert wrapped.get_device_memory_usage()["gpu_0"]["allocated"] > 0
    assert trainer.get_performance_stats()["samples"] == 2 * NUM
    trainer.close()
    with DistributedDataParallelTrainer(
        create_model(), settings, train, val, batch_size=BATCH, optimizer=sgd, scheduler=halving
    ) as other:
        other.load_checkpoint("two.pth")
        assert values + losses(other, 1, first=2) == pytest.approx(expected, abs=1e-9)
    assert next(iter(load_weights("two.pth").values())).device.type == "cpu"
    cleanup_distributed_training()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    setup_distributed_training(0, 1, "127.0.0.1", port)
    by_name = {"epochs": 3, "optimizer": sgd, "scheduler": halving, "save_path": None}
    one = config(num_gpus=1, min_memory_gb=0.1)
    results = [launch_distributed_training(0, 1, create_model, create_datasets, one, **by_name)]  # type: ignore[arg-type]
    cleanup_distributed_training()
    results.append(launch_multi_gpu_training(create_model, create_datasets, one, **by_name))  # type: ignore[arg-type]
    for result in results:
        reported = [row[name] for row in result["history"] for name in ("train_loss", "val_loss")]
        assert reported == pytest.approx(expected, abs=1e-9)
