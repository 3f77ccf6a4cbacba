"""Progress of training and of preparation: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from unisono.engine.recipe import Work
from unisono.formatting import format_duration
from unisono.observe import progress as progress_module
from unisono.observe.forecast import Forecast
from unisono.observe.progress import progress
from unisono.observe.status_line import print_line
from unisono.observe.training_line import TrainingLine

# --- training


class Terminal:
    """A real pseudo-terminal of a given width, with what was written to it."""

    def __init__(self, columns: int) -> None:
        self._reader, writer = pty.openpty()
        fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.stream = os.fdopen(writer, "w")

    def read(self) -> str:
        self.stream.close()
        text = b""
        while True:
            try:
                chunk = os.read(self._reader, 65536)
            except OSError:  # Linux: the other side is closed and all is read
                chunk = b""
            if not chunk:
                os.close(self._reader)
                return text.decode().replace("\r\n", "\n")
            text += chunk


NUMBERS = {"loss": 1.23451, "lr": 3e-4, "samples_per_s": 812.3, "mem_gib": 1.24, "eval/loss": 3.0, "epoch": 2}


def test_on_a_terminal_one_line_is_rewritten_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal(120)
    progress = TrainingLine(1000, stream=terminal.stream)
    progress.update(step=120, **NUMBERS)
    for step in range(121, 150):  # far more often than ten times a second
        progress.update(step=step, **NUMBERS)
    progress.message("saved step 149")
    progress.close()
    progress.close()
    text = terminal.read()
    rows = text.split("\n")
    bar = "█" * 4 + "░" * 26
    first = f"step 120/1000  {bar}  loss 1.2345  812 samples/s  lr 3.0e-04  1.2 GiB  epoch 2"
    assert rows[0] == f"\r{first}\x1b[K\r\x1b[Ksaved step 149"
    assert rows[1].startswith(first + f"\rstep 149/1000  {bar}  loss 1.2345")  # close shows the newest numbers
    assert rows[2:] == [""]


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        (10, "step 9999"),
        (30, "step 99999/100000"),
        (31, "step 99999/100000  loss 1.2345"),
        (40, "step 99999/100000  ████████████████████"),
        (60, "step 99999/100000  ████████████████  loss 1.2345  3 skipped"),
        (80, "step 99999/100000  █████████████████████  loss 1.2345  3 skipped  812 samples/s"),
    ],
)
def test_on_a_narrow_terminal_the_line_is_shortened_and_never_wraps(
    columns: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal(columns)
    progress = TrainingLine(100_000, stream=terminal.stream)
    progress.update(step=99_999, skipped=3, **NUMBERS)
    progress.close()
    assert terminal.read() == f"\r{expected}\x1b[K" * 2 + "\n"
    assert len(expected) < columns


@pytest.mark.parametrize("term", ["dumb", None])
def test_a_dumb_terminal_gets_plain_lines(term: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if term is None:
        monkeypatch.delenv("TERM", raising=False)
    else:
        monkeypatch.setenv("TERM", term)
    terminal = Terminal(80)
    progress = TrainingLine(10, stream=terminal.stream)
    progress.update(step=1, loss=0.5)
    progress.message("note")
    progress.update(step=2, loss=float("nan"), skipped=1)
    progress.close()
    first, note, second, end = terminal.read().split("\n")
    assert (first, note, end) == ("step 1/10  loss 0.5000", "note", "")
    assert second.startswith("step 2/10  loss nan  1 skipped")


def test_a_log_file_gets_a_line_per_update_with_the_time_left(tmp_path: Path) -> None:
    with open(tmp_path / "log", "w") as stream:
        progress = TrainingLine(30, stream=stream)
        progress.update(step=10, loss=1e-9)
        time.sleep(0.5)
        progress.update(step=20, loss=123456.0)
        progress.close()
    first, second = (tmp_path / "log").read_text().splitlines()
    assert first == "step 10/30  loss 1.000e-09"
    assert re.fullmatch(r"step 20/30  loss 1\.235e\+05  \ds left", second)


def test_progress_of_other_ranks_is_silent(capfd: pytest.CaptureFixture[str]) -> None:
    progress = TrainingLine(10, enabled=False)
    progress.update(step=1, **NUMBERS)
    progress.message("x")
    progress.close()
    assert capfd.readouterr() == ("", "")


def test_a_terminal_that_goes_away_does_not_stop_the_run() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    stream = os.fdopen(writer, "w")
    progress = TrainingLine(10, stream=stream)
    progress.update(step=1)
    progress.message("x")
    progress.close()
    with pytest.raises(BrokenPipeError):
        stream.close()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-1, "0s"), (59.4, "59s"), (59.6, "1m00s"), (190, "3m10s"), (7500, "2h05m"), (277_000, "3d04h")],
)
def test_durations_are_shown_in_suitable_units(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


# --- other long work


def on(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal.stream)


def test_a_terminal_shows_a_bar_with_count_rate_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(100)
    on(terminal, monkeypatch)
    with progress("encoding videos", 40) as advance:
        for _ in range(10):
            time.sleep(0.05)
            advance()
        print_line("bad file: a.mp4")
        time.sleep(0.5)
    text = terminal.read()
    assert re.search(r"\rencoding videos  █{7,8}░{22,23}  10/40  \ds left  [\d.]+/s\x1b\[K", text), text
    assert "\r\x1b[Kbad file: a.mp4\nencoding videos  " in text, "a line stands above the bar"
    last = text.rsplit("\r", 1)[1]
    assert re.fullmatch(r"\x1b\[Kencoding videos: 10 of 40 in \ds\n", last), last


def test_work_of_unknown_amount_shows_the_time_it_has_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(60)
    on(terminal, monkeypatch)
    with progress("making the teacher"):
        time.sleep(0.5)
    text = terminal.read()
    assert "\r| making the teacher  0s so far\x1b[K\r/ making" in text and "█" not in text
    assert re.search(r"making the teacher: \ds\n$", text)


def test_a_log_gets_few_lines_however_often_the_work_advances(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_module, "FIRST_LINE_S", 0.2)
    lines: list[str] = []
    with progress("encoding", 10**12, "MB", sink=lines.append) as advance:
        until = time.monotonic() + 2.5
        while time.monotonic() < until:
            advance(10, note="clip.mp4")
    assert lines[0] == "encoding: 1,000,000,000,000 MB"
    # After 0.2 s, then 0.4, 0.8 and 1.6 later: three lines fit, or fewer on a busy machine.
    assert 1 <= len(lines[1:-1]) <= 4
    assert re.fullmatch(r"encoding: [\d,]+ of 1,000,000,000,000 MB, \w+ left, [\d,]+ MB/s, clip.mp4", lines[1]), lines[
        1
    ]
    assert re.fullmatch(r"encoding: [\d,]+ of 1,000,000,000,000 MB in \ds", lines[-1]), lines[-1]


def test_without_work_and_on_other_ranks_nothing_is_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lines: list[str] = []
    with (
        progress("encoding", 0, sink=lines.append),
        progress("encoding", 3, sink=lines.append, enabled=False) as advance,
    ):
        advance()
    with Work(tmp_path, 1, 2, _say=lines.append).progress("encoding", 3) as advance:
        advance()
    with Work(tmp_path, _say=lines.append, _asked_to_stop=lambda: True).progress("encoding", 3):
        pass  # a stop request came first
    assert not lines and capfd.readouterr() == ("", "")


def test_progress_shows_the_main_ranks_share_of_the_work(tmp_path: Path) -> None:
    lines: list[str] = []
    work = Work(tmp_path, 0, 2, _say=lines.append)
    with work.progress("encoding", 3, "videos", of=6) as advance:
        advance(3)
    assert lines == ["encoding: 6 videos, 3 of them on this rank", "encoding: 3 videos in 0s"]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_bar_restores_the_terminal(signum: int) -> None:
    code = """
