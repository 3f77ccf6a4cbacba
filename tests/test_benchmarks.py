"""The benchmarks run, write down what they say they write, and compare loops that really do the same."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


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
