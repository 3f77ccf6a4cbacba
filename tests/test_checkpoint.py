"""A checkpoint appears complete or not at all, loads on any number of ranks, and is never loaded if it is damaged."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn

from ranks import run_ranks
from unisono.checkpoint.commit import read_best
from unisono.checkpoint.contents import describe
from unisono.checkpoint.find import list_steps, newest_valid, read_extra, validate
from unisono.checkpoint.load import load, load_whole
from unisono.checkpoint.manifest import CheckpointError, Manifest, read_manifest
from unisono.checkpoint.save import Best, Saver, SaveResult
from unisono.checkpoint.shards import shard_name, write_shards

IDENTITY = {"recipe": "my_file.py:MyRecipe", "seed": 0, "global_batch": 16}


def make_saver(folder: Path, rank: int = 0, world: int = 1, **options: Any) -> Saver:
    group = dist.new_group(backend="gloo") if world > 1 else None
    options = {"keep_last": 0, "asynchronous": True, "identity": IDENTITY, **options}
    return Saver(folder, rank=rank, world=world, group=group, **options)


def save_now(saver: Saver, step: int, tensors: dict[str, torch.Tensor], **options: Any) -> SaveResult:
    saver.save(step, tensors, {"step": step, "samples": 16 * step}, **options)
    (result,) = saver.wait()
    return result


def trained(world: int, *, seed: int = 0) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A small model after one AdamW step, sharded when there are ranks; 7 and 1 rows split unevenly over 2 and 3."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 1))
    if world > 1:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = parameter.detach() * 0.5
    optimizer.step()
    state: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        state[f"model.{name}"] = parameter
        for slot, value in optimizer.state[parameter].items():
            state[f"optimizer.{name}.{slot}"] = value
    return model, state


def every_kind() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    weight = torch.randn(6, 4)
    return {
        "model.float32": weight,
        "model.tied": weight,
        "model.turned": weight.t(),
        "model.view": weight[1:3],
        "model.float64": torch.randn(3, dtype=torch.float64),
        "model.bfloat16": torch.randn(2, 3).bfloat16(),
        "model.float16": torch.randn(5).half(),
        "model.int64": torch.tensor([2**60, -1]),
        "model.bool": torch.tensor([True, False, True]),
        "model.count": torch.tensor(7),
        "model.scale": torch.tensor(0.5),
        "model.nothing": torch.empty(0, 5),
    }


def zeros_like(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(t.shape, dtype=t.dtype) for name, t in tensors.items()}


def assert_equal(here: dict[str, torch.Tensor], there: dict[str, torch.Tensor]) -> None:
    assert here.keys() == there.keys()
    for name in here:
        assert here[name].dtype == there[name].dtype and torch.equal(here[name], there[name]), name


# --- any number of ranks, and a failure on one of them -------------------------------------------------------------


def on_two_ranks(folder: str) -> dict[str, Any]:
    rank, world = join()
    top = Path(folder)
    return {
        "sharded": save_sharded(rank, world, top / "sharded"),
        "plain into shards": load_sharded(world, top / "plain" / "step_00000005"),
        "replicated": save_replicated(rank, world, top / "replicated"),
        "full disk": save_with_a_full_disk_on_rank_1(rank, world, top / "full disk"),
        "failing copy": save_with_a_failing_copy_on_rank_1(rank, world, top / "failing copy"),
        "bad target": load_with_a_bad_target_on_rank_1(rank, world, top / "sharded" / "step_00001000"),
    }


def on_three_ranks(folder: str) -> dict[str, Any]:
    _, world = join()
    return {"sharded": load_sharded(world, Path(folder) / "sharded" / "step_00001000")}


def join() -> tuple[int, int]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def save_sharded(rank: int, world: int, folder: Path) -> dict[str, Any]:
    _, state = trained(world)
    smallest = min(t.to_local().numel() for t in state.values() if hasattr(t, "to_local"))
    return {**as_json(save_now(make_saver(folder, rank, world), 1000, state)), "smallest": smallest}


def load_sharded(world: int, path: Path) -> dict[str, Any]:
    _, state = trained(world, seed=1)
    load(path, state, group=dist.new_group(backend="gloo"), world=world)
    return {n: (t.full_tensor() if hasattr(t, "full_tensor") else t).tolist() for n, t in state.items()}


def save_replicated(rank: int, world: int, folder: Path) -> dict[str, Any]:
    saver = make_saver(folder, rank, world)
    return {**as_json(save_now(saver, 7, every_kind())), "copied": sorted(saver._snapshot._buffers)}


def save_with_a_full_disk_on_rank_1(rank: int, world: int, folder: Path) -> list[dict[str, Any]]:
    _, state = trained(world)
    saver = make_saver(folder, rank, world, keep_last=1)
    results = [save_now(saver, 1, state)]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))  # Python ignores SIGXFSZ: writes fail with EFBIG
    results.append(save_now(saver, 2, state))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    dist.barrier()  # rank 0 cleans up after the other ranks know the outcome
    assert [path.name for path in folder.iterdir()] == ["step_00000001"]
    dist.barrier()
    results.append(save_now(saver, 3, state))
    return [as_json(result) for result in results]


def save_with_a_failing_copy_on_rank_1(rank: int, world: int, folder: Path) -> list[dict[str, Any]]:
    saver = make_saver(folder, rank, world)
    device = "meta" if rank == 1 else "cpu"  # a tensor without data, so that rank 1 cannot copy its part
    failed = save_now(saver, 1, {"model.a": torch.ones(4), "model.b": torch.ones(4, device=device)})
    differing = save_now(saver, 2, {"model.a": torch.ones(4 + rank)})
    return [as_json(result) for result in (failed, differing, save_now(saver, 3, {"model.a": torch.ones(4)}))]


def load_with_a_bad_target_on_rank_1(rank: int, world: int, path: Path) -> str:
    targets = zeros_like(trained(1)[1])
    if rank == 1:
        targets["model.0.bias"] = torch.zeros(8)
    try:
        load(path, targets, group=dist.new_group(backend="gloo"), world=world)
    except CheckpointError as error:
        return str(error)
    return "loaded"


def as_json(result: SaveResult) -> dict[str, Any]:
    return {"path": result.path and str(result.path), "bytes": result.bytes, "error": result.error}


@dataclass
class Ranks:
    folder: Path
    two: list[dict[str, Any]]
    three: list[dict[str, Any]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """The results of saving and loading on two ranks, then loading on three; run once for all tests."""
    folder = tmp_path_factory.mktemp("ranks")
    assert save_now(make_saver(folder / "plain"), 5, trained(1)[1]).error is None
    two = run_ranks("on_two_ranks", __file__, 2, {"folder": str(folder)})
    return Ranks(folder, two, run_ranks("on_three_ranks", __file__, 3, {"folder": str(folder)}))


def expected() -> dict[str, torch.Tensor]:
    return {name: tensor.detach() for name, tensor in trained(1)[1].items()}


def test_state_sharded_over_two_ranks_loads_on_one_and_on_three(ranks: Ranks) -> None:
    path = ranks.folder / "sharded" / "step_00001000"
    saved = [results["sharded"] for results in ranks.two]
    assert saved[1]["smallest"] == 0, "the case of an empty shard is not tested"
    for result in saved:
        assert (result["error"], result["path"]) == (None, str(path))
        assert result["bytes"] == read_manifest(path).total_bytes > 0
    assert read_manifest(path).world == 2 and validate(path, identity=IDENTITY) is None
    assert {file.suffix for file in path.iterdir()} == {".safetensors", ".json"}

    assert describe(path) == {name: (tuple(t.shape), t.dtype) for name, t in expected().items()}
    single = zeros_like(expected())
    load(path, single, group=None, world=1)
    assert_equal(single, expected())
    model = {n.removeprefix("model."): t for n, t in expected().items() if n.startswith("model.")}
    assert_equal(load_whole(path, "model."), model)
    for results in ranks.three:
        assert_equal({name: torch.tensor(values) for name, values in results["sharded"].items()}, expected())


def test_unsharded_state_of_one_process_loads_into_the_shards_of_two(ranks: Ranks) -> None:
    for results in ranks.two:
        assert_equal({n: torch.tensor(values) for n, values in results["plain into shards"].items()}, expected())


def test_replicated_state_of_every_kind_is_copied_and_written_once(ranks: Ranks) -> None:
    first, second = (results["replicated"] for results in ranks.two)
    assert first["error"] is None and first["copied"] and second["copied"]
    assert sorted(first["copied"] + second["copied"]) == sorted(every_kind())
    back = zeros_like(every_kind())
    load(Path(first["path"]), back, group=None, world=1)
    assert_equal(back, every_kind())


def test_if_one_rank_cannot_write_the_save_fails_on_all_ranks_and_training_continues(ranks: Ranks) -> None:
    for good, failed, after in (results["full disk"] for results in ranks.two):
        assert good["error"] is None and after["error"] is None
        assert failed["path"] is None and "rank 1" in failed["error"] and "File too large" in failed["error"]
    assert [path.name for path in (ranks.folder / "full disk").iterdir()] == ["step_00000003"]
    assert validate(ranks.folder / "full disk" / "step_00000003") is None


def test_no_rank_waits_for_one_whose_copy_fails_or_differs(ranks: Ranks) -> None:
    for failed, differing, after in (results["failing copy"] for results in ranks.two):
        assert "rank 1: copying to host memory failed" in failed["error"]
        assert "same names, shapes" in differing["error"]
        assert after["error"] is None
    assert [path.name for path in (ranks.folder / "failing copy").iterdir()] == ["step_00000003"]


def test_if_one_rank_cannot_load_all_ranks_stop(ranks: Ranks) -> None:
    for results in ranks.two:
        assert "rank 1" in results["bad target"]
        assert "'model.0.bias' is [7] in the checkpoint and [8] in this run" in results["bad target"]


# --- damage --------------------------------------------------------------------------------------------------------


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)


def shard_of(path: Path) -> Path:
    return next(path.glob("*.safetensors"))


def rewrite_manifest(path: Path, **changes: Any) -> None:
    old = read_manifest(path)
    fields = {"step": old.step, "world": old.world, "identity": old.identity, "files": old.files, **changes}
    (path / "manifest.json").write_text(json.dumps(Manifest(**fields).to_json()))


def point_outside(path: Path, name: str) -> None:
    entry = read_manifest(path).files["state.json"]
    rewrite_manifest(path, files={**read_manifest(path).files, name: entry})


def link_shard(path: Path) -> None:
    shard = shard_of(path)
    os.rename(shard, path.parent / "elsewhere")
    shard.symlink_to(path.parent / "elsewhere")


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "bit in a shard": (lambda p: flip_a_bit(shard_of(p)), "hash of shard-"),
    "bit in the state": (lambda p: flip_a_bit(p / "state.json"), "hash of state.json"),
    "bit in the manifest": (
        lambda p: (p / "manifest.json").write_text((p / "manifest.json").read_text().replace('"step": 2', '"step": 3')),
        "manifest.json is damaged",
    ),
    "half a manifest": (lambda p: os.truncate(p / "manifest.json", 50), "manifest.json cannot be read"),
    "a list as manifest": (lambda p: (p / "manifest.json").write_text("[]"), "not a unisono manifest"),
    "short shard": (lambda p: os.truncate(shard_of(p), shard_of(p).stat().st_size - 10), "is 10 bytes shorter"),
    "no shard": (lambda p: shard_of(p).unlink(), "is missing"),
    "no manifest": (lambda p: (p / "manifest.json").unlink(), "no manifest.json"),
    "another recipe": (lambda p: rewrite_manifest(p, identity={"recipe": "darkroom"}), "manifest of another run"),
    "no state": (
        lambda p: rewrite_manifest(p, files={shard_of(p).name: read_manifest(p).files[shard_of(p).name]}),
        "lists no state.json",
    ),
    "a shard too many": (
        lambda p: (p / "shard-00009-of-00009.safetensors").write_bytes(shard_of(p).read_bytes()),
        "is not in the manifest",
    ),
    "a linked shard": (link_shard, "not a regular file"),
    "a path upwards": (lambda p: point_outside(p, "../outside.json"), "not a file of this folder"),
    "an absolute path": (lambda p: point_outside(p, "/etc/hostname"), "not a file of this folder"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_skipped_with_the_reason(tmp_path: Path, damage: str) -> None:
    saver = make_saver(tmp_path)
    for step in (1, 2):
        assert save_now(saver, step, {"model.a": torch.full((4,), float(step))}).error is None
    older, newer = (path for _, path in list_steps(tmp_path))
    assert newest_valid(tmp_path, IDENTITY) == (newer, [])
    apply, reason = DAMAGES[damage]
    apply(newer)
    newest, skipped = newest_valid(tmp_path, IDENTITY)
    assert newest == older and read_extra(newest) == {"step": 1, "samples": 16}
    assert [path for path, _ in skipped] == [newer] and reason in skipped[0][1]


def test_a_missing_shard_is_never_filled_with_existing_values(ranks: Ranks, tmp_path: Path) -> None:
    path = shutil.copytree(ranks.folder / "sharded" / "step_00001000", tmp_path / "step_00001000")
    next(path.glob("shard-00001-*")).unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        load_whole(path, "model.")
    with pytest.raises(CheckpointError, match="a shard is missing"):
        describe(path)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ({"model.a": torch.zeros(4), "model.c": torch.zeros(1)}, "lacks 'model.c'; it also contains 'model.b'"),
        ({"model.a": torch.zeros(4), "model.b": torch.zeros(3)}, r"'model.b' is \[2\] in the checkpoint and \[3\] in"),
        (
            {"model.a": torch.zeros(4), "model.b": torch.zeros(2).double()},
            "float32 in the checkpoint and torch.float64",
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit_changes_nothing(tmp_path: Path, targets: Any, message: str) -> None:
    path = save_now(make_saver(tmp_path), 1, {"model.a": torch.ones(4), "model.b": torch.ones(2)}).path
    assert path is not None
    with pytest.raises(CheckpointError, match=message):
        load(path, targets, group=None, world=1)
    assert not targets["model.a"].any()


def test_a_checkpoint_may_hold_only_tensors_that_are_named_as_unused(tmp_path: Path) -> None:
    path = save_now(make_saver(tmp_path), 1, {"model.a": torch.ones(4), "ema.a": torch.ones(4)}).path
    assert path is not None
    target = {"model.a": torch.zeros(4)}
    with pytest.raises(CheckpointError, match=r"also contains 'ema\.a'"):
        load(path, target, group=None, world=1)
    load(path, target, group=None, world=1, unused={"ema.a"})
    assert torch.equal(target["model.a"], torch.ones(4))


# --- steps of a save ---------------------------------------------------------------------------------------------


def test_training_after_save_does_not_change_what_is_written(tmp_path: Path) -> None:
    weight, extra = torch.zeros(2_000_000), {"samples": 1}
    saver = make_saver(tmp_path)
    for step in (1, 2):  # the second save reuses the buffers of the first
        weight.fill_(step)
        extra["samples"] = step
        saver.save(step, {"model.weight": weight}, extra)
        weight.fill_(-1.0)
        extra["samples"] = -1
    assert [(result.step, result.error) for result in saver.wait()] == [(1, None), (2, None)]
    assert saver.poll() == saver.wait() == []
    for step, path in list_steps(tmp_path):
        assert torch.equal(load_whole(path, "model.")["weight"], torch.full((2_000_000,), float(step)))
        assert read_extra(path) == {"samples": step}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="page-locked memory needs a GPU")
def test_the_first_save_uses_memory_that_was_allocated_in_advance(tmp_path: Path) -> None:
    weights = {"model.a": torch.full((1000, 1000), 1.0, device="cuda"), "model.b": torch.ones(3)}
    saver = make_saver(tmp_path)
    saver.warm_up(weights)
    saver._snapshot._join()
    (made,) = saver._snapshot._buffers.values()
    assert made.is_pinned() and made.shape == (1000, 1000)
    assert save_now(saver, 1, weights).error is None
    assert saver._snapshot._buffers["model.a"] is made
    assert torch.equal(load_whole(tmp_path / "step_00000001", "model.")["a"], torch.ones(1000, 1000))


def test_warming_up_for_one_state_does_not_spoil_another(tmp_path: Path) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    saver = make_saver(tmp_path)
    saver.warm_up({"model.a": torch.ones(4, device=device), "model.gone": torch.ones(2, device=device)})
    assert save_now(saver, 1, {"model.a": torch.ones(5, device=device)}).error is None
    assert list(saver._snapshot._buffers) == ["model.a"] and describe(tmp_path / "step_00000001") == {
        "model.a": ((5,), torch.float32)
    }


def test_the_save_stall_benchmark_runs_and_writes_its_results(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parent.parent
    words = ["--parameters", "1e5", "--device", "cpu", "--quick", "--folder", tmp_path, "--output", tmp_path / "out"]
    ended = subprocess.run(
        [sys.executable, str(root / "benchmarks" / "save_stall.py"), *map(str, words)],
        env=os.environ | {"PYTHONPATH": str(root / "src")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    result = json.loads((tmp_path / "out" / "save_stall.json").read_text())
    assert result["medians"]["stall_s"] >= result["medians"]["call_s"] > 0 and result["bytes"] > 12 * 9e4
    assert str(tmp_path) not in (tmp_path / "out" / "save_stall.md").read_text() + json.dumps(result)
    assert [path.name for path in tmp_path.iterdir()] == ["out"], "checkpoints were left behind"


def test_pruning_keeps_the_newest_the_best_and_the_checkpoint_just_saved(tmp_path: Path) -> None:
    saver = make_saver(tmp_path, keep_last=2, asynchronous=False)
    (tmp_path / "step_00000000").mkdir()  # not a checkpoint of ours
    kept = []
    for step in range(1, 6):
        best = Best("eval/loss", 0.25) if step == 2 else None
        assert save_now(saver, step, {"model.a": torch.ones(1)}, best=best).error is None
        kept.append([step for step, _ in list_steps(tmp_path)][1:])
    assert kept == [[1], [1, 2], [2, 3], [2, 3, 4], [2, 4, 5]]
    assert read_best(tmp_path) == {"step": 2, "metric": "eval/loss", "value": 0.25}
    assert save_now(saver, 1, {"model.a": torch.ones(1)}).error is None  # a run that resumed from an earlier step
    assert [step for step, _ in list_steps(tmp_path)] == [0, 1, 2, 4, 5]
    (tmp_path / "best.json").write_text("{")
    result = save_now(saver, 6, {"model.a": torch.ones(1)})
    assert result.path is not None and result.error is not None and "best.json cannot be read" in result.error
    assert [step for step, _ in list_steps(tmp_path)] == [0, 1, 2, 4, 5, 6], "pruned without knowing the best"


def test_the_same_step_again_keeps_a_valid_checkpoint_and_moves_a_damaged_one_aside(tmp_path: Path) -> None:
    saver = make_saver(tmp_path)
    first = save_now(saver, 4, {"model.a": torch.ones(3)})
    assert first.path is not None
    before = {file.name: file.stat().st_mtime_ns for file in first.path.iterdir()}
    again = save_now(saver, 4, {"model.a": torch.zeros(3)}, best=Best("eval/loss", 1.0))
    assert (again.path, again.bytes, again.error) == (first.path, first.bytes, None)
    assert before == {file.name: file.stat().st_mtime_ns for file in first.path.iterdir()}
    assert read_best(tmp_path) is not None

    flip_a_bit(shard_of(first.path))
    assert save_now(saver, 4, {"model.a": torch.full((3,), 2.0)}).error is None
    assert torch.equal(load_whole(first.path, "model.")["a"], torch.full((3,), 2.0))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best.json", "step_00000004", "step_00000004.bad-1"]


def test_leftovers_of_a_killed_save_are_harmless_and_removed_by_the_next_commit(tmp_path: Path) -> None:
    leftover = tmp_path / ".staging-step_00000009-0a1b2c3d"
    leftover.mkdir()
    (leftover / "shard-00001-of-00002.safetensors").write_bytes(b"half")
    assert newest_valid(tmp_path, IDENTITY) == (None, [(leftover, "left behind by an interrupted save")])
    saver = make_saver(tmp_path)
    newer = tmp_path / ".staging-step_00000009-ffffffff"  # of another run, which may still be active
    newer.mkdir()
    assert save_now(saver, 9, {"model.a": torch.ones(1)}).error is None
    assert not leftover.exists() and newer.exists()


def test_a_finished_run_removes_leftovers_of_killed_saves(tmp_path: Path) -> None:
    names = [".staging-step_00000003-0a1b", ".trash-step_00000001-0a1b", ".staging-step_00000004-0a1b", ".staging-mine"]
    for name in names:
        (tmp_path / name).mkdir()
    make_saver(tmp_path).tidy(3)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names[2:]), "later ones may be a living run's"


@pytest.mark.parametrize("name", ["model._orig_mod.a", "model.0._checkpoint_wrapped_module.a", "ema._fsdp_wrapped.a"])
def test_names_with_a_wrappers_prefix_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="wrapper's prefix"):
        make_saver(tmp_path).save(1, {name: torch.ones(1)}, {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mode", [0o750, 0o700])
def test_shards_have_the_permissions_of_their_folder(tmp_path: Path, mode: int) -> None:
    before = os.umask(0o777 & ~mode)
    try:
        assert save_now(make_saver(tmp_path), 1, trained(1)[1]).error is None
    finally:
        os.umask(before)
    ((_, committed),) = list_steps(tmp_path)
    files = list(committed.iterdir())
    assert len(files) == 3 and {file.stat().st_mode & 0o777 for file in files} == {mode & 0o666}


def test_a_state_without_tensors_is_saved_and_found(tmp_path: Path) -> None:
    assert save_now(make_saver(tmp_path), 1, {}).error is None
    newest, _ = newest_valid(tmp_path, IDENTITY)
    assert newest is not None and describe(newest) == {}
    load(newest, {}, group=None, world=1)


def test_a_thousand_ranks_write_their_files_independently(tmp_path: Path) -> None:
    """One process plays them one after the other: a collective would have nobody to wait for, and fail here."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    world, folder = 1000, tmp_path
    whole = torch.arange(3.0 * world).view(world, 3)
    for rank in (*range(0, world, 37), world - 1):
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
        try:
            mesh, row = init_device_mesh("cpu", (world,)), whole[rank : rank + 1].clone()
            part = DTensor.from_local(row, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())
            write_shards({"model.w": part}, folder, rank=rank, world=world)
        finally:
            dist.destroy_process_group()
        with safe_open(folder / shard_name(rank, world), "pt") as file:
            assert torch.equal(file.get_tensor("model.w"), row)
            assert json.loads(file.metadata()["DCP_SHARDING_INFO"]) == {"model.w": {"saved_offsets": [rank, 0]}}
