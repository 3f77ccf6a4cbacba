"""`unisono plan`: memory and time of a run on GPUs that are elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from command_line import unisono as command
from test_fit import BATCH, WIDTH, Blocks, Net, loss_of
from unisono.engine.checks import check_run
from unisono.engine.plan.plan import Plan, Planner, fastest_by_mesh
from unisono.engine.start.run import configure
from unisono.errors import ConfigError
from unisono.planning.memory.trace import extended, trace_step
from unisono.planning.speed.collectives import Ring, ring_between, ring_of_all, ring_within
from unisono.planning.speed.gpus import NAMES, Cluster, parse_cluster
from unisono.planning.speed.step_time import Micro, Traffic, step_time
from unisono.planning.speed.work import Work

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "examples/own_model/recipe.py"


def plan_of(cluster: str, *, nodes: int = 1, recipe: Any = Blocks, **settings: Any) -> Plan:
    resolved = configure(recipe, flags=[f"--{name}={value}" for name, value in settings.items()])
    return Planner(check_run(recipe, resolved), resolved, parse_cluster(cluster, nodes)).plan()


# GPUs


@pytest.mark.parametrize("name", NAMES)
def test_every_gpu_of_the_catalogue_is_found_by_its_name_and_has_rates(name: str) -> None:
    cluster = parse_cluster(f"4x{name}", 2)
    assert (cluster.gpu.name, cluster.ranks) == (name, 8)
    assert cluster.gpu.rate("fp8") >= cluster.gpu.rate("bf16") > cluster.gpu.rate("fp32") > 0


@pytest.mark.parametrize(
    ("text", "name", "memory"),
    [
        ("h100", "H100-80GB", 79.1),
        ("8 x A100-40GB", "A100-40GB", 39.4),
        ("NVIDIA GeForce RTX 4090", "RTX4090-24GB", 24),
    ],
)
def test_names_are_read_as_people_write_them(text: str, name: str, memory: float) -> None:
    assert parse_cluster(text).gpu.name == name
    assert parse_cluster(text).memory_gb == memory


def test_a_card_with_another_memory_has_the_rates_of_its_series() -> None:
    cluster = parse_cluster("2xH100-94GB")
    assert cluster.memory_gb == 94
    assert cluster.gpu.rate("bf16") == parse_cluster("H100").gpu.rate("bf16")


def test_an_unknown_gpu_is_an_error_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="unknown GPU 'H10O'; did you mean H100"):
        parse_cluster("8xH10O")


# Work and time


def test_the_operations_of_linear_layers_are_counted_exactly() -> None:
    work = trace_step(Net(2), loss_of, torch.ones(BATCH, 50, WIDTH), None).work
    tokens, per_block = BATCH * 50, 9 * WIDTH**2
    head = 3 * WIDTH
    # Forward, gradients of weights and of inputs. The first block's layer `side` has an input without gradient.
    expected = 2 * tokens * (3 * 2 * per_block + 3 * head - WIDTH**2)
    assert work.flops == pytest.approx(expected, rel=0.001)


def test_the_work_of_few_blocks_continues_to_all_blocks() -> None:
    batch = torch.ones(BATCH, 50, WIDTH)
    traces = {num: trace_step(Net(num), loss_of, batch, None) for num in (2, 3, 8)}
    predicted = extended(traces[2], traces[3], 5).work
    assert predicted.flops == pytest.approx(traces[8].work.flops)
    assert predicted.other_bytes == pytest.approx(traces[8].work.other_bytes, rel=0.01)


def test_recomputation_is_work_too() -> None:
    rows = plan_of("1xH100").rows
    none = next(row for row in rows if not row.flags["activation_checkpointing"])
    whole = next(row for row in rows if row.flags["activation_checkpointing"] is True)
    assert whole.time.elementwise > none.time.elementwise
    assert whole.memory.activations < none.memory.activations
    assert whole.flops == none.flops, "the model's operations do not include recomputation"


def test_collectives_in_a_ring_take_the_time_of_their_bytes_and_messages() -> None:
    ring = Ring(4, bandwidth=1e9, latency=1e-6)
    assert ring.gather(1e9) == pytest.approx(0.75 + 3e-6)
    assert ring.all_reduce(1e9) == pytest.approx(2 * ring.gather(1e9))
    assert Ring(1, 1e9).all_reduce(1e9) == 0


def test_groups_within_a_machine_do_not_use_the_network() -> None:
    cluster = Cluster(parse_cluster("H100").gpu, 8, nodes=4, network=25e9)
    assert ring_within(cluster, 8).gather(1e9) < ring_of_all(cluster).gather(1e9) / 5
    # Eight groups of ranks share the adapters of a machine, but each sends an eighth of the weights.
    assert ring_between(cluster, 8).all_reduce(1e9 / 8) == pytest.approx(
        Ring(4, 0.8 * 25e9, 20e-6).all_reduce(1e9), rel=0.01
    )


def test_computation_hides_communication_up_to_its_own_length() -> None:
    gpu = parse_cluster("H100").gpu
    micro = Micro(Work(other_bytes=1e11), compiled=False)

    def total(seconds: float) -> float:
        return step_time(gpu, micro, num_micro_batches=1, traffic=Traffic(per_step=seconds), update_bytes=0).total

    assert total(0.001) == total(0)
    assert total(1.0) == pytest.approx(total(0) + 1.0, rel=0.05)


def test_a_small_model_waits_for_kernel_launches_unless_its_step_is_recorded() -> None:
    gpu, work = parse_cluster("H100").gpu, Work(other_bytes=1e6, launches=1000)
    eager, recorded = (
        step_time(gpu, Micro(work, False, graph), num_micro_batches=1, traffic=Traffic(), update_bytes=0)
        for graph in (False, True)
    )
    assert eager.bottleneck == "kernel launches"
    assert recorded.total < eager.total / 100


# Plans


def test_sharding_takes_less_memory_and_more_communication() -> None:
    rows = {row.title: row for row in fastest_by_mesh(plan_of("4xA100", activation_checkpointing="false"))}
    assert set(rows) == {"ddp", "fsdp", "hsdp 2"}
    weights = {name: row.memory.optimizer for name, row in rows.items()}
    assert weights["ddp"] == pytest.approx(2 * weights["hsdp 2"], rel=0.01)
    assert weights["hsdp 2"] == pytest.approx(2 * weights["fsdp"], rel=0.01)


def test_more_gpus_do_the_same_samples_in_less_time() -> None:
    one, four = (plan_of(f"{num}xA100", global_batch_size=64) for num in (1, 4))
    assert one.rows[0].samples_per_step == four.rows[0].samples_per_step == 64
    assert four.rows[0].num_micro_batches * 4 >= one.rows[0].num_micro_batches


def test_several_machines_shard_within_a_machine() -> None:
    rows = plan_of("2xH100", nodes=2).rows
    hsdp = next(row for row in rows if row.mesh.name == "hsdp")
    assert (hsdp.mesh.shard_size, hsdp.flags["shard_size"]) == (2, "node")


def test_settings_of_the_user_are_not_varied() -> None:
    plan = plan_of("4xA100", strategy="fsdp", activation_checkpointing="true")
    assert {row.flags["strategy"] for row in plan.rows} == {"fsdp"}
    assert all("activation_checkpointing" not in row.flags for row in plan.rows)


def test_eight_bits_are_never_recommended_if_a_plan_fits_without() -> None:
    plan = plan_of("1xH100", frozen="true")
    assert any(row.is_lossy for row in plan.rows)
    assert plan.recommended is not None and not plan.recommended.is_lossy


# The command


def test_the_recommended_command_is_one_that_train_accepts(tmp_path: Path) -> None:
    result = command("plan", f"{RECIPE}:TwoMoons", "--gpus", "2xRTX4090", "--json", "plan.json", cwd=tmp_path)
    assert result.code == 0, result.err
    recommended = result.out.strip().splitlines()[-1].split()
    assert recommended[:2] == ["unisono", "train"] and "--gpus 2" in " ".join(recommended)
    assert command(*recommended[1:], "--print_config", cwd=tmp_path).code == 0
    rows = json.loads((tmp_path / "plan.json").read_text())["rows"]
    assert {row["strategy"] for row in rows} == {"ddp", "fsdp"}
    assert all(sum(row["seconds"].values()) == pytest.approx(row["seconds_per_step"]) for row in rows)
    again = command("plan", f"{RECIPE}:TwoMoons", "--gpus", "2xRTX4090", "--json", "plan.json", cwd=tmp_path)
    assert again.code == 2 and "already exists" in again.err


class TooLarge(Blocks):
    """A model with weights of 256 GiB."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 2**30), nn.Linear(2**30, 3))


def test_a_model_that_fits_nowhere_is_said_to_need_its_memory(tmp_path: Path) -> None:
    plan = plan_of("1xT4", recipe=TooLarge)
    assert plan.recommended is None
    assert min(row.memory.total for row in plan.rows) > 256 * 2**30


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus", "8xH10O"], "did you mean H100"),
        ([], "--gpus is missing"),
        (["--gpus", "H100", "--nodes", "0"], "at least one GPU and one machine"),
        (["--gpus", "H100", "--price", "-1"], "price -1"),
        (["--gpus", "H100", "--network_gbit", "0"], "network_gbit 0"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], message: str, tmp_path: Path) -> None:
    result = command("plan", f"{RECIPE}:TwoMoons", *arguments, cwd=tmp_path)
    assert result.code == 2
    assert message in result.err and result.err.count("\n") == 1


def test_darkroom_is_planned_without_its_histories() -> None:
    from unisono.recipes.darkroom.recipe import Darkroom

    for compressed in ("true", "false"):
        row = plan_of("H200", recipe=Darkroom, use_compressed_context=compressed).rows[0]
        assert row.fits and row.flops > 0
