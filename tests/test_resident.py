"""A dataset on the device gives the same batches, and so the same bits, as one that workers read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from many_runs import Outcome, Run, identical
from ranks import run_ranks
from unisono import Loss, Recipe
from unisono.data.cursor import Cursor
from unisono.data.loader import Loader, to_device
from unisono.data.nested import leaves, mapped
from unisono.data.order import Order
from unisono.data.resident import Resident, ResidentLoader, Rows, gathered
from unisono.engine.step.guard import shape_of
from unisono.settings import DataSettings

NUM_SAMPLES, NUM_EVAL = 29, 7


class Points(NamedTuple):
    """A batch of points, or a single point without the first dimension."""

    x: Tensor
    y: Tensor
    number: Tensor


class Ordinary(Dataset[Points]):
    """Points in the plane, read one by one."""

    def __init__(self, size: int, first: int = 0) -> None:
        numbers = torch.arange(size) + first
        x = torch.stack([torch.sin(numbers * 0.7), torch.cos(numbers * 1.3)], dim=1)
        self.points = Points(x, (x.prod(1) * 3).sin(), numbers)

    def __len__(self) -> int:
        return len(self.points.x)

    def __getitem__(self, index: int) -> Points:
        return Points(*(column[index] for column in self.points))


class OnDevice(Ordinary):
    """The same points as a resident dataset."""

    device: torch.device | None = None

    def to(self, device: torch.device) -> OnDevice:
        self.points = to_device(self.points, device)
        self.device = device
        return self

    def gather(self, indices: Tensor) -> Points:
        assert indices.device == self.device, "nobody has brought the data to the device"
        return Points(*(column[indices] for column in self.points))


class Fit(Recipe):
    """Fits the points; samples have different counts."""

    defaults = {"num_workers": 0, "tensorboard": False, "log_every": 1, "learning_rate": 1e-2}
    data: type[Ordinary] = Ordinary

    @dataclass
    class Config:
        record: str | None = None
        """Not used here."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 16), nn.Dropout(0.2), nn.Tanh(), nn.Linear(16, 1))

    def dataset(self, split: str) -> Ordinary:
        return self.data(NUM_SAMPLES) if split == "train" else self.data(NUM_EVAL, first=1000)

    def loss(self, model: nn.Module, batch: Points, noise: Any) -> Loss:
        each = (model(batch.x + 0.1 * noise.normal(2))[:, 0] - batch.y).square()
        weight = batch.number % 3 + 1
        return Loss((each * weight).sum(), weight.sum(), {"numbers": batch.number.sum()})


class FitOnDevice(Fit):
    """The same recipe with data on the device."""

    data = OnDevice


def train_both(runs: list[dict[str, Any]], root: str) -> dict[str, Any]:
    """Runs in each rank: trains the runs with the recipes of this file."""
    import many_runs
    import recipes_for_tests

    for kind in (Fit, FitOnDevice):
        setattr(recipes_for_tests, kind.__name__, kind)
    return many_runs.train_all(runs, root)


RUN = {"num_epochs": 1, "eval_every": 4, "ema_decay": 0.9, "deterministic": True, "eval_batch_size": 2}
# name -> world and settings
WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "one at a time, more than are ordered ahead": (1, {"num_epochs": 3, "global_batch_size": 1, "eval_every": 0}),
    "one rank, accumulation": (1, {"global_batch_size": 8, "batch_size": 3}),
    "two ranks, uneven shares": (2, {"global_batch_size": 7, "batch_size": 7, "strategy": "ddp"}),
    "two ranks, accumulation": (2, {"global_batch_size": 9, "batch_size": 2, "strategy": "ddp"}),
    "three ranks, stand-ins": (3, {"global_batch_size": 2, "batch_size": 1, "strategy": "ddp"}),
    "three ranks, fsdp": (3, {"global_batch_size": 5, "batch_size": 1, "strategy": "fsdp"}),
    "float64": (2, {"global_batch_size": 7, "batch_size": 2, "strategy": "ddp", "dtype": "float64"}),
    "out of memory": (2, {"global_batch_size": 8, "strategy": "ddp", "inject": "oom@rank1:step3"}),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    root = tmp_path_factory.mktemp("resident")
    run_list = [
        Run(f"{kind}: {name}", f"{kind}: {name}", world, RUN | settings, recipe=kind)
        for name, (world, settings) in WAYS.items()
        for kind in ("Fit", "FitOnDevice")
    ]
    results = run_ranks("train_both", __file__, 3, {"runs": [asdict(run) for run in run_list], "root": str(root)})
    return {
        run.name: Outcome(root / run.folder, root / run.name, [results[rank][run.name] for rank in range(run.world)])
        for run in run_list
    }


