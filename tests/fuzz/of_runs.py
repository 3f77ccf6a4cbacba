"""Readers of config files, run folders, checkpoints, weights and messages of launchers."""

from __future__ import annotations

import dataclasses
import json
import socket
import time
from pathlib import Path
from typing import Any

from fuzz.reader import Reader, files_in, write
from unisono.checkpoint.tensor_file import BadTensorFile

_YAML = """\
batch_size: 4
learning_rate: 3.0e-4
mixed_precision: bf16   # a comment
output_dir: &anchor "runs/a"
include: other.yaml
resume: *anchor
"""
_YAML_WORDS = (b"!!python/object/apply:os.system ['x']\n", b"&a [*a]", b"*anchor", b"<<: *anchor\n", b"!!int ''", b"? ")
_JSON_WORDS = (b'"step": 1', b'"batch_size": "4"', b"NaN", b"-Infinity", b'{"a": 1, "a": 2}', b"1e999")


def _write_config(folder: Path) -> None:
    write({"config.yaml": _YAML, "other.yaml": "seed: 3\nmax_steps: 10\n"})(folder)


def _resolve(folder: Path) -> None:
    from unisono.config.resolve import resolve
    from unisono.settings import Settings

    file = next(file for file in (folder / "config.yaml", folder / "config.json") if file.exists())
    resolve([Settings], file=file)


# ---- checkpoints ----


def save_checkpoints(folder: Path) -> None:
    """Two checkpoints of a run."""
    import torch

    from unisono.checkpoint.save import Saver
    from unisono.engine.state import TrainState

    saver = Saver(
        folder / "checkpoints",
        **{"rank": 0, "world": 1, "group": None, "keep_last": 0, "asynchronous": False},  # type: ignore[arg-type]
        identity={"recipe": "Tiny", "run": "a"},
    )
    for step in (1, 2):
        extra = {"state": TrainState(4, step=step, samples=4 * step).to_json(), "optimizer": {}}
        saver.save(step, {"model.a": torch.full((4, 3), float(step)), "model.b": torch.tensor(1.0)}, extra)
        assert saver.wait()[0].error is None


def _resealed(folder: Path) -> None:
    """Updates the manifest to the damaged files, as an attacker could do, so that their content is parsed."""
    from unisono.checkpoint.manifest import CheckpointError, hash_file, read_manifest

    try:
        old = read_manifest(folder)
    except CheckpointError:
        return
    files = {name: hash_file(folder / name) for name in old.files}
    (folder / "manifest.json").write_text(json.dumps(dataclasses.replace(old, files=files).to_json()))


def _read_checkpoints(folder: Path) -> None:
    from unisono.checkpoint.load import load_whole
    from unisono.engine.resume import find_checkpoint, read_state

    _resealed(folder / "checkpoints" / "step_00000002")
    path = find_checkpoint("auto", folder, "Tiny", "a").path
    assert path is not None
    read_state(path)
    load_whole(path, "model.")


def _manifest_with_checksum(name: str, content: bytes) -> bytes:
    from unisono.checkpoint.manifest import _checksum

    try:
        body = json.loads(content)
        body.pop("sha256", None)
        return json.dumps({**body, "sha256": _checksum(body)}).encode()
    except (ValueError, AttributeError, TypeError, RecursionError):
        return content


def _read_manifest(folder: Path) -> None:
    from unisono.checkpoint.find import validate

    validate(folder / "checkpoints" / "step_00000002")


def _write_tensors(folder: Path) -> None:
    import torch
    from safetensors.torch import save_file

    tensors = {
        "a": torch.arange(12.0).reshape(3, 4),
        "b": torch.tensor(3),
        "c.weight": torch.ones(2, 2, dtype=torch.bfloat16),
        "d": torch.zeros(0, 4, dtype=torch.int8),
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _read_tensors(folder: Path) -> None:
    from unisono.checkpoint.tensor_file import TensorFile

    file = TensorFile(folder / "model.safetensors")
    for name, entry in file.entries.items():
        file.dtype(name)
        file.tensor(name)
        if entry.shape:
            file.rows(name, 0, 1)


def _write_shards(folder: Path) -> None:
    from safetensors.torch import save_file

    from unisono.recipes.wan.models.load import build

    sizes = {"num_attention_heads": 1, "attention_head_dim": 12, "num_layers": 1, "ffn_dim": 4, "text_dim": 4}
    weights = build({**sizes, "patch_size": (1, 2, 2), "freq_dim": 4, "in_channels": 4, "out_channels": 4}).state_dict()
    part, stem = "part.safetensors", "diffusion_pytorch_model"
    save_file(weights, folder / part)
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights, part)}
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index))


def _read_shards(folder: Path) -> None:
    from unisono.recipes.wan.models.weights import open_weights, weight_files

    weights = open_weights(weight_files(folder))
    for name in list(weights.names())[:5]:
        weights.shape(name), weights.dtype(name)
        weights.tensor(name)


# ---- run folders ----


