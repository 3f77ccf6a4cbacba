"""A run on several machines continues when one leaves, is disconnected, or joins."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from command_line import TINY, Ended, end, lines, losses, start, wait_until
from network import Machine, needs_root, network
from ranks import run_ranks
from tiny_recipe import HOLD

pytestmark = needs_root

STEPS = 60
PORT = 29400
TRAIN = ["-m", "unisono", "train", TINY, "--output_dir", "run", "--max_steps", STEPS, "--dtype", "float64"]
TWO_EACH = ["--batch_size", 2]  # the effective batch is 4 on two machines


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of an undisturbed run on one machine."""
    place = tmp_path_factory.mktemp("undisturbed")
    ended = end(start([*TRAIN, "--batch_size", 4], cwd=place))
    assert ended.code == 0, ended.err
    values = losses(place / "run")
    assert len(values) == STEPS
    return values


@pytest.fixture
def machines() -> Iterator[list[Machine]]:
    """Two machines."""
    with network(2) as computers:
        yield computers


class Run:
    """A run on two machines in a shared folder."""

    def __init__(self, folder: Path, machines: list[Machine]) -> None:
        self.folder, self.machines = folder, machines
        self.hold = folder / "hold"
        self.hold.write_text("1")  # slows down steps until a test removes it

    def launch(self, number: int, nnodes: str, *more: object) -> subprocess.Popen[str]:
        """Starts unisono's launcher on one of the machines."""
        machine = self.machines[number]
        meet = ["--nnodes", nnodes, "--node_rank", number, "--rdzv_endpoint", f"{self.machines[0].address}:{PORT}"]
        words = [*TRAIN, *TWO_EACH, "--nproc", 1, *meet, "--save_every", 2, *more]
        return machine.run(*words, cwd=self.folder, **{HOLD: str(self.hold)})

    def torchrun(self, number: int, nnodes: str, *more: object) -> subprocess.Popen[str]:
        """Starts torchrun on one of the machines."""
        address = self.machines[number].address
        meet = ["--nnodes", nnodes, "--rdzv_backend", "c10d", "--rdzv_endpoint", f"{self.machines[0].address}:{PORT}"]
        meet += ["--rdzv_id", "test", "--local_addr", address, "--rdzv_conf", f"is_host={number == 0}"]
        words = ["-m", "torch.distributed.run", "--nproc_per_node", 1, "--max_restarts", 9, *meet]
        words += [*TRAIN, *TWO_EACH, "--save_every", 2, *more]
        # Otherwise a joining machine looks for an address that torchrun announces only in the first round.
        way_out = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if ":" in nnodes else {}
        return self.machines[number].run(*words, cwd=self.folder, **{HOLD: str(self.hold)}, **way_out)

    def wait_for_steps(self, count: int, world: int, *processes: subprocess.Popen[str], seconds: float = 90) -> None:
        """Waits until this many ranks have done this many more steps."""
        after = max((line["step"] for line in lines(self.folder / "run")), default=0)

        def done() -> bool:
            dead = [each for each in processes if each.poll() is not None]
            assert not dead, dead[0].communicate()
            new = [line for line in lines(self.folder / "run") if line["step"] > after]
            return sum(line["world"] == world for line in new) >= count

        wait_until(done, f"{count} steps on {world} ranks", seconds)

    def events(self, kind: str) -> list[dict[str, object]]:
        """The run's events of one kind."""
        return [event for event in lines(self.folder / "run", "events.jsonl") if event["kind"] == kind]

    def starts(self) -> list[dict[str, object]]:
        """Every start of the ranks."""
        starts: list[dict[str, object]] = json.loads((self.folder / "run/run.json").read_text())["starts"]
        return starts

    def worlds(self) -> list[object]:
        """The number of ranks of each start."""
        return [each["world"] for each in self.starts()]


def all_ended_well(*ended: Ended) -> None:
    assert [each.code for each in ended] == [0] * len(ended), "\n".join(each.err for each in ended)


@pytest.mark.slow
def test_two_machines_under_torchrun(tmp_path: Path, machines: list[Machine], undisturbed: list[float]) -> None:
    run = Run(tmp_path, machines)
    run.hold.unlink()
    both = [run.torchrun(number, "2") for number in (0, 1)]
    all_ended_well(*(end(each) for each in both))
    assert losses(tmp_path / "run") == pytest.approx(undisturbed, rel=1e-10)
    assert run.worlds() == [2]


def test_two_machines_train_like_one(tmp_path: Path, machines: list[Machine], undisturbed: list[float]) -> None:
    run = Run(tmp_path, machines)
    run.hold.unlink()
    both = [run.launch(number, "2") for number in (0, 1)]
    main, other = (end(each) for each in both)
    all_ended_well(main, other)
    assert "2 on 2 machines" in main.err and other.err == ""
    assert losses(tmp_path / "run") == pytest.approx(undisturbed, rel=1e-10)


