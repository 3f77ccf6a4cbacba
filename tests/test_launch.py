"""The launcher restarts ranks if that can help, stops on request, and leaves no process behind.

Run as a program, this file is the rank that the tests launch (or a separate launcher that a test can kill).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from unisono.cluster import outcome as outcomes
from unisono.cluster.lifetime import die_with_parent, end_process, start_loader_worker
from unisono.cluster.outcome import Outcome
from unisono.cluster.signals import StopRequest
from unisono.errors import UserError

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
SOURCES = Path(__file__).resolve().parents[1] / "src"

# ---- behaviours of ranks ----


def be_done(job, rank, attempt):
    return Outcome("done", rank=rank)


def show_environment(job, rank, attempt):
    (job / f"seen{rank}.json").write_text(json.dumps({"argv": sys.argv, "environ": dict(os.environ)}))
    print(f"printed by {rank}", flush=True)
    return Outcome("done", rank=rank)


def make_a_user_error(job, rank, attempt):
    if rank == 0:
        time.sleep(60)
    return Outcome("user_error", "batch_size 3 does not fit; use 2", rank)


def always_die(job, rank, attempt):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def end_without_a_word(job, rank, attempt):
    os._exit(0)


def die_while_the_other_computes(job, rank, attempt):
    """The survivor is inside C code, as in a collective, where no Python signal handler can run."""
    if attempt == 0:
        if rank == 1:
            with StopRequest("unisono", job):
                (job / "survivor").touch()
                hashlib.pbkdf2_hmac("sha256", b"", b"", 500_000_000)
        while not (job / "survivor").exists():
            time.sleep(0.05)
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    return Outcome("done", rank=rank)


def reduce_then_die(job, rank, attempt, restarts):
    import torch
    import torch.distributed as dist

    from unisono.cluster.environment import detect
    from unisono.cluster.process_group import join_process_group, leave_process_group

    world = detect()
    join_process_group(world, torch.device("cpu"), timeout_s=20)
    value = torch.tensor([10.0 * rank + 1])
    dist.all_reduce(value)
    with (job / f"sums{rank}").open("a") as file:
        file.write(f"{value.item()}\n")
    dist.barrier()
    tries = len((job / f"sums{rank}").read_text().split())
    if tries <= restarts:
        if rank == tries % 2:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(value)  # the survivor sees its peer die
    leave_process_group()
    return Outcome("done", rank=rank)


def wait_for_stop(job, rank, attempt):
    with StopRequest("unisono", job) as stop:
        (job / f"ready{rank}").touch()
        deadline = time.monotonic() + 30
        while stop.requested is None and time.monotonic() < deadline:
            time.sleep(0.02)
    return Outcome("stopped" if stop.requested else "failed", stop.requested or "nobody asked", rank)


def never_stop(job, rank, attempt):
    (job / f"pid{rank}").write_text(str(os.getpid()))
    (job / f"ready{rank}").touch()
    time.sleep(60)


class SlowItems:
    """A dataset whose worker blocks at its second item, so that it cannot notice its rank's death."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        if index > 0:
            time.sleep(60)
        return index


def load_data_forever(job, rank, attempt):
    from torch.utils.data import DataLoader

    loader = DataLoader(SlowItems(), batch_size=1, num_workers=1, worker_init_fn=start_loader_worker)
    batches = iter(loader)
    next(batches)
    (job / f"pid{rank}").write_text(f"{os.getpid()} {batches._workers[0].pid}")
    (job / f"ready{rank}").touch()
    next(batches)


# ---- how tests start them ----


def command_for(behaviour, job, *args):
    return [sys.executable, __file__, behaviour.__name__, str(job), *map(str, args)]


def run(behaviour, job, *args, nproc=2, environ=None, **options):
    from unisono.cluster.launch.launcher import launch

    environ = {"PYTHONPATH": str(SOURCES), **(environ or {})}
    return launch(command_for(behaviour, job, *args), nproc=nproc, environ=environ, job_folder=job, **options)


def start_launcher(behaviour, job, *args, **options):
    """Starts a launcher in a separate process."""
    call = json.dumps({"command": command_for(behaviour, job, *args), "job_folder": str(job), **options})
    environ = os.environ | {"PYTHONPATH": str(SOURCES)}
    return subprocess.Popen([sys.executable, __file__, "launcher", call], env=environ, start_new_session=True)


