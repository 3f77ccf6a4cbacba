"""A rank that hangs or dies is reported with its step and stack, the run continues, and no rank waits forever.

Run as a program, this file is a rank that reports the phases of a few steps without training.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from command_line import TESTS, TINY, end, lines, losses, mark, marked, start, unisono
from ranks import RanksFailed, run_ranks
from unisono.cluster import awake_clock as awake
from unisono.cluster import outcome as outcomes
from unisono.cluster.hangs.diagnosis import Limits, ProgressTracker, RankStatus, furthest_behind
from unisono.cluster.hangs.heartbeat import Beat, Heartbeat, read_heartbeats
from unisono.cluster.hangs.launcher_monitor import HangMonitor
from unisono.cluster.hangs.stacks import is_in_collective, main_thread, write_stacks_on_signal
from unisono.cluster.lifetime import die_with_parent
from unisono.cluster.outcome import Outcome
from unisono.cluster.signals import StopRequest
from unisono.faults import Injector, parse
from unisono.observe.straggler import INTERVALS, STEADY_S, StragglerDetector

STEPS = 6
TRAIN = ["train", TINY, "--output_dir", "run", "--max_steps", STEPS, "--global_batch_size", 4, "--dtype", "float64"]


# ---- which rank caused the hang ----


def status(rank: int, phase: str, step: int, index: int = 0, idle_s: float = 9.0, waits: bool = False) -> RankStatus:
    return RankStatus(Beat(rank, phase, step, 5, 0.0, index, 1), idle_s, waits)


@pytest.mark.parametrize(
    ("statuses", "blamed"),
    [
        ([status(0, "reduce", 7), status(1, "forward", 7), status(2, "reduce", 7)], 1),
        ([status(0, "forward", 8), status(1, "optimizer", 7)], 1),
        ([status(0, "forward", 7, 4), status(1, "backward", 7, 2)], 1),  # phase of the previous micro-batch
        ([status(0, "forward", 7, 1, waits=True), status(1, "forward", 7, 1)], 1),  # fsdp gathers in forward
        ([status(0, "reduce", 7, 1), status(1, "backward", 7, 2)], 1),  # waits for an exchange that it started early
        ([status(0, "evaluate", 7), status(1, "save", 7), status(2, "evaluate", 7, 3, waits=True)], 0),
        ([status(0, "start", 0, 2), status(1, "prepare", 0, 1)], 1),  # the first rank has finished its part
        ([status(0, "reduce", 7, idle_s=8.0), status(1, "reduce", 7, idle_s=9.0)], 1),  # a network that is gone
    ],
)
def test_the_least_advanced_rank_that_is_not_itself_waiting_is_blamed(statuses: list[RankStatus], blamed: int) -> None:
    for order in (statuses, statuses[::-1]):
        status = furthest_behind(order)
        assert status is not None and status.rank == blamed


def test_each_phase_has_its_own_time_limit() -> None:
    limits = Limits(hang_s=10, start_s=60)

    def limit(phase: str, step: int) -> float | None:
        return limits.limit_for(Beat(0, phase, step, 1, 0.0, first_step=0 if phase == "start" else 3))

    assert [limit(phase, 0) for phase in ("start", "prepare")] == [60, None]
    assert limit("forward", 3) == 60, "the first step of a start may compile"
    assert [limit(phase, 4) for phase in ("data", "reduce", "evaluate", "save")] == [10, 10, 10, 60]
    assert Limits(0, 60).limit_for(Beat(0, "forward", 4, 1, 0.0, first_step=1)) is None, "0 is never"


def test_hang_detection_does_not_depend_on_the_wall_clock() -> None:
    tracker = ProgressTracker()
    beat = Beat(0, "forward", 3, 1, time.time() - 1e6)
    assert tracker.update([beat])[0].idle_s == 0
    time.sleep(0.2)
    assert tracker.update([beat])[0].idle_s >= 0.2
    assert tracker.update([Beat(0, "backward", 3, 2, time.time() - 1e6)])[0].idle_s == 0


def test_a_suspended_watchdog_does_not_blame_the_ranks_for_its_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    moment = [100.0]
    monkeypatch.setattr(awake.time, "monotonic", lambda: moment[0])
    tracker, beat = ProgressTracker(), Beat(0, "forward", 3, 1, 0.0)
    assert tracker.update([beat])[0].idle_s == 0
    for pause in (9.0, 1e6):  # Ctrl-Z, or a job that was suspended for days
        before = tracker.clock.now
        moment[0] += pause
        assert tracker.update([beat], expected_s=0.1)[0].idle_s - before < 0.2
    for _ in range(100):
        moment[0] += 0.1
        tracker.update([beat], expected_s=0.1)
    assert tracker.update([beat])[0].idle_s > 9.9, "a rank that really stands still hangs"


def test_a_heartbeat_shows_its_position_and_first_step_to_readers_outside(tmp_path: Path) -> None:
    heartbeat = Heartbeat(3, tmp_path)
    seen = []
    for phase, step in (("prepare", 0), ("data", 5), ("forward", 5), ("data", 6)):
        heartbeat.at(phase, step)
        assert read_heartbeats(tmp_path) == [heartbeat.last]
        seen.append((heartbeat.last.index_in_step, heartbeat.last.first_step, heartbeat.last.is_starting))
    assert seen == [(2, 0, True), (0, 5, True), (1, 5, True), (0, 5, False)]


def test_a_stack_shows_which_rank_waits() -> None:
    dump = """Thread 0x01 (most recent call first):
  File "/x/threading.py", line 1 in wait

