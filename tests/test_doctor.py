"""`unisono doctor` and `unisono gpus`: each fault is detected, comes with advice, and sets the exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from unisono.cli import doctor, gpus
from unisono.cli.doctor import GIB, Check, Machine
from unisono.cluster import allreduce
from unisono.devices import Driver, Gpu
from unisono.errors import TrainingFailed

PACKAGES = {"torch": "2.11.0+cu130", "rich": "15.0"}
H200 = Gpu(0, "GPU-0aaa", "NVIDIA H200", 150 * 10**9, 149 * 10**9, 0, (), "0000:01:00.0", ("NVLink x18", "PCIe 5 x16"))
HEALTHY = Machine(
    packages=PACKAGES,
    cuda_build="13.0",
    cuda_works=True,
    nccl="2.28.9",
    driver=Driver("580.95", (13, 0)),
    gpus=(H200,),
    shm_bytes=64 * GIB,
)


def judge(machine: Machine) -> dict[str, Check]:
    return {check.name: check for check in (each(machine) for each in (*doctor.INSTALLED, *doctor.VISIBLE))}


def test_a_healthy_gpu_machine_passes_all_checks() -> None:
    checks = judge(HEALTHY)
    assert {check.status for check in checks.values()} == {"ok"}
    assert "CUDA 13.0, NCCL 2.28.9" in checks["torch"].found and "H200" in checks["gpus"].found


@pytest.mark.parametrize(
    ("machine", "name", "status", "words"),
    [
        (replace(HEALTHY, packages={**PACKAGES, "torch": "2.8.1"}), "torch", "fail", "too old"),
        (replace(HEALTHY, packages={**PACKAGES, "torch": "2.14.0"}), "torch", "warn", "torch<2.14"),
        (replace(HEALTHY, packages={**PACKAGES, "torch": None}), "torch", "fail", "pip install"),
        (replace(HEALTHY, torch_error="libcudart.so.13: no such file"), "torch", "fail", "torch cannot be imported"),
        (replace(HEALTHY, packages={**PACKAGES, "rich": None}), "packages", "fail", "pip install rich"),
        (replace(HEALTHY, gpus=(), driver=None, cuda_works=False), "cuda", "warn", "nvidia-smi"),
        (replace(HEALTHY, driver=Driver("535.1", (12, 2)), cuda_works=False), "cuda", "fail", "update the driver"),
        (replace(HEALTHY, mask="", cuda_works=False), "cuda", "warn", "unset CUDA_VISIBLE_DEVICES"),
        (replace(HEALTHY, mask="5", cuda_works=False), "cuda", "warn", "unset CUDA_VISIBLE_DEVICES"),
        (replace(HEALTHY, cuda_build=None, cuda_works=False), "cuda", "fail", "CUDA build"),
        (replace(HEALTHY, cuda_works=False), "cuda", "fail", "torch.cuda.init"),
        (replace(HEALTHY, bf16=False), "gpus", "warn", "fp16"),
        (replace(HEALTHY, shm_bytes=64 * 2**20), "shared memory", "warn", "--shm-size"),
        (replace(HEALTHY, disk_bytes=GIB), "disk", "warn", "--output_dir"),
        (replace(HEALTHY, open_files=256), "open files", "warn", "ulimit -n"),
        (replace(HEALTHY, orphans=["71 python", "72 python"]), "orphans", "warn", "kill 71 72"),
    ],
)
def test_each_fault_is_detected_and_comes_with_advice(machine: Machine, name: str, status: str, words: str) -> None:
    wrong = [check for check in judge(machine).values() if check.status != "ok"]
    assert [(check.name, check.status) for check in wrong] == [(name, status)]
    assert words in wrong[0].advice and "\n" not in wrong[0].advice


def test_a_newer_minor_cuda_than_the_drivers_is_fine() -> None:
    assert judge(replace(HEALTHY, cuda_build="13.1"))["cuda"].status == "ok"


def test_a_missing_extra_is_not_a_fault() -> None:
    machine = replace(HEALTHY, packages={**PACKAGES, "torchmetrics": None}, optional={"torchmetrics": "metrics"})
    check = judge(machine)["packages"]
    assert check.status == "ok" and "unisono[metrics]" in check.found


def test_bad_launcher_variables_are_a_fault() -> None:
    check = doctor.check_launcher({"WORLD_SIZE": "2"})
    assert check.status == "fail" and "RANK" in check.found and "torchrun" in check.advice


def test_an_unwritable_output_folder_is_a_fault_and_no_file_is_left_in_a_writable_one(tmp_path: Path) -> None:
    assert doctor.check_output_dir(str(tmp_path / "runs" / "new")).status == "ok"
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("precious")
    for path in (tmp_path / "file", tmp_path / "file" / "run", Path("/proc/unisono-run")):
        assert doctor.check_output_dir(str(path)).status == "fail", path
    assert (tmp_path / "file").read_text() == "precious"


def process(proc: Path, pid: int, parent: int, *command: str) -> None:
    (proc / str(pid)).mkdir(parents=True)
    (proc / str(pid) / "cmdline").write_bytes("\0".join(command).encode() + b"\0")
    (proc / str(pid) / "stat").write_text(f"{pid} (py (thon) x) S {parent} {pid} 1 0")


def test_only_ranks_without_a_launcher_are_orphans(tmp_path: Path) -> None:
    process(tmp_path, 1, 0, "/sbin/init")
    process(tmp_path, 10, 9, "python", "-m", "unisono.engine.start.rank")
    process(tmp_path, 11, 1, "python", "-m", "unisono.engine.start.rank")
    process(tmp_path, 12, 1, "sshd")
    assert doctor.orphaned_ranks(tmp_path) == ["11 python -m unisono.engine.start.rank"]


def test_ranks_of_a_launcher_with_process_id_1_are_not_orphans(tmp_path: Path) -> None:
    process(tmp_path, 1, 0, "python", "/usr/bin/unisono", "train")
    process(tmp_path, 11, 1, "python", "-m", "unisono.engine.start.rank")
    assert doctor.orphaned_ranks(tmp_path) == []


def test_this_machine_is_checked_with_a_real_all_reduce(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # two CPU ranks, on any machine
    code = doctor.main(["--json", "--output-dir", str(tmp_path)])
    answer = json.loads(capsys.readouterr().out)
    checks = {check["name"]: check for check in answer["checks"]}
    reduced = checks["all-reduce, 2 CPU ranks over gloo"]
    assert reduced["status"] == "ok" and "GB/s" in reduced["found"] and "µs" in reduced["found"], reduced
    assert checks["output folder"]["status"] == "ok"
    faults = [check for check in checks.values() if check["status"] == "fail"]
    assert (code, answer["healthy"]) == ((1, False) if faults else (0, True))


def test_a_broken_network_is_a_fault_with_the_ranks_own_reason(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nonexistent0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert doctor.main([]) == 1
    output = " ".join(capsys.readouterr().out.split())
    assert "nonexistent0" in output and "GLOO_SOCKET_IFNAME" in output


def test_an_all_reduce_that_times_out_names_the_waiting_ranks() -> None:
    with pytest.raises(TrainingFailed, match=r"not done after 0.3 s; still waiting: rank 0, 1"):
        allreduce.measure("gloo", 2, timeout_s=0.3)


def test_help_of_both_commands_does_not_import_torch() -> None:
    for module in ("doctor", "gpus"):
        script = (
            f"import sys\nfrom unisono.cli.{module} import main\n"
            "try: main(['--help'])\nexcept SystemExit as end: assert end.code == 0\n"
            "assert 'torch' not in sys.modules"
        )
        src = str(Path(__file__).parents[1] / "src")
        done = subprocess.run([sys.executable, "-c", script], env={"PYTHONPATH": src}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert f"unisono {module}" in done.stdout and "--json" in done.stdout


def test_the_gpus_command_says_what_to_check_if_there_is_no_gpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "visible_gpus", list)
    monkeypatch.setattr(gpus, "read_gpus", list)
    assert gpus.main([]) == 0 and "nvidia-smi" in capsys.readouterr().out
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    monkeypatch.setattr(gpus, "read_gpus", lambda: [H200])
    assert gpus.main([]) == 0 and "CUDA_VISIBLE_DEVICES='-1' hides all 1" in capsys.readouterr().out


def test_the_gpus_command_marks_the_gpus_that_auto_would_take(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = replace(H200, index=1, uuid="GPU-1bbb", free_bytes=10**9)
    monkeypatch.setattr(gpus, "visible_gpus", lambda: [H200, busy])
    monkeypatch.setenv("COLUMNS", "160")
    assert gpus.main([]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if "NVIDIA H200" in line]
    assert ["✓" in row for row in rows] == [True, False] and "NVLink x18, PCIe 5 x16" in rows[0]
    assert gpus.main(["--json"]) == 0
    assert [gpu["auto"] for gpu in json.loads(capsys.readouterr().out)] == [True, False]
