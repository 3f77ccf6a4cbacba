"""The process of one tracker: `python -m unisono.observe.trackers.process`, started by `TrackerProcesses`.

The first line of its input is a JSON object with the tracker and the run folder; the second line means that the run has
ended. Its output consists of lines for the user. Output of libraries is dropped, because it may contain addresses and
keys.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from unisono.cluster.lifetime import die_with_parent
from unisono.errors import UnisonoError
from unisono.formatting import describe_exception
from unisono.observe.redaction import redacted_text
from unisono.observe.trackers.follower import Follower, tracked_run
from unisono.observe.trackers.named import load_tracker

_POLL_S = 0.5  # seconds between two reads of the run folder
_LONGEST_PAUSE_S = 60.0  # maximum seconds between two attempts of a call that failed
_CHECK_S = 1.0


class TrackerProcess:
    """Runs one tracker until the run has ended."""

    def __init__(self, name: str, follower: Follower, output: TextIO, hang_s: float) -> None:
        self._name, self._follower, self._output = name, follower, output
        self._ended = threading.Event()
        self._failing = False
        self._busy_since: float | None = None
        threading.Thread(target=self._await_end, daemon=True).start()
        threading.Thread(target=self._watch, args=[hang_s], daemon=True).start()

    def run(self) -> None:
        """Opens the tracker, passes records to it until the run has ended, and closes it."""
        if not self._until_it_succeeds(self._follower.open):
            return
        while not self._ended.wait(_POLL_S):
            self._until_it_succeeds(self._follower.deliver)
        self._attempt(lambda: self._follower.deliver(everything=True))
        self._attempt(self._follower.close)

    def _until_it_succeeds(self, call: Callable[[], object]) -> bool:
        """Repeats a call that raises, less and less often, until it succeeds or the run has ended."""
        pause = 1.0
        while not self._attempt(call):
            if self._ended.is_set():
                return False
            self._ended.wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        return True

    def _attempt(self, call: Callable[[], object]) -> bool:
        self._busy_since = time.monotonic()
        try:
            call()
        except (Exception, SystemExit) as error:
            reason = str(error) if isinstance(error, UnisonoError) else describe_exception(error)
            if not self._failing:
                self.say(f"failed ({reason}); the run continues, and missing records are sent when it works again")
            self._failing = True
            return False
        finally:
            self._busy_since = None
        if self._failing:
            self.say("works again")
        self._failing = False
        return True

    def say(self, text: str) -> None:
        """Sends the user a line about this tracker."""
        line = " ".join(redacted_text(text).split())[:400]
        try:
            self._output.write(f"track {self._name}: {line}\n")
            self._output.flush()
        except OSError:  # the run's process is gone
            os._exit(1)

    def _await_end(self) -> None:
        if not sys.stdin.readline():
            # The run's process died, and the kernel is about to kill this one (`die_with_parent`). The tracker must not
            # begin to close its run, because a kill in the middle could damage its files.
            os._exit(1)
        self._ended.set()

    def _watch(self, hang_s: float) -> None:
        """Warns once if a call does not return."""
        while not self._ended.wait(_CHECK_S):
            since = self._busy_since
            if since is not None and time.monotonic() - since > hang_s:
                self.say(f"has not responded for {hang_s:.0f} s; the run continues")
                return


def main() -> None:
    """Runs the tracker that the input names."""
    die_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):  # the run decides when it ends
        signal.signal(number, signal.SIG_IGN)
    order = json.loads(sys.stdin.readline())
    output = os.fdopen(os.dup(1), "w")
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)
    name: str = order["name"]
    run = tracked_run(Path(order["folder"]), project=order["project"], offline=order["offline"])
    tracker = load_tracker(name)
    process = TrackerProcess(order["label"], Follower(tracker, run, name), output, order["hang_s"])
    tracker.say = process.say
    process.run()
    os._exit(0)  # a library's threads or exit handlers must not delay the end of the run


if __name__ == "__main__":
    main()
