"""The benchmark of ranks over NCCL: every row can fail, and what did not run is listed."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
VERIFIED = """
┃ ranks ┃ strategy ┃ micro-batches ┃    loss ┃ metrics ┃ weights ┃ verdict    ┃
│     1 │ single   │        1 x 13 │ 0.0e+00 │ 0.0e+00 │ 0.0e+00 │ reference  │
│     1 │ single   │         3 x 5 │ 9.0e-11 │ 9.0e-11 │ 9.0e-11 │ same       │
│     2 │ ddp      │         1 x 7 │ 1.3e-14 │ 2.5e-14 │ 1.1e-13 │ same       │
│     2 │ ddp      │         3 x 3 │ 1.1e-14 │ 4.0e-13 │ 1.0e-13 │ same       │
Same run (tolerance …).
"""


@pytest.fixture(scope="module")
def nccl() -> Iterator[Any]:
    """The benchmark's modules."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import nccl as main
        import nccl_cases as cases
        import nccl_runs as runs

        yield type("Modules", (), {"main": main, "cases": cases, "runs": runs})
    finally:
        sys.path.pop(0)


def case(nccl: Any, difference: float | BaseException, **more: Any) -> Any:
    def work(runs: Any) -> float:
        if isinstance(difference, BaseException):
            raise difference
        return difference

    return replace(nccl.cases.Case("row", "a row", work, expected_s=5), **more)


def test_every_row_has_a_unique_name_and_every_number_of_ranks_has_rows(nccl: Any) -> None:
    names = [case.name for case in nccl.cases.all_cases([2, 4, 8])]
    assert len(names) == len(set(names)) and names[:2] == ["verify-float64-ddp-2", "verify-float64-fsdp-2"]
    for number in (2, 4, 8):
        kinds = {name.removesuffix(f"-{number}") for name in names if name.endswith(f"-{number}")}
        assert {"verify-bf16-fsdp", "saves-fsdp", "contrastive", "evaluation", "graph-ddp"} <= kinds
    assert {f"{kind}-{how}-2" for kind in ("kill", "hang", "oom", "nan", "slow") for how in ("ddp", "fsdp")} < set(
        names
    )
    assert {"faults-ddp-8", "faults-fsdp-8", "hsdp-4", "hsdp-8", "context-2", "context-4"} < set(names)


@pytest.mark.parametrize(
    ("outcome", "state"),
    [
        (0.0, "passed"),
        (1e-10, "passed"),
        (1.1e-10, "FAILED"),
        (math.inf, "FAILED"),
        (ValueError("damaged"), "FAILED"),
    ],
)
def test_a_row_passes_only_within_its_tolerance(
    nccl: Any, outcome: float | BaseException, state: str, tmp_path: Path
) -> None:
    row = nccl.main.carry_out(case(nccl, outcome), nccl.runs.Runs(tmp_path, "gloo", 60))
    assert nccl.main.state_of(row) == state
    json.dumps(row, allow_nan=False)


def test_rows_that_did_not_run_are_listed_with_the_reason(nccl: Any, tmp_path: Path) -> None:
    runs, never = nccl.runs.Runs(tmp_path, "gloo", 60), AssertionError("must not be called")
    rows = [
        nccl.main.carry_out(case(nccl, never, expected_s=61), runs),
        nccl.main.carry_out(case(nccl, nccl.runs.OutOfTime()), runs),
        nccl.main.carry_out(case(nccl, never, needs="gpu"), runs),
        nccl.main.carry_out(case(nccl, never, needs="no_such_setting"), runs),
        nccl.main.carry_out(case(nccl, nccl.runs.Failed("exit code 3")), runs),
    ]
    reasons = ["no time left", "no time left", "needs a GPU", "there is no --no_such_setting"]
    assert [row.get("not_run") for row in rows] == [*reasons, None]
    about = {"processor": "X", "cores": 2, "memory_gib": 4, "gpus": [], "system": "Linux", "load_average": 0}
    result = {"backend": "gloo", "machine": about, "versions": {}, "date": "today", "command": "c", "seconds": 9.0}
    page = nccl.main.table(result | {"rows": rows})
    assert "0 rows passed, 1 failed, 4 did not run" in page and "No NCCL was used" in page
    assert all(f"not run: {reason} |" in page for reason in reasons) and "Failed: exit code 3" in page


