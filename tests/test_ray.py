"""A run on a Ray cluster: placed by Ray, and the same run when a node is killed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from command_line import TESTS, TINY, end, lines, losses, start, unisono, wait_until
from ray_cluster import RayCluster, ranks, ray_cluster
from tiny_recipe import HOLD
from unisono.ray.driver import exit_code
from unisono.ray.machine import Machine
from unisono.ray.output import MergedOutput

STEPS = 40
TRAIN = ["--max_steps", STEPS, "--dtype", "float64", "--batch_size", 2, "--global_batch_size", 4, "--save_every", 2]
HELD = "0.15"  # seconds per step until a test removes the file


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of an undisturbed run on one rank, without Ray."""
    place = tmp_path_factory.mktemp("undisturbed")
    ended = unisono("train", TINY, "--output_dir", "run", *TRAIN, cwd=place)
    assert ended.code == 0, ended.err
    return losses(place / "run")


@pytest.fixture(scope="module")
def hold(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file that slows down steps while it exists."""
    return tmp_path_factory.mktemp("hold") / "hold"


@pytest.fixture(scope="module")
def running(hold: Path) -> Iterator[RayCluster]:
    """The cluster."""
    with ray_cluster(**{HOLD: str(hold)}) as cluster:
        yield cluster


@pytest.fixture
def cluster(running: RayCluster) -> RayCluster:
    """The cluster, with two nodes."""
    running.make_nodes(2)
    return running


def launch(cluster: RayCluster, cwd: Path, *words: object) -> subprocess.Popen[str]:
    """Starts the driver of a run."""
    command = ["-m", "unisono", "train", TINY, "--on", "ray", "--nproc", 1, "--output_dir", "run", *TRAIN, *words]
    return start(command, cwd=cwd, **cluster.variables)


def wait_for_steps(run: Path, count: int, world: int, driver: subprocess.Popen[str]) -> None:
    """Waits until this many ranks have done this many more steps."""
    after = max((line["step"] for line in lines(run)), default=0)

    def done() -> bool:
        assert driver.poll() is None, driver.communicate()
        return sum(line["world"] == world for line in lines(run) if line["step"] > after) >= count

    wait_until(done, f"{count} steps on {world} ranks", 120)


def starts(run: Path) -> list[dict[str, Any]]:
    """Every start of the ranks."""
    result: list[dict[str, Any]] = json.loads((run / "run.json").read_text())["starts"]
    return result


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    """The run's events of one kind."""
    return [event for event in lines(run, "events.jsonl") if event["kind"] == kind]


def tensors(run: Path) -> dict[str, Tensor]:
    """All tensors in the files of the last checkpoint."""
    newest = max((run / "checkpoints").glob("step_*"))
    files = sorted(newest.glob("*.safetensors"))
    return {f"{file.name}/{name}": tensor for file in files for name, tensor in load_file(file).items()}


# ---- without a cluster ----


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    for words, code, expected in (
        (["--on", "slurm"], 2, "unisono: on: expected ray or ray:HOST:PORT, got 'slurm'"),
        (["--on", "ray:nowhere"], 2, "unisono: address of the Ray cluster: expected HOST:PORT, for instance head-no"),
        (["--on", "ray:ray://head:10001"], 2, "unisono: Ray Client (ray://) is not supported; run the command on a"),
        (["--on", "ray:127.0.0.1:1"], 2, "unisono: no Ray cluster answers at 127.0.0.1:1 (Connection refused)"),
        (["--on", "ray", "--nnodes", 2, "--node_rank", 0], 2, "unisono: node_rank: the Ray driver sets this itself"),
    ):
        ended = unisono("train", TINY, *words, cwd=tmp_path)
        assert (ended.code, ended.err.count("\n")) == (code, 1) and ended.err.startswith(expected), ended.err
    assert list(tmp_path.iterdir()) == []


def test_without_ray_the_error_names_the_extra(tmp_path: Path) -> None:
    program = "import sys, importlib.util as u; u.find_spec = lambda name: None\n"
    program += f"sys.argv = ['unisono', 'train', {TINY!r}, '--on', 'ray']\n"
    ended = end(start(["-c", program + "from unisono.cli.main import program; program()"], cwd=tmp_path))
    assert ended.code == 2
    assert ended.err == 'unisono: a run on Ray needs Ray; run: pip install "unisono[ray]"\n'


def test_messages_of_all_launchers_appear_once(capsys: pytest.CaptureFixture[str]) -> None:
    output = MergedOutput()
    for machine, line in (
        *((0, "step 1"), (1, "from rank 1"), (0, "unisono: a"), (1, "unisono: a"), (1, "unisono: b")),
        *((1, "unisono: a"), (0, "unisono: a")),
    ):
        output.write(machine, "err", line, is_main=machine == 0)
    assert capsys.readouterr().err.splitlines() == [
        *("step 1", "[machine 1] from rank 1", "unisono: a", "unisono: b", "unisono: a")
    ]


def test_the_last_report_of_a_machine_can_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "node"))
    machine = Machine({}, str(tmp_path), {})  # the job lacks everything, so the program ends at once
    while (report := machine.poll())["exit"] is None:
        pass
    again = machine.poll()
    assert (again["exit"], again["result"]) == (report["exit"], report["result"]) == (1, None)


