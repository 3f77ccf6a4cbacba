"""The benchmarks run, write the promised files, and compare loops that compute the same."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from command_line import end, start

ROOT = Path(__file__).parent.parent


def fault_row(faults: int, tolerance: float, difference: float, ok: bool = True) -> dict[str, Any]:
    recoveries = [] if tolerance else [4.0, 6.0]
    return {"faults": faults, "tolerance": tolerance, "difference": difference, "ok": ok, "recoveries": recoveries}


def test_the_benchmarks_page_shows_the_measured_fault_results(tmp_path: Path) -> None:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        from figures import survived
    finally:
        sys.path.pop(0)
    assert survived(tmp_path) == ""
    rows = [fault_row(200, 0.0, 0.0), fault_row(30, 1e-10, 3e-14)]
    (tmp_path / "faults.json").write_text(json.dumps({"rows": rows}))
    [line] = survived(tmp_path).splitlines()
    assert "230 injected faults, no run lost" in line and "bit for bit: no difference" in line
    assert "largest difference 3e-14" in line and "5.0 s" in line and "(../benchmarks/results/faults.md)" in line
    (tmp_path / "faults.json").write_text(json.dumps({"rows": [*rows, fault_row(20, 0.0, 0.25, ok=False)]}))
    (tmp_path / "save_stall.json").write_text(
        json.dumps(
            {
                "machine": {"gpus": ["NVIDIA X"]},
                "medians": {"stall_s": 0.2, "synchronous_s": 20.0},
                "stall_share": 0.01,
                "parameters": 1_000_000_000,
                "bytes": 12e9,
            }
        )
    )
    first, second = survived(tmp_path).splitlines()
    assert "1 of 3 rows lost" in first and "bit for bit: largest difference 2e-01" in first
    assert "1 billion parameters (12 GB) on NVIDIA X" in second and "0.20 s, 1.0 % of the 20.0 s" in second


@pytest.fixture()
def memory() -> Any:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import wan_memory

        return wan_memory
    finally:
        sys.path.pop(0)


@pytest.mark.parametrize("model", ["1.3B", "14B", "14B, LoRA of rank 32"])
def test_memory_of_a_whole_wan_is_extrapolated_from_two_depths(memory: Any, model: str) -> None:
    """Cases of a simulated machine with a known memory use: weights, stored activations, and the current block.

    The next test compares sharded models with real allocations.
    """
    config = memory.config_of(model, 30, False)
    block, rest = memory.size(config)
    width, lora = config["num_attention_heads"] * config["attention_head_dim"], "LoRA" in model
    state, gradient, copied = (2, 0, 0) if lora else (12, 4, 2)
    layers = 30 if model == "1.3B" else 40
    tokens = {"512x512x1": 1024, "480x832x17": 7800, "480x832x81": 32760}

    def gib(shape: str, blocks: list[str]) -> float:
        kept = {"none": 28 * tokens[shape] * width * 2 + copied * block, "all": tokens[shape] * width * 2}
        weights, work = len(blocks) * block + rest, 30 * tokens[shape] * width * 2
        forward = state * weights + sum(kept[one] for one in blocks)
        backward = (state + gradient) * weights
        return float(max(forward, 0 if lora else backward) + work) / 2**30

    cases = [
        {"model": model, "shape": shape, "recompute": recompute, "layers": depth, "tokens": count}
        | {"failed": "", "gib": gib(shape, [recompute] * depth)}
        for shape, count in tokens.items()
        for recompute in ("none", "all")
        for depth in memory.MODELS[model][2]
    ]
    for row in memory.finished(cases, False):
        for name, blocks in (("none", ["none"]), ("all", ["all"]), ("every 2nd", ["none", "all"])):
            whole = blocks * (layers // len(blocks))
            assert row[name] == pytest.approx(gib(row["shape"], whole), rel=0.01), (row["shape"], name)
    cases[0] |= {"gib": None, "failed": "ran out of memory"}
    first = memory.finished(cases, False)[0]
    assert first["none_failed"] == "ran out of memory" and "none" not in first and "all, fsdp" not in first
    assert memory.cell(first, "none", 100.0) == "FAILED: ran out of memory" and memory.cell(first, "all", 100.0) == ""


@pytest.mark.slow
def test_predicted_memory_of_a_sharded_wan_matches_real_allocations(memory: Any) -> None:
    """Compares with steps of the real strategies on a Wan with a tenth of the width and simulated ranks."""
    from wan_fits import Whole

    def allocated(*words: object) -> float:
        ended = end(start([ROOT / "tests" / "wan_memory_of.py", *words], cwd=ROOT))
        assert ended.code == 0, ended.err
        return float(ended.out)

    shape, frames, actual = "480x832x17", 17, {}
    for recompute in ("none", "all"):
        for depth in (2, 4):
            case = {"tokens": 7800, "failed": "", "gib": allocated("single", depth, recompute, frames)}
            actual["14B", shape, recompute, depth] = case
    whole = Whole("14B", actual, False)
    whole.depths, whole.layers = (2, 4), 6
    for recompute in ("none", "all"):
        assert whole.peak(shape, recompute, 8) == pytest.approx(allocated("fsdp", 6, recompute, frames), abs=0.7)


def test_the_memory_table_matches_its_cases(memory: Any) -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / "wan_memory.json").read_text())
    assert result["rows"] == memory.finished(result["cases"], False) and len(result["rows"]) == 16
    first = result["rows"][0] | {"none": 21.3, "every 2nd": 21.25}
    assert memory.cell(first, "none", 139.8) == "21.3" and memory.cell(first, "none", 20.0) == "*21.3*"
    assert memory.cell(first, "every 2nd", 139.8) == "*21.2*"


@pytest.mark.slow
@pytest.mark.timeout(600)  # a minute on an idle machine
def test_the_overhead_benchmark_compares_loops_that_train_the_same(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "benchmarks/overhead.py", "--quick", "--output", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "overhead_cpu.json").read_text())
    table = (tmp_path / "overhead_cpu.md").read_text()
    assert [case["ranks"] for case in result["cases"]] == [1, 2]
    for case in result["cases"]:
        measured = {name: row for name, row in case["variants"].items() if "missing" not in row}
        assert {"hand", "unisono"} <= measured.keys()
        for name, row in measured.items():
            assert f"| {name} | {row['step_ms']:.2f} |" in table
            assert all(
                math.isfinite(row[key]) and row[key] > 0 for key in ("step_ms", "ratio", "busy_ratio", "peak_mib")
            )
            assert row["weights_max_difference"] < 1e-4, f"{name} on {case['case']} trained something else"
    for reported in (result["command"], result["date"], result["versions"]["torch"], result["machine"]["processor"]):
        assert reported in table
