"""A start: one rank builds a large model for all, every number of ranks begins with the weights of one process."""

from __future__ import annotations

import gc
import hashlib
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ranks import run_ranks
from unisono import Recipe
from unisono.checkpoint.tensor_file import TensorFile
from unisono.cluster.agree import Agreement
from unisono.cluster.environment import detect
from unisono.cluster.process_group import join_process_group, leave_process_group
from unisono.engine.batch import BatchPlan
from unisono.engine.build.device import find_placement
from unisono.engine.step.components import Components
from unisono.errors import RecipeError
from unisono.parallel.materialize import fill, materialize
from unisono.settings import Settings

SEED = 7


class Everything(nn.Module):
    """What a model may hold: shared and frozen weights, buffers of many kinds, weights with attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 7), nn.GELU(), nn.Linear(7, 6)) for _ in range(3))
        self.convolution = nn.Conv2d(6, 4, 3)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 10)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Parameter(torch.randn(5, 2), requires_grad=False)
        self.register_buffer("table", torch.outer(torch.arange(4.0), torch.rand(3)), persistent=False)
        self.register_buffer("mask", torch.tril(torch.ones(3, 3)).bool()[None])
        self.register_buffer("turned", torch.view_as_complex(torch.randn(4, 2)))
        self.norm.weight.learning_rate = 0.5  # type: ignore[attr-defined]
        self.seen = [self.head.weight]  # a plain list: the weight must stay the same object


class Building(Recipe):
    """Counts the calls of model() and the default device of each."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self.devices: list[str] = []

    def model(self) -> nn.Module:
        self.devices.append(torch.get_default_device().type)
        return self.build()

    def build(self) -> nn.Module:
        return Everything()


class OfChannels(Building):
    """Its weights have another layout in memory, which fsdp does not support; and one of them has no dimension."""

    def build(self) -> nn.Module:
        model = Everything().to(memory_format=torch.channels_last)
        model.scale = nn.Parameter(torch.rand(()))
        return model


class WithFiles(Building):
    """Most weights come from a file, a LoRA is drawn in model()."""

    def build(self) -> nn.Module:
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 6))
        model.add_module("lora", nn.Linear(6, 6))
        return model

    def weights(self, model: nn.Module) -> Any:
        return Numbers()


class Numbers:
    """Weights whose elements are the numbers of their rows."""

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        width = {"0.weight": (6,), "1.weight": (7,)}.get(name, ())
        return torch.arange(start, stop).view(-1, *[1] * len(width)).expand(-1, *width).double()


class OnMeta(Building):
    """model() builds on the meta device, and its modules initialise themselves."""

    def build(self) -> nn.Module:
        with torch.device("meta"):
            return nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 6))


class ReadsAValue(Building):
    """model() reads the value of a weight."""

    def build(self) -> nn.Module:
        model = nn.Linear(6, 4)
        model.scale = float(model.weight.detach().std())  # type: ignore[assignment]
        return model


class PlainAttribute(Building):
    """Holds a tensor that is neither a weight nor a buffer."""

    def build(self) -> nn.Module:
        model = nn.Linear(6, 4)
        model.offset = {"of": [torch.rand(4)]}  # type: ignore[assignment]
        return model


class SecondModel(Building):
    """The recipe stores a second model in an attribute."""

    def build(self) -> nn.Module:
        self.teacher = nn.Linear(6, 6)
        return nn.Linear(6, 4)


class OwnDraws(Building):
    """Draws random numbers on the CPU, whatever the default device is."""

    def build(self) -> nn.Module:
        model = nn.Linear(6, 4)
        model.register_buffer("noise", torch.randn(4, device="cpu"))
        return model


class RemembersItsDevice(Building):
    """The model stores the device on which it was built."""

    def build(self) -> nn.Module:
        model = nn.Linear(6, 4)
        model.home = model.weight.device  # type: ignore[assignment]
        return model


class BuiltBefore(Building):
    """model() returns a module that the constructor has built."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        torch.manual_seed(SEED)
        self.own = nn.Linear(6, 4)

    def build(self) -> nn.Module:
        return self.own


class SharedStorage(Building):
    """A buffer that is a part of another one."""

    def build(self) -> nn.Module:
        model = nn.Linear(6, 4)
        model.register_buffer("whole", torch.rand(6))
        model.register_buffer("part", model.whole[:3])
        return model


FALLBACKS = [ReadsAValue, PlainAttribute, SecondModel, OwnDraws, RemembersItsDevice, BuiltBefore, SharedStorage]
CASES = [
    *[(Building, world, strategy) for world in (2, 3) for strategy in ("ddp", "fsdp")],
    (OfChannels, 2, "ddp"),
    *[(kind, 2, strategy) for kind in (WithFiles, OnMeta) for strategy in ("ddp", "fsdp")],
    *[(kind, 2, "ddp") for kind in FALLBACKS],
]


def fingerprints(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Hashes of the bytes of each tensor."""
    flat = {name: tensor.detach().contiguous().view(-1).view(torch.uint8) for name, tensor in tensors.items()}
    return {name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in flat.items()}