def test_one_machine_that_ended_well_speaks_for_the_run() -> None:
    for codes, expected in (
        *(({0}, 0), ({75}, 75), ({0, 3}, 0), ({75, 143}, 75)),  # a machine came too late, or exited slowly
        *(({2, 3}, 2), ({3, 143}, 3), ({1}, 3), ({130}, 130), (set(), 3)),
    ):
        assert exit_code(codes) == expected, codes


# ---- on a cluster ----


def test_a_run_continues_on_what_is_left_when_a_node_is_killed(
    tmp_path: Path, cluster: RayCluster, hold: Path, undisturbed: list[float]
) -> None:
    run = tmp_path / "run"
    hold.write_text(HELD)
    driver = launch(cluster, tmp_path, "--nnodes", "1:2", "--max_restarts", 0)
    wait_for_steps(run, 3, 2, driver)
    cluster.kill_node_of(rank=0)
    wait_for_steps(run, 2, 1, driver)
    hold.unlink()
    ended = end(driver)
    assert ended.code == 0, ended.err
    assert losses(run) == pytest.approx(undisturbed, rel=1e-10)
    assert [each["world"] for each in starts(run)] == [2, 1]
    [change] = events(run, "machines")
    assert change["left"] == [0] and change["machines"] == [1]
    assert events(run, "restart") == [], "machines that leave are no restarts"
    assert "machine 0 left: continuing from the last checkpoint with 1 machine, 1 rank" in ended.err
    assert ranks() == []


def test_a_driver_script_trains_on_the_cluster(tmp_path: Path, cluster: RayCluster, undisturbed: list[float]) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(TESTS)!r})\n"
        "import unisono\nfrom tiny_recipe import Tiny\n"
        f"result = unisono.ray.train(Tiny, {{'max_steps': {STEPS}}}, address={cluster.address!r}, nnodes=2, nproc=1,\n"
        "    dtype='float64', batch_size=2, output_dir='run')\n"
        "print(result.status, result.step, result.folder, len(result.metrics) > 0, result.last['loss'])\n"
    )
    ended = end(start([script], cwd=tmp_path, **cluster.variables | {"RAY_ADDRESS": ""}))
    assert ended.code == 0, ended.err
    assert ended.out.splitlines()[-1].startswith(f"done {STEPS} run True "), ended.out
    assert losses(tmp_path / "run") == pytest.approx(undisturbed, rel=1e-10)
    assert [each["world"] for each in starts(tmp_path / "run")] == [2]
    assert "2 on 2 machines" in ended.out + ended.err


