"""The numbers of a step: model FLOPs utilization, waiting for other ranks, load and power of a GPU."""

from __future__ import annotations

import io
import random
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from many_runs import Outcome, Run, many_runs
from recipes_for_tests import Layers
from unisono.engine.recorder import MAX_RANKS_LISTED, Recorder
from unisono.engine.step.flops import FlopMeter, _Counter
from unisono.observe.gpu_load import GpuLoad
from unisono.observe.report.write import write_report
from unisono.observe.straggler import StragglerDetector, medians_of_others
from unisono.observe.training_line import TrainingLine
from unisono.planning.peak_rates import peak_flops
from unisono.quantize.layers import quantize
from unisono.recipes.wan.flops import forward_flops

PEAK = 1e-6  # TFLOP/s, so that the utilization of these small models has digits
SAMPLES = 8
SLOW_S = 0.15
COMMON = {"global_batch_size": SAMPLES, "max_steps": 6, "log_every": 3, "peak_tflops": PEAK, "num_workers": 0}
RUNS = {
    "one": (1, {"batch_size": 8}),
    "micro-batches": (1, {"batch_size": 2}),
    "recomputed": (1, {"batch_size": 8, "activation_checkpointing": True}),
    "formula": (1, {"batch_size": 8, "formula": 1e6}),
    "unknown peak": (1, {"batch_size": 8, "peak_tflops": None}),
    "ddp": (2, {"batch_size": 4, "strategy": "ddp"}),
    "fsdp": (2, {"batch_size": 4, "strategy": "fsdp"}),
    "uneven": (3, {"batch_size": 3, "strategy": "ddp", "global_batch_size": 2}),
    "slow, fast path": (2, {"batch_size": 4, "slow_rank": 1, "guard_steps": 0, "strategy": "ddp", "slow_s": SLOW_S}),
    "slow, guarded": (2, {"batch_size": 4, "slow_rank": 1, "guard_steps": -1, "strategy": "ddp", "slow_s": SLOW_S}),
    "slow, fsdp": (2, {"batch_size": 4, "slow_rank": 1, "strategy": "fsdp", "slow_s": SLOW_S}),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    run_list = [Run(name, name, world, COMMON | each, recipe="Layers") for name, (world, each) in RUNS.items()]
    return many_runs(run_list, tmp_path_factory.mktemp("numbers"))


def operations(line: dict[str, Any]) -> float:
    """Operations per step of all ranks, as the utilization says."""
    utilizations = line.get("mfu_by_rank", [line["mfu"]])
    steps = line.get("step_ms_by_rank", [line["step_ms"]])
    return sum(mfu * ms / 1e3 * PEAK * 1e12 for mfu, ms in zip(utilizations, steps, strict=True))


@pytest.mark.parametrize("name", ["one", "micro-batches", "recomputed", "ddp", "fsdp"])
def test_every_layout_counts_the_same_flops(name: str, runs: dict[str, Outcome]) -> None:
    """Those of the model: recomputed activations are not among them."""
    assert runs[name].main.get("status") == "done", runs[name].main
    for line in runs[name].steps():
        assert operations(line) == pytest.approx(Layers.OPERATIONS * SAMPLES, rel=1e-2)


def test_a_rank_without_samples_has_no_useful_flops(runs: dict[str, Outcome]) -> None:
    line = runs["uneven"].steps()[-1]
    assert sorted(utilization > 0 for utilization in line["mfu_by_rank"]) == [False, True, True]
    assert operations(line) == pytest.approx(Layers.OPERATIONS * 2, rel=1e-2)
    assert line["mfu"] == pytest.approx(sum(line["mfu_by_rank"]) / 3)


def test_a_recipes_own_flops_formula_is_used(runs: dict[str, Outcome]) -> None:
    for line in runs["formula"].steps():
        assert operations(line) == pytest.approx(1e6 * SAMPLES, rel=1e-3)


@pytest.mark.parametrize(("formula", "counted"), [(7.0, 7.0 * SAMPLES), (0.0, None)])
def test_flops_of_compiled_code_come_from_the_recipe_only(formula: float, counted: float | None) -> None:
    """A dispatch mode would make it run uncompiled, with other rounding than in the other steps."""
    batch = torch.zeros(SAMPLES, 4)
    micro = SimpleNamespace(is_dummy=False, data=batch)
    meter = FlopMeter(Layers(Layers.Config(formula=formula)), peak=1.0, can_count=False)
    for _ in range(3):
        meter.begin_step()
        meter.begin(micro)  # type: ignore[arg-type]
        with meter.counting():
            meter.see(batch)  # the step calls it when the batch is on the device, inside of the forward pass
            batch @ batch.T
        meter.end()
        meter.end_step()
    assert meter.per_step() == counted


@pytest.mark.parametrize(("formula", "counted"), [(None, None), (7.0, 7.0 * SAMPLES)])
def test_functions_that_a_recipe_compiles_stay_compiled(formula: float | None, counted: float | None) -> None:
    num_calls = 0

    def backend(graph: Any, example: Any) -> Any:
        def compiled(*inputs: Any) -> Any:
            nonlocal num_calls
            num_calls += 1
            return graph(*inputs)

        return compiled

    product = torch.compile(lambda x: (x @ x.T).relu(), backend=backend)
    batch = torch.zeros(SAMPLES, 4)
    micro: Any = SimpleNamespace(is_dummy=False, data=batch)
    config = Layers.Config() if formula is None else Layers.Config(formula=formula)
    meter = FlopMeter(Layers(config), peak=1.0, can_count=True)
    try:
        for _ in range(4):
            meter.begin_step()
            meter.begin(micro)
            with meter.counting():
                meter.see(batch)
                product(batch)
            meter.end()
            meter.end_step()
        assert num_calls == 4 and meter.per_step() == counted
    finally:
        torch._dynamo.utils.counters.clear()  # other tests of this process count


@pytest.mark.parametrize("recomputes", [False, True])
def test_flops_of_layers_with_custom_autograd_functions_count_once(recomputes: bool) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64).requires_grad_(False))
    quantize(model, ["0"], "int8")
    counter, x = _Counter(), torch.randn(4, 64, requires_grad=True)
    with counter:
        y = checkpoint(lambda x: model(x).relu(), x, use_reentrant=False) if recomputes else model(x).relu()
    with counter:
        y.sum().backward()
    assert counter.flops == 2 * (2 * 4 * 64 * 64)