Current thread 0x02 (most recent call first):
  File "/x/torch/distributed/distributed_c10d.py", line 1 in all_reduce
  File "/x/mine.py", line 2 in step
"""
    assert [line.split()[-1] for line in main_thread(dump)] == ["all_reduce", "step"]
    assert is_in_collective(main_thread(dump))
    assert not is_in_collective(main_thread(dump.replace("torch/distributed", "mine")))


# ---- under unisono's launcher: ranks that only report phases ----


def walk(job: Path, rank: int, attempt: int, faults: str) -> Outcome:
    """Four steps in lockstep with the other rank, with faults as injected by `--inject`."""
    heartbeat = Heartbeat(rank, job, Injector(parse(faults), rank, job / "memory"))
    with StopRequest("unisono", job) as stop:
        for step in (1, 2, 3, 4):
            for phase in ("data", "forward", "backward", "reduce"):
                heartbeat.at(phase, step)
            (job / f"at{attempt}.{step}.{rank}").touch()
            while not (job / f"at{attempt}.{step}.{1 - rank}").exists() and stop.requested is None:
                time.sleep(0.01)
    return Outcome("stopped" if stop.requested else "done", stop.requested or "", rank)


def stop_itself(job: Path, rank: int, attempt: int) -> Outcome:
    heartbeat = Heartbeat(rank, job)
    heartbeat.at("forward", 1)
    heartbeat.at("data", 2)
    if attempt == 0 and rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    return Outcome("done", rank=rank)


def never_start(job: Path, rank: int, attempt: int) -> Outcome:
    Heartbeat(rank, job)
    if rank == 1:
        time.sleep(60)
    return Outcome("done", rank=rank)


def run(tmp_path: Path, behaviour: Any, *args: str, **options: Any) -> tuple[int, list[tuple[str, dict[str, Any]]]]:
    """Returns the exit code and the events."""
    from unisono.cluster.launch.launcher import launch

    events: list[tuple[str, dict[str, Any]]] = []
    code = launch(
        [sys.executable, __file__, behaviour.__name__, str(tmp_path / "job"), *args],
        nproc=2,
        environ={"PYTHONPATH": os.pathsep.join([str(TESTS.parent / "src"), str(TESTS)])},
        job_folder=tmp_path / "job",
        run_folder=tmp_path / "run",
        record_event=lambda kind, details: events.append((kind, dict(details))),
        **options,
    )
    return code, events


def test_a_hanging_rank_is_named_with_its_step_phase_and_stack(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, events = run(tmp_path, walk, "hang@rank1:step2:backward", max_restarts=1, limits=Limits(1.5, 30))
    assert code == 0
    assert [(kind, event["rank"], event["step"]) for kind, event in events] == [("hang", 1, 2), ("restart", 1, 2)]
    assert events[0][1]["phase"] == "backward"
    output = capfd.readouterr().err
    assert re.search(r"unisono: rank 1, step 2: no progress for \d s in backward \(hang_timeout 1.5\)", output)
    assert "in _hang\n" in output and "restarting all ranks from the last checkpoint (1 of 1)" in output
    [kept] = (tmp_path / "run/stacks").iterdir()
    assert kept.name == "step_00000002-attempt0"
    assert "in _hang\n" in (kept / "rank1.txt").read_text()
    assert "in walk\n" in (kept / "rank0.txt").read_text() and "in _hang" not in (kept / "rank0.txt").read_text()


def test_repeated_hangs_end_the_run_when_no_restarts_are_left(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, events = run(tmp_path, walk, "hang@rank0:step2:x2", max_restarts=1, limits=Limits(1, 30))
    assert code == 3
    assert [kind for kind, _ in events] == ["hang", "restart", "hang", "failed"]
    last = capfd.readouterr().err.splitlines()[-1]
    assert last.startswith("unisono: rank 0, step 2: no progress") and last.endswith("(the same as before)")
    assert len(list((tmp_path / "run/stacks").iterdir())) == 2


def test_a_stopped_process_is_named_although_it_writes_no_stack(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, events = run(tmp_path, stop_itself, max_restarts=1, limits=Limits(1, 30))
    kind, details = events[0]
    assert code == 0 and kind == "hang" and 1 <= details.pop("seconds") < 10
    assert details == {"step": 2, "rank": 0, "phase": "data"}
    assert "no stack: it is stopped (SIGSTOP" in capfd.readouterr().err


@pytest.mark.slow
def test_the_start_has_its_own_time_limit(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, events = run(tmp_path, never_start, max_restarts=0, limits=Limits(0.1, 4))
    assert code == 3 and events[0][1]["phase"] == "start"
    output = capfd.readouterr().err
    assert re.search(r"unisono: rank 1: no progress for \d s in startup \(start_timeout 4\)", output)
    assert "in never_start" in output


def test_every_kind_of_death_is_reported_with_its_rank_and_step(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    faults = "exit@rank1:step1,kill@rank1:step2,error@rank0:step3,segfault@rank0:step4"
    code, events = run(tmp_path, walk, faults, max_restarts=4)
    assert code == 0
    causes = [(event["rank"], event["step"], event["cause"].partition(": ")[2][:20]) for _, event in events]
    assert causes == [
        (1, 1, "exited with status 1"),  # the first 20 characters
        (1, 2, "killed by SIGKILL (b"),
        (0, 3, "RuntimeError: inject"),
        (0, 4, "killed by SIGSEGV"),
    ]
    output = capfd.readouterr().err
    assert output.count("Traceback (most recent call last)") == 1, "an exception is shown where it was raised"
    assert "unisono: rank 0, step 3: RuntimeError: injected: error@rank0:step3; restarting" in output


@pytest.mark.parametrize("kind", ["sigterm", "sigint", "sigusr1"])
def test_a_signal_to_one_rank_is_a_stop_request(tmp_path: Path, kind: str) -> None:
    code, events = run(tmp_path, walk, f"{kind}@rank1:step1,hang@rank0:step2:0.1s", limits=Limits(20, 30))
    assert code == 75 and events == []
    assert outcomes.read_all(tmp_path / "job")[1].message == kind.upper()


@pytest.mark.slow
def test_ranks_that_only_wait_for_another_machine_get_more_time(tmp_path: Path) -> None:
    messages: list[str] = []
    monitor = HangMonitor(tmp_path, Limits(0.4, 30), tmp_path / "run", messages.append)
    heartbeat = Heartbeat(0, tmp_path)
    for step in (1, 2):
        heartbeat.at("reduce", step)
    began, hang = time.monotonic(), None
    while hang is None and time.monotonic() - began < 30:
        hang = monitor.check({0: os.getpid()}, attempt=0, other_machines=True)
        time.sleep(0.02)
    assert hang is not None and time.monotonic() - began > 0.8
    assert (
        len(messages) == 1
        and messages[0].startswith("rank 0, step 2: no progress")
        and "waiting for other ranks" in messages[0]
    )


# ---- under another launcher: the ranks detect hangs themselves ----


def hang_under_a_foreign_launcher(how: str, folder: str) -> None:
    import torch
    import torch.distributed as dist

    from unisono.cluster.environment import detect
    from unisono.cluster.hangs.rank_watchdog import Watchdog
    from unisono.cluster.process_group import join_process_group

    world = detect()
    heartbeat = Heartbeat(world.rank)
    with Watchdog(heartbeat, world, Limits(2, 60)) as watchdog:
        join_process_group(world, torch.device("cpu"))
        watchdog.joined()
        watchdog.run_folder = Path(folder)
        for step in (1, 2):
            heartbeat.at("forward", step)
            if world.rank == 1 and step == 2:
                time.sleep(60) if how == "sleep" else os.kill(os.getpid(), signal.SIGSTOP)
            heartbeat.at("reduce", step)
            dist.all_reduce(torch.ones(1))


def test_ranks_under_another_launcher_report_the_hanging_rank_and_exit(tmp_path: Path) -> None:
    args = {"how": "sleep", "folder": str(tmp_path)}
    with pytest.raises(RanksFailed) as failed:
        run_ranks("hang_under_a_foreign_launcher", __file__, 2, args, timeout_s=60)
    output = str(failed.value)
    assert output.count("exit status 1") == 2 and "Connection closed by peer" not in output, output
    assert output.count("unisono: rank 1, step 2: no progress for") == 1, "one rank reports it, once"
    assert "stack of rank 1, innermost call first:" in output and "in hang_under_a_foreign_launcher" in output
    [kept] = (tmp_path / "stacks").iterdir()
    assert "all_reduce" in (kept / "rank0.txt").read_text() and "all_reduce" not in (kept / "rank1.txt").read_text()


@pytest.mark.slow
def test_a_silent_rank_is_the_suspect(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed) as failed:
        run_ranks("hang_under_a_foreign_launcher", __file__, 2, {"how": "stop", "folder": str(tmp_path)}, timeout_s=60)
    output = str(failed.value)
    assert "rank 0: exit status 1" in output and "unisono: rank 1: no response for" in output, output


# ---- real training runs ----


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    place = tmp_path_factory.mktemp("undisturbed")
    ended = unisono(*TRAIN, cwd=place)
    assert ended.code == 0, ended.err
    return losses(place / "run")


def test_training_continues_after_a_hang_with_the_same_losses(tmp_path: Path, undisturbed: list[float]) -> None:
    words = [*TRAIN, "--nproc", 2, "--save_every", 2, "--inject", "hang@rank1:step5", "--hang_timeout", 4]
    ended = unisono(*words, cwd=tmp_path, seconds=180)
    assert ended.code == 0, ended.err
    assert "unisono: rank 1, step 5: no progress for 4 s in forward" in ended.err and "in _hang" in ended.err
    assert losses(tmp_path / "run") == pytest.approx(undisturbed, rel=1e-10)
    events = {event["kind"]: event for event in reversed(lines(tmp_path / "run", "events.jsonl"))}
    assert (events["hang"]["rank"], events["hang"]["step"], events["hang"]["phase"]) == (1, 5, "forward")
    assert (events["restart"]["rank"], events["restart"]["step"], events["restart"]["attempt"]) == (1, 5, 1)
    assert (tmp_path / "run/stacks/step_00000005-attempt0/rank1.txt").exists()


@pytest.mark.slow
def test_torchrun_restarts_ranks_after_a_hang(tmp_path: Path, undisturbed: list[float]) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max-restarts=1"]
    words = ["--save_every", 2, "--inject", "hang@rank1:step5", "--hang_timeout", 4]
    ended = end(start([*torchrun, "-m", "unisono", *TRAIN, *words], cwd=tmp_path), 240)
    assert ended.code == 0, ended.err
    assert ended.err.count("unisono: rank 1, step 5: no progress for") == 1 and "in _hang" in ended.err
    assert losses(tmp_path / "run") == pytest.approx(undisturbed, rel=1e-10)
    assert [event["rank"] for event in lines(tmp_path / "run", "events.jsonl") if event["kind"] == "hang"] == [1]


@pytest.mark.slow
def test_a_single_process_that_hangs_prints_its_stack_and_exits(tmp_path: Path) -> None:
    ended = unisono(*TRAIN, "--inject", "hang@step3", "--hang_timeout", 3, cwd=tmp_path)
    assert ended.code == 3, ended.err
    assert re.search(r"unisono: rank 0, step 3: no progress for \d s in forward \(hang_timeout 3\)", ended.err)
    assert "in _hang" in ended.err
    assert (tmp_path / "run/stacks/step_00000003-attempt0/rank0.txt").exists()


@pytest.mark.slow
def test_a_signal_to_one_rank_stops_all_with_a_checkpoint(tmp_path: Path, undisturbed: list[float]) -> None:
    words = [*TRAIN, "--nproc", 2, "--inject", "sigterm@rank1:step3"]
    ended, ours = unisono(*words, cwd=tmp_path, seconds=180), mark()
    assert ended.code == 75, ended.err
    assert 3 <= len(losses(tmp_path / "run")) < STEPS and "restart" not in ended.err
    ended = unisono(*words, cwd=tmp_path, seconds=180, **ours)
    assert ended.code == 0, ended.err
    assert losses(tmp_path / "run") == pytest.approx(undisturbed, rel=1e-10)
    assert marked(ours) == []


# ---- stragglers ----


def test_a_steadily_slower_rank_is_named_once_a_minute_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr("unisono.observe.straggler.time.monotonic", lambda: clock[0])
    stragglers = StragglerDetector()
    slow, even = ([10.0, 10.4, 13.0], [1.0, 1.0, 3.8]), ([10.0, 10.4, 11.0], [1.0] * 3)
    warnings = []
    for each in (slow, slow, even, slow, slow, slow, slow):
        clock[0] += STEADY_S / 2
        warnings.append(stragglers.check(*each))
    hasty = StragglerDetector()
    assert not any(hasty.check(*slow) for _ in range(10))  # many intervals within no time
    assert [each is not None for each in warnings] == [False] * (2 + INTERVALS) + [True, False]
    assert warnings[5] is not None and (warnings[5].rank, warnings[5].slower_percent, warnings[5].reason) == (
        2,
        27,
        "data",
    )
    clock[0] += 61
    again = stragglers.check([10.0, 10.4, 13.0], [1.0] * 3)
    assert again is not None and again.reason == "compute"
    assert StragglerDetector().check([5.0], [0.0]) is None


def test_a_slow_rank_of_a_run_is_named(tmp_path: Path) -> None:
    ended = unisono(*TRAIN, "--nproc", 2, "--inject", "slow@rank1:step2:1.0s", cwd=tmp_path, seconds=180)
    assert ended.code == 0, ended.err
    assert "rank 1 slows down the others" in ended.err
    [event] = [event for event in lines(tmp_path / "run", "events.jsonl") if event["kind"] == "straggler"]
    assert (event["rank"], event["reason"]) == (1, "compute") and event["slower_percent"] > 20
    [line] = [line for line in lines(tmp_path / "run") if line["step"] == 4]
    assert line["slowest_rank"] == 1 and line["own_ms_by_rank"][1] > 990 and min(line["step_ms_by_rank"]) > 900


# ---- this file as a program ----


def main() -> None:
    die_with_parent()
    behaviour, job, *args = sys.argv[1:]
    rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    write_stacks_on_signal(Path(job), rank)
    try:
        outcome = globals()[behaviour](Path(job), rank, attempt, *args)
    except Exception as error:
        import traceback

        outcome = Outcome("crashed", f"{type(error).__name__}: {error}", rank, traceback=traceback.format_exc())
    outcomes.write(Path(job), outcome)
    os._exit(0 if outcome.is_good else 1)


if __name__ == "__main__":
    main()