def all_tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in (*model.named_parameters(), *model.named_buffers())}


@contextmanager
def components_of(recipe: Recipe, strategy: str, attempt: str) -> Iterator[Components]:
    """On each rank: what a run of the recipe begins with."""
    from unisono.engine.build.components import build_components

    os.environ["UNISONO_ATTEMPT"] = attempt
    world = detect()
    default = Settings()
    settings = replace(
        default,
        run=replace(default.run, seed=SEED),
        parallel=replace(default.parallel, strategy=strategy),
        optim=replace(default.optim, optimizer="SGD"),
        ema=replace(default.ema, ema_decay=0.0),
    )
    join_process_group(world, torch.device("cpu"))
    placement = find_placement(world, settings)
    yield build_components(recipe, settings, placement, BatchPlan(world.size, 1, world.size), Agreement())
    leave_process_group()


def start_all() -> list[dict[str, Any] | None]:
    """In each rank: builds each case's model in its world and describes what it begins with."""
    from unisono.engine.build import build_once

    build_once.SMALL, build_once.WORTH_A_REMARK = 0, 0
    return [start(f"case{number}", *case) for number, case in enumerate(CASES)]


def start(attempt: str, kind: type[Building], world_size: int, strategy: str) -> dict[str, Any] | None:
    if int(os.environ["RANK"]) >= world_size:
        return None
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"):
        os.environ[name] = str(world_size)
    recipe = kind()
    with components_of(recipe, strategy, attempt) as components:
        model = components.strategy.model
        whole = {
            name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            for name, tensor in all_tensors(model).items()
        }
        result = {
            "weights": fingerprints(whole),
            "saved": sorted(components.strategy.tensors()),
            "devices": recipe.devices,
            "remarks": components.remarks,
        }
        if isinstance(model, Everything) and strategy == "ddp":
            result["same object"] = model.seen[0] is model.head.weight is model.embedding.weight
            result["attribute"] = model.norm.weight.learning_rate
            result["layout"] = model.convolution.weight.is_contiguous(memory_format=torch.channels_last)
        return result


@pytest.fixture(scope="module")
def starts() -> dict[tuple[str, int, str], list[dict[str, Any]]]:
    by_rank = run_ranks("start_all", __file__, 3)
    return {
        (kind.__name__, world, strategy): [by_rank[rank][number] for rank in range(world)]
        for number, (kind, world, strategy) in enumerate(CASES)
    }


def alone(kind: type[Building]) -> dict[str, str]:
    """The initial weights of a script that seeds torch and builds the model."""
    torch.manual_seed(SEED)
    model = kind().model()
    if kind is WithFiles:
        fill(model, Numbers())
    elif kind is OnMeta:
        materialize(model, SEED)
    return fingerprints(all_tensors(model))


@pytest.mark.parametrize(("kind", "world", "strategy"), [case for case in CASES if case[0] not in FALLBACKS])
def test_rank_0_builds_for_all_and_every_world_begins_with_the_weights_of_one_process(
    starts: dict[Any, list[dict[str, Any]]], kind: type[Building], world: int, strategy: str
) -> None:
    ranks = starts[kind.__name__, world, strategy]
    assert [rank["devices"] for rank in ranks] == [["cpu"], *[["meta"]] * (world - 1)]
    for rank in ranks:
        assert rank["weights"] == alone(kind) and not rank["remarks"][1:]
    if issubclass(kind, OfChannels):
        assert all(rank["same object"] and rank["layout"] and rank["attribute"] == 0.5 for rank in ranks)


def test_a_checkpoint_holds_the_frozen_weights_that_no_file_has(starts: dict[Any, list[dict[str, Any]]]) -> None:
    for strategy in ("ddp", "fsdp"):
        assert "frozen" in starts["Building", 2, strategy][0]["saved"]


