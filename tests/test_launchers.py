"""Every real launcher gives the same run, and no rank survives when a launcher dies."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import sys
from pathlib import Path

import pytest

from command_line import TINY, Ended, end, lines, losses, mark, marked, start, unisono, wait_until
from debian_packages import install
from tiny_recipe import HOLD
from unisono.checkpoint.find import list_steps

STEPS = 6
TRAIN = ["-m", "unisono", "train", TINY, "--output_dir", "run", "--max_steps", STEPS, "--global_batch_size", 4]
EXACT = ["--dtype", "float64"]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of the run on one rank, without a launcher."""
    place = tmp_path_factory.mktemp("one_rank")
    ended = end(start([*TRAIN, *EXACT], cwd=place))
    assert ended.code == 0, ended.err
    values = losses(place / "run")
    assert len(values) == STEPS
    return values


def is_the_same_run(ended: Ended, folder: Path, launcher: str, world: int, expected: list[float]) -> None:
    assert ended.code == 0, ended.err
    assert losses(folder) == pytest.approx(expected, rel=1e-10)
    [first] = json.loads((folder / "run.json").read_text())["starts"]
    assert (first["launcher"], first["world"]) == (launcher, world)
    assert f"rank 0 of {world}" in " ".join(ended.err.split())
    assert [step for step, _ in list_steps(folder / "checkpoints")] == [STEPS]


def test_under_torchrun(tmp_path: Path, one_rank: list[float]) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    ended = end(start([*torchrun, *TRAIN, *EXACT], cwd=tmp_path))
    is_the_same_run(ended, tmp_path / "run", "torchrun", 2, one_rank)


@pytest.mark.parametrize("options", [[], pytest.param(["--use_env"], marks=pytest.mark.slow)])
def test_under_torch_distributed_launch(options: list[str], tmp_path: Path, one_rank: list[float]) -> None:
    """Without --use_env it adds --local-rank=N to the program's arguments."""
    program = Path(tmp_path, "train.py")
    program.write_text("import sys\nfrom unisono.cli.main import main\nprint(sys.argv[1])\nsys.exit(main())\n")
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    launch = ["-m", "torch.distributed.launch", "--nproc_per_node=2", f"--master_port={port}", *options]
    ended = end(start([*launch, program, *TRAIN[2:], *EXACT], cwd=tmp_path))
    is_the_same_run(ended, tmp_path / "run", "torchrun", 2, one_rank)
    words = sorted(re.findall(r"--local-rank=\d|train", ended.out))
    assert words == (["train", "train"] if options else ["--local-rank=0", "--local-rank=1"])


def test_under_mpirun(tmp_path: Path, one_rank: list[float]) -> None:
    ended = end(start([*TRAIN, *EXACT], cwd=tmp_path, program=mpirun(2)))
    is_the_same_run(ended, tmp_path / "run", "mpi", 2, one_rank)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_run_stopped_by_a_signal_to_mpirun_can_continue(
    number: signal.Signals, tmp_path: Path, one_rank: list[float]
) -> None:
    """mpirun forwards SIGUSR1 at once. It forwards SIGTERM after a second, and kills the ranks a second later."""
    hold, ours, run = tmp_path / "hold", mark(), tmp_path / "run"
    hold.write_text("2 after 2")
    words = [*TRAIN, *EXACT, "--save_every", 0 if number == signal.SIGUSR1 else 1]
    launcher = start(words, cwd=tmp_path, program=mpirun(2), **{HOLD: str(hold)}, **ours)
    try:
        wait_until(lambda: len(lines(run)) >= 1 or launcher.poll() is not None, "a step")
        launcher.send_signal(number)
        ended = end(launcher)
        assert ended.code == 75 if number == signal.SIGUSR1 else ended.code != 0, ended
        wait_until(lambda: not marked(ours), "no process is left", seconds=15)
    finally:
        launcher.kill()
        for pid in marked(ours):
            os.kill(pid, signal.SIGKILL)
    hold.unlink()
    assert len(lines(run)) < STEPS
    if number == signal.SIGUSR1:
        assert [event["kind"] for event in lines(run, "events.jsonl")] == ["start", "signal", "save", "stopped"]
    goes_on(tmp_path, one_rank)


