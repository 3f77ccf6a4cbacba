"""Launchers with a shared secret: who does not know it takes no part, learns nothing and costs little."""

from __future__ import annotations

import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from command_line import TINY, end, start, wait_until
from test_rendezvous import Machines
from unisono.cluster.rendezvous import authentication, client, server
from unisono.cluster.rendezvous.authentication import MARK, SECRET, SECRET_FILE, secret_of
from unisono.cluster.rendezvous.client import RendezvousClient
from unisono.errors import UserError

RIGHT, WRONG = b"the secret of this run", b"the secret of another run"


class WithSecrets(Machines):
    """Launchers with secrets, and what they print."""

    def __init__(self) -> None:
        super().__init__()
        self.printed: list[str] = []

    def with_secret(self, number: int, secret: bytes | None) -> RendezvousClient:
        config = client.RendezvousConfig(number, 1, 1, 2, "127.0.0.1", self.port, secret=secret)
        made = RendezvousClient(config, 1, self.printed.append)
        self.made.append(made)
        return made

    def connection(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=20)


@pytest.fixture
def machines(monkeypatch: pytest.MonkeyPatch) -> Iterator[WithSecrets]:
    monkeypatch.setattr(server, "LAST_CALL_FIRST_ROUND_S", 0.5)
    monkeypatch.setattr(server, "LAST_CALL_LATER_ROUNDS_S", 0.1)
    launchers = WithSecrets()
    yield launchers
    launchers.close()


def until_closed(peer: socket.socket) -> bytes:
    data = b""
    while more := peer.recv(1 << 16):
        data += more
    return data


def test_launchers_with_the_same_secret_take_part(machines: WithSecrets) -> None:
    rounds = machines.join(machines.with_secret(0, RIGHT), machines.with_secret(1, RIGHT))
    assert rounds[0].machines == [[0, 1], [1, 1]] and machines.printed == []


@pytest.mark.parametrize(
    "of_machine_0, of_machine_1, server_prints, client_raises",
    [
        (RIGHT, WRONG, "the launcher there has another secret", "127.0.0.1:.* has another secret"),
        (RIGHT, None, "the launcher there has no secret", "127.0.0.1:.* asks for a secret"),
        (None, RIGHT, "has a secret, but this launcher has none", "127.0.0.1:.* has no secret"),
    ],
)
def test_a_wrong_or_missing_secret_is_one_line_on_both_sides(
    machines: WithSecrets, of_machine_0: bytes, of_machine_1: bytes, server_prints: str, client_raises: str
) -> None:
    host = machines.with_secret(0, of_machine_0)
    [first] = machines.join(host)
    with pytest.raises(
        UserError, match=f"^the launcher at {client_raises}; set UNISONO_SECRET .*on all machines"
    ) as error:
        machines.begin(machines.with_secret(1, of_machine_1)).result(30)
    wait_until(lambda: machines.printed, "the server reports it")
    [line] = machines.printed
    assert line.startswith("refused a connection from ") and server_prints in line
    assert first.machines == [[0, 1]] and not host.wants_checkpoint, "it took no part"
    for text in (line, str(error.value), repr(host._config)):
        assert "\n" not in text and RIGHT.decode() not in text and WRONG.decode() not in text


