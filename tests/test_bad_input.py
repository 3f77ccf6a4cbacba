"""A user's mistake: exit code 2, one line that says what to do, nothing written. Through the real command line.

The commands run two at a time, because each start of torch takes seconds; only those that pytest selected run.
"""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from command_line import TINY, Ended, end, lines, start, unisono
from unisono.observe.folder import RunFolder

TINY_FILE = TINY.rpartition(":")[0]
LAST = "run/checkpoints/step_00000004"


# ---- preparations that a case may make in its folder ----


def with_file(name: str, text: str) -> Callable[[Path, Path], None]:
    return lambda place, run: (place / name).write_text(text) and None


def with_run(place: Path, run: Path) -> None:
    shutil.copytree(run, place / "run")


def with_flipped_bit(place: Path, run: Path) -> None:
    with_run(place, run)
    file = next((place / LAST).glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-3] ^= 4
    file.write_bytes(data)


def with_truncated_shard(place: Path, run: Path) -> None:
    with_run(place, run)
    file = next((place / LAST).glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-7])


def with_no_manifest_left(place: Path, run: Path) -> None:
    with_run(place, run)
    for manifest in (place / "run").rglob("manifest.json"):
        manifest.unlink()


def with_torn_run_json(place: Path, run: Path) -> None:
    with_run(place, run)
    (place / "run/run.json").write_text('{"recipe": "Ti')


# ---- the cases ----


@dataclass(frozen=True)
class Mistake:
    """A command line, and the words that its one-line error must contain."""

    flags: str
    says: Sequence[str]
    recipe: str = TINY
    before: Callable[[Path, Path], None] = lambda place, run: None
    environ: dict[str, str] = field(default_factory=dict)
    program: Sequence[str] = (sys.executable,)