@pytest.mark.parametrize("kind", FALLBACKS)
def test_a_model_that_needs_its_values_is_built_on_every_rank(
    starts: dict[Any, list[dict[str, Any]]], kind: type[Building]
) -> None:
    first, second = starts[kind.__name__, 2, "ddp"]
    assert first["devices"] == ["cpu"] and second["devices"] == ["meta", "cpu"]
    assert first["weights"] == second["weights"] == alone(kind)
    assert [remark for remark in first["remarks"] if "each rank builds the whole model" in remark]


def test_an_error_in_model_is_the_same_on_every_rank() -> None:
    for message in run_ranks("fail_to_build", __file__, 2):
        assert message == "model() returned NoneType; expected a torch.nn.Module"


def fail_to_build() -> str:
    try:
        with components_of(Nothing(), "ddp", "fails"):
            return "it was built"
    except RecipeError as error:
        return str(error)


class Nothing(Building):
    """Its model() returns nothing."""

    def build(self) -> Any:
        return None


# --- host memory ------------------------------------------------------------------------------------------------------


def resident(pids: Sequence[int]) -> int:
    """Bytes of memory that these processes hold for themselves."""
    lines = (line for pid in pids for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


@contextmanager
def watched(pids: Sequence[int]) -> Iterator[list[int]]:
    """Notes how much memory the processes hold together, from time to time."""
    notes, ended = [resident(pids)], threading.Event()

    def watch() -> None:
        while not ended.wait(0.005):
            notes.append(resident(pids))

    thread = threading.Thread(target=watch)
    thread.start()
    yield notes
    ended.set()
    thread.join()
    notes.append(resident(pids))


class Large(Building):
    """About 600 MB in float32."""

    num_bytes = 24 * 2560 * 2560 * 4

    def build(self) -> nn.Module:
        return nn.Sequential(*(nn.Linear(2560, 2560, bias=False) for _ in range(24)))

    def optimizer(self, parameters: Any) -> None:
        dist.barrier()  # every rank has its weights, none has state of the optimizer
        self.weights_are_placed()
        dist.barrier()


def peak_of_a_start(strategy: str) -> float:
    """In each rank: the most host memory that all ranks together held until they had their weights, in models."""
    torch.set_num_threads(1)
    torch.ones(31 * 2**20, dtype=torch.uint8)  # freed: from now on, the C library puts weights of 26 MB on its heap
    join_process_group(detect(), torch.device("cpu"))
    pids: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    leave_process_group()
    with components_of(Building(), strategy, "small"):  # imports everything a start needs: modules are no weights
        pass
    recipe = Large()
    with ExitStack() as watching:
        notes = watching.enter_context(watched(pids))
        recipe.weights_are_placed = watching.close
        with components_of(recipe, strategy, "large"):
            return (max(notes) - notes[0]) / recipe.num_bytes


def test_four_sharded_ranks_together_use_little_more_memory_than_one_model_at_the_start() -> None:
    peak = run_ranks("peak_of_a_start", __file__, 4, {"strategy": "fsdp"})[0]
    assert 0.9 < peak < 1.2, f"{peak:.2f} copies of the model"


def peak_of_a_load(file: str) -> dict[str, float]:
    """In one process: the peak host memory of loading weights to the CPU and to another device, without the weights."""
    model = Reading().model()
    source = OneFile(TensorFile(file))
    result = {}
    for device, held in (("meta", 0), ("cpu", Reading.num_bytes)):  # like a GPU, meta needs no host memory
        gc.collect()
        with watched([os.getpid()]) as notes:
            fill(model, source, device)
        result[device] = (max(notes) - notes[0] - held) / 2**20
        result[f"{device} at the end"] = (notes[-1] - notes[0]) / 2**20
    result["right"] = float(torch.equal(model[1].weight[:2], source.rows("1.weight", 0, 2).float()))
    return result


class Reading(Building):
    """About 270 MB, most of it in one weight."""

    num_bytes = 4 * 4096 * (15360 + 1024)

    def build(self) -> nn.Module:
        with torch.device("meta"):
            return nn.Sequential(nn.Linear(4096, 15360, bias=False), nn.Linear(4096, 1024, bias=False))


@dataclass(frozen=True)
class OneFile:
    file: TensorFile

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        return self.file.rows(name, start, stop)


def test_loading_reads_weights_into_host_memory_in_pieces(tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    save_file({f"{n}.weight": torch.randn(rows, 4096).bfloat16() for n, rows in enumerate((15360, 1024))}, file)
    [actual] = run_ranks("peak_of_a_load", __file__, 1, {"file": str(file)})
    assert actual["meta"] < 32 and actual["cpu"] < 32 and actual["right"], actual
    assert actual["cpu at the end"] > 250, actual
