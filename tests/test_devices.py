"""Choosing GPUs: every `--gpus` value, CUDA_VISIBLE_DEVICES as CUDA reads it, and locks between real processes."""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path

import pytest

from unisono.devices import (
    Choice,
    Gpu,
    GpuLock,
    GpuProcess,
    apply_mask,
    child_environment,
    choose,
    choose_and_lock,
    locked_gpus,
    read_driver,
    read_gpus,
    visible_gpus,
)
from unisono.errors import UserError

GB = 10**9


def gpu(index: int, free_gb: float = 80, *, uuid: str | None = None, processes: tuple[GpuProcess, ...] = ()) -> Gpu:
    return Gpu(index, uuid or f"GPU-{index}aaa-0000", "H100", 80 * GB, int(free_gb * GB), 0, processes)


FOUR = [gpu(0, 20), gpu(1, 80), gpu(2, 70), gpu(3, 79)]


def taken(choice: Choice) -> list[int]:
    return [each.index for each in choice.gpus]


def test_all_takes_every_visible_gpu() -> None:
    choice = choose("all", FOUR)
    assert taken(choice) == [0, 1, 2, 3] and choice.requested == 4 and not choice.warnings


def test_auto_takes_every_free_gpu() -> None:
    assert taken(choose("auto", FOUR)) == [1, 2, 3]
    small = GpuProcess(7, 2**29, "Xorg")
    big = GpuProcess(8, 2**31, "python")
    assert taken(choose("auto", [gpu(0, 79, processes=(small,)), gpu(1, 77, processes=(small, big))])) == [0]
    choice = choose("auto", FOUR, locked={FOUR[1].uuid, FOUR[3].uuid})
    assert taken(choice) == [2] and choice.requested == 1 and not choice.warnings


def test_auto_takes_the_gpu_with_most_free_memory_and_warns_when_none_is_free() -> None:
    choice = choose("auto", [gpu(0, 10), gpu(1, 30), gpu(2, 20)])
    assert taken(choice) == [1] and choice.requested == 1
    assert len(choice.warnings) == 1 and "GPU 1" in choice.warnings[0]
    everything_locked = choose("auto", FOUR, locked={each.uuid for each in FOUR})
    assert taken(everything_locked) == [1] and len(everything_locked.warnings) == 1


def test_a_count_takes_the_gpus_with_most_free_memory_in_pci_order() -> None:
    assert taken(choose("2", FOUR)) == [1, 3]
    assert taken(choose("2", FOUR, locked={FOUR[1].uuid})) == [2, 3]
    assert taken(choose("4", FOUR)) == [0, 1, 2, 3]


def test_requesting_too_many_gpus_gives_fewer_with_one_warning_and_records_the_request() -> None:
    choice = choose("8", FOUR)
    assert taken(choice) == [0, 1, 2, 3] and choice.requested == 8
    assert len(choice.warnings) == 1 and "8" in choice.warnings[0] and "4" in choice.warnings[0]
    held = choose("4", FOUR, locked={FOUR[0].uuid})
    assert taken(held) == [1, 2, 3] and held.requested == 4 and "1 in use by other runs" in held.warnings[0]


def test_ids_are_taken_in_the_order_given_even_when_busy() -> None:
    assert taken(choose("2,0", FOUR)) == [2, 0]
    assert taken(choose("3,", FOUR)) == [3]
    assert taken(choose("GPU-2aaa", FOUR)) == [2]
    shared = choose("1,", FOUR, locked={FOUR[1].uuid})
    assert taken(shared) == [1] and "GPU 1" in shared.warnings[0]


@pytest.mark.parametrize(
    ("request_", "names"),
    [
        ("0,7", "GPU 7 .*use one of 0, 1, 2, 3"),
        ("GPU-9", "GPU GPU-9"),
        ("1,1", "GPU 1 is listed twice"),
        ("two", "'two' is not all, auto"),
        ("", "is not all, auto"),
        ("-1", "is not all, auto"),
        ("1,,2", "is not all, auto"),
    ],
)
def test_an_impossible_request_is_rejected_by_name(request_: str, names: str) -> None:
    with pytest.raises(UserError, match=names):
        choose(request_, FOUR)


def test_hidden_gpus_keep_their_numbers() -> None:
    visible = apply_mask("2,3", FOUR)
    assert taken(choose("2,", visible)) == [2]
    with pytest.raises(UserError, match="hidden by CUDA_VISIBLE_DEVICES; use one of 2, 3"):
        choose("0,", visible)


def test_min_memory_skips_full_gpus_and_reports_if_none_is_left() -> None:
    assert taken(choose("all", FOUR, min_memory_gb=75)) == [1, 3]
    assert taken(choose("3", FOUR, min_memory_gb=75)) == [1, 3]
    with pytest.raises(UserError, match=r"no GPU has 90 GB of free memory .*GPU 1 has the most, 80.0 GB"):
        choose("auto", FOUR, min_memory_gb=90)
    with pytest.raises(UserError, match=r"GPU 0 has 20.0 GB free"):
        choose("0,1", FOUR, min_memory_gb=75)


def test_zero_uses_the_cpu_silently_and_a_missing_gpu_uses_it_with_a_note() -> None:
    assert choose("0", FOUR) == Choice((), 0) == choose("0", [])
    for request, num_requested in (("auto", 0), ("all", 0), ("2", 2)):
        choice = choose(request, [])
        assert (choice.gpus, choice.requested, len(choice.warnings)) == ((), num_requested, 1)
        assert "no CUDA device" in choice.warnings[0] and "training on the CPU" in choice.warnings[0]