@pytest.mark.slow
def test_a_run_continues_without_a_dead_machine_which_can_rejoin(
    tmp_path: Path, machines: list[Machine], undisturbed: list[float]
) -> None:
    run = Run(tmp_path, machines)
    first, second = (run.launch(number, "1:2", "--max_restarts", 0) for number in (0, 1))
    run.wait_for_steps(2, 2, first, second)
    machines[1].kill_all()
    second.communicate()
    run.wait_for_steps(1, 1, first)
    again = run.launch(1, "1:2", "--max_restarts", 0)
    run.wait_for_steps(1, 2, first, again)
    run.hold.unlink()
    ended = end(first)
    all_ended_well(ended, end(again))
    assert losses(tmp_path / "run") == pytest.approx(undisturbed, rel=1e-10)
    assert run.worlds() == [2, 1, 2]
    assert [(event["joined"], event["left"]) for event in run.events("machines")] == [([], [1]), ([1], [])]
    assert run.events("restart") == [], "machines that come and go are no restarts"
    [saved] = run.events("signal")
    assert (saved["signal"], saved["step"]) == ("a machine joins", run.starts()[2]["from_step"]), "no step was lost"
    assert "machine 1 left: continuing from the last checkpoint with 1 machine, 1 rank" in ended.err


@pytest.mark.slow
@pytest.mark.parametrize("nnodes", ["1:2", "2"])
def test_a_disconnected_machine_comes_back(
    tmp_path: Path, machines: list[Machine], undisturbed: list[float], nnodes: str
) -> None:
    run = Run(tmp_path, machines)
    both = [run.launch(number, nnodes, "--max_restarts", 0) for number in (0, 1)]
    run.wait_for_steps(2, 2, *both)
    machines[1].pull_cable()
    if nnodes == "1:2":
        run.wait_for_steps(1, 1, *both)
    else:
        time.sleep(20)  # longer than a machine may be silent
    machines[1].plug_cable()
    run.wait_for_steps(1, 2, *both)
    run.hold.unlink()
    ended = [end(each) for each in both]
    all_ended_well(*ended)
    assert losses(tmp_path / "run") == pytest.approx(undisturbed, rel=1e-10)
    assert run.worlds() == ([2, 1, 2] if nnodes == "1:2" else [2, 2])
    assert run.events("restart") == []


@pytest.mark.slow
def test_a_disconnected_machine_under_torchrun_is_restarted(
    tmp_path: Path, machines: list[Machine], undisturbed: list[float]
) -> None:
    run = Run(tmp_path, machines)
    first, second = (run.torchrun(number, "1:2", "--hang_timeout", 15) for number in (0, 1))
    run.wait_for_steps(2, 2, first, second)
    machines[1].pull_cable()
    run.wait_for_steps(1, 1, first, seconds=240)
    machines[1].kill_all()
    second.communicate()
    machines[1].plug_cable()
    again = run.torchrun(1, "1:2", "--hang_timeout", 15)
    run.wait_for_steps(1, 2, first, again, seconds=120)
    run.hold.unlink()
    all_ended_well(end(first), end(again))
    assert losses(tmp_path / "run") == pytest.approx(undisturbed, rel=1e-10)
    assert run.worlds() == [2, 1, 2]


# ---- the run's folder ----


def check_in(folders: list[str]) -> str:
    """A rank on its own machine, whose run writes to its own folder or to a shared one."""
    import torch

    from unisono.cluster.agree import Agreement
    from unisono.cluster.environment import detect
    from unisono.cluster.process_group import join_process_group, leave_process_group
    from unisono.cluster.shared_folder import check_shared
    from unisono.errors import UserError

    world = detect()
    join_process_group(world, torch.device("cpu"))
    machine = replace(world, node=world.rank, num_nodes=world.size, local_rank=0, local_size=1)
    os.chdir(folders[world.rank])
    try:
        check_shared("runs/mine", machine, Agreement(), timeout_s=0.5)
        return "shared"
    except UserError as error:
        return str(error)
    finally:
        leave_process_group()


@pytest.mark.parametrize("shared", [True, False])
def test_a_run_folder_that_the_machines_do_not_share_is_refused(tmp_path: Path, shared: bool) -> None:
    folders = [tmp_path / "a", tmp_path / "a" if shared else tmp_path / "b"]
    for folder in folders:
        folder.mkdir(exist_ok=True)
    answers = run_ranks("check_in", __file__, 2, {"folders": list(map(str, folders))})
    refused = "output_dir runs/mine is not the same folder on machine 1 as on machine 0; "
    refused += "use a folder on a file system that all machines share"
    assert answers == (["shared"] * 2 if shared else [refused] * 2)
    assert not [each for folder in folders for each in folder.iterdir()], "nothing is left behind"