def wait_until(condition, seconds, what):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.02)


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def send(job, *signals, nproc=2, pause=0.5):
    """Sends the signals to this process, one after the other, once all ranks are ready."""

    def sender():
        wait_until(lambda: all((job / f"ready{rank}").exists() for rank in range(nproc)), 30, "ranks ready")
        for signum in signals:
            os.kill(os.getpid(), signum)
            time.sleep(pause)

    threading.Thread(target=sender, daemon=True).start()


# ---- claims about outcomes ----


def test_the_worst_outcome_decides_the_exit_code():
    done, stopped = Outcome("done", rank=0), Outcome("stopped", rank=1)
    assert outcomes.exit_code([done], [0]) == 0
    assert outcomes.exit_code([done, stopped], [0, 1]) == 75
    assert outcomes.exit_code([done], [0, 1]) == 3, "a rank that left nothing failed"
    assert outcomes.exit_code([stopped, Outcome("crashed", rank=0)], [0, 1]) == 3
    assert outcomes.exit_code([Outcome("failed", rank=0), Outcome("user_error", rank=1)], [0, 1]) == 2
    assert outcomes.exit_code([], []) == 3


def test_the_first_cause_is_not_a_consequence_of_a_peers_death():
    echo = Outcome("crashed", "[gloo] Connection closed by peer [127.0.0.1]:1234", 0, time=1.0)
    cause = Outcome("crashed", "IndexError: list index out of range", 1, step=4, time=2.0)
    later = Outcome("crashed", "KeyError: 'x'", 2, time=3.0)
    assert outcomes.first_cause([echo, later, cause, Outcome("done", rank=3, time=0.0)]) == cause
    assert outcomes.first_cause([echo]) == echo
    assert outcomes.first_cause([Outcome("done")]) is None
    assert cause.describe() == "rank 1, step 4: IndexError: list index out of range"


def test_outcomes_survive_a_round_trip_and_are_renamed_per_attempt(tmp_path):
    written = [Outcome("crashed", "what", rank, 12, "Traceback …") for rank in (2, 10)]
    for outcome in reversed(written):
        outcomes.write(tmp_path, outcome)
    assert outcomes.read_all(tmp_path) == written
    outcomes.set_aside(tmp_path, [0, 2], attempt=1)
    assert outcomes.read_all(tmp_path) == written[1:]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["outcome_rank10.json", "outcome_rank2.attempt1.json"]


# ---- claims about launching ----


