"""`--backend`: who communicates over what, and ranks that share one GPU over NCCL are the same run as one rank."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch

import unisono
from command_line import TINY, Ended, lines, losses
from command_line import unisono as command
from ranks import run_ranks
from tiny_recipe import Tiny
from unisono.cluster.backend import SLOW, Backend, GroupBackend, choose_backend
from unisono.cluster.process_group import join_process_group
from unisono.devices import Gpu
from unisono.engine.start import device_plan
from unisono.engine.start.run import configure
from unisono.errors import ConfigError

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="NCCL needs a GPU")
# The same tests with CPU ranks over gloo, so that what they claim can be checked on any machine.
BACKENDS = [pytest.param("nccl", marks=on_a_gpu), pytest.param("gloo", marks=pytest.mark.slow)]
MOONS = f"{Path(__file__).parent.parent / 'examples' / 'own_model' / 'recipe.py'}:TwoMoons"
BOTH = "cpu:gloo,cuda:nccl"


def choice(requested: Backend, *, on_gpu: bool, shared: bool, num_nodes: int = 1) -> GroupBackend:
    return choose_backend(requested, on_gpu=on_gpu, gpus_are_shared=shared, rank=3, num_nodes=num_nodes)


# --- which backend ---


@pytest.mark.parametrize(
    ("requested", "on_gpu", "shared", "name"),
    [
        ("auto", True, False, BOTH),
        ("auto", True, True, "gloo"),
        ("auto", False, False, "gloo"),
        ("gloo", True, False, "gloo"),
        ("gloo", True, True, "gloo"),
        ("gloo", False, False, "gloo"),
        ("nccl", True, False, BOTH),
    ],
)
def test_no_variable_changes_and_no_warning_appears(requested: Backend, on_gpu: bool, shared: bool, name: str) -> None:
    assert choice(requested, on_gpu=on_gpu, shared=shared) == GroupBackend(name)


def test_over_nccl_ranks_that_share_a_gpu_count_as_separate_hosts() -> None:
    one = choice("nccl", on_gpu=True, shared=True)
    assert one.name == BOTH and one.uses_nccl and one.warning == SLOW
    assert one.forced == {"NCCL_HOSTID": "unisono-rank3"}
    assert one.defaults == {"NCCL_CUMEM_ENABLE": "0", "NCCL_SOCKET_IFNAME": "lo"}
    # Between machines the loopback interface connects nothing.
    assert choice("nccl", on_gpu=True, shared=True, num_nodes=2).defaults == {"NCCL_CUMEM_ENABLE": "0"}


def train_as_if_on_one_gpu(folder: str) -> dict[str, Any]:
    """In each rank: trains as ranks that share a GPU over NCCL do, except that gloo carries the data."""
    from unisono.cluster import process_group

    def chosen(requested: Backend, **facts: Any) -> GroupBackend:
        return replace(choose_backend("nccl", **facts | {"on_gpu": True, "gpus_are_shared": True}), name="gloo")

    process_group.choose_backend = chosen  # type: ignore[assignment]
    with redirect_stderr(StringIO()) as printed:
        unisono.train(TINY, output_dir=folder, max_steps=1, gpus="0")
    names = ("NCCL_HOSTID", "NCCL_SOCKET_IFNAME", "NCCL_CUMEM_ENABLE")
    return {"variables": [os.environ.get(name) for name in names], "warnings": printed.getvalue().count(SLOW)}


def test_ranks_set_nccls_variables_before_they_join_and_the_main_rank_warns_once(tmp_path: Path) -> None:
    # A host id that all ranks inherit would make them one host; the interface is the user's to choose.
    inherited = {"NCCL_HOSTID": "one", "NCCL_SOCKET_IFNAME": "eth0"}
    args = {"folder": str(tmp_path / "run")}
    result = run_ranks("train_as_if_on_one_gpu", __file__, 2, args, env=inherited)
    assert [rank["variables"] for rank in result] == [[f"unisono-rank{rank}", "eth0", "0"] for rank in (0, 1)]
    assert [rank["warnings"] for rank in result] == [1, 0]


# --- without a GPU ---


@pytest.mark.parametrize(
    ("flags", "reason"),
    [(["--nproc", "2"], "there is none here"), (["--gpus", "0"], "--gpus 0 trains on the CPU"), ([], "none here")],
)
def test_nccl_without_a_gpu_is_refused_in_one_line(
    flags: list[str], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_plan, "visible_gpus", list)
    with pytest.raises(ConfigError, match=f"^backend nccl needs a GPU, and .*{reason}; remove --backend"):
        device_plan.plan_devices(configure(Tiny, flags=["--backend", "nccl", *flags]))


def test_nccl_between_cpu_ranks_on_a_machine_with_gpus_is_refused_with_the_flag_that_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device_plan, "visible_gpus", lambda: [Gpu(0, "GPU-test-nccl", "H200", 10**11, 10**11)])
    flags = ["--backend", "nccl", "--nproc", "2"]
    with pytest.raises(ConfigError, match="--nproc alone starts CPU ranks; add --gpus 1"):
        device_plan.plan_devices(configure(Tiny, flags=flags))
    assert device_plan.plan_devices(configure(Tiny, flags=[*flags, "--gpus", "1"])).ranks == 2


@pytest.mark.parametrize("verb", ["train", "verify"])
def test_the_command_ends_with_2_and_writes_nothing(verb: str, tmp_path: Path) -> None:
    ended = command(verb, TINY, "--backend", "nccl", *(["--nproc", 2] if verb == "train" else []), cwd=tmp_path)
    assert ended.code == 2 and not any(tmp_path.iterdir())
    assert ended.err.splitlines()[-1].endswith("remove --backend: CPU ranks use gloo"), ended.err


def test_a_rank_of_another_launcher_is_refused_before_it_waits_for_the_others() -> None:
    from unisono.cluster.environment import World

    world = World("torchrun", rank=1, size=2, local_rank=1, local_size=2, master_port=1)
    with pytest.raises(ConfigError, match="backend nccl needs GPUs, and rank 1 has none"):
        join_process_group(world, torch.device("cpu"), backend="nccl")


# --- two ranks on one GPU ---


def on_ranks(backend: str, num_ranks: int) -> list[object]:
    """Flags for ranks that share one GPU over NCCL, or for CPU ranks over gloo."""
    gpus = [] if backend == "gloo" and num_ranks > 1 else ["--gpus", int(backend == "nccl")]
    return [*gpus, *(["--nproc", num_ranks, "--backend", backend] if num_ranks > 1 else [])]


def run(backend: str, verb: str, *words: object, cwd: Path) -> Ended:
    ended = command(verb, MOONS, *words, cwd=cwd, CUDA_VISIBLE_DEVICES="0" if backend == "nccl" else "")
    assert ended.code == 0, ended.err
    return ended


def train(backend: str, num_ranks: int, steps: int, folder: Path, *words: object, strategy: str = "auto") -> None:
    flags = ["--max_steps", steps, "--save_every", 1, "--eval_every", -1, "--log_every", 1, "--tensorboard", "false"]
    flags += ["--dtype", "float64", "--global_batch_size", 13, "--lr_schedule", "constant", "--preview_every", -1]
    flags += ["--strategy", strategy, "--output_dir", folder, *words]
    ended = run(backend, "train", *flags, *on_ranks(backend, num_ranks), cwd=folder.parent)
    assert (SLOW in ended.err) is (backend == "nccl" and num_ranks > 1)


def same(one: Sequence[float], other: Sequence[float]) -> None:
    assert len(one) == len(other) == 6
    assert list(one) == pytest.approx(list(other), abs=1e-10, rel=0)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("one") / "run"
    train("nccl" if torch.cuda.is_available() else "gloo", 1, 6, folder)
    return losses(folder)


@pytest.mark.parametrize("backend", BACKENDS)
def test_verify_finds_the_same_run_under_ddp_and_fsdp(backend: str, tmp_path: Path) -> None:
    words = ["--ranks", "1,2", "--strategies", "ddp,fsdp", "--backend", backend]
    ended = run(backend, "verify", *words, *([] if backend == "nccl" else ["--gpus", 0]), cwd=tmp_path)
    assert "Same run" in ended.out and ended.out.count(" same ") >= 4, ended.out


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_run_that_moves_from_one_rank_to_two_and_back_is_the_same_run(
    backend: str, tmp_path: Path, undisturbed: list[float]
) -> None:
    train(backend, 1, 2, tmp_path / "run")
    train(backend, 2, 4, tmp_path / "run", strategy="fsdp")
    train(backend, 1, 6, tmp_path / "run")
    same(losses(tmp_path / "run"), undisturbed)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_killed_rank_does_not_change_the_losses(backend: str, tmp_path: Path, undisturbed: list[float]) -> None:
    train(backend, 2, 6, tmp_path / "run", "--inject", "kill@rank1:step4:backward", strategy="ddp")
    assert [event["kind"] for event in lines(tmp_path / "run", "events.jsonl")].count("restart") == 1
    same(losses(tmp_path / "run"), undisturbed)