import time
from unisono.observe.progress import progress
with progress("encoding", 10) as advance:
    advance()
    time.sleep(60)
"""
    terminal = Terminal(80)
    before = termios.tcgetattr(terminal.stream)
    environment = {**os.environ, "TERM": "xterm"}
    process = subprocess.Popen([sys.executable, "-c", code], stderr=terminal.stream, env=environment)
    seen = os.read(terminal._reader, 4096).decode()
    while "1/10" not in seen:
        seen += os.read(terminal._reader, 4096).decode()
    process.send_signal(signum)
    assert process.wait(60) == -signum
    after = termios.tcgetattr(terminal.stream)
    seen += terminal.read()
    assert before == after and "\x1b[?25l" not in seen, "the cursor is never hidden"
    if signum == signal.SIGINT:
        assert "\r\x1b[KTraceback" in seen, "the bar is gone before anything else is printed"


# ---- how long it will take ----


@pytest.mark.parametrize(
    "seconds, total, said",
    [
        (6.0, 1003, "about 1h40m for the 1,000 remaining steps, at 6 s each"),
        (0.25, 100_000, "about 6h56m for the 99,987 remaining steps, at 0.25 s each"),
        (6.0, 50, None),  # five minutes: the progress line is enough
        (6.0, 2**62, None),  # the user's own loop decides the length
    ],
)
def test_a_long_run_prints_its_estimated_duration_once(seconds: float, total: int, said: str | None) -> None:
    now = [100.0]
    forecast, lines = Forecast(lambda: now[0]), []
    now[0] += 1000.0  # preparation and the first step do not count
    for step in range(1, 40):
        lines += [line for line in [forecast.step(step, total)] if line]
        now[0] += seconds
    assert len(lines) == (said is not None) and all(str(said) in line for line in lines), lines
