"""The benchmarks run, write down what they say they write, and compare loops that really do the same."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


def fault_row(faults: int, tolerance: float, difference: float, ok: bool = True) -> dict[str, Any]:
    recoveries = [] if tolerance else [4.0, 6.0]
    return {"faults": faults, "tolerance": tolerance, "difference": difference, "ok": ok, "recoveries": recoveries}


def test_the_readme_tells_what_was_measured_about_faults_and_nothing_else(tmp_path: Path) -> None:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        from figures import survived
    finally:
        sys.path.pop(0)
    assert survived(tmp_path) == ""
    rows = [fault_row(200, 0.0, 0.0), fault_row(30, 1e-10, 3e-14)]
    (tmp_path / "faults.json").write_text(json.dumps({"rows": rows}))
    [line] = survived(tmp_path).splitlines()
    assert "230 faults on purpose, no run lost" in line and "to the bit: no difference" in line
    assert "largest difference 3e-14" in line and "5.0 s" in line and "(benchmarks/results/faults.md)" in line
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
    assert "1 of 3 rows lost" in first and "to the bit: largest difference 2e-01" in first
    assert "1 billion parameters (12 GB) on NVIDIA X" in second and "0.20 s, 1.0 % of the 20.0 s" in second


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
    for told in (result["command"], result["date"], result["versions"]["torch"], result["machine"]["processor"]):
        assert told in table
