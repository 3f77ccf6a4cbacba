"""Trains from tar shards with checkpoints in object storage, while machines and the storage fail.

    python benchmarks/storage_faults.py --output benchmarks/results        # about 5 minutes on 2 cores

Shards and checkpoints are on a real S3-compatible server on loopback (tests/s3_server.py). The server is killed and
slowed, the run is killed with SIGKILL and continued on fresh machines with other numbers of ranks, and objects are
damaged. Each run is compared with one that read local shards on one rank without any fault: the samples of every step
element by element, the loss of every step, and the final weights. Needs the extra `storage`, and moto[server].
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from machine import machine, versions

from unisono.checkpoint.find import list_steps
from unisono.checkpoint.load import load_whole

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests"))

from s3_server import BUCKET, S3Server  # noqa: E402

RECIPE = f"{HERE / 'storage_faults_recipe.py'}:Shards"
STEPS, EVERY, BATCH = 32, 4, 12
SHARDS, PER_SHARD, BYTES = 8, 40, 4000
RUN = ["--global_batch_size", str(BATCH), "--batch_size", "6", "--max_steps", str(STEPS), "--save_every", str(EVERY)]
RUN += ["--seed", "5", "--max_restarts", "0", "--mirror_timeout", "60", "--shuffle_window", "80"]
PACE_S, SLOW_PACE_S = 0.15, 0.6  # seconds per micro-batch; slow: so that a run does not end before it is killed
ROUNDING = 1e-12
MOST_STARTS = 8
SLOW_BYTES_PER_S, SLOW_DELAY_S = 150_000, 0.05


class Failed(Exception):
    """A run ended in an unexpected way."""


@dataclass
class Row:
    """One line of the table."""

    name: str
    ranks: list[int] = field(default_factory=list)  # of each start
    faults: int = 0
    mirrored: int = 0  # checkpoints copied
    samples: int = 0  # compared
    order_differs: int = 0  # samples that differ from the undisturbed run
    repeated: int = 0  # steps computed again after a fault
    loss_difference: float = 0.0
    weight_difference: float = 0.0
    seconds: float = 0.0
    error: str = ""

    @property
    def ok(self) -> bool:
        differs = max(self.loss_difference, self.weight_difference) > ROUNDING
        return not self.error and self.samples == STEPS * BATCH and not self.order_differs and not differs


class SlowProxy:
    """Forwards connections to the server, with a delay and a limited number of bytes per second in all."""

    def __init__(self, target: int) -> None:
        self._target, self._lock, self._free_at = target, threading.Lock(), 0.0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                return
            for one, other in ((client, server), (server, client)):
                threading.Thread(target=self._forward, args=(one, other), daemon=True).start()

    def _forward(self, one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError):
            while data := one.recv(16384):
                time.sleep(SLOW_DELAY_S)
                with self._lock:  # each byte takes its time on the one line that all connections share
                    self._free_at = max(self._free_at, time.monotonic()) + len(data) / SLOW_BYTES_PER_S
                    wait = self._free_at - time.monotonic()
                time.sleep(max(0.0, wait))
                other.sendall(data)
        for end in (one, other):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


class Scenario:
    """One run that is started several times, each time on the same machine or on a fresh one."""

    def __init__(
        self, root: Path, server: S3Server, name: str, row: Row, *, port: int | None = None, pace_s: float = PACE_S
    ) -> None:
        self.root, self.server, self.row, self._port = root / name, server, row, port
        self._pace_s = pace_s
        self.address, self._machine = f"s3://{BUCKET}/{name}", 0
        self.root.mkdir(parents=True)

    def fresh_machine(self) -> None:
        """From now on, commands run on a machine without any file of the run."""
        self._machine += 1

    @property
    def cache(self) -> Path:
        return self.root / f"machine{self._machine}"

    @property
    def folder(self) -> Path:
        """The run folder on the present machine."""
        return next((self.cache / "unisono" / "runs").iterdir())

    def start(self, ranks: int, *flags: str) -> subprocess.Popen[bytes]:
        number = len(self.row.ranks)
        self.row.ranks.append(ranks)
        environ = {**os.environ, **self.server.environ(self._port), "XDG_CACHE_HOME": str(self.cache)}
        environ |= {"UNISONO_BENCH_SAMPLES": str(self.root / f"samples{number:02d}")}
        environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        words = ["train", RECIPE, "--nproc", str(ranks), *RUN, "--output_dir", self.address]
        words += ["--pace", str(self._pace_s)]
        words += [
            "--shards",
            f"s3://{BUCKET}/shards/{{000..{SHARDS - 1:03d}}}.tar",
            "--cache",
            str(self.cache / "data"),
        ]
        with open(self.root / "log", "ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "unisono", *words, *flags],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def finish(self, process: subprocess.Popen[bytes], ranks: int) -> None:
        """Waits for the run; starts it again if it ended because it could not read its data."""
        while (code := self._wait(process)) != 0:
            if code != 3 or len(self.row.ranks) >= MOST_STARTS:
                raise Failed(f"exit code {code}: {self._last_line()}")
            process = self.start(ranks)

    def _wait(self, process: subprocess.Popen[bytes]) -> int:
        try:
            return process.wait(300)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise Failed("hangs") from None

    def _last_line(self) -> str:
        lines = (self.root / "log").read_text().splitlines()
        return lines[-1] if lines else ""

    def reach(self, condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + 200
        while not condition():
            if time.monotonic() > deadline or process.poll() is not None:
                raise Failed(f"no progress (exit code {process.poll()}): {self._last_line()}")
            time.sleep(0.02)

    def copied(self) -> list[int]:
        """The steps whose checkpoints are complete in the store."""
        names = self.server.objects(f"{self.address.rpartition('/')[2]}/checkpoints/")
        return sorted(int(name[5:13]) for name in names if name.endswith("/manifest.json"))

    def step(self) -> int:
        """The newest step that the present start has computed."""
        files = self.root.glob(f"samples{len(self.row.ranks) - 1:02d}-0.jsonl")
        lines = [line for file in files for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
        return json.loads(lines[-1])["step"] if lines else 0

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        """Sends SIGKILL to the launcher; the kernel then kills its ranks and the process that copies."""
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        self.row.faults += 1
        time.sleep(1.0)

    def kill_server(self, seconds: float) -> None:
        self.server.kill()
        self.row.faults += 1
        time.sleep(seconds)
        self.server.start()


def order_of(folder: Path, row: Row | None = None) -> dict[int, list[int]]:
    """The samples of each step in the order of the global batch, from the last start that computed the step."""
    starts: dict[str, dict[int, dict[int, list[int]]]] = {}
    for file in sorted(folder.glob("samples*-*.jsonl")):
        start, _, rank = file.stem.partition("-")
        for line in file.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                record = json.loads(line)
                steps = starts.setdefault(start, {}).setdefault(record["step"], {})
                steps.setdefault(int(rank), []).extend(record["ids"])
    order: dict[int, list[int]] = {}
    for start in sorted(starts):
        for step, by_rank in starts[start].items():
            if row is not None and step in order:
                row.repeated += 1
            order[step] = [number for rank in sorted(by_rank) for number in by_rank[rank]]
    return order


def losses(folder: Path) -> list[float]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    if [record["step"] for record in records] != list(range(1, STEPS + 1)):
        raise Failed("metrics.jsonl does not contain each step once")
    return [record["loss"] for record in records]


def compare(scenario: Scenario, reference: Path) -> None:
    row, folder = scenario.row, scenario.folder
    ours, theirs = order_of(scenario.root, row), order_of(reference)
    for step in range(1, STEPS + 1):
        row.samples += len(ours.get(step, []))
        pairs = zip(ours.get(step, []), theirs[step], strict=False)
        row.order_differs += sum(one != other for one, other in pairs)
    row.loss_difference = max(abs(a - b) for a, b in zip(losses(folder), losses(reference / "run"), strict=True))
    weights = [load_whole(list_steps(path / "checkpoints")[-1][1], "") for path in (folder, reference / "run")]
    row.weight_difference = max(float((weights[0][name] - weights[1][name]).abs().max()) for name in weights[1])
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    row.mirrored = sum(event["kind"] == "mirrored" for event in events)
    if scenario.copied()[-1] != STEPS:
        raise Failed("the last checkpoint is not in the store")


def write_shards(folder: Path) -> None:
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    for shard in range(SHARDS):
        with tarfile.open(folder / f"{shard:03d}.tar", "w") as tar:
            for number in range(shard * PER_SHARD, (shard + 1) * PER_SHARD):
                for name, data in (("bin", random.bytes(BYTES)), ("cls", str(number).encode())):
                    info = tarfile.TarInfo(f"{number:06d}.{name}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))


def undisturbed(root: Path) -> Path:
    """One rank, local shards, no copy."""
    folder = root / "reference"
    folder.mkdir()
    environ = {**os.environ, "UNISONO_BENCH_SAMPLES": str(folder / "samples00"), "CUDA_VISIBLE_DEVICES": ""}
    words = ["train", RECIPE, "--nproc", "1", *RUN, "--output_dir", str(folder / "run"), "--cache", str(folder)]
    words += ["--shards", str(root / "shards" / "*.tar")]
    with open(folder / "log", "ab") as log:
        subprocess.run([sys.executable, "-m", "unisono", *words], env=environ, stdout=log, stderr=log, check=True)
    return folder


def server_killed(root: Path, server: S3Server) -> Scenario:
    row = Row("server killed twice for 3 s, after the first copy")
    scenario = Scenario(root, server, "killed", row)
    process = scenario.start(2)
    scenario.reach(lambda: bool(scenario.copied()), process)
    scenario.kill_server(3)
    scenario.reach(lambda: scenario.step() >= STEPS // 2, process)
    scenario.kill_server(3)
    scenario.finish(process, 2)
    return scenario


def server_slow(root: Path, server: S3Server) -> Scenario:
    rate = f"{SLOW_BYTES_PER_S // 1000} kB/s, {1000 * SLOW_DELAY_S:.0f} ms"
    row = Row(f"server slowed to {rate} for the whole run", faults=1)
    proxy = SlowProxy(server.port)
    scenario = Scenario(root, server, "slow", row, port=proxy.port)
    scenario.finish(scenario.start(2), 2)
    proxy.close()
    return scenario


def machines_killed(root: Path, server: S3Server) -> Scenario:
    row = Row("machine lost (SIGKILL) on 2 ranks, then on 3, then 1 rank: a fresh machine each time; server killed too")
    scenario = Scenario(root, server, "moved", row, pace_s=SLOW_PACE_S)
    process = scenario.start(2)
    scenario.reach(lambda: bool(scenario.copied()), process)
    scenario.kill(process)
    scenario.fresh_machine()
    before = scenario.copied()[-1]
    process = scenario.start(3)
    scenario.reach(lambda: scenario.copied()[-1] > before, process)
    scenario.kill_server(2)
    scenario.kill(process)
    scenario.fresh_machine()
    scenario.finish(scenario.start(1), 1)
    return scenario


def killed_in_an_upload(root: Path, server: S3Server) -> Scenario:
    row = Row("machine lost in the middle of an upload; newest copy damaged; 2 → 3 ranks on a fresh machine")
    scenario = Scenario(root, server, "upload", row, pace_s=SLOW_PACE_S)
    held = server.folder / "held"
    held.unlink(missing_ok=True)
    process = scenario.start(2)
    scenario.reach(lambda: bool(scenario.copied()), process)
    saved = -(-scenario.step() // EVERY) * EVERY + EVERY
    (server.folder / "hold").write_text(f"upload/checkpoints/step_{saved:08d}/state.json")
    try:
        scenario.reach(held.exists, process)
        scenario.kill(process)
    finally:
        (server.folder / "hold").unlink()
    server.kill()
    name = f"upload/checkpoints/step_{scenario.copied()[-1]:08d}/state.json"
    content = bytearray(server.objects()[name])
    content[len(content) // 2] ^= 1
    server.put(name, bytes(content))
    row.faults += 1
    server.start()
    scenario.fresh_machine()
    scenario.finish(scenario.start(3), 3)
    if "skipped: the hash of state.json differs" not in (scenario.root / "log").read_text():
        raise Failed("the damaged object was not noticed")
    return scenario


def carry_out(work: Callable[[Path, S3Server], Scenario], root: Path, server: S3Server, reference: Path) -> Row:
    started, row = time.monotonic(), Row(work.__name__)
    try:
        scenario = work(root, server)
        row = scenario.row
        compare(scenario, reference)
    except (Failed, OSError, ValueError, IndexError) as error:
        row.error = f"{type(error).__name__}: {error}"
    row.seconds = time.monotonic() - started
    print(f"{'ok  ' if row.ok else 'LOST'} {row.seconds:6.1f} s  {row.name}  {row.error}", flush=True)
    return row


def table(rows: list[Row], results: dict) -> str:
    faults, lost = sum(row.faults for row in rows), sum(not row.ok for row in rows)
    facts = results["machine"]
    out = [
        "# Faults of object storage",
        "",
        f"**{faults} faults, {lost} runs lost.** `{results['command']}`, {results['when']}; {facts['processor']}, "
        f"{facts['cores']} cores, load average {facts['load_average']} at the start, torch "
        f"{results['versions']['torch']}, {results['seconds'] / 60:.1f} minutes.",
        "",
        f"Each run trains {STEPS} steps of {BATCH} samples from {SHARDS} tar shards on an S3 server on loopback, "
        f"through a cache of shards, and copies a checkpoint there every {EVERY} steps. It is compared with a run of "
        "one rank on local shards without faults.",
        "",
        "| fault | ranks of each start | faults | samples in order | steps repeated | largest difference: losses "
        "| weights | copies | seconds | ok |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        right = f"{row.samples - row.order_differs} of {STEPS * BATCH}"
        ranks = " → ".join(map(str, row.ranks))
        differences = f"{row.loss_difference:.0e} | {row.weight_difference:.0e}"
        verdict = "yes" if row.ok else f"NO {row.error}"
        out.append(
            f"| {row.name} | {ranks} | {row.faults} | {right} | {row.repeated} | {differences} | {row.mirrored} | "
            f"{row.seconds:.0f} | {verdict} |"
        )
    out += [
        "",
        f"Losses and weights are float64 and may differ by rounding (up to {ROUNDING:.0e}), because the numbers of "
        "ranks differ. A run that ends because its data cannot be read (exit code 3) is started again with the same "
        "command, and counts as another start. Copies are the checkpoints that events.jsonl of the last machine "
        "records.",
    ]
    return "\n".join([*out, ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="folder for storage_faults.json and storage_faults.md")
    parser.add_argument("--only", default="", help="run only the scenario whose function name contains this")
    parser.add_argument("--keep", type=Path, help="keep the runs in this new folder")
    options = parser.parse_args()
    before, started = machine(), time.monotonic()
    every = (server_killed, server_slow, machines_killed, killed_in_an_upload)
    works = [work for work in every if options.only in work.__name__]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="unisono-storage-") as temporary:
        root = (options.keep or Path(temporary)).resolve()
        write_shards(root / "shards")
        server = S3Server(root / "server")
        (root / "server" / BUCKET).mkdir()
        for shard in (root / "shards").iterdir():
            shutil.copy(shard, root / "server" / BUCKET / f"shards%2F{shard.name}")
        server.start()
        try:
            reference = undisturbed(root)
            rows = [carry_out(work, root, server, reference) for work in works]
        finally:
            server.kill()
    results = {
        "command": shlex.join(["python", "benchmarks/storage_faults.py", *sys.argv[1:]]),
        "when": time.strftime("%Y-%m-%d"),
        "seconds": time.monotonic() - started,
        "machine": before,
        "versions": versions(["torch", "fsspec", "s3fs", "moto"]),
        "rows": [vars(row) | {"ok": row.ok} for row in rows],
    }
    print("\n" + table(rows, results))
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "storage_faults.json").write_text(json.dumps(results, indent=1) + "\n")
        (options.output / "storage_faults.md").write_text(table(rows, results))
    return 0 if rows and all(row.ok for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
