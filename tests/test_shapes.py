"""Samples of several shapes: each micro-batch has one shape, and the run is the same on any number of ranks."""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Hashable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import Dataset

from command_line import environment, unisono
from many_runs import Copy, Outcome, Run, largest_difference
from ranks import run_ranks
from unisono import Loss, Recipe, train
from unisono.data.bits import key_of
from unisono.data.cursor import Chunk, Cursor, TrialCursor
from unisono.data.loader import Loader, MicroBatch, positions_tensor, to_device
from unisono.data.noise import Noise
from unisono.data.order import Order
from unisono.data.resident import ResidentLoader, gathered
from unisono.data.shapes import deal, is_shaped, shapes_of
from unisono.engine import evaluate
from unisono.engine.step.guard import shape_of
from unisono.errors import RecipeError
from unisono.settings import DataSettings

CPU = torch.device("cpu")
SIZES = [(1, 2, 2), (1, 2, 4), (3, 2, 4)]  # two image shapes and a video shape: frames, height, width


class Films(Dataset[dict[str, Any]]):
    """Item i: numbers in one of three shapes, with randomness that depends on the position in the stream."""

    def __init__(self, num_samples: int, first: int = 0) -> None:
        self.num_samples, self.first = num_samples, first

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        size = self.size(index)
        steps = torch.arange(2 * size[0] * size[1] * size[2]).view(2, *size)
        return {"id": index, "x": torch.sin(steps * (0.3 + 0.1 * index) + self.first), "shade": torch.rand(())}

    def size(self, index: int) -> tuple[int, int, int]:
        return SIZES[(index * 5 + index // 4) % 7 % 3]


class MixedFilms(Films):
    """The same data with shapes."""

    def shape(self, index: int) -> Hashable:
        return self.size(index)


class Mixer(nn.Module):
    """Attention over all positions of a video."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(5, 15), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(nn.functional.scaled_dot_product_attention(*self.qkv(x).chunk(3, dim=-1)))


class Denoiser(nn.Module):
    """Takes [batch, 2, frames, height, width] of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.back = nn.Linear(2, 5), nn.Linear(5, 2)
        self.blocks = nn.ModuleList(Mixer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.into(x.flatten(2).transpose(1, 2))
        for block in self.blocks:
            tokens = block(tokens)
        return self.back(tokens).transpose(1, 2).view(x.shape)


class Mixed(Recipe):
    """Denoises videos of several sizes; `collate` can only stack samples of equal shape."""

    defaults = {"num_workers": 0, "tensorboard": False, "log_every": 1, "learning_rate": 1e-2}
    data: type[Films] = MixedFilms

    @dataclass
    class Config:
        num_samples: int = 22
        """Films to train on."""
        num_eval: int = 0
        """Films to evaluate on; 0 does not evaluate."""
        record: str | None = None
        """Folder in which each rank writes down the samples of its micro-batches."""

    def model(self) -> nn.Module:
        return Denoiser()

    def dataset(self, split: str) -> Films | None:
        if split == "train":
            return self.data(self.config.num_samples)
        return self.data(self.config.num_eval, first=7) if self.config.num_eval else None

    def loss(self, model: nn.Module, batch: dict[str, Tensor], noise: Any) -> Loss:
        self._note("train" if model.training else "eval", batch["id"])
        return _loss(model, batch, noise)

    def _note(self, split: str, ids: Tensor) -> None:
        if self.config.record is not None:
            folder = Path(self.config.record)
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / f"{split}.{os.environ.get('RANK', '0')}").open("a") as file:
                file.write(json.dumps(ids.tolist()) + "\n")


class OneByOne(Mixed):
    """The same videos in micro-batches of one sample, without shapes."""

    data = Films


def _loss(model: nn.Module, batch: Mapping[str, Tensor], noise: Any) -> Loss:
    x, ids = batch["x"], batch["id"]
    wrong = model(x * batch["shade"].view(-1, 1, 1, 1, 1) + 0.2 * noise.normal(*x.shape[1:])) - x
    return Loss(wrong.square().flatten(1).mean(1).sum(), len(x), {"ids": ids.sum(), "squares": ids.square().sum()})


class Cut:
    """A dataset with the shapes and costs that a test sets."""

    def __init__(self, shapes: list[Hashable], costs: Mapping[Hashable, float] | None = None) -> None:
        self.shapes, self.costs = shapes, costs
        if costs is not None:
            self.cost = lambda index: costs[shapes[index]]

    def shape(self, index: int) -> Hashable:
        return self.shapes[index]

    def cursors(self, world: int, micro_batch: int, **more: Any) -> list[Cursor]:
        """The cursors of all ranks, by default in dataset order and with one global batch."""
        size = len(self.shapes)
        order = more.pop("order", Order(size, 0, shuffle=False))
        kind = more.pop("kind", Cursor)
        where = {"start": 0, "end": size, "global_batch": size} | more
        return [
            kind(micro_batch=micro_batch, rank=rank, world=world, shapes=shapes_of(self, order), **where)
            for rank in range(world)
        ]

    def chunks(self, world: int, micro_batch: int, **more: Any) -> list[list[Chunk]]:
        return [list(cursor.chunks()) for cursor in self.cursors(world, micro_batch, **more)]


@settings(max_examples=150, deadline=None)
@given(
    shapes=st.lists(st.sampled_from(["a", (3, 4), (9, 9, 9), None]), min_size=1, max_size=30),
    costs=st.none() | st.lists(st.floats(0.01, 1000), min_size=4, max_size=4),
    start=st.integers(0, 90),
    num_samples=st.integers(1, 60),
    global_batch=st.integers(1, 25),
    micro_batch=st.integers(1, 8),
    world=st.integers(1, 7),
)
def test_every_position_is_in_one_micro_batch_of_its_shape_and_step(
    shapes: list[Hashable],
    costs: list[float] | None,
    start: int,
    num_samples: int,
    global_batch: int,
    micro_batch: int,
    world: int,
) -> None:
    by_shape = None if costs is None else dict(zip(["a", (3, 4), (9, 9, 9), None], costs, strict=True))
    order = Order(len(shapes), 5)
    where = {"start": start, "end": start + num_samples, "global_batch": global_batch}
    ranks = Cut(shapes, by_shape).chunks(world, micro_batch, order=order, **where)
    assert len({len(chunks) for chunks in ranks}) == 1
    lasts = [chunk.last for chunk in ranks[0]]
    assert all([chunk.last for chunk in chunks] == lasts for chunks in ranks)
    assert sum(lasts) == -(-num_samples // global_batch) and lasts[-1]
    counted: Counter[int] = Counter()
    for chunks in ranks:
        step = 0
        for chunk in chunks:
            whole = range(start + step * global_batch, min(start + (step + 1) * global_batch, start + num_samples))
            assert sorted(chunk.global_batch) == list(whole) and set(chunk.positions) <= set(whole)
            assert 1 <= len(chunk.positions) <= micro_batch and list(chunk.positions) == sorted(chunk.positions)
            assert {shapes[order[position]] for position in chunk.positions} == {chunk.shape}
            counted.update([] if chunk.is_dummy else chunk.positions)
            step += chunk.last
    assert counted == Counter(range(start, start + num_samples))


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 40), global_batch=st.integers(1, 25), micro_batch=st.integers(1, 8), world=st.integers(1, 7))
def test_data_of_one_shape_is_split_like_data_without_shapes(
    size: int, global_batch: int, micro_batch: int, world: int
) -> None:
    where = {"global_batch": global_batch}
    plain = [list(Cursor(0, size, global_batch, micro_batch, rank, world).chunks()) for rank in range(world)]
    for mine, theirs in zip(Cut([(3, 4)] * size).chunks(world, micro_batch, **where), plain, strict=True):
        assert [(c.positions, c.last, c.is_dummy, c.global_batch) for c in mine] == [
            (c.positions, c.last, c.is_dummy, c.global_batch) for c in theirs
        ]
        assert all(isinstance(chunk.positions, range) for chunk in mine)


def sizes_by_turn(data: Cut, world: int, micro_batch: int) -> list[list[str]]:
    """For each turn, what the ranks compute: 2f is two videos, p an image, - a dummy."""
    result = []
    for turn in zip(*data.chunks(world, micro_batch), strict=True):
        words = ["-" if chunk.is_dummy else f"{len(chunk.positions)}{chunk.shape}" for chunk in turn]
        result.append(sorted(words))
    return result


@pytest.mark.parametrize(
    ("samples", "world", "micro_batch", "expected"),
    [
        ("ffpp", 2, 2, [["1f", "1f"], ["1p", "1p"]]),  # not two videos on one rank while the others have images
        ("ffpp", 1, 2, [["2f"], ["2p"]]),
        ("fpfp", 4, 1, [["1f", "1f", "1p", "1p"]]),
        ("pppppf", 2, 5, [["1f", "5p"]]),  # a video takes longer than five images anyway
        ("ffffpppp", 2, 4, [["2f", "2f"], ["2p", "2p"]]),
        ("fp", 3, 4, [["-", "1f", "1p"]]),
        ("ppppppppfff", 2, 4, [["1f", "2f"], ["4p", "4p"]]),
        ("ppppffff", 1, 1, [["1f"]] * 4 + [["1p"]] * 4),
    ],
)
def test_ranks_compute_micro_batches_of_similar_cost_at_the_same_time(
    samples: str, world: int, micro_batch: int, expected: list[list[str]]
) -> None:
    assert sizes_by_turn(Cut(list(samples), {"f": 20.0, "p": 1.0}), world, micro_batch) == expected


def test_one_rank_and_single_samples_need_as_few_micro_batches_as_possible() -> None:
    chosen, costs = random.Random(3), {"a": 1.0, "b": 3.0, "c": 30.0}
    for _ in range(200):
        shapes: list[Hashable] = [chosen.choice("abc") for _ in range(chosen.randint(1, 40))]
        world, micro_batch = chosen.randint(1, 6), chosen.randint(1, 6)
        fewest = sum(-(-count // micro_batch) for count in Counter(shapes).values())
        data = Cut(shapes, costs)
        assert len(data.chunks(1, micro_batch)[0]) == fewest
        assert len(data.chunks(world, 1)[0]) == -(-len(shapes) // world)
        stand_ins = sum(chunk.is_dummy for chunks in data.chunks(world, 1) for chunk in chunks)
        assert stand_ins == -len(shapes) % world


def test_no_rank_has_much_more_to_do_than_another() -> None:
    chosen = random.Random(4)
    costs = {"a": 1.0, "b": 3.0, "c": 30.0}
    for _ in range(200):
        data = Cut([chosen.choice("abc") for _ in range(64)], costs)
        work = [
            sum(costs[str(chunk.shape)] * len(chunk.positions) for chunk in chunks if not chunk.is_dummy)
            for chunks in data.chunks(world=4, micro_batch=4)
        ]
        assert max(work) - min(work) <= 2 * costs["c"], work


def test_the_costliest_samples_do_not_always_go_to_the_same_rank() -> None:
    data = Cut([*"fppp"] * 400, {"f": 20.0, "p": 1.0})
    chunks = [[chunk.shape for chunk in rank] for rank in data.chunks(4, 1, global_batch=4)]
    assert [len(turn) for turn in zip(*chunks, strict=True)] == [4] * 400
    assert all(60 < films.count("f") < 140 for films in chunks)


def test_a_rank_without_samples_computes_the_cheapest_sample_of_the_step() -> None:
    data = Cut([(5, 5), (9, 9), (2, 2), (9, 9)])
    chunks = [chunk for rank in data.chunks(world=5, micro_batch=1) for chunk in rank]
    (idle,) = [chunk for chunk in chunks if chunk.is_dummy]
    assert (tuple(idle.positions), idle.shape) == ((2,), (2, 2))


def test_the_cost_of_a_sample_is_given_or_follows_from_its_shape() -> None:
    def costs(data: Cut) -> list[float]:
        result = shapes_of(data, Order(len(data.shapes), 0, shuffle=False))
        assert result is not None
        return [group.each for group in result.groups(range(len(data.shapes)))]

    assert costs(Cut([(2, 3), (2, 5), 7])) == [6, 10, 7]
    assert costs(Cut(["small", (2, "large"), None, (0, 3)])) == [1, 1, 1, 1]
    assert costs(Cut([(2, 3), (2, 5)], {(2, 3): 0.5, (2, 5): 9})) == [0.5, 9]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (Cut([[1, 2], [1]]), "shape(0) returned a list"),  # type: ignore[list-item]
        (Cut([1, 2], {1: 1.0, 2: -1.0}), "cost(1) returned -1.0"),
        (Cut([1, 2], {1: float("nan"), 2: 1.0}), "cost(0) returned nan"),
    ],
)
def test_invalid_shapes_and_costs_are_refused(data: Cut, words: str) -> None:
    with pytest.raises(RecipeError) as caught:
        data.chunks(1, 1)
    assert words in str(caught.value)


def test_only_a_method_named_shape_is_used() -> None:
    assert is_shaped(MixedFilms(3))
    assert not is_shaped(Films(3)) and not is_shaped(torch.ones(3)) and not is_shaped([1, 2])


def test_a_trial_uses_the_costliest_micro_batch_of_the_dataset() -> None:
    data = Cut([*"pppppppppp", "f", "q", "q", "q", "q", "f"], {"p": 1.0, "q": 4.0, "f": 10.0})

    def tried(micro_batch: int, mixed: bool = True, **more: Any) -> list[tuple[list[int], Hashable]]:
        result = []
        for cursor in data.cursors(2, micro_batch, kind=TrialCursor, global_batch=4, **more):
            result.append([(list(chunk.positions), chunk.shape) for chunk in cursor.chunks()])
        assert result[0] == result[1] or not mixed
        return result[0]

    assert tried(1) == [([10], "f")] * 2
    assert tried(3) == [([10, 15], "f")] * 2  # there are no more than two
    assert tried(8) == [([10, 15], "f")] * 2
    assert tried(2, end=13) == [([10], "f")] * 2
    assert tried(4, end=15) == [([11, 12, 13, 14], "q")] * 2  # more than the one film
    assert tried(2, mixed=False, end=10)[:2] == [([0, 1], "p"), ([4, 5], "p")]  # one shape: simply the next samples


def test_out_of_memory_halves_the_size_that_was_really_tried() -> None:
    costs = {"p": 1.0, "f": 20.0}

    def at_once(samples: str, world: int, micro_batch: int) -> int:
        result = {cursor.most_at_once() for cursor in Cut(list(samples), costs).cursors(world, micro_batch)}
        assert len(result) == 1
        return result.pop()

    assert at_once("ffpppppppp", 1, 8) == 2  # the two videos, not the eight images
    assert at_once("fppp", 1, 8) == 3  # a single video cannot be split
    assert at_once("fp", 1, 8) == 1
    assert at_once("pppppp", 2, 8) == 3 and at_once("pppppp", 2, 2) == 2


def test_positions_of_a_micro_batch_reach_the_device_unchanged() -> None:
    assert positions_tensor((7, 2, 5), CPU).tolist() == [7, 2, 5] and positions_tensor((7, 2), CPU).dtype == torch.int64
    assert positions_tensor(range(3, 6), CPU).tolist() == [3, 4, 5]


ORDER = Order(22, 3)


def cursor(data: Any, rank: int = 0, world: int = 1, start: int = 0) -> Cursor:
    return Cursor(start, 44, 7, 3, rank, world, shapes_of(data, ORDER))


def read(data: Films, where: Cursor, workers: int = 0) -> list[MicroBatch]:
    messages: list[str] = []
    loader = Loader(data, _stacked, ORDER, where, DataSettings(num_workers=workers), False, messages.append)
    with closing(loader):
        result = list(loader)
    assert len(messages) == getattr(data, "deaths", 0), messages
    return result


def _stacked(items: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": [i["id"] for i in items],
        "x": torch.stack([i["x"] for i in items]),
        "shade": [i["shade"] for i in items],
    }


def seen(micros: list[MicroBatch]) -> list[tuple[list[int], list[int], list[float]]]:
    return [(list(m.positions), m.data["id"], [float(shade) for shade in m.data["shade"]]) for m in micros]


def test_workers_do_not_change_what_is_read() -> None:
    data = MixedFilms(22)
    for rank in (0, 1):
        alone = seen(read(data, cursor(data, rank, 2)))
        assert seen(read(data, cursor(data, rank, 2), workers=2)) == alone
        assert seen(read(data, cursor(data, rank, 2, start=21))) == alone[-len(read(data, cursor(data, rank, 2, 21))) :]


class Deadly(MixedFilms):
    """The first worker that reads sample 9 is killed."""

    deaths = 1

    def __init__(self, file: Path) -> None:
        super().__init__(22)
        self.file = file

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 9 and not self.file.exists():
            self.file.touch()
            os._exit(9)
        return super().__getitem__(index)


def test_a_worker_that_replaces_a_dead_one_continues_in_the_middle_of_the_step(tmp_path: Path) -> None:
    data = MixedFilms(22)
    assert seen(read(Deadly(tmp_path / "dead"), cursor(data), workers=2)) == seen(read(data, cursor(data)))


class Unsure(MixedFilms):
    """A dataset that raises for the shape of one sample."""

    def shape(self, index: int) -> Hashable:
        if index == ORDER[16]:  # in the third global batch
            raise OSError("no such file")
        return super().shape(index)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_shape_that_raises_is_an_error_where_it_is_needed(workers: int) -> None:
    data = Unsure(22)
    settings = DataSettings(num_workers=workers, prefetch_factor=4)
    with closing(Loader(data, _stacked, ORDER, cursor(data), settings, False)) as loader:
        expected = [positions for positions, _, _ in seen(read(MixedFilms(22), cursor(MixedFilms(22))))]
        before = [positions for positions in expected if max(positions) < 14]
        assert [list(next(loader).positions) for _ in before] == before
        with pytest.raises(OSError, match="no such file"):
            next(loader)


class Torn(MixedFilms):
    """A dataset whose large videos are unreadable."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.size(index) == SIZES[2]:
            raise ValueError("torn")
        return super().__getitem__(index)


def test_the_cheapest_sample_replaces_an_unreadable_micro_batch() -> None:
    data = Torn(22)
    for micro in read(data, replace(cursor(data), end=42)):
        if micro.chunk.shape == SIZES[2]:
            assert micro.is_dummy and [bad.position for bad in micro.bad] == list(micro.chunk.positions)
            assert data.size(ORDER[micro.positions[0]]) == SIZES[0]
        else:
            assert list(micro.positions) == list(micro.chunk.positions) and not micro.is_dummy


class FilmsOnDevice(MixedFilms):
    """A resident dataset that gathers videos of equal shape."""

    def to(self, device: torch.device) -> FilmsOnDevice:
        return self

    def gather(self, indices: Tensor) -> dict[str, Any]:
        items = [self[index] for index in indices.tolist()]
        return {"id": [i["id"] for i in items], "x": torch.stack([i["x"] for i in items])}


def test_data_on_the_device_is_gathered_by_shape_too() -> None:
    data = FilmsOnDevice(22)
    kinds: dict[Hashable, Hashable] = {}
    for rank in (0, 1):
        loader = ResidentLoader(data, ORDER, cursor(data, rank, 2), CPU)
        for one, other in zip(loader, read(data, cursor(data, rank, 2)), strict=True):
            batch = gathered(one.data)
            assert (one.chunk, list(one.positions)) == (other.chunk, list(other.positions))
            assert batch["id"] == other.data["id"] and torch.equal(batch["x"], other.data["x"])
            assert to_device(one.data, CPU) is one.data
            # A step that was recorded for one shape must not be replayed for another.
            assert kinds.setdefault(shape_of(one.data), batch["x"].shape) == batch["x"].shape
    assert len(kinds) > 3


NUM, STEPS = 12, 4  # two epochs in three steps of 7 samples, across the epochs' border, and one of 3
RUN = {"global_batch_size": 7, "num_epochs": 2, "num_samples": NUM, "num_eval": 9, "dtype": "float64"}
PLACES = [(1, "single"), (2, "ddp"), (2, "fsdp"), (3, "ddp"), (3, "fsdp")]
WAYS = [(world, strategy, size) for world, strategy in PLACES for size in (1, 2, 4)]
# name -> world, settings; recovery in place or with smaller micro-batches never changes the result
DISTURBED: dict[str, tuple[int, dict[str, Any]]] = {
    "forward": (2, {"strategy": "ddp", "inject": "oom@rank1:step2:forward"}),
    "backward": (2, {"strategy": "ddp", "inject": "oom@rank0:step3:backward", "num_workers": 2}),
    "3 ranks": (3, {"strategy": "ddp", "inject": "oom@rank2:step2:backward"}),
    "one device": (1, {"strategy": "single", "inject": "oom@rank0:step2:backward"}),
}
RESUMED = [1, 2]  # in the middle of either epoch


def train_mixed(runs: list[dict[str, Any]], root: str) -> dict[str, Any]:
    """Runs in each rank: trains the runs with the recipes of this file."""
    import many_runs
    import recipes_for_tests

    for kind in (Mixed, OneByOne):
        setattr(recipes_for_tests, kind.__name__, kind)
    return many_runs.train_all(runs, root)


def name_of(world: int, strategy: str, size: int) -> str:
    return f"{world} x {strategy} x {size}"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    root = tmp_path_factory.mktemp("shapes")
    one = RUN | {"strategy": "single", "batch_size": 1}
    run_list = [Run("nothing known of shapes", "plain", 1, one, recipe="OneByOne")]
    for world, strategy, size in WAYS:
        name = name_of(world, strategy, size)
        saves = {"save_every": 1, "keep_last": 0} if (world, strategy, size) == (2, "ddp", 2) else {}
        way = {"strategy": strategy, "batch_size": size} | saves
        run_list.append(Run(name, name, world, RUN | way, recipe="Mixed"))
    for name, (world, ways) in DISTURBED.items():
        run_list.append(Run(name, name, world, RUN | {"batch_size": 7} | ways, recipe="Mixed"))
    workers = {"strategy": "ddp", "batch_size": 2, "num_workers": 2}
    run_list.append(Run("workers", "workers", 2, RUN | workers, recipe="Mixed"))
    hardly = {"strategy": "ddp", "batch_size": 2, "guard_steps": 1}
    run_list.append(Run("hardly guarded", "hardly guarded", 3, RUN | hardly, recipe="Mixed"))
    run_list.append(
        Run("auto", "auto", 2, RUN | {"strategy": "ddp", "batch_size": 4, "micro_batch": "auto"}, recipe="Mixed")
    )
    for step in RESUMED:
        again = Copy(name_of(2, "ddp", 2), step)
        run_list.append(Run(f"resumed @{step}", f"resumed @{step}", 1, {"strategy": "single"}, again, recipe="Mixed"))
    args = {"runs": [asdict(run) for run in run_list], "root": str(root)}
    results = run_ranks("train_mixed", __file__, 3, args)
    return {
        run.name: Outcome(
            root / run.folder, root / "records" / run.name, [results[rank][run.name] for rank in range(run.world)]
        )
        for run in run_list
    }


def assert_same(run: Outcome, reference: Outcome) -> None:
    assert run.main.get("status") == "done", run.main
    assert len(run.losses()) == len(reference.losses()) == STEPS
    assert float((run.losses() - reference.losses()).abs().max()) < 1e-10
    assert largest_difference(run.weights(prefix=""), reference.weights(prefix="")) < 1e-10
    for key in ("samples", "count", "lr"):
        assert [line[key] for line in run.steps()] == [line[key] for line in reference.steps()]
    for key in ("grad_norm", "ids", "squares"):
        assert [line[key] for line in run.steps()] == pytest.approx([line[key] for line in reference.steps()], abs=1e-9)


def micro_batches(run: Outcome, split: str = "train") -> list[list[list[int]]]:
    """By rank, the samples of its micro-batches, in order."""
    files = [run.record / f"{split}.{rank}" for rank in range(len(run.by_rank))]
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


@pytest.mark.parametrize(("world", "strategy", "size"), WAYS)
def test_mixed_shapes_train_like_single_samples(runs: dict[str, Outcome], world: int, strategy: str, size: int) -> None:
    run = runs[name_of(world, strategy, size)]
    assert_same(run, runs["nothing known of shapes"])
    calls = micro_batches(run)
    assert len({len(mine) for mine in calls}) == 1
    read_at_once = [ids for mine in calls for ids in mine]
    data = MixedFilms(NUM)
    assert all(len({data.shape(i) for i in ids}) == 1 for ids in read_at_once)
    assert max(map(len, read_at_once)) <= size and (world > 1 or max(map(len, read_at_once)) == size)


def test_loader_workers_do_not_change_a_run_of_mixed_shapes(runs: dict[str, Outcome]) -> None:
    assert_same(runs["workers"], runs["nothing known of shapes"])
    assert micro_batches(runs["workers"]) == micro_batches(runs[name_of(2, "ddp", 2)])


def test_guarded_and_fast_steps_may_alternate(runs: dict[str, Outcome]) -> None:
    assert_same(runs["hardly guarded"], runs["nothing known of shapes"])


@pytest.mark.parametrize("step", RESUMED)
def test_a_run_on_two_ranks_continues_on_one_in_the_middle_of_an_epoch(runs: dict[str, Outcome], step: int) -> None:
    run = runs[f"resumed @{step}"]
    assert_same(run, runs["nothing known of shapes"])
    read_ids = Counter(i for mine in micro_batches(run) for ids in mine for i in ids)
    assert read_ids == Counter(Order(NUM, 0)[position] for position in range(7 * step, 2 * NUM))


@pytest.mark.parametrize("name", DISTURBED)
def test_out_of_memory_leads_to_smaller_micro_batches(runs: dict[str, Outcome], name: str) -> None:
    assert_same(runs[name], runs["nothing known of shapes"])
    (event,) = runs[name].events("oom")
    world, step = DISTURBED[name][0], event["step"] - 1
    groups = shapes_of(MixedFilms(NUM), Order(NUM, 0)).groups(range(7 * step, 7 * step + 7))  # type: ignore[union-attr]
    pieces = [piece for turn in deal(groups, world, -(-7 // world)) for piece in turn if piece is not None]
    tried = max((piece for piece in pieces if len(piece.positions) > 1), key=lambda piece: piece.cost)
    assert event["in_place"] and event["micro_batch"] == -(-len(tried.positions) // 2)
    assert runs[name].state()["micro_batch"] == event["micro_batch"]


def test_auto_tries_the_costliest_samples_first_and_changes_nothing(runs: dict[str, Outcome]) -> None:
    run = runs["auto"]
    assert_same(run, runs["nothing known of shapes"])
    (result,) = run.events("micro_batch")
    assert result["micro_batch"] == 4 and result["trials"] == 3  # 1, 2, 4
    data = MixedFilms(NUM)
    for mine in micro_batches(run):
        trials = mine[:6]  # each with two micro-batches
        assert [len(ids) for ids in trials] == [1, 1, 2, 2, 3, 3]  # an epoch has no more of them
        assert {data.shape(i) for ids in trials for i in ids} == {SIZES[2]}


@pytest.mark.parametrize(("world", "strategy", "size"), WAYS)
def test_every_sample_of_any_shape_is_evaluated_once(
    runs: dict[str, Outcome], world: int, strategy: str, size: int
) -> None:
    run = runs[name_of(world, strategy, size)]
    model = Denoiser().double()
    model.load_state_dict(run.weights())
    data, order, seed = MixedFilms(9, first=7), Order(9, key_of(5, 0), shuffle=False), key_of(5, 0)
    where = Cursor(0, 9, 9, 1, 0, 1)
    losses = []
    torch.set_default_dtype(torch.float64)
    try:
        for micro in Loader(data, torch.utils.data.default_collate, order, where, DataSettings(num_workers=0), False):
            batch = to_device(micro.data, CPU, torch.float64)
            with torch.no_grad():
                losses.append(float(_loss(model, batch, Noise(seed, torch.tensor(micro.positions))).total))
    finally:
        torch.set_default_dtype(torch.float32)
    (line,) = run.evaluations()
    assert line["eval/loss"] == pytest.approx(sum(losses) / 9, abs=1e-10)
    assert (line["eval/ids"], line["eval/squares"]) == pytest.approx((36 / 9, 204 / 9), abs=1e-10)
    calls = [ids for mine in micro_batches(run, "eval") for ids in mine]
    assert max(map(len, calls)) <= size and {i for ids in calls for i in ids} == set(range(9))
    assert all(len({data.shape(i) for i in ids}) == 1 for ids in calls)


def test_an_evaluation_groups_a_limited_number_of_samples_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = {}
    for grouped in (2**16, 4):
        monkeypatch.setattr(evaluate, "_GROUPED", grouped)
        record = tmp_path / f"record {grouped}"
        values = {"num_eval": 9, "eval_every": 1, "max_steps": 1, "gpus": "0", "batch_size": 4, "record": str(record)}
        result[grouped] = train(Mixed, **values, output_dir=str(tmp_path / str(grouped))).last
        calls = [json.loads(line) for line in (record / "eval.0").read_text().splitlines()]
        assert sorted(i for ids in calls for i in ids) == list(range(9))
    assert all(max(ids) // 4 == min(ids) // 4 for ids in calls)
    assert result[4] == pytest.approx(result[2**16], rel=1e-6)


@pytest.mark.slow
def test_verify_finds_mixed_shapes_to_be_the_same_run(tmp_path: Path) -> None:
    done = unisono(
        "verify",
        f"{Path(__file__).resolve()}:Mixed",
        *("--ranks", "1,2", "--strategies", "ddp,fsdp", "--steps", "2", "--global_batch_size", "7"),
        cwd=tmp_path,
        seconds=240,
        PYTHONPATH=os.pathsep.join([str(Path(__file__).parent), environment()["PYTHONPATH"]]),
    )
    assert done.code == 0, done.err
    assert "Same run" in done.out and "DIFFERS" not in done.out