def numbers(line: Mapping[str, Any]) -> dict[str, Any]:
    untimed = ("step", "epoch", "samples", "loss", "lr", "grad_norm", "count", "numbers", "skipped", "eval/loss")
    return {name: line[name] for name in untimed if name in line}


@pytest.mark.parametrize("name", WAYS)
def test_data_on_the_device_trains_bit_for_bit_like_data_read_one_by_one(name: str, runs: dict[str, Outcome]) -> None:
    ordinary, resident = runs[f"Fit: {name}"], runs[f"FitOnDevice: {name}"]
    assert resident.main["status"] == ordinary.main["status"] == "done"
    assert identical(resident.weights(prefix=""), ordinary.weights(prefix=""))
    lines = [[numbers(line) for line in run.lines()] for run in (ordinary, resident)]
    assert lines[0] == lines[1]
    assert resident.evaluations()[-1]["eval/loss"] > 0
    assert len(resident.events("oom")) == len(ordinary.events("oom")) == (name == "out of memory")


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(("global_batch", "micro_batch"), [(1, 1), (5, 1), (5, 2), (6, 3), (40, 40)])
def test_both_loaders_give_the_same_micro_batches(world: int, global_batch: int, micro_batch: int) -> None:
    order = Order(NUM_SAMPLES, seed=3)
    settings = DataSettings(num_workers=0)
    for rank in range(world):
        for start in (0, global_batch * 3):
            cursor = Cursor(start, 303, global_batch, micro_batch, rank, world)
            data = OnDevice(NUM_SAMPLES).to(torch.device("cpu"))
            resident = ResidentLoader(data, order, cursor, torch.device("cpu"))
            ordinary = Loader(Ordinary(NUM_SAMPLES), default_collate, order, cursor, settings, pin=False)
            count = 0
            for one, other in zip(resident, ordinary, strict=True):
                assert (one.chunk, list(one.positions), one.is_dummy) == (
                    other.chunk,
                    list(other.positions),
                    other.is_dummy,
                )
                for mine, theirs in zip(leaves(gathered(one.data)), leaves(other.data), strict=True):
                    assert torch.equal(mine, theirs)
                count += 1
            assert count >= (303 - start) // global_batch


def test_a_closed_loader_ends() -> None:
    data = OnDevice(5).to(torch.device("cpu"))
    loader = ResidentLoader(data, Order(5, 0), Cursor(0, 100, 5, 5, 0, 1), torch.device("cpu"))
    next(loader)
    loader.close()
    assert list(loader) == []


def test_resident_datasets_are_recognised() -> None:
    assert isinstance(OnDevice(3), Resident)
    assert not isinstance(Ordinary(3), Resident) and not isinstance([1, 2], Resident)


@dataclass(frozen=True)
class Pair:
    """A batch in a dataclass."""

    first: Tensor
    second: tuple[Points, None]


def test_every_leaf_of_a_nested_batch_is_visited_once_in_order_and_containers_are_preserved() -> None:
    points = Ordinary(3).points
    batch = {"a": [points, 5], "b": Pair(torch.ones(2), (points, None)), "c": "words"}
    met: list[Any] = []
    result = mapped(batch, lambda leaf: met.append(leaf) or (leaf + 1 if isinstance(leaf, Tensor) else leaf))
    assert [id(leaf) for leaf in met] == [id(leaf) for leaf in leaves(batch)] and len(met) == 10
    assert type(result["a"][0]) is Points and type(result["b"]) is Pair and result["b"].second[1] is None
    assert torch.equal(result["a"][0].x, points.x + 1) and result["c"] == "words"
    assert shape_of(result) == shape_of(batch)


def test_rows_are_gathered_on_demand_and_stay_on_their_device() -> None:
    rows = Rows(OnDevice(5).to(torch.device("cpu")), torch.tensor([4, 0]))
    assert to_device(rows, torch.device("cpu")) is rows
    assert gathered(rows).number.tolist() == [4, 0]
    assert gathered(rows.with_indices(torch.tensor([2]))).number.tolist() == [2]
    assert (
        shape_of(rows)
        == shape_of(rows.with_indices(torch.tensor([1, 1])))
        != shape_of(rows.with_indices(torch.tensor([1])))
    )