@pytest.mark.slow
def test_no_rank_waits_for_a_killed_rank_of_mpirun(tmp_path: Path, one_rank: list[float]) -> None:
    ours, run = mark(), tmp_path / "run"
    words = [*TRAIN, *EXACT, "--save_every", 2, "--inject", "kill@rank1:step5"]
    launcher = start(words, cwd=tmp_path, program=mpirun(2), **ours)
    try:
        ended = end(launcher)
        assert ended.code != 0
        wait_until(lambda: not marked(ours), "no process is left", seconds=15)
    finally:
        for pid in marked(ours):
            os.kill(pid, signal.SIGKILL)
    assert len(lines(run)) < STEPS and "Killed" in ended.out + ended.err
    goes_on(tmp_path, one_rank)


def mpirun(ranks: int) -> list[str]:
    """Debian's Open MPI, installed if it is missing."""
    if os.geteuid() != 0 and shutil.which("mpirun") is None:
        pytest.skip("NOT TESTED: mpirun is not installed, and installing it needs root")
    install("mpirun", ["openmpi-bin"])
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return ["mpirun", *root, "--oversubscribe", "-n", str(ranks), sys.executable]


def goes_on(place: Path, expected: list[float]) -> None:
    """Runs the same command again in one process; the run must end as if undisturbed."""
    ended = end(start([*TRAIN, *EXACT], cwd=place))
    assert ended.code == 0, ended.err
    assert losses(place / "run") == pytest.approx(expected, rel=1e-10)
    assert "resume" in [event["kind"] for event in lines(place / "run", "events.jsonl")]


ACCELERATE = ["-m", "accelerate.commands.accelerate_cli", "launch"]


@pytest.mark.slow
def test_under_accelerate_with_a_flag_that_wins_over_its_mixed_precision(tmp_path: Path, one_rank: list[float]) -> None:
    options = ["--multi_gpu", "--num_processes", 2, "--mixed_precision", "bf16", "--main_process_port", 0]
    words = [*ACCELERATE, *options, *TRAIN, *EXACT, "--mixed_precision", "no"]
    ended = end(start(words, cwd=tmp_path, HF_HOME=str(tmp_path)))  # no config file of the user's own
    is_the_same_run(ended, tmp_path / "run", "accelerate", 2, one_rank)


def test_under_accelerate_with_a_config_file(tmp_path: Path, one_rank: list[float]) -> None:
    """A default_config.yaml as `accelerate config` writes it."""
    config = tmp_path / "default_config.yaml"
    config.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nmixed_precision: bf16\n"
        "num_machines: 1\nnum_processes: 2\nmain_process_port: 0\nuse_cpu: false\n"
    )
    words = [*ACCELERATE, "--config_file", config, *TRAIN, *EXACT, "--mixed_precision", "no"]
    is_the_same_run(end(start(words, cwd=tmp_path)), tmp_path / "run", "accelerate", 2, one_rank)


@pytest.mark.slow
def test_accelerate_passes_its_mixed_precision_even_to_a_single_process(
    tmp_path: Path,
) -> None:
    options = ["--cpu", "--num_processes", 2, "--mixed_precision", "bf16"]
    ended = end(start([*ACCELERATE, *options, *TRAIN], cwd=tmp_path, HF_HOME=str(tmp_path)))
    assert ended.code == 0, ended.err
    output = " ".join(ended.err.split())
    assert "precision bf16 (mixed)" in output
    assert "plain: started by accelerate launch" in output and "set no RANK" in output and "use --nproc" in output
    record = json.loads((tmp_path / "run/run.json").read_text())
    assert (record["config"]["mixed_precision"], record["sources"]["mixed_precision"]) == ("bf16", "launcher")
    assert record["starts"][0]["world"] == 1 and len(losses(tmp_path / "run")) == STEPS


