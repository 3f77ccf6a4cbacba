"""The driver of a run on Ray: creates the machines, replaces lost ones, forwards signals, and collects the outcome.

If a node is lost, its ranks and its launcher die with it. The rendezvous, which runs in this process, detects the loss
at once (after 15 s if the node is only disconnected), and the other machines regroup: they continue if there are enough
of them, and otherwise wait. Meanwhile Ray reports that the actor is dead, and the driver creates a new actor in the
same bundle. Ray places this actor as soon as a node has room for it, and its launcher then joins the run.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

from unisono.cluster.launch.agent import print_line
from unisono.cluster.rendezvous.host import RendezvousHost
from unisono.cluster.signals import SAME_PRESS_S, handling_stop_signals
from unisono.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED, EXIT_USER_ERROR
from unisono.ray.machine import Machine, Report
from unisono.ray.output import MergedOutput
from unisono.ray.placement import Needs, Place

_WAIT_S = 0.3
_LOST = -1  # exit status of a machine that was lost while the run was stopping
_KILL_AFTER_S = 10.0  # seconds between a second signal and killing the actors of machines that are still running


@dataclass
class _Member:
    """A machine of the run."""

    number: int
    place: Place
    actor: Any = None
    report: Any = None  # Ray's reference to the next report
    node: str = ""  # address of the machine's node; empty until Ray has placed the actor
    node_id: str = ""
    exit: int | None = None


class Driver:
    """Runs one run on the machines that Ray places."""

    def __init__(
        self,
        places: Sequence[Place],
        needs: Needs,
        start: Callable[[int], tuple[Mapping[str, Any], str, Mapping[str, str]]],
        host: RendezvousHost,
        max_restarts: int,
    ) -> None:
        """`start` returns the arguments of `Machine` for the machine with a given number."""
        self._members = [_Member(number, place) for number, place in enumerate(places)]
        self._needs, self._start, self._host, self._max_restarts = needs, start, host, max_restarts
        self._output = MergedOutput()
        self._num_crashes = 0
        self._signals: list[int] = []
        self._num_forwarded = 0
        self._signal_at = 0.0
        self._kill_at: float | None = None
        self.result: dict[str, Any] | None = None
        """The result of the run, as written by a launcher."""

    def run(self) -> int:
        """Creates the machines, waits for the end of the run, and returns its exit code."""
        import ray

        try:
            with handling_stop_signals(self._on_signal):
                for member in self._members:
                    self._create(member)
                while not self._has_ended():
                    if self._num_forwarded < len(self._signals) and not self._forward_signals():
                        return EXIT_STOPPED
                    if self._kill_at is not None and time.monotonic() > self._kill_at:
                        return 128 + self._signals[-1]
                    waiting = {member.report: member for member in self._members if member.exit is None}
                    ready, _ = ray.wait(list(waiting), num_returns=1, timeout=_WAIT_S)
                    for reference in ready:
                        self._receive(waiting[reference], reference)
            return self._exit_code()
        finally:
            for member in self._members:
                with suppress(Exception):  # the actor was never created, or the cluster is gone
                    ray.kill(member.actor)

    def _create(self, member: _Member) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        job, folder, environ = self._start(member.number)
        options = {
            "num_cpus": self._needs.ranks,
            "num_gpus": self._needs.gpus,
            "max_restarts": 0,  # the driver creates a new actor itself, and prints a message
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                member.place.group, placement_group_bundle_index=member.place.bundle
            ),
        }
        member.node = member.node_id = ""
        member.actor = ray.remote(**options)(Machine).remote(job, folder, environ)
        member.report = member.actor.poll.remote()

    def _receive(self, member: _Member, reference: Any) -> None:
        import ray

        try:
            report: Report = ray.get(reference)
        except ray.exceptions.ActorUnavailableError:  # the connection broke; the actor may be alive
            time.sleep(_WAIT_S)
            member.report = member.actor.poll.remote()
            return
        except ray.exceptions.RayError as error:
            self._replace(member, error)
            return
        if not member.node and self._num_forwarded:  # the machine started after the signal
            member.actor.signal.remote(self._signals[0])
        member.node, member.node_id = report["node"], report["node_id"]
        is_main = member.number == min(each.number for each in self._members if each.node)
        # Once the run has a result, drops the output of other machines, such as a machine that joins too late.
        for stream, line in report["lines"] if is_main or self.result is None else []:
            self._output.write(member.number, stream, line, is_main=is_main)
        status = report["exit"]
        if status is None:
            member.report = member.actor.poll.remote()
        elif status < 0:
            ray.kill(member.actor)
            self._replace(member, f"its launcher was killed by signal {-status}")
        else:
            member.exit = status
            self.result = self.result or report["result"]
            if status not in (EXIT_DONE, EXIT_STOPPED):
                self._host.end_run("the run has failed on another machine; see its output for the cause")

    def _replace(self, member: _Member, cause: object) -> None:
        """Creates a new actor for a machine whose actor died; fails the run if no restarts are left."""
        import ray

        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        name = f"machine {member.number}{f' ({member.node})' if member.node else ''}"
        node_is_lost = bool(member.node_id) and member.node_id not in alive
        reason = "its node is lost" if node_is_lost else _last_line(cause)
        if self._signals:
            print_line(f"{name}: {reason}")
            member.exit = _LOST
            return
        if not node_is_lost:
            self._num_crashes += 1
        if self._num_crashes > self._max_restarts:
            print_line(f"{name}: {reason}; all {self._max_restarts} restarts are used up (--max_restarts)")
            member.exit = EXIT_FAILED
            self._host.end_run("the run has failed on another machine; see its output for the cause")
            return
        print_line(f"{name}: {reason}; Ray starts it again as soon as a node has room")
        self._create(member)

    def _has_ended(self) -> bool:
        """Returns whether a machine has ended the run and no other machine is still working."""
        ended = any(member.exit is not None for member in self._members)
        return ended and not any(member.exit is None and member.node for member in self._members)

    def _exit_code(self) -> int:
        return exit_code({member.exit for member in self._members if member.exit not in (None, _LOST)})

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if time.monotonic() - self._signal_at > SAME_PRESS_S:
            self._signals.append(signum)
        self._signal_at = time.monotonic()

    def _forward_signals(self) -> bool:
        """Sends new signals to all machines; returns False if there is no machine yet."""
        signum = self._signals[self._num_forwarded]
        self._num_forwarded += 1
        running = [member for member in self._members if member.node and member.exit is None]
        if not running:
            print_line(f"{signal.Signals(signum).name}: stopped before any rank was started")
            return False
        for member in running:
            member.actor.signal.remote(signum)
        if self._num_forwarded > 1 and signum in (signal.SIGINT, signal.SIGTERM):
            self._kill_at = self._kill_at or time.monotonic() + _KILL_AFTER_S
        return True


def exit_code(codes: Collection[int]) -> int:
    """Returns the exit code of a run whose launchers ended with these codes."""
    # All ranks of a run end together, so one launcher that succeeded is enough. A machine that Ray placed too late
    # fails, because there is no run left to join.
    for code in (EXIT_STOPPED, EXIT_DONE, EXIT_USER_ERROR):
        if code in codes:
            return code
    killed = [code for code in codes if code > 128]
    return killed[0] if killed and len(killed) == len(codes) else EXIT_FAILED


def _last_line(cause: object) -> str:
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    return lines[-1] if lines else type(cause).__name__
