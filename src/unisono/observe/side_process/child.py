"""The program of a side process, which follows a run's folder, such as a tracker; `SideProcesses` starts it.

The first line of its input is a JSON object that describes its task; the second line means that the run has ended. Its
output consists of lines for the user. Output of libraries is dropped, because it may contain addresses and keys.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn, Protocol, TextIO

from unisono.cluster.lifetime import die_with_parent
from unisono.errors import UnisonoError, UserError
from unisono.formatting import describe_exception
from unisono.observe.redaction import redacted_text

_POLL_S = 0.5  # seconds between two reads of the run folder
_LONGEST_PAUSE_S = 60.0  # maximum seconds between two attempts of a call that failed
_LAST_PAUSE_S = 3.0  # the same once the run has ended
_CHECK_S = 1.0


class GiveUp(UserError):
    """The reason why a follower cannot go on; the process prints it and ends."""


class Follower(Protocol):
    """Follows a run folder. If a method raises an exception other than GiveUp, it is called again."""

    def open(self) -> object:
        """Prepares the work; called before the other methods."""

    def deliver(self, *, everything: bool = False) -> object:
        """Handles what is new in the run folder; `everything`: the run has ended, so nothing more will follow."""

    def close(self) -> object:
        """Ends the work."""


class SideProcess:
    """Runs one follower until the run has ended."""

    def __init__(self, name: str, output: TextIO, hang_s: float, *, persists: bool = False) -> None:
        """`name` begins each line for the user. With `persists`, failing calls are repeated after the run has ended.

        The run's process limits how long that may take.
        """
        self._name, self._output, self._persists = name, output, persists
        self._ended = threading.Event()
        self._failing = False
        self._busy_since: float | None = None
        threading.Thread(target=self._await_end, daemon=True).start()
        threading.Thread(target=self._watch, args=[hang_s], daemon=True).start()

    def run(self, follower: Follower) -> NoReturn:
        """Opens the follower, lets it deliver until the run has ended, closes it, and ends this process."""
        if self._until_it_succeeds(follower.open):
            while not self._ended.wait(_POLL_S):
                self._until_it_succeeds(follower.deliver)
            last = partial(follower.deliver, everything=True)
            self._until_it_succeeds(last) if self._persists else self._attempt(last)
            self._attempt(follower.close)
        os._exit(0)  # a library's threads or exit handlers must not delay the end of the run

    def _until_it_succeeds(self, call: Callable[[], object]) -> bool:
        """Repeats a call that raises, less and less often, until it succeeds or the run has ended."""
        pause = 1.0
        while not self._attempt(call):
            if not self._persists and self._ended.is_set():
                return False
            if self._ended.is_set():  # the run waits for this process
                time.sleep(min(pause, _LAST_PAUSE_S))
            else:
                self._ended.wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        return True

    def _attempt(self, call: Callable[[], object]) -> bool:
        self._busy_since = time.monotonic()
        try:
            call()
        except GiveUp as error:
            self.say(str(error))
            os._exit(0)
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
        """Sends the user a line about this process."""
        line = " ".join(redacted_text(text).split())[:400]
        try:
            self._output.write(f"{self._name}: {line}\n")
            self._output.flush()
        except OSError:  # the run's process has ended
            os._exit(1)

    def _await_end(self) -> None:
        if not sys.stdin.readline():
            # The run's process died, and the kernel is about to kill this one (`die_with_parent`). A tracker must not
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


def begin() -> tuple[dict[str, Any], TextIO]:
    """Prepares this process; returns the description of its task, and the stream for lines to the user."""
    die_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):  # the run decides when it ends
        signal.signal(number, signal.SIG_IGN)
    order: dict[str, Any] = json.loads(sys.stdin.readline())
    output = os.fdopen(os.dup(1), "w")
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)
    return order, output