def test_on_two_machines_with_our_own_launcher(tmp_path: Path, one_rank: list[float]) -> None:
    with socket.socket() as probe:
        probe.bind(("", 0))
        endpoint = f"localhost:{probe.getsockname()[1]}"
    words = [*TRAIN, *EXACT, "--nproc", 1, "--nnodes", 2, "--rdzv_endpoint", endpoint]
    machines = [start([*words, "--node_rank", node], cwd=tmp_path) for node in (0, 1)]
    try:
        ended = [end(machine) for machine in machines]
    finally:
        for machine in machines:
            machine.kill()
    assert [each.code for each in ended] == [0, 0], ended
    [main, other] = sorted(ended, key=lambda each: len(each.err), reverse=True)  # rank 0 may be on either machine
    assert other.err == ""
    is_the_same_run(main, tmp_path / "run", "unisono", 2, one_rank)
    assert "processes         2 on 2 machines" in main.err


def test_a_user_error_under_torchrun_shows_no_traceback_of_ours(tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1"]
    ended = end(start([*torchrun, *TRAIN, "--num_samples", 0], cwd=tmp_path))
    assert ended.code != 0
    assert 'unisono: dataset("train") is empty' in ended.err
    assert "RecipeError" not in ended.err
    assert not (tmp_path / "run").exists()


def test_no_rank_outlives_a_killed_launcher(tmp_path: Path) -> None:
    hold, ours = tmp_path / "hold", mark()
    hold.write_text("0.2")
    words = [*TRAIN, "--max_steps", 1000, "--nproc", 2, "--num_workers", 2]
    launcher = start(words, cwd=tmp_path, **{HOLD: str(hold)}, **ours)
    try:
        wait_until(lambda: len(lines(tmp_path / "run")) >= 2 or launcher.poll() is not None, "two steps")
        assert launcher.poll() is None, launcher.communicate()
        assert len(marked(ours)) >= 1 + 2 + 2 * 2, "launcher, ranks and their loader workers"
        launcher.send_signal(signal.SIGKILL)
        launcher.wait()
        wait_until(lambda: not marked(ours), "no process is left", seconds=15)
    finally:
        for pid in marked(ours):
            os.kill(pid, signal.SIGKILL)


def test_a_killed_rank_is_restarted_and_the_run_is_the_same(tmp_path: Path, one_rank: list[float]) -> None:
    hold, ours, run = tmp_path / "hold", mark(), tmp_path / "run"
    hold.write_text("60 after 3")
    words = [*TRAIN, *EXACT, "--nproc", 2, "--max_restarts", 1, "--save_every", 2]
    launcher = start(words, cwd=tmp_path, **{HOLD: str(hold)}, **ours)
    try:
        wait_until(lambda: list_steps(run / "checkpoints") or launcher.poll() is not None, "a checkpoint")
        [rank_1] = marked(ours, RANK="1")
        os.kill(rank_1, signal.SIGKILL)
        hold.unlink()
        ended = end(launcher)
    finally:
        launcher.kill()
    assert ended.code == 0, ended.err
    assert losses(run) == pytest.approx(one_rank, rel=1e-10)
    assert len(re.findall(r"unisono: rank 1, step \d: killed by SIGKILL", ended.err)) == 1
    assert "Traceback" not in ended.err
    events = lines(run, "events.jsonl")
    [restart] = [event for event in events if event["kind"] == "restart"]
    assert restart["attempt"] == 1 and re.match(r"rank 1, step \d: killed by SIGKILL", restart["cause"])
    kinds = [event["kind"] for event in events]
    assert kinds.index("start") < kinds.index("restart") < kinds.index("resume") < kinds.index("done")
    starts = json.loads((run / "run.json").read_text())["starts"]
    assert [(each["world"], each["from_step"]) for each in starts] == [(2, 0), (2, 2)]
    assert starts[1]["why"] == "resumed from step_00000002, restart 1"


def test_one_process_gets_a_launcher_if_the_user_requests_restarts(tmp_path: Path, one_rank: list[float]) -> None:
    ended = unisono(*TRAIN[2:], *EXACT, "--max_restarts", 1, cwd=tmp_path)
    is_the_same_run(ended, tmp_path / "run", "unisono", 1, one_rank)