def test_only_rows_that_passed_with_the_same_code_are_kept(nccl: Any, tmp_path: Path) -> None:
    file = tmp_path / "so_far.json"
    so_far = nccl.main.SoFar(file, "nccl")
    so_far.add({"name": "good", "ok": True})
    so_far.add({"name": "bad", "ok": False})
    so_far.add({"name": "later", "not_run": "no time left"})
    assert list(nccl.main.SoFar(file, "nccl").rows) == ["good"]
    assert nccl.main.SoFar(file, "gloo").rows == {}, "a rehearsal is no result"
    stored = json.loads(file.read_text())
    file.write_text(json.dumps(stored | {"of": ["other code", *stored["of"][1:]]}))
    assert nccl.main.SoFar(file, "nccl").rows == {}


def written(folder: Path, losses: list[float], evaluated: float = 0.5) -> Path:
    folder.mkdir()
    lines = [{"step": step, "loss": loss, "samples": 13 * step} for step, loss in enumerate(losses, 1)]
    lines.append({"step": len(losses), "eval/loss": evaluated, "eval/long": 3.0})
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return folder


def test_different_losses_are_detected(nccl: Any, tmp_path: Path) -> None:
    one = written(tmp_path / "one", [3.0, math.nan, 1.0])
    assert nccl.runs.compare_steps(written(tmp_path / "same", [3.0, math.nan, 1.0]), one, 3) == 0.0
    assert nccl.runs.compare_steps(written(tmp_path / "off", [3.0, math.nan, 1.5]), one, 3) == 0.5
    assert nccl.runs.compare_steps(written(tmp_path / "finite", [3.0, 2.0, 1.0]), one, 3) == math.inf
    with pytest.raises(nccl.runs.Failed, match="each of 3 steps once"):
        nccl.runs.compare_steps(written(tmp_path / "short", [3.0, math.nan]), one, 3)
    off = written(tmp_path / "evaluation", [3.0, math.nan, 1.0], evaluated=0.75)
    assert nccl.runs.compare_evaluations(off, one) == 0.25


def test_the_largest_difference_of_verify_is_read_from_its_table(nccl: Any) -> None:
    assert nccl.runs.largest_difference_in(VERIFIED, 2) == 4.0e-13
    sixteen = VERIFIED.replace("tolerance …", "metrics and weights are not compared in 16 bit")
    assert nccl.runs.largest_difference_in(sixteen, 2) == 1.3e-14
    for flawed in (VERIFIED.replace("ddp      │         3 x 3", "ddp │ x │"), VERIFIED):
        with pytest.raises(nccl.runs.Failed, match="no runs of"):
            nccl.runs.largest_difference_in(flawed, 2 if flawed is not VERIFIED else 4)


def test_a_run_that_did_not_use_nccl_fails(nccl: Any, tmp_path: Path) -> None:
    runs = nccl.runs.Runs(tmp_path, "nccl", 60)
    for rank in (0, 1):
        with pytest.raises(nccl.runs.Failed, match=f"communicators in {rank} processes, expected 2"):
            runs._check_nccl(tmp_path / "run", 2)
        (tmp_path / f"run.nccl.{rank}").write_text("host:1 NCCL INFO comm 0x1 rank 0 nranks 2 - Init COMPLETE\n")
    runs._check_nccl(tmp_path / "run", 2)


def test_without_a_gpu_no_measurement_starts_and_a_rehearsal_needs_its_own_output_folder(tmp_path: Path) -> None:
    for flags, why in ((["--backend", "gloo"], "need --output"), (["--output", str(tmp_path)], "there is no GPU here")):
        words = [sys.executable, "benchmarks/nccl.py", *flags]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, env=_environment())
        assert done.returncode != 0 and why in done.stderr, done.stderr
    assert not any(tmp_path.iterdir())


def _environment() -> dict[str, str]:
    from command_line import environment

    return environment()


@pytest.mark.slow
def test_a_rehearsal_over_gloo_runs_a_row_and_is_labelled_as_a_rehearsal(tmp_path: Path) -> None:
    words = [sys.executable, "benchmarks/nccl.py", "--backend", "gloo", "--ranks", "2", "--quick"]
    words += ["--only", "kill-ddp,hsdp", "--output", str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, env=_environment())
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "nccl_rehearsal.json").read_text())
    [row] = result["rows"]
    assert row["name"] == "kill-ddp-2" and row["ok"] and 0 <= row["difference"] <= 1e-10
    assert "s in total." in done.stdout and "No NCCL was used" in (tmp_path / "nccl_rehearsal.md").read_text()
    assert not (tmp_path / "nccl_so_far.json").exists()