def test_ranks_that_share_a_sample_share_its_flops() -> None:
    micro: Any = SimpleNamespace(is_dummy=False, data=torch.ones(2, 3))
    recipe = Layers(Layers.Config(formula=12.0))
    expected = recipe.flops(micro.data)
    meter = FlopMeter(recipe, peak=1.0, can_count=True, sharing=4)
    meter.begin_step()
    meter.begin(micro)
    meter.see(micro.data)
    meter.end_step()
    assert expected and meter.per_step() == expected / 4


def test_without_a_peak_rate_there_is_no_utilization(runs: dict[str, Outcome]) -> None:
    assert not any("mfu" in line or "comm_ms" in line for line in runs["unknown peak"].lines())


@pytest.mark.parametrize("name", ["slow, fast path", "slow, guarded"])
def test_a_rank_that_is_slow_in_its_backward_pass_is_named(name: str, runs: dict[str, Outcome]) -> None:
    """Its time until it first waits for others is like theirs: only the whole of its computation shows it."""
    line = runs[name].steps()[-1]
    slow_ms = SLOW_S * 1e3
    assert line["slowest_rank"] == line["slowest_compute_rank"] == 1
    assert max(line["own_ms_by_rank"]) < slow_ms / 2
    assert line["compute_ms_by_rank"][1] > slow_ms * 0.95 > 2 * line["compute_ms_by_rank"][0]
    assert line["comm_ms_by_rank"][0] > slow_ms * 0.8 > 2 * line["comm_ms_by_rank"][1]
    assert line["comm_ms"] == pytest.approx(statistics.mean(line["comm_ms_by_rank"]), abs=1e-3)
    assert line["step_ms"] > slow_ms


def test_under_fsdp_the_wait_for_the_last_reduction_is_measured(runs: dict[str, Outcome]) -> None:
    line = runs["slow, fsdp"].steps()[-1]
    assert runs["slow, fsdp"].main.get("status") == "done" and len(line["comm_ms_by_rank"]) == 2
    assert all(0 <= waited < line["step_ms"] for waited in line["comm_ms_by_rank"])


def test_the_report_draws_the_numbers_of_each_rank(runs: dict[str, Outcome], tmp_path: Path) -> None:
    page = write_report(runs["ddp"].folder, tmp_path / "ddp.html").read_text()
    titles = ["Model FLOPs utilization", "computation per step", "wait for the others per step", "communication"]
    assert all(title in page for title in titles) and ">MFU<" in page
    slow = write_report(runs["slow, guarded"].folder, tmp_path / "slow.html").read_text()
    assert "The slowest rank, on average rank 1" in slow
    assert "GPU utilization" not in page and "GPU power" not in page  # there was no GPU
    alone = write_report(runs["unknown peak"].folder, tmp_path / "one.html").read_text()
    assert not any(title in alone for title in ["Model FLOPs", "wait for the others"])