def test_ranks_get_their_environment_and_print_straight_through(tmp_path, monkeypatch, capfd):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    job = tmp_path / "a job $with signs"
    assert run(show_environment, job, "$$x", "${local_rank}", environ={"MINE": "1", "RANK": "7"}) == 0
    for rank in (0, 1):
        seen = json.loads((job / f"seen{rank}.json").read_text())
        assert seen["argv"][2:] == [str(job), "$$x", "${local_rank}"]
        expected = {"MINE": "1", "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "UNISONO_JOB": str(job)}
        assert {name: seen["environ"][name] for name in expected} == expected
        assert seen["environ"]["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) // 2))
    out, err = capfd.readouterr()
    assert sorted(out.split("\n")) == ["", "printed by 0", "printed by 1"]
    assert err == ""


def test_a_user_error_is_printed_once_and_not_retried(tmp_path, capfd):
    restarts = []
    start = time.monotonic()
    assert run(make_a_user_error, tmp_path, record_event=lambda *event: restarts.append(event)) == 2
    assert time.monotonic() - start < 25, "the agent waited out its grace of 30 s"
    assert restarts == []
    assert capfd.readouterr().err == "unisono: batch_size 3 does not fit; use 2\n"


def test_a_rank_that_leaves_no_outcome_counts_as_failed(tmp_path, capfd):
    assert run(end_without_a_word, tmp_path, max_restarts=0) == 3
    output = capfd.readouterr().err
    assert re.fullmatch(r"unisono: rank [01]: exited with status 0 without an outcome\n", output)  # whoever was first


def test_a_survivor_inside_c_code_does_not_delay_the_restart(tmp_path, capfd):
    restarts = []
    start = time.monotonic()
    assert run(die_while_the_other_computes, tmp_path, record_event=lambda *event: restarts.append(event)) == 0
    assert time.monotonic() - start < 25, "the agent waited out its grace of 30 s"
    cause = "rank 0: killed by SIGKILL (by hand, or by the system because memory ran out)"
    assert restarts == [("restart", {"attempt": 1, "rank": 0, "step": None, "cause": cause})]
    assert capfd.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("count", [2, pytest.param(5, marks=pytest.mark.slow)])
def test_restarted_ranks_find_their_peers(tmp_path, capfd, count):
    restarts = []
    code = run(
        reduce_then_die, tmp_path, count, max_restarts=count, record_event=lambda kind, each: restarts.append(each)
    )
    printed = capfd.readouterr().err.splitlines()
    assert code == 0, printed
    assert [(each["attempt"], each["cause"].partition(" (")[0]) for each in restarts] == [
        (attempt, f"rank {attempt % 2}: killed by SIGKILL") for attempt in range(1, count + 1)
    ]
    assert [(tmp_path / f"sums{rank}").read_text().split() for rank in (0, 1)] == [["12.0"] * (count + 1)] * 2
    assert len(printed) == count and all(line.startswith("unisono: ") for line in printed)


def test_restarts_end_after_the_given_number(tmp_path, capfd):
    assert run(always_die, tmp_path, max_restarts=1) == 3
    printed = capfd.readouterr().err.splitlines()
    assert len(printed) == 2 and "restarting" in printed[0]
    assert printed[1].startswith("unisono: rank 1: killed by SIGKILL") and printed[1].endswith("(the same as before)")


def test_the_ranks_of_two_machines_restart_together(tmp_path):
    with socket.socket() as probe:
        probe.bind(("", 0))
        endpoint = f"localhost:{probe.getsockname()[1]}"
    machines = [
        start_launcher(
            reduce_then_die, tmp_path, 1, nproc=1, nnodes=2, node_rank=node, rdzv_endpoint=endpoint, max_restarts=2
        )
        for node in (0, 1)
    ]
    try:
        assert [machine.wait(60) for machine in machines] == [0, 0]
    finally:
        for machine in machines:
            machine.kill()
            machine.wait()
    assert [(tmp_path / f"sums{rank}").read_text().split() for rank in (0, 1)] == [["12.0"] * 2] * 2


def test_launching_works_off_the_main_thread(tmp_path):
    codes = []
    thread = threading.Thread(target=lambda: codes.append(run(be_done, tmp_path)))
    thread.start()
    thread.join(30)
    assert codes == [0]


def test_a_port_in_use_is_refused_with_its_holder(tmp_path):
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        message = rf"port {port} \(rdzv_endpoint\) is already in use by process {os.getpid()} "
        with pytest.raises(UserError, match=message):
            run(be_done, tmp_path, rdzv_endpoint=f"localhost:{port}")
    assert run(be_done, tmp_path, rdzv_endpoint=f"localhost:{port}") == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nnodes": 2}, "needs node_rank"),
        ({"nnodes": 2, "node_rank": 2, "rdzv_endpoint": "a:1"}, "use 0 to 1"),
        ({"rdzv_endpoint": "node0"}, "not host:port"),
    ],
)
def test_incomplete_machine_settings_are_refused(tmp_path, options, message):
    with pytest.raises(UserError, match=message):
        run(be_done, tmp_path, **options)


# ---- claims about stopping ----


@pytest.mark.parametrize("signum", STOP_SIGNALS)
def test_a_signal_asks_all_ranks_to_stop(tmp_path, signum, capfd):
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)}
    send(tmp_path, signum)
    assert run(wait_for_stop, tmp_path) == 75
    assert [(left.rank, left.message) for left in outcomes.read_all(tmp_path)] == [(0, signum.name), (1, signum.name)]
    assert {each: signal.getsignal(each) for each in before} == before
    assert capfd.readouterr().err.startswith(f"unisono: {signum.name}: saving a checkpoint and stopping")