def test_nothing_is_parsed_before_the_proof(machines: WithSecrets, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[object] = []
    machines.with_secret(0, RIGHT)
    monkeypatch.setattr("unisono.cluster.rendezvous.connection.parse_json", parsed.append)
    with machines.connection() as stranger:
        stranger.sendall(b'{"machine": 1, "ranks": 1}\n{"ready": null}\n')
        assert until_closed(stranger).startswith(MARK)
    assert parsed == []


def test_a_recorded_exchange_cannot_be_repeated(machines: WithSecrets) -> None:
    machines.with_secret(0, RIGHT)

    def exchange(send: Callable[[bytes], bytes]) -> bytes:
        with machines.connection() as peer:
            challenge = peer.makefile("rb").readline().removeprefix(MARK).strip()
            peer.sendall(send(challenge))
            return until_closed(peer) if send is repeat else peer.recv(1000)

    ours = b"0" * 64
    recorded: list[bytes] = []

    def honest(challenge: bytes) -> bytes:
        proof = authentication._proof(RIGHT, b"client", challenge, ours)
        recorded.append(MARK + ours + b"\n" + MARK + proof + b"\n")
        return recorded[0]

    def repeat(challenge: bytes) -> bytes:
        return recorded[0]

    assert len(exchange(honest)) == len(MARK) + 64 + 1, "the server proves itself too"
    assert exchange(repeat) == MARK + b"wrong\n"


@pytest.mark.parametrize("echoes", [True, False])
def test_a_false_machine_0_gets_no_message(echoes: bool) -> None:
    received: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            peer, _ = listener.accept()
            with peer, peer.makefile("rb") as lines:
                first = lines.readline()
                peer.sendall(first if echoes else MARK + b"1" * 64 + b"\n")
                received.append(lines.readline())
                peer.sendall(received[0] or b"\n")  # its own proof sent back
                received.append(lines.read())

        thread = threading.Thread(target=answer)
        thread.start()
        config = client.RendezvousConfig(1, 1, 1, 2, "127.0.0.1", listener.getsockname()[1], secret=RIGHT)
        launcher = RendezvousClient(config, 0, print)
        with pytest.raises(UserError, match="does not ask for the secret" if echoes else "has another secret"):
            launcher.next_rendezvous()
        thread.join()
    assert received == ([b"", b""] if echoes else [received[0], b""]), "no message follows"
    assert RIGHT not in b"".join(received)


def test_strangers_are_closed_after_a_time_and_only_some_may_wait(
    machines: WithSecrets, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(authentication, "LIMIT_S", 1.0)
    monkeypatch.setattr(server, "MOST_STRANGERS", 3)
    host = machines.with_secret(0, RIGHT)
    with machines.connection() as silent, machines.connection() as long:
        long.sendall(b"x" * 5000)
        began = time.monotonic()
        assert until_closed(long).startswith(MARK) and until_closed(silent).startswith(MARK)
        assert time.monotonic() - began < 15
    waiting = [machines.connection() for _ in range(20)]
    assert sum(not until_closed(each) for each in waiting) >= 10, "closed without a thread of their own"
    for each in waiting:
        each.close()
    assert machines.join(host)[0].machines == [[0, 1]]


def test_on_one_machine_no_other_program_may_take_part(machines: WithSecrets) -> None:
    config = replace(machines.with_secret(1, None)._config, machine=0, max_machines=1)
    alone = RendezvousClient(config, 0, print)
    machines.made.append(alone)
    with machines.connection() as stranger:
        stranger.sendall(b'{"machine": 0, "ranks": 1}\n')
        assert b"rejected" not in until_closed(stranger)
    assert machines.join(alone)[0].machines == [[0, 1]]


def test_a_round_that_is_none_closes_the_connection() -> None:
    from unisono.cluster.rendezvous.server import Round

    good = {"number": 1, "name": "a", "machines": [[0, 1]], "store_port": 1, "num_restarts": 0}
    good |= {"joined": [], "left": [], "causes": []}
    assert Round.from_message(good) is not None
    for bad in ({"name": 1}, {"machines": [[0]]}, {"machines": []}, {"store_port": "x"}, {"causes": [1]}, {"more": 1}):
        assert Round.from_message({**good, **bad}) is None
    assert Round.from_message([1]) is None and Round.from_message({}) is None


def test_the_secret_comes_from_a_variable_or_a_private_file(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_bytes(RIGHT + b"\n")
    file.chmod(0o600)
    assert secret_of({}) is None
    assert secret_of({SECRET: RIGHT.decode()}) == secret_of({SECRET_FILE: str(file)}) == RIGHT
    file.chmod(0o644)
    with pytest.raises(UserError, match="other users may read or change it; run: chmod 600"):
        secret_of({SECRET_FILE: str(file)})
    for environ, words in (
        ({SECRET: "short"}, "UNISONO_SECRET: the secret has 5 characters, expected 16"),
        ({SECRET: RIGHT.decode(), SECRET_FILE: str(file)}, "both set"),
        ({SECRET_FILE: str(tmp_path)}, "cannot be read"),
        ({SECRET_FILE: str(tmp_path / "none")}, "cannot be read"),
    ):
        with pytest.raises(UserError, match=words) as error:
            secret_of(environ)
        assert RIGHT.decode() not in str(error.value)


def test_real_launchers_with_a_secret_leave_no_trace_of_it(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = ["-m", "unisono", "train", TINY, "--output_dir", "run", "--max_steps", 2, "--nproc", 1, "--batch_size", 2]
    words += ["--nnodes", 2, "--rdzv_endpoint", f"127.0.0.1:{port}", "--node_rank"]
    processes: list[subprocess.Popen[str]] = []
    try:
        processes.append(start([*words, 0], cwd=tmp_path, **{SECRET: RIGHT.decode()}))
        processes.append(start([*words, 1], cwd=tmp_path, **{SECRET: WRONG.decode()}))
        wrong = end(processes[1])
        assert wrong.code == 2 and "has another secret; set UNISONO_SECRET to the same secret" in wrong.err
        processes.append(start([*words, 1], cwd=tmp_path, **{SECRET: RIGHT.decode()}))
        arguments = [Path(f"/proc/{each.pid}/cmdline").read_bytes() for each in (processes[0], processes[2])]
        host, other = end(processes[0]), end(processes[2])
    finally:
        for process in processes:
            process.kill()
    assert host.code == other.code == 0, host.err + other.err
    assert host.err.count("refused a connection from") == 1
    files = [path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert len(files) > 5
    for text in (
        *files,
        *arguments,
        *(part.encode() for each in (host, other, wrong) for part in (each.out, each.err)),
    ):
        assert RIGHT not in text and WRONG not in text