@pytest.mark.slow
def test_a_run_with_a_replaced_node_equals_the_undisturbed_run(tmp_path: Path, cluster: RayCluster, hold: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    ended = end(launch(cluster, tmp_path / "a", "--nnodes", 2))
    assert ended.code == 0, ended.err
    hold.write_text(HELD)
    driver = launch(cluster, tmp_path / "b", "--nnodes", 2)
    run = tmp_path / "b/run"
    wait_for_steps(run, 3, 2, driver)
    cluster.kill_node_of(rank=0)
    cluster.make_nodes(2)
    wait_for_steps(run, 1, 2, driver)
    hold.unlink()
    ended = end(driver)
    assert ended.code == 0, ended.err
    assert "machine 0 (" in ended.err and "its node is lost; Ray starts it again" in ended.err
    assert losses(run) == losses(tmp_path / "a/run")
    assert len(tensors(run)) > 0
    torch.testing.assert_close(tensors(run), tensors(tmp_path / "a/run"), rtol=0, atol=0)
    assert [each["world"] for each in starts(run)] == [2, 2]


@pytest.mark.slow
def test_a_machine_that_ray_places_later_joins_without_losing_a_step(
    tmp_path: Path, cluster: RayCluster, hold: Path, undisturbed: list[float]
) -> None:
    run = tmp_path / "run"
    hold.write_text("2")  # longer, because a node must start in the meantime
    driver = launch(cluster, tmp_path, "--nnodes", "1:3", "--max_restarts", 0)  # begins with two after half a minute
    wait_for_steps(run, 2, 2, driver)
    cluster.make_nodes(3)
    wait_for_steps(run, 1, 3, driver)
    hold.unlink()
    ended = end(driver)
    assert ended.code == 0, ended.err
    assert losses(run) == pytest.approx(undisturbed, rel=1e-10)


@pytest.mark.slow
def test_a_user_error_is_not_retried(tmp_path: Path, cluster: RayCluster) -> None:
    ended = end(launch(cluster, tmp_path, "--nnodes", 2, "--flaw", "text"))
    assert ended.code == 2
    assert ended.err.count("unisono: loss(): total must be a scalar tensor") == 1
    assert "restarting" not in ended.err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_sigterm_saves_and_stops_and_the_same_command_continues(
    tmp_path: Path, cluster: RayCluster, hold: Path, undisturbed: list[float]
) -> None:
    run = tmp_path / "run"
    hold.write_text(HELD)
    driver = launch(cluster, tmp_path, "--nnodes", 2)
    wait_for_steps(run, 3, 2, driver)
    driver.send_signal(signal.SIGTERM)
    ended = end(driver)
    hold.unlink()
    assert ended.code == 75, ended.err
    assert ended.err.count("SIGTERM: saving a checkpoint and stopping") == 1
    [event] = events(run, "signal")
    assert event["signal"] == "SIGTERM"
    ended = end(launch(cluster, tmp_path, "--nnodes", 1))
    assert ended.code == 0, ended.err
    assert starts(run)[1]["from_step"] == event["step"], "no step was lost"
    assert losses(run) == pytest.approx(undisturbed, rel=1e-10)


@pytest.mark.slow
def test_a_killed_driver_leaves_no_rank_behind(tmp_path: Path, cluster: RayCluster, hold: Path) -> None:
    hold.write_text(HELD)
    driver = launch(cluster, tmp_path, "--nnodes", 2)
    wait_for_steps(tmp_path / "run", 1, 2, driver)
    assert len(ranks()) == 2
    driver.kill()
    driver.communicate()
    hold.unlink()
    wait_until(lambda: ranks() == [], "all ranks end", 60)


@pytest.mark.slow
def test_a_killed_launcher_is_started_again_by_the_driver(
    tmp_path: Path, cluster: RayCluster, hold: Path, undisturbed: list[float]
) -> None:
    run = tmp_path / "run"
    hold.write_text(HELD)
    driver = launch(cluster, tmp_path, "--nnodes", 1)
    wait_for_steps(run, 3, 1, driver)
    [rank] = ranks()
    launcher = int(Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[1])
    subprocess.run(["kill", "-9", str(launcher)], check=True)
    hold.unlink()
    ended = end(driver)
    assert ended.code == 0, ended.err
    assert "its launcher was killed by signal 9; Ray starts it again" in ended.err
    assert losses(run) == pytest.approx(undisturbed, rel=1e-10)


def test_the_command_line_does_not_import_ray() -> None:
    program = "import sys, unisono.cli.train; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