@pytest.mark.parametrize(
    ("mask", "indices"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("3,1", [3, 1]),
        (" 0 , 2 ", [0, 2]),
        ("GPU-2aaa", [2]),
        ("gpu-2aaa", []),
        ("GPU-1AAA-0000,0", [1, 0]),
        ("GPU-", []),  # not unique
        ("1,9,2", [1]),  # CUDA stops at the first bad entry
        ("1,-1,2", [1]),
        ("1,1,2", [1]),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(mask: str | None, indices: list[int]) -> None:
    assert [each.index for each in apply_mask(mask, FOUR)] == indices


def test_a_mig_slice_is_passed_through() -> None:
    (slice_,) = apply_mask("MIG-5f4c-11", FOUR)
    choice = choose("auto", [slice_])
    assert child_environment(choice)["CUDA_VISIBLE_DEVICES"] == "MIG-5f4c-11"


def test_children_see_exactly_the_choice_by_uuid() -> None:
    assert child_environment(choose("2,0", FOUR)) == {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": f"{FOUR[2].uuid},{FOUR[0].uuid}",
    }
    assert child_environment(choose("0", FOUR))["CUDA_VISIBLE_DEVICES"] == ""


HOLD = """
import sys
from pathlib import Path
from unisono.devices import Gpu, choose_and_lock
gpus = [Gpu(i, f"GPU-{i}aaa-0000", "H100", 80, 80) for i in range(4)]
choice, lock = choose_and_lock(sys.argv[1], gpus, folder=Path(sys.argv[2]))
print(*[gpu.index for gpu in choice.gpus], flush=True)
sys.stdin.read()
"""
IDLE = [gpu(index) for index in range(4)]


def holder(request: str, folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HOLD, request, str(folder)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def held_by(process: subprocess.Popen[str]) -> list[int]:
    assert process.stdout is not None
    return [int(index) for index in process.stdout.readline().split()]


@pytest.fixture(autouse=True)
def our_package_for_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "src"))


def test_two_runs_started_together_take_different_gpus(tmp_path: Path) -> None:
    processes = [holder("2", tmp_path), holder("2", tmp_path)]
    try:
        first, second = (held_by(process) for process in processes)
        assert sorted(first + second) == [0, 1, 2, 3]
        assert locked_gpus(IDLE, tmp_path) == {each.uuid for each in IDLE}
        choice, _lock = choose_and_lock("auto", IDLE, folder=tmp_path)
        assert len(choice.gpus) == 1 and "no GPU is free" in choice.warnings[0]
    finally:
        for process in processes:
            process.communicate()


def test_a_killed_run_releases_its_gpus(tmp_path: Path) -> None:
    process = holder("auto", tmp_path)
    assert held_by(process) == [0, 1, 2, 3]
    process.kill()
    process.communicate()
    choice, lock = choose_and_lock("auto", IDLE, folder=tmp_path)
    assert taken(choice) == [0, 1, 2, 3]
    lock.release()
    assert locked_gpus(IDLE, tmp_path) == set()


def test_explicit_ids_and_all_share_a_locked_gpu_with_a_warning(tmp_path: Path) -> None:
    process = holder("2,", tmp_path)
    try:
        assert held_by(process) == [2]
        for request, indices in (("2,", [2]), ("all", [0, 1, 2, 3])):
            choice, lock = choose_and_lock(request, IDLE, folder=tmp_path)
            assert taken(choice) == indices and "GPU 2" in choice.warnings[0]
            lock.release()
    finally:
        process.communicate()


def test_a_lock_ends_with_its_object(tmp_path: Path) -> None:
    lock = GpuLock(tmp_path)
    assert lock.acquire("GPU-1") and not GpuLock(tmp_path).acquire("GPU-1")
    del lock
    assert GpuLock(tmp_path).acquire("GPU-1")


def test_a_planted_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "unisono-gpu-GPU-1.lock").symlink_to(tmp_path / "precious")
    assert not GpuLock(tmp_path).acquire("GPU-1")
    assert not (tmp_path / "precious").exists()


class NVMLError(Exception):
    pass


def nvml_that_knows_little(*, starts: bool) -> types.ModuleType:
    """A pynvml for an unusual card: it initialises and counts GPUs, but supports no other query."""

    def unsupported(*_: object) -> object:
        raise NVMLError("Not Supported")

    class Little(types.ModuleType):
        def __getattr__(self, name: str) -> object:
            if name.startswith("nvml"):
                return unsupported
            raise AttributeError(name)

    nvml = Little("pynvml")
    known = {
        "NVMLError": NVMLError,
        "NVML_NVLINK_MAX_LINKS": 18,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}".encode(),
        "nvmlSystemGetDriverVersion": lambda: "580.1",
        "nvmlShutdown": lambda: None,
        **({"nvmlInit": lambda: None} if starts else {}),
    }
    for name, value in known.items():
        setattr(nvml, name, value)
    return nvml


def test_a_gpu_with_few_supported_nvml_queries_is_still_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml_that_knows_little(starts=True))
    gpus = visible_gpus({"CUDA_VISIBLE_DEVICES": "1"})
    assert gpus == [Gpu(1, "GPU-1", "unknown", 0, 0)]
    assert taken(choose("auto", gpus)) == [1]
    driver = read_driver()
    assert driver is not None and driver.version == "580.1"


def test_without_a_driver_there_are_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml_that_knows_little(starts=False))
    assert read_gpus() == [] and read_driver() is None
    monkeypatch.setitem(sys.modules, "pynvml", None)  # not installed
    assert read_gpus() == [] and read_driver() is None