def test_known_gpus_have_a_peak_rate_and_others_have_none() -> None:
    assert peak_flops("NVIDIA H200", "bf16") == 989e12 and peak_flops("NVIDIA H200", "fp8") == 1979e12
    assert peak_flops("NVIDIA H200 NVL", "fp16") == 835e12 and peak_flops("NVIDIA H100 PCIe", "tf32") == 378e12
    assert (
        peak_flops("NVIDIA A100-SXM4-80GB", "fp32") == 19.5e12 and peak_flops("Tesla V100-SXM2-16GB", "fp16") == 125e12
    )
    for unknown in [
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA A100-SXM4-80GB MIG 1g.10gb",
        "NVIDIA A1000",
        "Some GPU",
    ]:
        assert peak_flops(unknown, "bf16") is None
    assert peak_flops("NVIDIA A100-SXM4-80GB", "fp8") is None and peak_flops("Tesla T4", "tf32") is None


def test_the_load_of_a_gpu_is_averaged_between_two_records(monkeypatch: pytest.MonkeyPatch) -> None:
    loads = iter([20, 40, *[60] * 10_000])
    nvml = SimpleNamespace(
        NVMLError=RuntimeError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: {"GPU-x": 7}[uuid],
        nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=next(loads)),
        nvmlDeviceGetPowerUsage=lambda handle: 350_000,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    load = GpuLoad("GPU-x", every_s=0.01)
    time.sleep(0.2)
    load.close()
    taken = load.take()
    assert 0.2 < taken["gpu_util"] <= 0.6 and taken["gpu_power_w"] == 350
    assert load.take() == {}


def test_a_gpu_that_nvml_does_not_know_has_no_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    load = GpuLoad("GPU-x", every_s=0.01)
    time.sleep(0.05)
    load.close()
    assert load.take() == {}


def test_the_progress_line_shows_mfu_and_gpu_load() -> None:
    stream = io.StringIO()
    TrainingLine(10, stream=stream).update(
        step=1, loss=1.0, mfu=0.4321, comm_ms=5.0, step_ms=50.0, gpu_util=0.97, gpu_power_w=651.4
    )
    assert all(text in stream.getvalue() for text in ["MFU 43.2%", "10% communication", "GPU 97% 651 W"])


def test_many_ranks_are_summarised() -> None:
    """A line with the numbers of 4,096 ranks would have 200 kB."""
    world = MAX_RANKS_LISTED + 1
    ranks = [
        {"step_ms": 9.0, "own_ms": 5.0, "data_wait_ms": 1.0, "comm_ms": 2.0, "compute_ms": 6.0 + (rank == 5)}
        for rank in range(world)
    ]
    recorder = Recorder.__new__(Recorder)
    recorder._agreement = SimpleNamespace(gather=lambda mine: ranks)  # type: ignore[assignment]
    recorder._sharded, recorder._stragglers = False, StragglerDetector()
    assert recorder._over_ranks(ranks[0], 1) == {
        "comm_ms": pytest.approx(2.0),
        "compute_ms": pytest.approx(6.0 + 1 / world),
        "slowest_rank": 5,
        "slowest_compute_rank": 5,
    }
    recorder._agreement = SimpleNamespace(gather=lambda mine: ranks[:2])  # type: ignore[assignment]
    assert recorder._over_ranks(ranks[0], 1)["comm_ms_by_rank"] == [2.0, 2.0]


def test_the_medians_of_all_others_are_those_of_statistics() -> None:
    numbers = random.Random(0)
    for count in range(2, 12):
        values = [numbers.choice([1.0, 2.0, numbers.random()]) for _ in range(count)]
        others = [statistics.median(values[:place] + values[place + 1 :]) for place in range(count)]
        assert medians_of_others(values) == pytest.approx(others)


def test_a_straggler_among_thousands_of_ranks_is_found_in_milliseconds() -> None:
    times, began = [10.0] * 4096, time.perf_counter()
    times[17] = 20.0
    StragglerDetector().check(times, [0.0] * 4096)
    assert time.perf_counter() - began < 0.5


@pytest.mark.parametrize(
    ("latent", "tera"), [((1, 16, 1, 64, 64), 3.0), ((1, 16, 1, 128, 128), 13.9), ((1, 16, 21, 60, 104), 283)]
)
def test_wans_flops_formula_gives_the_published_numbers(latent: tuple[int, ...], tera: float) -> None:
    config = {"patch_size": (1, 2, 2), "num_attention_heads": 12, "attention_head_dim": 128}
    config |= {"ffn_dim": 8960, "num_layers": 30}
    assert forward_flops(config, latent, 512) / 1e12 == pytest.approx(tera, rel=0.02)