def test_a_second_signal_kills_all_ranks_at_once(tmp_path):
    send(tmp_path, signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
    start = time.monotonic()
    assert run(never_stop, tmp_path) == 130
    assert time.monotonic() - start < 25
    assert (tmp_path / "stop").read_text() == "SIGUSR1"
    assert not any(is_alive(int((tmp_path / f"pid{rank}").read_text())) for rank in (0, 1))


def test_an_old_stop_file_does_not_stop_a_new_start(tmp_path):
    (tmp_path / "stop").write_text("SIGTERM")
    outcomes.write(tmp_path, Outcome("user_error", "of yesterday", 5))
    assert run(be_done, tmp_path) == 0


@pytest.mark.parametrize("launcher", ["plain", "torchrun", "unisono"])
def test_signals_to_a_rank_set_a_flag(launcher, tmp_path):
    before = [signal.getsignal(signum) for signum in STOP_SIGNALS]
    for signum in STOP_SIGNALS:
        with StopRequest(launcher, tmp_path if launcher == "unisono" else None) as stop:
            assert stop.requested is None
            os.kill(os.getpid(), signum)
            assert stop.requested == signum.name
    assert [signal.getsignal(signum) for signum in STOP_SIGNALS] == before


def test_nohup_keeps_a_run_alive():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest("plain") as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.requested is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_before_torch_is_imported_is_not_lost():
    program = (
        "import os, signal; from unisono.cluster.signals import *; note_signals_early(); "
        "os.kill(os.getpid(), signal.SIGTERM)\nwith StopRequest('plain') as stop: print(stop.requested)"
    )
    environ = os.environ | {"PYTHONPATH": str(SOURCES)}
    ended = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "SIGTERM\n"), ended.stderr


def test_a_second_ctrl_c_stops_a_single_process_at_once():
    with StopRequest("plain") as stop:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)  # a signal that a wrapper forwards a moment later is the same request
        assert stop.requested == "SIGINT"
        time.sleep(0.3)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)


def test_off_the_main_thread_no_handler_is_installed():
    def enter():
        with StopRequest("plain") as stop:
            handlers.append((signal.getsignal(signal.SIGINT), stop.requested))

    before, handlers = signal.getsignal(signal.SIGINT), []
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert handlers == [(before, None)]


# ---- claims about orphaned processes ----


def test_nothing_outlives_a_launcher_killed_with_kill_9(tmp_path):
    launcher = start_launcher(load_data_forever, tmp_path, nproc=2)
    try:
        wait_until(lambda: all((tmp_path / f"ready{rank}").exists() for rank in (0, 1)), 60, "ranks load data")
        pids = [int(pid) for rank in (0, 1) for pid in (tmp_path / f"pid{rank}").read_text().split()]
        assert len(pids) == 4 and all(map(is_alive, pids))
    finally:
        launcher.kill()
        launcher.wait()
    wait_until(lambda: not any(map(is_alive, pids)), 20, f"all of {pids} gone")


def test_a_rank_whose_launcher_is_already_gone_ends_at_once(tmp_path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    environ = os.environ | {"PYTHONPATH": str(SOURCES), "UNISONO_LAUNCHER_PID": str(gone.pid), "RANK": "0"}
    assert subprocess.run(command_for(be_done, tmp_path), env=environ).returncode == 137
    assert outcomes.read_all(tmp_path) == []


# ---- this file as a program ----


def main():
    if sys.argv[1] == "launcher":
        from unisono.cluster.launch.launcher import launch

        call = json.loads(sys.argv[2])
        job = Path(call.pop("job_folder"))
        sys.exit(launch(job_folder=job, environ={}, **call))
    die_with_parent()
    behaviour, job, *args = sys.argv[1:]
    if behaviour == show_environment.__name__:
        args = []
    rank, attempt = int(os.environ["RANK"]), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    try:
        outcome = globals()[behaviour](Path(job), rank, attempt, *map(int, args))
    except Exception as error:
        outcome = Outcome("crashed", f"{type(error).__name__}: {error}", rank)
    outcomes.write(Path(job), outcome)
    end_process(0 if outcome.is_good else 1)  # as ranks end


if __name__ == "__main__":
    main()
