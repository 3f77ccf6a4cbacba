"""`unisono federate`: one client equals plain training; rounds, drop-outs, privacy, Flower's engines, mistakes."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from command_line import lines, losses
from command_line import unisono as run
from unisono.cli.main import main
from unisono.errors import ConfigError

pytest.importorskip("flwr")

from unisono.federated.split import indices_of, share_of

ROOT = Path(__file__).resolve().parent.parent
MOONS = f"{ROOT / 'examples/own_model/recipe.py'}:TwoMoons"
SMALL = ("--gpus", "0", "--num_points", "512", "--log_every", "1")


class Table(torch.utils.data.Dataset[Any]):
    """Samples with a field, and with shapes."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"hospital": f"h{index % 5}", "value": torch.tensor(float(index))}

    def shape(self, index: int) -> int:
        return index % 3


@pytest.mark.parametrize("split", ["iid", "by:hospital"])
def test_a_split_gives_every_sample_to_exactly_one_client(split: str) -> None:
    data = Table(53)
    shares = [list(indices_of(data, split, client, 4, seed=3)) for client in range(4)]
    assert sorted(index for share in shares for index in share) == list(range(53))
    assert shares == [list(indices_of(data, split, client, 4, seed=3)) for client in range(4)]
    if split == "iid":
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
        assert shares != [list(indices_of(data, split, client, 4, seed=4)) for client in range(4)]
    else:
        owners = [{data[index]["hospital"] for index in share} for share in shares]
        assert [len(each) for each in owners] == [2, 1, 1, 1] and len(set.union(*owners)) == 5
    assert list(indices_of(data, split, 0, 1, seed=3)) == list(range(53))  # one client has the plain order


def test_a_share_keeps_the_shapes_of_its_samples() -> None:
    share: Any = share_of(Table(10), [1, 4, 8])
    assert [share.shape(index) for index in range(3)] == [1, 1, 2] and len(share) == 3


def test_a_field_that_samples_do_not_have_is_an_error_that_lists_those_they_have() -> None:
    with pytest.raises(ConfigError, match="split by:ward: samples have no such field; they have hospital, value"):
        indices_of(Table(5), "by:ward", 0, 2, seed=0)
    with pytest.raises(ConfigError, match="5 values for 6 clients"):
        indices_of(Table(20), "by:hospital", 0, 6, seed=0)


@pytest.fixture
def taken_port() -> Iterator[int]:
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--clients", "0"), "clients: expected a whole number of at least 1, got 0"),
        (("--split", "random"), "split: expected iid, none or by:FIELD"),
        (("--hiden", "8"), "did you mean --hidden?"),
        (("--algorithm", "fedsgd"), "--algorithm: invalid choice"),
        (("--secure_aggregation", "--clients", "2"), "secure_aggregation needs at least 3 clients"),
        (("--secure_aggregation", "--privacy", "server"), "use privacy local"),
        (("--algorithm", "fedprox", "--strategy", "fsdp"), "fedprox needs the whole weights on each rank"),
        (("--ema_decay", "0.9"), "ema_decay: moving averages of clients cannot be combined"),
        (("--min_clients", "9"), "min_clients 9 exceeds the 4 clients"),
        (("--drop", "first"), "drop: expected CLIENT:ROUND"),
        (("--engine", "processes", "--port", "taken"), "cannot be used"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_written(
    flags: tuple[str, ...],
    message: str,
    taken_port: int,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = tuple(str(taken_port) if flag == "taken" else flag for flag in flags)
    assert main(["federate", MOONS, *SMALL, *flags, "--output_dir", "fed"]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_without_flower_the_error_has_the_pip_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flwr.serverapp", None)
    assert main(["federate", MOONS, "--output_dir", str(tmp_path / "fed")]) == 2
    assert 'pip install "unisono[federated]"' in capsys.readouterr().err


def federate(cwd: Path, *flags: object) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor], dict[str, float]]:
    """Runs a federation in the folder `fed`; returns its rounds, weights and metrics."""
    done = run("federate", MOONS, *SMALL, *flags, "--output_dir", "fed", cwd=cwd, seconds=800)
    assert done.code == 0, done.err
    metrics = json.loads((cwd / "fed/result.json").read_text())["metrics"]
    return lines(cwd / "fed", "rounds.jsonl"), load_file(cwd / "fed/model.safetensors"), metrics


@pytest.mark.timeout(900)
def test_a_federation_of_one_client_equals_plain_training(tmp_path: Path) -> None:
    plain = run(
        "train", MOONS, *SMALL, "--max_steps", "12", "--num_epochs", "none", "--output_dir", "plain", cwd=tmp_path
    )
    assert plain.code == 0, plain.err
    rounds, weights, metrics = federate(tmp_path, "--clients", 1, "--rounds", 2, "--local_steps", 6)
    assert [line["clients"] for line in rounds] == [1, 1]
    [checkpoint] = (tmp_path / "plain/checkpoints").glob("step_00000012")
    expected = load_file(checkpoint / "shard-00001-of-00001.safetensors")
    names = [name for name in expected if name.startswith("model.")]
    assert len(names) == len(weights) == 6
    for name in names:
        assert torch.equal(expected[name], weights[name.removeprefix("model.")]), name
    assert losses(tmp_path / "fed/clients/0") == losses(tmp_path / "plain")
    evaluated = [line for line in lines(tmp_path / "plain") if "eval/loss" in line][-1]
    assert metrics["eval/loss"] == evaluated["eval/loss"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_client_that_drops_out_of_a_round_returns_in_the_next(tmp_path: Path) -> None:
    flags = ("--clients", 2, "--rounds", 2, "--local_steps", 6, "--drop", "1:1", "--algorithm", "fedprox", "--nproc", 2)
    rounds, weights, metrics = federate(tmp_path, *flags)
    assert [line["clients"] for line in rounds] == [1, 2]
    assert "client 1 drops out of round 1" in rounds[0]["dropped"][0]
    assert metrics["eval/loss"] < 1 and all(tensor.isfinite().all() for tensor in weights.values())
    steps = [len(losses(tmp_path / f"fed/clients/{client}")) for client in (0, 1)]
    assert steps == [12, 6]
    assert json.loads((tmp_path / "fed/clients/0/run.json").read_text())["starts"][0]["world"] == 2


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "flags",
    [
        ("--engine", "processes", "--clients", 2),
        ("--engine", "simulation", "--clients", 2),
        ("--secure_aggregation", "--clients", 3),
        ("--privacy", "server", "--clients", 2),
        ("--privacy", "client", "--clients", 2),
        ("--privacy", "local", "--clients", 2),
    ],
    ids=lambda flags: "-".join(map(str, flags)).replace("--", ""),
)
def test_a_round_of_each_engine_and_each_protection(tmp_path: Path, flags: tuple[object, ...]) -> None:
    rounds, weights, metrics = federate(tmp_path, *flags, "--rounds", 1, "--local_steps", 6)
    assert [line["clients"] for line in rounds] == [flags[-1]] and rounds[0]["dropped"] == []
    assert all(tensor.isfinite().all() for tensor in weights.values()) and "eval/loss" in metrics
    own = [load_file(file) for file in (tmp_path / "fed/clients").glob("*/checkpoints/step_*/shard-*.safetensors")]
    mean = {name: sum(each[f"model.{name}"] for each in own) / len(own) for name in weights}
    distance = max(float((mean[name] - weights[name]).abs().max()) for name in weights)
    if "--privacy" in flags:
        assert distance > 1e-3  # noise
    else:
        assert distance < (1e-4 if "--secure_aggregation" in flags else 1e-6)  # SecAgg+ quantizes to 22 bits