def write_run(folder: Path) -> None:
    """A run folder with every file that the report and the live page read."""
    from unisono.observe.folder import RunFolder
    from unisono.observe.watch.rank_status import status_file

    run = RunFolder(folder)
    config = {"batch_size": 4, "api_key": "x", "betas": [0.9, 0.95], "total_steps": 5}
    run.open({"id": "1", "recipe": "Made", "config": config, "sources": {"batch_size": "flag"}, "total_steps": 5})
    run.event("start", step=0, world=2, strategy="ddp", launcher="unisono", why="first start")
    for step in range(1, 6):
        run.metrics({"step": step, "loss": 1 / step, "samples": 4 * step, "step_ms_by_rank": [1.0, 2.0], "own_ms": 1.0})
    run.metrics({"step": 5, "eval/loss": 0.1, "eval/curve": [0.1, 0.2, 0.3]})
    run.event("save", step=5, seconds=0.1, bytes=1000)
    run.event("oom", step=3, rank=1, micro_batch=2)
    run.event("restart", step=3, rank=0, cause="rank 1, step 3: killed", world=2)
    run.event("end", step=5, outcome="done")
    run.close()
    (folder / "previews").mkdir()
    (folder / "previews" / "step_00000005_sample.txt").write_text("a preview")
    file = status_file(folder, 0)
    file.parent.mkdir(exist_ok=True)
    record = {"rank": 0, "world": 2, "host": "a", "device": "cpu", "time": time.time(), "phase": "forward", "pid": 1}
    file.write_text(json.dumps({**record, "phase_since": time.time(), "beat": 5, "step": 7, "total_steps": 90}))


def _report(folder: Path) -> None:
    from unisono.observe.report.write import write_comparison, write_report

    (folder / "made").mkdir()
    write_report(folder, folder / "made" / "report.html")
    write_comparison([folder, _copy(folder)], folder / "made" / "comparison.html")


def _copy(folder: Path) -> Path:
    copy = folder / "made" / "copy"
    write(files_in(folder))(copy)
    return copy


def _watch(folder: Path) -> None:
    from unisono.observe.watch.folder_of_runs import Runs
    from unisono.observe.watch.server import Site
    from unisono.observe.watch.terminal import show_once

    runs = Runs([folder])
    site = Site(runs)
    site.page("/", None)
    site.page("/run", next(iter(runs.by_name), None))
    site.state(next(iter(runs.by_name), None), {})
    show_once(runs)


def _start_again(folder: Path) -> None:
    """What a new start in this folder reads: the record, the stored settings, the best checkpoint, the last metrics."""
    from unisono.checkpoint.commit import read_best
    from unisono.config.resolve import resolve
    from unisono.engine.run_folder.stored_settings import continue_run
    from unisono.observe.folder import RunFolder
    from unisono.settings import Settings

    record = RunFolder.read(folder)
    run = RunFolder(folder)
    run.evaluations(5)
    run.close()
    read_best(folder / "checkpoints")
    resolved = resolve([Settings])
    continue_run(resolved, record, "Made", [Settings], str(folder / "run.json"))


def _write_started(folder: Path) -> None:
    from unisono.config.resolve import resolve
    from unisono.observe.folder import RunFolder
    from unisono.settings import Settings

    resolved = resolve([Settings]).to_json()
    run = RunFolder(folder)
    run.open({"id": "1", "recipe": "Made", "seed": 0, "config": resolved["values"], "sources": resolved["sources"]})
    run.metrics({"step": 5, "eval/loss": 0.1})
    run.close()


def _write_copy(folder: Path) -> None:
    """The copy of a run in object storage."""
    from unisono.observe.folder import RunFolder

    run = RunFolder(folder)
    run.open({"id": "a", "recipe": "Tiny", "starts": ["x"], "config": {}, "sources": {}})
    run.metrics({"step": 2, "eval/loss": 0.1})
    run.close()
    save_checkpoints(folder)


def _restore(folder: Path) -> None:
    """Restores the run from its copy, which fsspec reads from this folder."""
    from unisono.mirror.restore import restore_run

    _resealed(folder / "checkpoints" / "step_00000002")
    address = f"file://{folder.resolve()}"
    restore_run(folder / "made", address, "Tiny", resume="auto", is_named=True)


def _write_study(folder: Path) -> None:
    _write_trials(folder, shared=False)


def _write_shared_study(folder: Path) -> None:
    _write_trials(folder, shared=True)


def _write_trials(folder: Path, *, shared: bool) -> None:
    import optuna

    from unisono.tuning.storage import close_database, open_database

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    storage = open_database(folder, shared=shared)
    study = optuna.create_study(storage=storage, study_name="study", sampler=optuna.samplers.RandomSampler(seed=0))
    study.optimize(lambda trial: trial.suggest_float("learning_rate", 1e-4, 1e-1, log=True), n_trials=3)
    close_database(storage)
    record = {
        **{"kind": "study", "recipe": "Made", "objective": "eval/loss", "direction": "minimize", "trials": 3},
        **{"search": {"learning_rate": "0.0001..0.1"}, "command": ["unisono", "train", "Made"], "config": {}},
    }
    (folder / "study.json").write_text(json.dumps(record))


