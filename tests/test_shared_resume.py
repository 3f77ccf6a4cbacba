"""Ranks share the examination of a checkpoint, agree on the result, and open only the files that they need."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from many_runs import Run, many_runs, train_all
from ranks import RanksFailed, run_ranks
from unisono.checkpoint.examination import share_of_files
from unisono.checkpoint.manifest import FileEntry

RANKS = 3
SHARDS = [f"shard-{rank + 1:05d}-of-{RANKS:05d}.safetensors" for rank in range(RANKS)]
SETTINGS = {"strategy": "fsdp", "global_batch_size": 8, "batch_size": 8, "save_every": 2, "keep_last": 0}


def resume_and_count(runs: list[dict[str, Any]], root: str) -> dict[str, Any]:
    """In each rank: continues the runs; also returns how often it opened each file of their checkpoints."""
    opens: Counter[str] = Counter()

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str | os.PathLike) and "/step_0000" in str(arguments[0]):
            opens["/".join(Path(arguments[0]).parts[-4:])] += 1

    sys.addaudithook(count)
    return {"results": train_all(runs, root), "opens": opens}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three sharded ranks with checkpoints of steps 2 and 4."""
    root: Path = tmp_path_factory.mktemp("shared")
    many_runs([Run("run", "run", RANKS, SETTINGS | {"max_steps": 4})], root)
    return root / "run"


@pytest.fixture(scope="module")
def resumed(trained: Path) -> tuple[Path, list[dict[str, Any]]]:
    """The run continued as it is, and with damage in a file that rank 0 or the last rank hashes."""
    root = trained.parent
    damaged = ["none", SHARDS[0], SHARDS[-1]]
    for name in damaged:
        copy = Path(shutil.copytree(trained, root / name))
        if name != "none":
            file = copy / "checkpoints" / "step_00000004" / name
            content = bytearray(file.read_bytes())
            content[-2] ^= 1
            file.write_bytes(content)
    settings = SETTINGS | {"max_steps": 5, "save_every": 0}
    runs = [vars(Run(name, name, RANKS, settings)) for name in damaged]
    return root, run_ranks("resume_and_count", __file__, RANKS, {"runs": runs, "root": str(root)}, timeout_s=200)


def test_each_file_is_hashed_by_one_rank_and_each_rank_opens_only_what_it_needs(resumed: Any) -> None:
    _, by_rank = resumed
    folder = "none/checkpoints/step_00000004"
    for number, rank in enumerate(by_rank):
        opened = {Path(name).name: times for name, times in rank["opens"].items() if name.startswith(folder)}
        shards = {name: times for name, times in opened.items() if name.startswith("shard-")}
        # Its own shard: to hash it, to read its header, to load it. The first one also holds what is not sharded.
        assert shards == {SHARDS[0]: 1} | {SHARDS[number]: 3}, (number, opened)
        if number > 0:
            assert opened.get("manifest.json", 0) == 0 and opened.get("state.json", 0) <= 1, (number, opened)


@pytest.mark.parametrize("name", [SHARDS[0], SHARDS[-1]])
def test_damage_is_found_by_whichever_rank_hashes_the_file_and_all_take_the_older_checkpoint(
    resumed: Any, name: str
) -> None:
    root, by_rank = resumed
    assert all(rank["results"][name] == by_rank[0]["results"]["none"] for rank in by_rank)
    record = json.loads((root / name / "run.json").read_text())
    assert [start["from_step"] for start in record["starts"]] == [0, 2]
    events = [json.loads(line) for line in (root / name / "events.jsonl").read_text().splitlines()]
    assert any(f"the hash of {name} differs from the manifest's" in json.dumps(event) for event in events), events
    assert (root / name / "checkpoints" / "step_00000004.bad-1").is_dir()


def test_an_undamaged_run_continues_from_its_newest_checkpoint(resumed: Any) -> None:
    root, _ = resumed
    assert json.loads((root / "none" / "run.json").read_text())["starts"][-1]["from_step"] == 4


def test_files_are_divided_among_ranks_by_size() -> None:
    files = {f"shard-{number:05d}": FileEntry(1000, "") for number in range(8)} | {"state.json": FileEntry(3, "")}
    shares = [share_of_files(files, rank, 8) for rank in range(8)]
    assert shares == [[f"shard-{number:05d}"] for number in range(7)] + [["shard-00007", "state.json"]]
    for world in (1, 2, 3, 5, 64):
        shares = [share_of_files(files, rank, world) for rank in range(world)]
        assert [name for share in shares for name in share] == list(files)
        assert max(len(share) for share in shares) <= -(-8 // world) + 1
    assert share_of_files({"empty": FileEntry(0, "")}, 0, 2) == ["empty"]


def die_while_hashing(folder: str) -> None:
    """In each rank: resumes a run; rank 1 is killed while the ranks examine the checkpoint."""
    from unisono.checkpoint import examination

    if os.environ["RANK"] == "1":
        examination.why_damaged = lambda file, entry: os.kill(os.getpid(), signal.SIGKILL)
    train_all([vars(Run("killed", "killed", 2, SETTINGS | {"max_steps": 5}))], folder)


def test_a_rank_that_dies_while_it_hashes_leaves_the_run_folder_as_it_was(trained: Path) -> None:
    copy = Path(shutil.copytree(trained, trained.parent / "killed"))
    before = {str(path.relative_to(copy)): path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    with pytest.raises(RanksFailed, match=r"rank 1: exit status -9"):
        run_ranks("die_while_hashing", __file__, 2, {"folder": str(trained.parent)})
    after = {str(path.relative_to(copy)): path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    assert {name: after.get(name) for name in before if "checkpoints" in name} == {
        name: content for name, content in before.items() if "checkpoints" in name
    }
