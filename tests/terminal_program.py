"""A unisono command in a real pseudo-terminal: what it draws, the keys it gets, and how it leaves the terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from pathlib import Path

from command_line import environment


class TerminalProgram:
    """Runs `python -m unisono` in a terminal of a given size."""

    def __init__(self, words: Sequence[str], *, cwd: Path, columns: int, rows: int) -> None:
        self._reader, self._writer = pty.openpty()
        fcntl.ioctl(self._writer, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self._before = termios.tcgetattr(self._writer)
        variables = environment(TERM="xterm-256color")
        variables.pop("COLUMNS", None)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "unisono", *words],
            cwd=cwd,
            env=variables,
            stdin=self._writer,
            stdout=self._writer,
            stderr=self._writer,
            start_new_session=True,
        )
        self._output = ""

    @property
    def is_restored(self) -> bool:
        """Whether the terminal has the same settings as before."""
        return termios.tcgetattr(self._writer) == self._before

    def press(self, key: str) -> None:
        """Sends a key to the program."""
        os.write(self._reader, key.encode())
        self._read(0.3)

    def wait_for(self, text: str, seconds: float = 60) -> None:
        """Reads what the program draws until it contains a text (ignoring colours)."""
        deadline = time.monotonic() + seconds
        while text not in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self._output):
            assert time.monotonic() < deadline and self.process.poll() is None, self._output
            self._read(0.1)

    def end(self, seconds: float = 60) -> tuple[str, int]:
        """Waits for the program; returns all that it has drawn, and its exit code."""
        deadline = time.monotonic() + seconds
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self._output
            self._read(0.05)
        while self._read(0.05):
            pass
        return self._output, self.process.returncode

    def _read(self, seconds: float) -> bool:
        if not select.select([self._reader], [], [], seconds)[0]:
            return False
        self._output += os.read(self._reader, 65536).decode(errors="replace")
        return True
