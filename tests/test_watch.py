"""`unisono watch` shows a run while it trains, is killed and restarted, and however its files look."""

from __future__ import annotations

import json
import os
import shutil
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from browser import Browser
from command_line import TINY, end, lines, start, unisono, wait_until
from tiny_recipe import HOLD
from unisono.cli.main import main
from unisono.cluster.hangs.heartbeat import Heartbeat
from unisono.errors import UserError
from unisono.observe.folder import RunFolder
from unisono.observe.watch.dot_chart import dot_chart
from unisono.observe.watch.folder_of_runs import Runs
from unisono.observe.watch.growing_file import GrowingFile
from unisono.observe.watch.live_run import LiveRun
from unisono.observe.watch.rank_rows import rank_rows
from unisono.observe.watch.rank_status import RankStatus, status_file, write_interval_s
from unisono.observe.watch.ranks import RankReader
from unisono.observe.watch.server import serving

ATTACK = "<img src=x onerror=\"document.title='hacked'\"></script><script>document.title='hacked'</script>"


def made(folder: Path, metrics: list[dict[str, Any]] = (), events: list[dict[str, Any]] = (), **record: Any) -> Path:  # type: ignore[assignment]
    """A run folder with these records."""
    run = RunFolder(folder)
    run.open({"id": "1", "recipe": "Made", **record})
    for event in events:
        run.event(**event)
    for line in metrics:
        run.metrics(line)
    run.close()
    return folder


def write_status(folder: Path, rank: int, **more: Any) -> None:
    """A status file as a rank writes it."""
    file = status_file(folder, rank)
    file.parent.mkdir(exist_ok=True)
    record = {"rank": rank, "world": 2, "host": "a", "device": "cpu", "time": time.time(), "phase": "forward"}
    file.write_text(json.dumps({**record, "phase_since": time.time(), "beat": 5, "step": 7, "total_steps": 90, **more}))