BELOW_A_READ_ONLY_MOUNT = [
    *("unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o ro tmpfs ro && exec "$0" "$@"', sys.executable)
]
OTHER_FOLDER = Mistake(
    "--output_dir {place}/run",
    ["output_dir", "holds a run of Tiny, not Sibling", "choose another folder"],
    recipe=f"{TINY_FILE}:Sibling",
    before=with_run,
)
NOT_A_LOSS = Mistake("--flaw number", [r"loss\(\) returned Tensor", r"return unisono\.Loss\(total, count\)"])
EMPTY = Mistake("--num_samples 0", [r'dataset\("train"\) is empty', "check the data path"])
FLIPPED_BIT = Mistake(
    "--output_dir {place}/run --resume {place}/" + LAST,
    ["resume", "step_00000004 is not a valid checkpoint", "hash of .* differs"],
    before=with_flipped_bit,
)

MISTAKES = {
    # settings
    "unknown flag": Mistake("--batchsize 3", ["batchsize", "did you mean .*batch_size"]),
    "flag of the wrong type": Mistake("--batch_size many", ["batch_size", "expected a whole number", "'many'"]),
    "flag out of range": Mistake("--batch_size 0", ["batch_size: expected at least 1, got 0"]),
    "file value of the wrong type": Mistake(
        "--config {place}/my.yaml",
        ["learning_rate: expected a number, got", r"my\.yaml"],
        before=with_file("my.yaml", "learning_rate: fast\n"),
    ),
    "unknown field in a file": Mistake(
        "--config {place}/my.yaml",
        ["unknown field learning_rat", r"my\.yaml", "did you mean learning_rate"],
        before=with_file("my.yaml", "learning_rat: 0.1\n"),
    ),
    "config file that is not there": Mistake("--config {place}/none.yaml", [r"none\.yaml"]),
    "flags that contradict each other on two ranks": Mistake(
        "--nproc 2 --batch_size 2 --gradient_accumulation_steps 2 --global_batch_size 7",
        ["batch_size 2 x 2 devices x gradient_accumulation_steps 2 = 8 is not global_batch_size 7", "or use .* 8 with"],
    ),
    "two settings that exclude each other": Mistake(
        "--static_graph --find_unused_parameters", ["static_graph and find_unused_parameters contradict", "remove one"]
    ),
    "several machines, half told": Mistake("--nnodes 2 --node_rank 0", ["nnodes", "also need rdzv_endpoint"]),
    "machine number too high": Mistake(
        "--nnodes 2 --node_rank 2 --rdzv_endpoint localhost:{port}", ["node_rank: expected 0 to 1, got 2"]
    ),
    # recipes
    "no recipe": Mistake("", ["the recipe is missing", "for instance"], recipe=""),
    "recipe without a class": Mistake("", ["expected file.py:Class"], recipe=TINY_FILE),
    "recipe file that is not there": Mistake("", ["recipe file .*/none.py does not exist"], recipe="{place}/none.py:A"),
    "recipe file with a syntax error": Mistake(
        "",
        [r"bad\.py does not import: line 2: "],
        recipe="{place}/bad.py:A",
        before=with_file("bad.py", "import os\nclass A(:\n"),
    ),
    "recipe file that raises": Mistake(
        "",
        [r"bad\.py does not import: line 3: ModuleNotFoundError: No module named 'not_installed'"],
        recipe="{place}/bad.py:A",
        before=with_file("bad.py", "import os\n\nimport not_installed\n"),
    ),
    "recipe file that exits": Mistake(
        "",
        [r"bad\.py does not import: line 2: SystemExit: give me arguments"],
        recipe="{place}/bad.py:A",
        before=with_file("bad.py", "import sys\nsys.exit('give me arguments')\n"),
    ),
    "recipe class that is not there": Mistake("", ["no class 'Tny'", "did you mean Tiny"], recipe=f"{TINY_FILE}:Tny"),
    "recipe that is no class": Mistake("", ["'TINY_HOLD' is not a recipe", "extends"], recipe=f"{TINY_FILE}:HOLD"),
    "recipe without a method": Mistake("", [r"WithoutLoss has no loss\(\)"], recipe=f"{TINY_FILE}:WithoutLoss"),
    "loss with other parameters": Mistake(
        "",
        [r"WithAnotherLoss\.loss\(.*batch.*\) has the wrong parameters", r"define loss\(self, model, batch, noise\)"],
        recipe=f"{TINY_FILE}:WithAnotherLoss",
    ),
    "loss that is no Loss": NOT_A_LOSS,
    "loss that is no Loss, on two ranks": Mistake("--nproc 2 " + NOT_A_LOSS.flags, NOT_A_LOSS.says),
    "loss whose total is no scalar": Mistake("--flaw vector", ["total must be a scalar", r"got shape \(4, 1\)"]),
    "loss whose total is no tensor": Mistake("--flaw text", ["total must be a scalar tensor", "got str"]),
    "loss that is detached": Mistake("--flaw detached", ["total does not depend on any trainable weight", "detached"]),
    "empty data set": EMPTY,
    "empty data set, on two ranks": Mistake("--nproc 2 " + EMPTY.flags, EMPTY.says),
    # devices and launchers
    "GPU that does not exist": Mistake("--gpus 0,99", ["GPU 0 does not exist", "pass --gpus 0 to train on the CPU"]),
    "GPUs that mean nothing": Mistake("--gpus some", ["gpus 'some' is not all, auto"]),
    "port in use": Mistake(
        "--nnodes 2 --node_rank 0 --rdzv_endpoint localhost:{port} --nproc 1",
        [r"port {port} \(rdzv_endpoint\) is already in use by process \d+", "choose another port"],
    ),
    "WORLD_SIZE without RANK": Mistake(
        "",
        ["WORLD_SIZE=2 is set but RANK is not", "unset WORLD_SIZE, or start with torchrun"],
        environ={"WORLD_SIZE": "2"},
    ),
    # folders
    "folder of another recipe": OTHER_FOLDER,
    "folder of another recipe, on two ranks": Mistake(
        "--nproc 2 " + OTHER_FOLDER.flags, OTHER_FOLDER.says, OTHER_FOLDER.recipe, with_run
    ),
    "another effective batch": Mistake(
        "--output_dir {place}/run --global_batch_size 5",
        ["global_batch_size 5 differs from this run's 4", "remove the flag"],
        before=with_run,
    ),
    "another seed": Mistake(
        "--output_dir {place}/run --seed 7", ["seed 7 differs from this run's 0", "remove the flag"], before=with_run
    ),
    "folder below a file": Mistake(
        "--output_dir {place}/file/run",
        ["output_dir", "file is not a folder", "choose another --output_dir"],
        before=with_file("file", "mine"),
    ),
    "folder below /proc": Mistake("--output_dir /proc/run", ["output_dir /proc/run cannot be written"]),
    "folder on a read-only mount": Mistake(
        "--output_dir {place}/ro/run",
        ["ro/run cannot be written", "Read-only file system", "choose another --output_dir"],
        before=lambda place, run: (place / "ro").mkdir(),
        program=BELOW_A_READ_ONLY_MOUNT,
    ),
    "folder with a damaged run.json": Mistake(
        "--output_dir {place}/run", [r"run/run\.json is damaged", "restore it or"], before=with_torn_run_json
    ),
    # checkpoints
    "resume from a checkpoint with a flipped bit": FLIPPED_BIT,
    "resume from a checkpoint with a flipped bit, on two ranks": Mistake(
        "--nproc 2 " + FLIPPED_BIT.flags, FLIPPED_BIT.says, before=with_flipped_bit
    ),
    "resume from a truncated checkpoint": Mistake(
        "--output_dir {place}/new --resume {place}/" + LAST,
        ["resume", "not a valid checkpoint", "7 bytes shorter than the manifest says"],
        before=with_truncated_shard,
    ),
    "resume from another recipe's checkpoint": Mistake(
        "--output_dir {place}/new --resume {place}/" + LAST,
        ["resume", "a run of Tiny, not Sibling", "choose another"],
        recipe=f"{TINY_FILE}:Sibling",
        before=with_run,
    ),
    "resume from a folder that is no checkpoint": Mistake("--resume {place}", ["resume", r"no manifest\.json"]),
    "resume from nothing": Mistake("--resume {place}/none", ["resume", "is not a folder", "auto or never"]),
    "no valid checkpoint left": Mistake(
        "--output_dir {place}/run",
        ["no valid checkpoint is left in .*run/checkpoints", r"step_00000004: no manifest\.json", "another output_dir"],
        before=with_no_manifest_left,
    ),
    "never resume, but there are checkpoints": Mistake(
        "--output_dir {place}/run --resume never", ["resume never", "already has checkpoints"], before=with_run
    ),
}


# ---- running them ----


@dataclass(frozen=True)
class Outcome:
    ended: Ended
    before: dict[str, bytes]
    after: dict[str, bytes]
    port: int


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of Tiny with checkpoints of step 2 and step 4. Treat as read-only."""
    place = tmp_path_factory.mktemp("finished")
    ended = unisono("train", TINY, "--output_dir", "run", "--save_every", 2, cwd=place)
    assert ended.code == 0, ended.err
    return place / "run"


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, finished_run: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Outcome]]]:
    ours = [item for item in request.session.items if item.fspath == request.node.fspath]
    selected = {item.callspec.params["name"] for item in ours if hasattr(item, "callspec")}
    with ThreadPoolExecutor(2) as pool, socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        yield {
            name: pool.submit(make, mistake, tmp_path_factory.mktemp("place"), finished_run, port)
            for name, mistake in MISTAKES.items()
            if name in selected
        }
        pool.shutdown(cancel_futures=True)


def make(mistake: Mistake, place: Path, run: Path, port: int) -> Outcome:
    (place / "tmp").mkdir()
    mistake.before(place, run)
    flags = mistake.flags.format(place=place, port=port).split()
    if "--output_dir" not in flags:
        flags += ["--output_dir", str(place / "new")]
    recipe = [mistake.recipe.format(place=place)] if mistake.recipe else []
    before = contents(place)
    # Disables bytecode, which Python would write next to the recipe.
    environ = {"TMPDIR": str(place / "tmp"), "PYTHONDONTWRITEBYTECODE": "1", **mistake.environ}
    words = ["-m", "unisono", "train", *recipe, *flags]
    ended = end(start(words, cwd=place, program=mistake.program, **environ))
    return Outcome(ended, before, contents(place), port)


def contents(folder: Path) -> dict[str, bytes]:
    """All files and folders below a folder with their contents, except the cache that importing torch creates."""
    paths = [path for path in folder.rglob("*") if not path.name.startswith("torchinductor_")]
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b"" for path in paths}


def can_mount() -> bool:
    tried = subprocess.run([*BELOW_A_READ_ONLY_MOUNT[:4], "mount -t tmpfs -o ro tmpfs /mnt"], capture_output=True)
    return tried.returncode == 0


@pytest.mark.parametrize("name", MISTAKES)
def test_a_user_error_is_one_line_and_leaves_no_files(name: str, outcomes: dict[str, Future[Outcome]]) -> None:
    if MISTAKES[name].program is BELOW_A_READ_ONLY_MOUNT and not can_mount():
        pytest.skip("this user may not mount")
    outcome = outcomes[name].result()
    ended = outcome.ended
    assert ended.code == 2, ended.err
    assert ended.out == ""
    assert "Traceback" not in ended.err
    output = [line for line in ended.err.splitlines() if line.startswith("unisono: ")]
    assert len(output) == 1 and ended.err.endswith(output[0] + "\n"), ended.err
    for part in MISTAKES[name].says:
        assert re.search(part.replace("{port}", str(outcome.port)), output[0]), output[0]
    assert outcome.after == outcome.before


@pytest.mark.parametrize("name", [name for name in MISTAKES if "loss" not in name])
def test_nothing_is_printed_before_the_user_error(name: str, outcomes: dict[str, Future[Outcome]]) -> None:
    """Only an invalid loss is detected after the banner, in the first step."""
    if MISTAKES[name].program is BELOW_A_READ_ONLY_MOUNT and not can_mount():
        pytest.skip("this user may not mount")
    assert outcomes[name].result().ended.err.count("\n") == 1


# ---- not errors, but reported once ----


def test_a_dataset_smaller_than_a_batch_is_reported_once(tmp_path: Path) -> None:
    ended = unisono(*("train", TINY, "--nproc", 2, "--num_samples", 3, "--output_dir", tmp_path / "run"), cwd=tmp_path)
    assert ended.code == 0, ended.err
    assert ended.err.count("the dataset has 3 samples, fewer than the effective batch of 8") == 1
    assert [line["samples"] for line in lines(tmp_path / "run")] == [8, 16, 24, 32]


def test_with_fewer_gpus_than_requested_one_warning_is_printed_and_the_effective_batch_stays(tmp_path: Path) -> None:
    ended = unisono("train", TINY, "--gpus", 4, "--output_dir", tmp_path / "run", cwd=tmp_path)
    assert ended.code == 0, ended.err
    assert ended.err.count("no CUDA device for --gpus 4: training on the CPU") == 1
    assert "effective batch   16 = 4 per rank × 1 rank × 4 accumulation" in ended.err
    record = RunFolder.read(tmp_path / "run")
    assert record is not None and record["global_batch"] == 16
    assert [line["samples"] for line in lines(tmp_path / "run")] == [16, 32, 48, 64]