def _read_study(folder: Path) -> None:
    from unisono.tuning.page import write_page
    from unisono.tuning.study import read_trials

    (folder / "made").mkdir()
    write_page(read_trials(folder), folder / "made" / "study.html")


# ---- messages between launchers ----

_MESSAGES = (
    b'{"machine": 1, "ranks": 8}\n{"heartbeat": true}\n{"ready": {"cause": "rank 1: killed", "counted": true}}\n'
    b'{"ready": null}\n{"finished": true}\n{"closed": "over"}\n'
)


def _talk_to_server(folder: Path) -> None:
    """Sends the bytes to a real rendezvous server; it must go on to admit a machine."""
    from unisono.cluster.rendezvous.connection import Connection
    from unisono.cluster.rendezvous.server import RendezvousServer

    server = RendezvousServer(0, 1, 1, 2, 0)
    failed: list[BaseException] = []
    import threading

    before, threading.excepthook = threading.excepthook, lambda arguments: failed.append(arguments.exc_value)
    try:
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as stranger:
            stranger.sendall((folder / "sent").read_bytes())
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(1 << 16):
                pass
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as launcher:
            connection = Connection(launcher)
            connection.send(machine=0, ranks=1)
            connection.send(heartbeat=True)
            next(connection.messages())
    except ConnectionError:
        pass
    finally:
        server.shut_down()
        threading.excepthook = before
    if failed:
        raise failed[0]


_ROUND: dict[str, Any] = {
    **{"number": 1, "name": "a", "machines": [[0, 1], [1, 8]], "store_port": 5, "num_restarts": 0, "joined": []},
    **{"left": [], "causes": []},
}
_ANSWERS = b"\n".join(
    json.dumps(each).encode()
    for each in ({"heartbeat": True}, {"round": _ROUND}, {"regroup": "save"}, {"rejected": "x"}, {"closed": "y"}, {})
)


def _answer_client(folder: Path) -> None:
    """Answers a real launcher with these bytes, as a foreign program at the address of machine 0 could."""
    import threading

    from unisono.cluster.rendezvous.client import RendezvousClient, RendezvousConfig

    failed: list[BaseException] = []
    before, threading.excepthook = threading.excepthook, lambda arguments: failed.append(arguments.exc_value)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.sendall((folder / "answered").read_bytes())
                peer.shutdown(socket.SHUT_WR)
                while peer.recv(1 << 16):
                    pass

        thread = threading.Thread(target=answer)
        thread.start()
        config = RendezvousConfig(1, 1, 1, 2, "127.0.0.1", listener.getsockname()[1], join_s=0.2)
        client = RendezvousClient(config, 0, lambda line: None)
        try:
            client._connect(0.0)
            deadline = time.monotonic() + 20
            while client._connection is not None and time.monotonic() < deadline:
                client.num_nodes_waiting()
                time.sleep(0.001)
        finally:
            client.shutdown()
            thread.join()
            threading.excepthook = before
    if failed:
        raise failed[0]


def _read_job(folder: Path) -> None:
    from unisono.cluster.hangs.heartbeat import read_heartbeats

    read_heartbeats(folder)


READERS = [
    Reader("yaml_config", "unisono.config.file", _write_config, _resolve, words=_YAML_WORDS),
    Reader(
        "json_config",
        "unisono.config.resolve",
        write({"config.json": '{"batch_size": 4, "learning_rate": 0.1, "seed": 1}'}),
        _resolve,
        words=_JSON_WORDS,
    ),
    Reader(
        "manifest",
        "unisono.checkpoint.manifest",
        save_checkpoints,
        _read_manifest,
        damaged=("*_00000002/manifest.json",),
        mended=_manifest_with_checksum,
    ),
    Reader(
        "checkpoint",
        "unisono.checkpoint.contents",
        save_checkpoints,
        _read_checkpoints,
        damaged=("*_00000002/state.json", "*_00000002/*.safetensors"),
    ),
    Reader("safetensors", "unisono.checkpoint.tensor_file", _write_tensors, _read_tensors, (BadTensorFile,)),
    Reader("weights", "unisono.recipes.wan.models.weights", _write_shards, _read_shards),
    Reader("run_folder", "unisono.engine.run_folder.stored_settings", _write_started, _start_again),
    Reader("report", "unisono.observe.report.read", write_run, _report, words=_JSON_WORDS),
    Reader("watch", "unisono.observe.watch.live_run", write_run, _watch, words=_JSON_WORDS),
    Reader("study", "unisono.tuning.study", _write_study, _read_study),
    Reader("study_journal", "unisono.tuning.storage", _write_shared_study, _read_study, words=_JSON_WORDS),
    Reader("object_storage", "unisono.mirror.restore", _write_copy, _restore, words=_JSON_WORDS),
    Reader(
        "rendezvous_server",
        "unisono.cluster.rendezvous.server",
        write({"sent": _MESSAGES}),
        _talk_to_server,
        words=_JSON_WORDS,
    ),
    Reader(
        "rendezvous_client",
        "unisono.cluster.rendezvous.client",
        write({"answered": _ANSWERS}),
        _answer_client,
        words=_JSON_WORDS,
    ),
]