class Clock:
    """A clock that the test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


# ---- a real run ----


@contextmanager
def page_of(folder: Path, *words: str, port: int = 0) -> Iterator[str]:
    """The address of a real `unisono watch --web`, which ends with the block."""
    process = start(["-m", "unisono", "watch", folder, "--web", port, *words], cwd=folder.parent)
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert address.startswith("http://"), end(process)
        yield address
    finally:
        process.terminate()
        process.communicate(timeout=30)


def test_a_browser_follows_a_run_that_is_killed_and_restarted(browser: Browser, tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    hold.write_text("0.05")
    words = ["--nproc", "2", "--max_steps", "60", "--save_every", "20", "--no_async_save", "--output_dir", "runs/a"]
    faults = ["--inject", "kill@rank1:step31"]
    run = start(["-m", "unisono", "train", TINY, *words, *faults], cwd=tmp_path, **{HOLD: str(hold)})
    try:
        wait_until(lambda: (tmp_path / "runs/a/live/rank_1.json").exists(), "the ranks write their status", 120)
        with page_of(tmp_path / "runs") as address:
            browser.events.clear()
            browser("Page.navigate", url=address)
            browser.wait("document.querySelectorAll('.runs li').length === 1")
            browser("Page.navigate", url=f"{address}run?name=a")
            browser.wait("document.querySelectorAll('.ranks tbody tr').length === 2")
            browser.ask("window.sameDocument = true")
            step = "Number(document.querySelector('.steps b').textContent.replace(/\\D/g, ''))"
            before = browser.ask(step)
            browser.wait(f"{step} > {before}")
            browser.wait("document.body.innerText.includes('killed by SIGKILL')", 60)
            browser.wait("document.body.innerText.includes('resumed from step 20')", 120)
            hold.unlink()
            assert end(run).code == 0
            browser.wait("document.querySelector('.status b').textContent === 'done'")
            browser.wait(f"{step} === 60")
            assert browser.ask("window.sameDocument") is True, "the page updates itself without loading again"
            drawn = "JSON.parse(document.querySelector('.series').dataset.values).x"
            browser.wait(f"{drawn}.length === 60")
            assert browser.ask(drawn) == list(range(1, 61)), "repeated steps are drawn once"
            assert "60 of 60" in browser.ask("document.title")
            port = int(address.split(":")[2].strip("/"))
        browser.wait("!document.getElementById('connection').hidden")
        with page_of(tmp_path / "runs", port=port):
            browser.wait("document.getElementById('connection').hidden")
        errors = [event for event in browser.events if event["method"] == "Runtime.exceptionThrown"]
        assert not errors
    finally:
        run.kill()
    assert len({line["step"] for line in lines(tmp_path / "runs/a") if "loss" in line}) == 60
    printed = unisono("watch", "runs/a", "--once", cwd=tmp_path)
    assert printed.code == 0 and "done trained to the end" in printed.out and "step 60 of 60" in printed.out
    assert len([line for line in printed.out.splitlines() if "ended" in line]) == 2, printed.out


def test_a_run_shorter_than_a_second_leaves_at_most_its_last_status(tmp_path: Path) -> None:
    assert unisono("train", TINY, "--output_dir=run", cwd=tmp_path).code == 0
    status = json.loads(status_file(tmp_path / "run", 0).read_text())
    assert status["ended"] is True and status["step"] == status["total_steps"] == 4
    assert {"step_ms", "data_wait_ms", "mem_gib", "device", "phase", "beat"} <= status.keys()


def test_no_status_is_written_before_the_folder_contains_a_run(tmp_path: Path) -> None:
    status = RankStatus(tmp_path / "run", Heartbeat(0), 1)
    status.write()
    (tmp_path / "run").mkdir()
    status.write()
    assert os.listdir(tmp_path / "run") == []
    made(tmp_path / "run")
    status.write()
    assert json.loads(status_file(tmp_path / "run", 0).read_text())["phase"] == "start"
    shutil.rmtree(tmp_path / "run")
    status.write()
    assert os.listdir(tmp_path) == [], "a folder that the user removes stays removed"


def test_a_status_that_cannot_be_written_does_not_disturb_the_run(tmp_path: Path) -> None:
    made(tmp_path)
    (tmp_path / "live").write_text("a file of the user")
    status = RankStatus(tmp_path, Heartbeat(0), 1)
    status.numbers = {"step_ms": 1.0}
    status.start()
    status.close()
    assert (tmp_path / "live").read_text() == "a file of the user"


def test_many_ranks_write_less_often() -> None:
    assert [write_interval_s(world) for world in (1, 64, 640)] == [1.0, 1.0, 10.0]


# ---- reading files that change ----


def read(file: GrowingFile, known: list[Any]) -> list[Any]:
    for record in file.records():
        if record is None:
            known.clear()
        else:
            known.append(record["step"])
    return known


def test_lines_are_read_once_and_when_they_are_complete(tmp_path: Path) -> None:
    path, known = tmp_path / "metrics.jsonl", list[Any]()
    file = GrowingFile(path)
    assert read(file, known) == []
    path.write_bytes(b'{"step": 1}\n{"st')
    assert read(file, known) == [1]
    with open(path, "ab") as more:
        more.write(b'ep": 2}\nnot json\n[3]\n{"step": 4}\n')
    assert read(file, known) == [1, 2, 4] and file.damaged == 2
    assert read(file, known) == [1, 2, 4]


def test_a_file_that_was_rewound_replaced_or_removed_is_read_again(tmp_path: Path) -> None:
    path, known = tmp_path / "metrics.jsonl", list[Any]()
    file = GrowingFile(path)
    path.write_text("".join(f'{{"step": {n}}}\n' for n in range(5)))
    assert read(file, known) == [0, 1, 2, 3, 4]
    # Between two looks, a resumed run removes two steps and adds three others: the file is longer than before.
    path.write_text("".join(f'{{"step": {n}}}\n' for n in (0, 1, 2, 13, 14, 15)))
    assert read(file, known) == [0, 1, 2, 13, 14, 15] and file.restarts == 1
    path.unlink()
    assert read(file, known) == []
    path.write_text('{"step": 9}\n')
    assert read(file, known) == [9]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 400), max_size=8), st.integers(0, 3))
def test_a_file_read_in_pieces_has_the_same_records(sizes: list[int], stop: int) -> None:
    import tempfile

    content = b"".join(b'{"step": %d, "text": "%s"}\n' % (n, b"x" * (n * 7 % 50)) for n in range(20)) + b'{"step'
    with tempfile.TemporaryDirectory() as folder:
        path, known = Path(folder, "metrics.jsonl"), list[Any]()
        file = GrowingFile(path)
        end = 0
        for size in [*sizes, len(content)]:
            end = min(end + size, len(content))
            path.write_bytes(content[:end])
            for count, record in enumerate(file.records()):
                assert record is not None
                known.append(record["step"])
                if count == stop:
                    break  # the caller's time is up; the next read continues here
        while before := len(known):
            read(file, known)
            if len(known) == before:
                break
        assert known == list(range(20))


def test_a_line_of_gigabytes_costs_no_memory_and_is_skipped(tmp_path: Path) -> None:
    path, known = tmp_path / "metrics.jsonl", list[Any]()
    path.write_bytes(b'{"step": 1}\n"' + b"x" * (9 * 2**20) + b'"\n{"step": 2, "long": "' + b"y" * 2**19 + b'"}\n')
    file = GrowingFile(path)
    assert read(file, known) == [1, 2] and file.damaged == 1


def test_a_huge_run_is_shown_at_once_and_read_in_pieces(tmp_path: Path) -> None:
    made(tmp_path)
    line = '{{"step": {}, "loss": 1.0, "step_ms": 20.0}}\n'
    (tmp_path / "metrics.jsonl").write_text("".join(line.format(n) for n in range(1, 60_001)))
    run = LiveRun(tmp_path)
    run.update(budget_s=0.001)
    assert 0 < run.fraction_read < 1
    while run.fraction_read < 1:
        run.update(budget_s=1.0)
    assert run.step == 60_000 and run.run.metrics.series["loss"].count == 60_000


# ---- the state of ranks and runs ----


def test_a_rank_is_silent_or_stuck_by_the_watchers_own_clock(tmp_path: Path) -> None:
    clock = Clock()
    reader = RankReader(tmp_path, clock)
    write_status(tmp_path, 0)
    write_status(tmp_path, 1)
    assert [rank.problem for rank in reader.read()] == ["", ""]
    for _ in range(30):
        clock.now += 1.0
        write_status(tmp_path, 1, time=clock.now, phase_since=0.0)  # it lives, but its beat stays the same
        reader.read()
    silent, stuck = reader.read()
    assert (silent.problem, stuck.problem) == ("silent", "no progress") and silent.silent_s == pytest.approx(30, abs=1)
    write_status(tmp_path, 1, beat=6)
    assert reader.read()[1].problem == ""
    write_status(tmp_path, 0, ended=True)
    clock.now += 1000
    assert reader.read()[0].problem == "" and reader.read()[0].ended
    assert [rank.rank for rank in reader.read(world=1)] == [0], "files of an earlier start with more ranks are ignored"


def test_status_files_that_somebody_else_wrote_are_harmless(tmp_path: Path) -> None:
    (tmp_path / "live").mkdir()
    files = {0: b"", 1: b"\0" * 99, 2: b"[" * 100_000, 3: b'"x"', 4: b'{"time": "x", "beat": [], "step": 1e400}'}
    for rank, content in files.items():
        status_file(tmp_path, rank).write_bytes(content)
    os.mkfifo(status_file(tmp_path, 5))
    status_file(tmp_path, 6).mkdir()
    write_status(tmp_path, 7, phase=ATTACK * 99, host=3, device=None, world="many", mem_gib=float("nan"), comm_ms=True)
    (tmp_path / "live/rank_../../x.json").parent.parent.mkdir(parents=True, exist_ok=True)
    ranks = RankReader(tmp_path).read()
    assert [rank.rank for rank in ranks] == [4, 7]
    assert "mem_gib" not in ranks[1].numbers and len(ranks[1].phase) <= 60
    rows, hidden = rank_rows(ranks)
    assert len(rows) == 2 and hidden == 0


def test_of_many_ranks_those_with_a_problem_are_shown(tmp_path: Path) -> None:
    clock = Clock()
    reader = RankReader(tmp_path, clock)
    for rank in range(40):
        write_status(tmp_path, rank, ended=rank != 33)
    reader.read()
    clock.now += 60
    rows, hidden = rank_rows(reader.read(), most=4)
    assert [row.rank for row in rows] == [0, 1, 2, 33] and hidden == 36 and rows[3].problem == "silent for 1m00s"


def test_the_state_follows_the_events_and_the_folder(tmp_path: Path) -> None:
    clock = Clock()
    folder = tmp_path / "run"
    open_run = RunFolder(folder)
    open_run.open({"id": "1", "recipe": "Made", "config": {"max_steps": 90}})
    run = LiveRun(folder, clock)
    run.update()
    assert run.state[0] == "starting", "the run holds its lock and has recorded nothing"
    open_run.event("start", step=0, world=2)
    write_status(folder, 0)
    write_status(folder, 1)
    run.update()
    assert run.state[0] == "running" and run.total_steps == 90
    clock.now += 10
    write_status(folder, 0, beat=9, step=17, time=1.0)
    run.update()
    assert run.state[0] == "waiting" and run.state[1].startswith("rank 1: silent for 10 s")
    write_status(folder, 1, beat=9, step=17, time=2.0)
    run.update()
    assert run.step == 16 and run.seconds_left == pytest.approx(10.0 / 16 * (90 - 16))
    open_run.event("restart", cause="rank 1 was killed")
    run.update()
    assert run.state[0] == "restarting"
    open_run.event("resume", step=10, world=2)
    open_run.event("done", step=90)
    open_run.close()
    for rank in (0, 1):
        write_status(folder, rank, ended=True)
    run.update()
    assert run.state[0] == "done" and run.seconds_left is None
    shutil.rmtree(folder)
    run.update()
    assert run.state[0] == "gone" and run.ranks == []
    made(folder, [{"step": 3, "loss": 1.0}])
    run.update()
    assert run.state[0] == "unfinished" and run.step == 3, "another run in the same folder starts from nothing"


def test_a_folder_of_runs_lists_new_runs_and_gives_them_unique_names(tmp_path: Path) -> None:
    made(tmp_path / "runs/a")
    made(tmp_path / "runs/study/trial_1")
    made(tmp_path / "runs/other/trial_1")
    (tmp_path / "runs/link").symlink_to(tmp_path / "runs/a")
    clock = Clock()
    runs = Runs([tmp_path / "runs"], clock)
    runs.update()
    assert sorted(runs.by_name) == ["a", "other/trial_1", "study/trial_1"] and not runs.is_one_run
    before = runs.by_name["a"]
    made(tmp_path / "runs/b")
    clock.now += 5
    runs.update()
    assert "b" in runs.by_name and runs.by_name["a"] is before
    assert Runs([tmp_path / "runs/a"]).is_one_run
    with pytest.raises(UserError, match="is not a folder"):
        Runs([tmp_path / "none"])


# ---- the terminal ----


def test_a_curve_is_drawn_with_characters() -> None:
    rows = dot_chart([(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0)], 24, 4)
    assert len(rows) == 4 and all(len(row) == 24 for row in rows)
    assert rows[0].startswith("3 ") and rows[3].startswith("0 ")
    assert rows[0].rstrip()[-1] != " " and rows[0][2:10].strip() == "" and rows[3][-8:].strip() == ""
    plain = dot_chart([(0, 0.0), (1, 1.0)], 24, 3, braille=False)
    assert set("".join(plain)) <= set(" *01")
    assert dot_chart([(0, 1.0)], 24, 4) == [] and dot_chart([(0, 1.0), (1, 2.0)], 6, 4) == []
    assert len(dot_chart([(0, 5.0), (1, 5.0)], 24, 4)) == 4


def test_the_terminal_shows_runs_and_is_left_as_it_was(tmp_path: Path) -> None:
    from terminal_program import TerminalProgram

    metrics = [{"step": step, "loss": 10.0 / step, "samples_per_s": 5.0} for step in range(1, 30)]
    config = {"max_steps": 90}
    made(tmp_path / "runs/\x1b]0;evil\x07 name", metrics, recipe="Hostile\x1b[2J[red]recipe", config=config)
    made(tmp_path / "runs/first", metrics, [{"kind": "start", "step": 0, "world": 2}], config=config)
    for rank in range(2):
        write_status(tmp_path / "runs/first", rank, step_ms=20.0, data_wait_ms=5.0, mem_gib=1.5)
    program = TerminalProgram(["watch", "runs"], cwd=tmp_path, columns=100, rows=40)
    program.wait_for("waits for data")
    program.press("j")
    program.wait_for("Hostile")
    program.press("q")
    output, code = program.end()
    assert code == 0 and program.is_restored
    assert "waiting" in output or "running" in output or "unfinished" in output
    assert "25%" in output and "1.5 GiB" in output and "started" in output
    assert "\x1b]0;evil" not in output and "\x1b[2J[red]" not in output, "names cannot control the terminal"
    assert output.rstrip().endswith("\x1b[?25h") or "\x1b[?1049l" in output[-200:]


def test_a_signal_ends_the_terminal_program_and_restores_the_terminal(tmp_path: Path) -> None:
    import signal

    from terminal_program import TerminalProgram

    made(tmp_path / "run", [{"step": 1, "loss": 1.0}])
    program = TerminalProgram(["watch", "run"], cwd=tmp_path, columns=40, rows=12)
    program.wait_for("Made")
    program.process.send_signal(signal.SIGTERM)
    output, code = program.end()
    assert code == 0 and program.is_restored and "\x1b[?1049l" in output


def test_without_a_terminal_the_state_is_printed_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = [{"step": step, "loss": float(step)} for step in range(1, 50)]
    made(tmp_path / "runs/a", metrics, [{"kind": "start", "step": 0, "world": 1}, {"kind": "done", "step": 49}])
    assert main(["watch", str(tmp_path / "runs")]) == 0
    said = capsys.readouterr().out
    assert "a" in said and "done" in said and "\x1b" not in said
    assert main(["watch", str(tmp_path / "runs/a")]) == 0
    said = capsys.readouterr().out
    assert "done trained to the end" in said and "loss, smoothed, steps 1 to 49" in said
    (tmp_path / "empty").mkdir()
    assert main(["watch", str(tmp_path / "empty"), "--once"]) == 0


# ---- the page ----


@contextmanager
def served(paths: list[Path], host: str = "127.0.0.1", **options: Any) -> Iterator[str]:
    with serving(Runs(paths), host, 0, **options) as (server, address):
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield address
        finally:
            server.shutdown()
            thread.join()


def get(address: str, path: str = "/", **headers: str) -> tuple[int, str, dict[str, str]]:
    port = int(address.split(":")[2].partition("/")[0])
    connection = HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode(errors="replace"), dict(answer.getheaders())
    finally:
        connection.close()


def test_only_this_machine_may_ask_by_default(tmp_path: Path) -> None:
    made(tmp_path, [{"step": 1, "loss": 1.0}])
    with served([tmp_path]) as address:
        status, page, headers = get(address)
        assert status == 200 and "Made" in page
        assert headers["Cache-Control"] == "no-store" and headers["X-Frame-Options"] == "DENY"
        assert "default-src 'none'" in page and "connect-src 'self'" in page
        for path in ("/", "/state", "/run?name=x"):
            assert get(address, path, Host="evil.example:8420")[0] == 403, "a name that points at 127.0.0.1"
        for host in ("localhost:9999", "127.0.0.1", "[::1]:80"):
            assert get(address, "/", Host=host)[0] == 200, "a port that ssh forwards"
        for path in (
            "/run.json",
            "/../run.json",
            "/run?name=..",
            "/run?name=%2e%2e%2f",
            "/state?name=x",
            "//x",
            "/%00",
        ):
            assert get(address, path)[0] == 404
        assert get(address, "/state?seen=" + "x" * 3000)[0] == 200


def test_other_machines_need_the_token(tmp_path: Path) -> None:
    made(tmp_path, [{"step": 1, "loss": 1.0}])
    with served([tmp_path], "0.0.0.0") as address:
        token = address.partition("?token=")[2]
        assert len(token) >= 20
        for path in ("/", "/state", "/run?name=x", "/?token=", "/?token=wrong", f"/?token={token}x"):
            status, body, _ = get(address, path, Host="machine:8420")
            assert status == 403 and "Made" not in body
        assert get(address, "/", Cookie="unisono_1=x; broken")[0] == 403
        status, body, headers = get(address, f"/?token={token}", Host="machine:8420")
        assert status == 303 and headers["Location"] == "./" and "HttpOnly" in headers["Set-Cookie"]
        cookie = headers["Set-Cookie"].partition(";")[0]
        assert get(address, "/", Cookie=cookie)[0] == 200 and get(address, "/state", Cookie=cookie)[0] == 200
    with served([tmp_path], with_token=True) as address:
        assert get(address)[0] == 403


def test_only_changed_parts_are_sent(tmp_path: Path) -> None:
    run = RunFolder(made(tmp_path, [{"step": 1, "loss": 1.0}], [{"kind": "start", "step": 0}]))
    with served([tmp_path]) as address:
        first = json.loads(get(address, "/state")[1])["parts"]
        assert [name for name, _, _ in first] == ["head", "ranks", "learning", "events", "speed", "previews"]
        seen = ",".join(f"{name}:{digest}" for name, digest, _ in first)
        time.sleep(0.6)
        again = {name for name, _, _ in json.loads(get(address, f"/state?seen={seen}")[1])["parts"]}
        assert again <= {"head"}, "the training time may have changed"
        run.open({"id": "1", "recipe": "Made"})
        run.event("nan", step=2)
        run.close()
        time.sleep(0.6)
        changed = {name for name, _, _ in json.loads(get(address, f"/state?seen={seen}")[1])["parts"]}
        assert "events" in changed and "ranks" not in changed


def test_a_busy_port_and_wrong_flags_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        cases = {
            ("--web", str(port)): f"port {port} is in use; choose another one with --web PORT",
            ("--web", "70000"): "expected a port from 0 to 65535",
            ("--web", "0", "--host", "no.such.address.invalid"): "--host no.such.address.invalid",
            ("--host", "0.0.0.0"): "require --web",
            ("--web", "--once"): "remove one of them",
            ("--onces",): "did you mean --once?",
        }
        for words, said in cases.items():
            assert main(["watch", str(tmp_path), *words]) == 2, words
            told = capsys.readouterr()
            assert told.out == "" and told.err.count("\n") == 1 and said in told.err
    assert main(["watch"]) == 2 and "pass a run folder" in capsys.readouterr().err
    assert main(["watch", "--web", str(tmp_path / "none")]) == 2, "a folder may follow --web"
    assert "is not a folder" in capsys.readouterr().err


def test_hostile_names_are_text_on_the_page(browser: Browser, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / ATTACK.replace("/", "_")
    made(
        folder,
        [{"step": step, "loss": 1.0 / step, ATTACK: 1.0 * step, f"eval/{ATTACK}": step} for step in (1, 2, 3)],
        [{"kind": kind, "step": 1, "error": ATTACK} for kind in ("failed", ATTACK)],
        recipe=ATTACK,
        config={"max_steps": ATTACK},
    )
    write_status(folder, 0, phase=ATTACK, device=ATTACK)
    with served([tmp_path / "runs"]) as address:
        browser("Page.navigate", url=address)
        browser.wait("document.querySelectorAll('.runs li').length === 1")
        browser.ask("document.querySelector('.runs a').click()")
        browser.wait("document.querySelectorAll('.ranks tbody tr').length === 1")
        with open(folder / "events.jsonl", "a") as events:
            events.write(json.dumps({"kind": "nan", "step": 2, "loss": ATTACK}) + "\n")
        browser.wait("document.body.innerText.includes('not finite')")  # a part that was replaced
        assert browser.ask("document.querySelectorAll('img, #parts script').length") == 0
        assert browser.ask("document.title") != "hacked"
        shutil.rmtree(folder)
        browser.wait("document.querySelector('.status b').textContent === 'gone'")


def test_a_reader_keeps_what_is_open_while_the_page_updates(browser: Browser, tmp_path: Path) -> None:
    folder = made(tmp_path, [{"step": step, "loss": 1.0 / step} for step in range(1, 20)])
    (folder / "previews").mkdir()
    for step in (1, 2):
        (folder / f"previews/step_{step:08d}_words.txt").write_text(f"at {step}")
    with served([folder]) as address:
        browser("Page.navigate", url=address)
        browser.wait("document.querySelectorAll('svg[data-plot]').length >= 1 && !!document.querySelector('details')")
        browser.ask(
            "document.querySelector('details').open = true; window.svg = document.querySelector('svg[data-plot]')"
        )
        box = browser.ask("(box => [box.x + box.width / 2, box.y + box.height / 2])(svg.getBoundingClientRect())")
        browser("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])
        browser.wait("!document.querySelector('.tip').hidden")
        with open(folder / "metrics.jsonl", "a") as metrics:
            metrics.write('{"step": 20, "loss": 0.5}\n')
        browser.wait("JSON.parse(svg.querySelector('.series').dataset.values).x.at(-1) === 20")
        assert browser.ask("document.contains(svg) && document.querySelector('details').open")
        assert browser.ask("!document.querySelector('.tip').hidden && !!svg.querySelector('.cursor')")


@pytest.mark.parametrize("dark", [False, True])
def test_the_page_fits_a_phone_in_both_modes(browser: Browser, tmp_path: Path, dark: bool) -> None:
    made(tmp_path, [{"step": step, "loss": 1.0 / step, "samples_per_s": 9.0 * step} for step in range(1, 20)])
    for rank in range(3):
        write_status(tmp_path, rank, step_ms=20.0, data_wait_ms=5.0, comm_ms=2.0, gpu_util=0.5, gpu_power_w=300.0)
    mode = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    try:
        browser("Emulation.setDeviceMetricsOverride", width=390, height=844, deviceScaleFactor=2, mobile=True)
        browser("Emulation.setEmulatedMedia", features=[mode])
        with served([tmp_path]) as address:
            browser("Page.navigate", url=address)
            browser.wait("document.querySelectorAll('.ranks tbody tr').length === 3")
            assert browser.ask("document.documentElement.scrollWidth <= 390")
            colour = browser.ask("getComputedStyle(document.body).backgroundColor")
            assert (sum(int(part) for part in colour[4:-1].split(",")) < 200) == dark
    finally:
        browser("Emulation.clearDeviceMetricsOverride")
        browser("Emulation.setEmulatedMedia", features=[])


def test_the_server_answers_nothing_but_get(tmp_path: Path) -> None:
    made(tmp_path)
    with served([tmp_path]) as address:
        request = urllib.request.Request(address, data=b"x", method="POST")
        with pytest.raises(urllib.error.HTTPError, match="501"):
            urllib.request.urlopen(request, timeout=20)
