"""Weights in groups of ranks (hsdp): the same run, equal replicas, each shard saved once, resumed on any mesh."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from many_runs import Copy, Outcome, Run, identical, largest_difference, many_runs, selected, slow_unless
from ranks import run_ranks
from recipes_for_tests import Sentences
from unisono.checkpoint.manifest import SHARD_SUFFIX
from unisono.engine.checks import check_settings
from unisono.engine.verification.verify import VerifyPlan, variants
from unisono.errors import ConfigError
from unisono.planning.choose import Demand, check_shard_size, choose_shard_size
from unisono.settings import ParallelSettings, Settings

GIB = 2**30
PLACEMENTS = (Replicate(), Shard(0))
RUN: dict[str, Any] = {
    "global_batch_size": 9,  # 4 ranks get 3, 2, 2 and 2 samples
    "num_samples": 15,
    "max_steps": 6,
    "save_every": 3,
    "keep_last": 0,
    "dtype": "float64",
    "ema_decay": 0.9,
    "grad_clip": 0.05,  # every step is clipped
    "width": 46,  # uneven shards of matrices large enough for 8-bit moments
}
TWO_BY_TWO = {"strategy": "fsdp", "shard_size": 2}
MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "2 x 2": (4, TWO_BY_TWO),
    "2 x 2, one sample at a time": (4, TWO_BY_TWO | {"batch_size": 1}),
    "2 x 2, one sample at a time, summed once": (4, TWO_BY_TWO | {"batch_size": 1, "fsdp_sync": "last"}),
    "1 x 4, one sample at a time, summed once": (4, {"strategy": "fsdp", "batch_size": 1, "fsdp_sync": "last"}),
    "2 x 1": (2, {"strategy": "hsdp", "shard_size": 1}),
}
OPTIMIZERS = ["adamw", "muon", "adafactor", "adamw8bit"]
QUICK_MESHES = ["2 x 2", "2 x 2, one sample at a time, summed once", "2 x 1"]
QUICK_OPTIMIZERS = ["adamw", "muon", "adamw8bit"]
# A run moves from mesh to mesh: (world, settings, steps until then).
JOURNEY: list[tuple[int, dict[str, Any], int]] = [
    (1, {"strategy": "single"}, 1),
    (4, TWO_BY_TWO, 2),
    (3, {"strategy": "fsdp"}, 3),
    (2, {"strategy": "fsdp"}, 4),
    (2, {"strategy": "ddp"}, 5),
    (4, {"strategy": "hsdp", "shard_size": 1}, 6),
]


class Fingerprinted(Sentences):
    """Each rank writes down a hash of its shards of the blocks at the end of the run."""

    def preview(self, model: nn.Module, step: int) -> None:
        from torch.distributed import get_rank

        shards = [weight.to_local() for weight in model.parameters() if isinstance(weight, DTensor)]
        assert shards, "nothing is sharded"
        digest = hashlib.sha256(b"".join(shard.detach().numpy().tobytes() for shard in shards)).hexdigest()
        Path(self.config.record, f"shards.{get_rank()}").write_text(digest)


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    everything = []
    names, optimizers = selected(request, "mesh"), selected(request, "optimizer")
    for optimizer in optimizers | {"adamw", "muon"}:
        of_adamw = {mesh: layout for mesh, layout in MESHES.items() if mesh in names}
        meshes = of_adamw if optimizer == "adamw" else {}
        meshes = {"2 x 2": MESHES["2 x 2"], **meshes}
        for mesh, (world, settings) in {"1": (1, {"strategy": "single"}), **meshes}.items():
            name = f"{optimizer}, {mesh}"
            own = {"optimizer": optimizer, **settings}
            everything.append(
                Run(name, name, world, RUN | own, recipe=f"{__file__}:Fingerprinted" if world > 1 else "Sentences")
            )
    everything.append(Run("again", "again", 4, TWO_BY_TWO, Copy("muon, 2 x 2", 3), f"{__file__}:Fingerprinted"))
    for world, settings, steps in JOURNEY:
        everything.append(Run(f"journey {steps}", "journey", world, RUN | settings | {"max_steps": steps}))
    everything += [
        Run("elsewhere", "elsewhere", 1, RUN | {"strategy": "single"}, recipe="SentencesFromElsewhere"),
        Run("elsewhere, 2 x 2", "elsewhere, 2 x 2", 4, RUN | TWO_BY_TWO, recipe="SentencesFromElsewhere"),
        Run("pairs", "pairs", 1, RUN | {"strategy": "single"}, recipe="Pairs"),
        Run(
            "pairs, 2 x 2",
            "pairs, 2 x 2",
            4,
            RUN | MESHES["2 x 2, one sample at a time, summed once"][1],
            recipe="Pairs",
        ),
        Run("3 of 4", "3 of 4", 4, RUN | {"strategy": "fsdp", "shard_size": 3}),
        Run("unspecified", "unspecified", 4, RUN | {"strategy": "hsdp"}),
        Run("ddp", "ddp", 2, RUN | {"strategy": "ddp", "shard_size": 2}),
    ]
    return many_runs(everything, tmp_path_factory.mktemp("hsdp"))


def assert_same(run: Outcome, reference: Outcome) -> None:
    assert "error" not in run.main, run.main
    torch.testing.assert_close(run.losses(), reference.losses(), rtol=1e-10, atol=0)
    for prefix in ("model.", "ema.", "optimizer."):
        assert largest_difference(run.weights(prefix=prefix), reference.weights(prefix=prefix)) < 1e-10, prefix
    for key in ("grad_norm", "count", "samples", "ids"):
        assert [line[key] for line in run.steps()] == pytest.approx([line[key] for line in reference.steps()], rel=1e-9)


@pytest.mark.parametrize("mesh", slow_unless(MESHES, QUICK_MESHES))
def test_every_mesh_trains_like_one_device(runs: dict[str, Outcome], mesh: str) -> None:
    assert_same(runs[f"adamw, {mesh}"], runs["adamw, 1"])
    assert all(line["grad_norm"] > RUN["grad_clip"] for line in runs["adamw, 1"].steps()), "nothing was clipped"


@pytest.mark.parametrize("optimizer", slow_unless(OPTIMIZERS[1:], QUICK_OPTIMIZERS))
def test_every_optimizer_trains_replicas_like_one_device(runs: dict[str, Outcome], optimizer: str) -> None:
    assert_same(runs[f"{optimizer}, 2 x 2"], runs[f"{optimizer}, 1"])


@pytest.mark.parametrize("optimizer", slow_unless(OPTIMIZERS, QUICK_OPTIMIZERS))
def test_replicas_are_equal_bit_for_bit(runs: dict[str, Outcome], optimizer: str) -> None:
    record = runs[f"{optimizer}, 2 x 2"].record
    first, second, *others = [(record / f"shards.{rank}").read_text() for rank in range(4)]
    assert others == [first, second], "ranks 2 and 3 hold the second copy"
    assert first != second


def test_a_run_moves_through_all_meshes(runs: dict[str, Outcome]) -> None:
    for _, _, steps in JOURNEY:
        assert runs[f"journey {steps}"].main.get("step") == steps, runs[f"journey {steps}"].main
    assert_same(runs[f"journey {JOURNEY[-1][2]}"], runs["adamw, 1"])


def test_resumed_on_the_same_mesh_every_bit_is_the_same(runs: dict[str, Outcome]) -> None:
    for prefix in ("model.", "ema.", "optimizer."):
        assert identical(runs["again"].weights(prefix=prefix), runs["muon, 2 x 2"].weights(prefix=prefix))
    assert runs["again"].main["step"] == RUN["max_steps"]


def test_each_shard_is_written_once_and_all_ranks_share_the_work(runs: dict[str, Outcome]) -> None:
    whole, *_ = (runs["adamw, 1"].checkpoint()).glob(f"*{SHARD_SUFFIX}")
    files = sorted((runs["adamw, 2 x 2"].checkpoint()).glob(f"*{SHARD_SUFFIX}"))
    sizes = [file.stat().st_size for file in files]
    assert len(sizes) == 4
    assert sum(sizes) < 1.1 * whole.stat().st_size  # and headers
    assert max(sizes) < 0.35 * sum(sizes)


@pytest.mark.parametrize("name", ["elsewhere", "pairs"])
def test_hsdp_supports_weights_from_files_and_coupled_losses(runs: dict[str, Outcome], name: str) -> None:
    run, reference = runs[f"{name}, 2 x 2"], runs[name]
    assert "error" not in run.main, run.main
    assert largest_difference(run.weights(), reference.weights()) < 1e-10
    torch.testing.assert_close(run.losses(), reference.losses(), rtol=1e-10, atol=0)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("3 of 4", "shard_size 3 does not divide 4 ranks; use 1, 2 or 4"),
        ("unspecified", "strategy hsdp on one machine needs a shard_size; with 4 ranks use 1, 2"),
        ("ddp", "shard_size 2 needs fsdp, and strategy ddp shards nothing; remove one of them"),
    ],
)
def test_an_impossible_mesh_is_rejected_with_a_possible_one(runs: dict[str, Outcome], name: str, message: str) -> None:
    assert [(result["error"], result["exit_code"]) for result in runs[name].by_rank] == [(message, 2)] * len(
        runs[name].by_rank
    )
    assert not runs[name].folder.exists()


# Machines


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ((0, 0, 0, 1, 1, 1), None),
        ((0, 0, 1, 1, 1, 1), "the machines have 2, 4 ranks; start the same number on each, or use 1, 2, 3 or 6 ranks"),
        ((0, 1, 0, 1), "do not have consecutive numbers"),
    ],
)
def test_shard_size_node_needs_the_same_number_of_ranks_on_each_machine(
    nodes: tuple[int, ...], message: str | None
) -> None:
    if message is None:
        assert check_shard_size("node", ranks=len(nodes), nodes=nodes) == 3
    else:
        with pytest.raises(ConfigError, match=message):
            check_shard_size("node", ranks=len(nodes), nodes=nodes)


@pytest.mark.parametrize(
    ("nodes", "weights", "memory", "size"),
    [
        ((0, 0, 1, 1), 15 * GIB, 80 * GIB, 2),  # 4 x 15 GiB over 2 GPUs
        ((0, 0, 1, 1), 30 * GIB, 80 * GIB, 4),  # a copy does not fit into a machine
        ((0, 0, 0, 0), 15 * GIB, 80 * GIB, 4),  # one machine
        ((0, 1, 1, 1), 15 * GIB, 80 * GIB, 4),  # uneven machines
        ((0, 0, 1, 1), 15 * GIB, None, 4),  # on the CPU
    ],
)
def test_auto_shards_within_a_machine_if_a_copy_fits(
    nodes: tuple[int, ...], weights: int, memory: int | None, size: int
) -> None:
    demand = Demand.of(trainable_bytes=weights, other_bytes=0, optimizer_slots=2, ema=False)
    assert choose_shard_size(ranks=4, nodes=nodes, demand=demand, device_memory=memory) == size


def test_a_shard_size_below_1_is_refused() -> None:
    with pytest.raises(ConfigError, match="shard_size: expected at least 1, or node or all, got 0"):
        check_settings(Settings(parallel=ParallelSettings(strategy="fsdp", shard_size=0)))


def test_verify_chooses_a_shard_size_for_hsdp() -> None:
    plan = VerifyPlan((1, 2, 3, 4), 1, ("ddp", "hsdp"), "float64")
    sizes = {variant.ranks: variant.shard_size for variant in variants(plan, 12) if variant.strategy == "hsdp"}
    assert sizes == {2: 1, 3: 1, 4: 2}
    assert {variant.shard_size for variant in variants(plan, 12, 2) if variant.strategy == "hsdp"} == {2}
    assert {variant.shard_size for variant in variants(plan, 12, 2) if variant.strategy == "ddp"} == {"auto"}


# Modules that are not trained


class Rows:
    """Weights of a module on meta."""

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        width = {"weight": (5, 3), "bias": (5,)}[name.rpartition(".")[2]]
        return torch.arange(float(torch.Size(width).numel())).view(width)[start:stop]


def hold_on_rank() -> dict[str, Any]:
    """On 2 x 2 ranks: a frozen layer of 5 rows, and the copy of a state for a checkpoint."""
    import torch.distributed as dist

    from unisono.checkpoint.snapshot import Snapshot
    from unisono.parallel.frozen import shard_frozen
    from unisono.parallel.shard_mesh import ShardMesh

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh, inputs = ShardMesh(rank, 4, 2, "cpu"), torch.ones(2, 3)
    with torch.device("meta"):
        layer = nn.Linear(3, 5)
    shard_frozen(layer, mesh, torch.device("cpu"), Rows())
    shape = list(layer.weight.to_local().shape)  # type: ignore[operator]
    expected = inputs @ Rows().rows("weight", 0, 5).T + Rows().rows("bias", 0, 5)
    difference = float((layer(inputs) - expected).abs().max())
    state = {f"model.{number}": distribute_tensor(torch.ones(8, 4), mesh.devices, PLACEMENTS) for number in range(4)}
    copied = Snapshot(rank, 4).take({**state, "model.whole": torch.ones(8)})
    dist.destroy_process_group()
    return {"difference": difference, "shape": shape, "copied": sorted(name.removeprefix("model.") for name in copied)}


@pytest.fixture(scope="module")
def held() -> list[dict[str, Any]]:
    return run_ranks("hold_on_rank", __file__, 4)


def test_frozen_modules_are_sharded_within_the_same_groups(held: list[dict[str, Any]]) -> None:
    assert [(rank["difference"], rank["shape"]) for rank in held] == [(0.0, [3, 3]), (0.0, [2, 3])] * 2


def test_only_one_replica_copies_a_shard_to_host_memory(held: list[dict[str, Any]]) -> None:
    first, second, third, fourth = (rank["copied"] for rank in held)
    assert (first, second) == (["0", "2", "whole"], ["0", "2"])
    assert third == fourth == ["1", "3"]
