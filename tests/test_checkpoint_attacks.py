"""Damaged, swapped or planted checkpoints are skipped with a reason, kept on disk, and never execute code."""

from __future__ import annotations

import ast
import json
import os
import pickle
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import unisono
from command_line import TESTS, TINY, lines
from command_line import unisono as command
from tiny_recipe import Tiny
from unisono.checkpoint.aside import remark_on_asides, set_aside_after
from unisono.checkpoint.contents import describe
from unisono.checkpoint.find import list_steps, newest_valid, validate
from unisono.checkpoint.load import load, load_whole
from unisono.checkpoint.manifest import CheckpointError, Manifest, hash_file, read_manifest
from unisono.checkpoint.save import Saver
from unisono.engine.resume import ChosenCheckpoint, find_checkpoint
from unisono.engine.state import TrainState
from unisono.errors import TrainingFailed, UserError
from unisono.faults import SAVE_PHASES, Injector, parse

IDENTITY = {"recipe": "Tiny", "run": "a" * 32}


def train(folder: Path, **settings: Any) -> Any:
    """A run of the tiny recipe in this process."""
    always = {"nproc": 1, "save_every": 1, "keep_last": 0, "deterministic": True}
    return unisono.train(Tiny, **{"output_dir": str(folder), "max_steps": 4, **always, **settings})


def weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return load_whole(folder / "checkpoints" / f"step_{step:08d}", "")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def save(folder: Path, *steps: int, identity: dict[str, str] = IDENTITY) -> list[Path]:
    """Saves checkpoints with a state like that of a real run."""
    saver = Saver(folder, rank=0, world=1, group=None, keep_last=0, asynchronous=False, identity=identity)
    for step in steps:
        extra = {"state": TrainState(4, step=step, samples=4 * step).to_json(), "optimizer": {}}
        saver.save(step, {"model.a": torch.full((4,), float(step))}, extra)
        assert saver.wait()[0].error is None
    return [folder / f"step_{step:08d}" for step in steps]


def reseal(path: Path, **changes: Any) -> None:
    """Updates the manifest to match the current files, as an attacker could do."""
    old = read_manifest(path)
    files = {file.name: hash_file(file) for file in path.iterdir() if file.name in old.files or file.suffix == ".bin"}
    fields = {"step": old.step, "world": old.world, "identity": old.identity, "files": files, **changes}
    (path / "manifest.json").write_text(json.dumps(Manifest(**fields).to_json()))


# --- a run skips, renames and reports bad checkpoints ------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run of six steps."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    train(folder, max_steps=6)
    return folder


def test_bad_checkpoints_are_skipped_set_aside_and_named(
    tmp_path: Path, whole: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run, stranger = tmp_path / "run", tmp_path / "stranger"
    train(run, max_steps=5)
    train(stranger)
    checkpoints = run / "checkpoints"
    two, three, four, five = (checkpoints / f"step_{step:08d}" for step in (2, 3, 4, 5))
    shard = next(five.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x01")  # a flipped bit
    shutil.rmtree(four)
    shutil.copytree(stranger / "checkpoints" / "step_00000004", four)  # complete, but of another run of this recipe
    next(three.glob("*.safetensors")).unlink()
    before = {path.name: contents(path) for path in (five, four, three)}
    untouched = contents(two)

    capfd.readouterr()
    assert train(run, max_steps=6).step == 6

    kinds = {five.name: "bad", four.name: "other", three.name: "bad"}
    asides = {name: checkpoints / f"{name}.{kind}-1" for name, kind in kinds.items()}
    assert {name: contents(path) for name, path in asides.items()} == before, "a bad checkpoint was changed"
    assert contents(two) == untouched
    assert same(weights(run, 6), weights(whole, 6))
    assert [step for step, path in list_steps(checkpoints) if validate(path) is None] == [1, 2, 3, 4, 5, 6]
    events = {line["checkpoint"]: line["why"] for line in lines(run, "events.jsonl") if line["kind"] == "set_aside"}
    stderr = capfd.readouterr().err
    for path, reason in zip((five, four, three), ("hash of shard", "another run", "is missing"), strict=True):
        aside = asides[path.name].name
        assert reason in events[aside] and aside in stderr and reason in stderr


def test_the_next_start_detects_a_corrupted_save(tmp_path: Path, whole: Path) -> None:
    run = tmp_path / "run"
    train(run, inject="corrupt-save@rank0:step4")
    train(run, max_steps=6, inject="corrupt-save@rank0:step4")
    assert (run / "checkpoints" / "step_00000004.bad-1").is_dir()
    assert same(weights(run, 6), weights(whole, 6)) and same(weights(run, 4), weights(whole, 4))


def test_a_named_checkpoint_that_is_bad_is_refused(tmp_path: Path, whole: Path) -> None:
    path = Path(shutil.copytree(whole / "checkpoints" / "step_00000003", tmp_path / "step_00000003"))
    os.truncate(next(path.glob("*.safetensors")), 40)
    with pytest.raises(UserError, match=r"not a valid checkpoint: shard.* bytes shorter"):
        train(tmp_path / "run", resume=str(path))
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000003"]


def test_only_bad_or_later_checkpoints_are_renamed_and_none_is_overwritten(tmp_path: Path) -> None:
    _, _, good, bad, _ = save(tmp_path, 1, 2, 3, 4, 5)
    shard = next(bad.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x01")
    (tmp_path / "step_00000003.later-1").mkdir()
    (tmp_path / "step_00000006").write_text("not a folder")
    (tmp_path / "step_00000007").symlink_to(tmp_path / "nowhere")
    unusable = {bad: str(validate(bad))}
    asides = {path.name: reason for path, reason in set_aside_after(tmp_path, 2, IDENTITY, unusable)}
    assert list(asides) == [
        "step_00000003.later-2",
        "step_00000004.bad-1",
        "step_00000005.later-1",
        "step_00000006.bad-1",
        "step_00000007.bad-1",
    ]
    assert "went back to step 2" in asides["step_00000003.later-2"] and "hash of" in asides["step_00000004.bad-1"]
    assert [step for step, _ in list_steps(tmp_path)] == [1, 2] and validate(tmp_path / "step_00000003.later-2") is None
    assert (tmp_path / "step_00000006.bad-1").read_text() == "not a folder" and not good.exists()
    assert set_aside_after(tmp_path, 2, IDENTITY, {}) == []


def test_a_link_with_the_name_of_a_step_does_not_stop_its_save(tmp_path: Path) -> None:
    (tmp_path / "step_00000004").symlink_to(tmp_path / "nowhere")
    (path,) = save(tmp_path, 4)
    assert validate(path) is None and (tmp_path / "step_00000004.bad-1").is_symlink()


# --- the run that a checkpoint belongs to
# -------------------------------------------------------------------------------------


def test_a_checkpoint_under_the_name_of_another_step_is_not_used(tmp_path: Path) -> None:
    one, two = save(tmp_path, 1, 2)
    os.rename(two, tmp_path / "step_00000009")
    shutil.copytree(one, tmp_path / "step_000000005")
    checkpoint, skipped = newest_valid(tmp_path, IDENTITY)
    assert checkpoint == one
    reasons = {path.name: why for path, why in skipped}
    assert reasons == {
        "step_00000009": "its manifest says step 2",
        "step_000000005": "its manifest says step 1",
    }
    assert validate(shutil.copytree(one, tmp_path / "a copy of mine")) is None


def test_another_run_of_the_same_recipe_is_recognised_and_old_checkpoints_stay_loadable(tmp_path: Path) -> None:
    (path,) = save(tmp_path, 1)
    assert validate(path, identity=IDENTITY) is None
    assert validate(path, identity={"recipe": "Tiny"}) is None
    other = validate(path, identity={"recipe": "Tiny", "run": "b" * 32})
    assert other is not None and "manifest of another run" in other and "b" * 32 in other
    (old,) = save(tmp_path / "old", 1, identity={"recipe": "Tiny"})
    assert validate(old, identity=IDENTITY) is None


def test_a_run_keeps_its_id_and_its_checkpoints_survive_a_lost_run_json(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(run, max_steps=2)
    first = json.loads((run / "run.json").read_text())["id"]
    train(run, max_steps=3)
    assert json.loads((run / "run.json").read_text())["id"] == first
    assert {read_manifest(path).identity["run"] for _, path in list_steps(run / "checkpoints")} == {first}
    for name in ("run.json", "metrics.jsonl", "events.jsonl"):
        (run / name).unlink()
    assert train(run, max_steps=4).step == 4
    assert json.loads((run / "run.json").read_text())["id"] == first
    train(tmp_path / "branch", max_steps=4, resume=str(run / "checkpoints" / "step_00000003"))
    assert json.loads((tmp_path / "branch" / "run.json").read_text())["id"] != first


# --- intact files with a wrong state ---------------------------------------------------------------------------------


def state_with(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda extra: {**extra, "state": {**extra["state"], **changes}}


def without(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda extra: {**extra, "state": {key: value for key, value in extra["state"].items() if key != name}}


WRONG_STATES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no step": (without("step"), "lacks 'step'"),
    "no effective batch": (without("global_batch"), "lacks 'global_batch'"),
    "a newer version's": (state_with(flux=1), "'flux', which this version"),
    "text as step": (state_with(step="2"), "'step' cannot be '2'"),
    "true as step": (state_with(step=True), "'step' cannot be True"),
    "half a step": (state_with(step=2.0), "'step' cannot be 2.0"),
    "another step": (state_with(step=3), "says step 3, but its manifest says step 2"),
    "fewer than no samples": (state_with(samples=-1), "'samples' cannot be -1"),
    "a huge number": (state_with(samples=10**100), "'samples' cannot be 1000"),
    "an empty batch": (state_with(global_batch=0), "'global_batch' cannot be 0"),
    "not a number": (state_with(expected_count=float("nan")), "'expected_count' cannot be nan"),
    "infinite": (state_with(expected_count=float("inf")), "'expected_count' cannot be inf"),
    "a list of metrics": (state_with(last_metrics=[1]), "'last_metrics' cannot be this list"),
    "nested metrics": (state_with(last_metrics={"a": {}}), "'last_metrics' cannot be this dict"),
    "half a loss scale": (state_with(loss_scale={"value": 2.0}), "'loss_scale' cannot be"),
    "a best of nothing": (state_with(best={}), "'best' cannot be"),
    "no state": (lambda extra: {"optimizer": {}}, "the state is not an object"),
    "no optimizer": (lambda extra: {"state": extra["state"]}, "lacks the optimizer's state"),
    "odd optimizer": (lambda extra: {**extra, "optimizer": {"a": 1}}, "lacks the optimizer's state"),
    "a list": (lambda extra: [], "does not contain a JSON object"),
}
WRONG_TEXTS = {
    "deep": ('{"state": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested too deeply"),
    "deep objects": ('{"a": ' * 100_000 + "1" + "}" * 100_000, "nested too deeply"),
    "a number of 5000 digits": ('{"state": ' + "9" * 5000 + "}", "cannot be read"),
    "not text": ("\udcff", "cannot be read"),
    "nothing": ("", "cannot be read"),
}


def found_after(path: Path, text: str) -> ChosenCheckpoint:
    (path / "state.json").write_text(text, errors="surrogateescape")
    reseal(path)
    assert validate(path) is None, "the attack must get past the hashes"
    return find_checkpoint("auto", path.parent.parent, "Tiny", IDENTITY["run"])


@pytest.mark.parametrize("attack", [*WRONG_STATES, *WRONG_TEXTS])
def test_a_state_with_valid_hashes_but_wrong_values_is_skipped_with_the_reason(tmp_path: Path, attack: str) -> None:
    one, two = save(tmp_path / "checkpoints", 1, 2)
    if attack in WRONG_STATES:
        change, reason = WRONG_STATES[attack]
        text = json.dumps(change(json.loads((two / "state.json").read_text())))
    else:
        text, reason = WRONG_TEXTS[attack]
    checkpoint = found_after(two, text)
    assert checkpoint.path == one and reason in checkpoint.bad[two], checkpoint
    with pytest.raises(UserError, match="not a valid checkpoint"):
        find_checkpoint(str(two), tmp_path, "Tiny")


def test_a_state_may_lack_fields_of_later_versions() -> None:
    old = TrainState(4, step=2).to_json()
    for name in ("best", "last_metrics", "loss_scale"):
        del old[name]
    assert TrainState.from_json(old) == TrainState(4, step=2)
    assert TrainState.from_json(json.loads(json.dumps(TrainState(4, last_metrics={"loss": float("nan")}).to_json())))


# --- intact files with wrong tensors ---------------------------------------------------------------------------------


def rewrite(path: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Changes the tensors of a checkpoint and updates header and hashes accordingly."""
    [shard] = path.glob("*.safetensors")
    tensors = load_file(shard)
    change(tensors)
    offsets = {name: {"saved_offsets": [0] * tensor.dim()} for name, tensor in tensors.items()}
    save_file(tensors, shard, metadata={"DCP_SHARDING_INFO": json.dumps(offsets), "format": "pt"})
    reseal(path)


def restate(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Changes the state of a checkpoint and updates the hashes accordingly."""
    file = path / "state.json"
    file.write_text(json.dumps(change(json.loads(file.read_text()))))
    reseal(path)


def as_type(name: str, dtype: torch.dtype) -> Callable[[dict[str, torch.Tensor]], Any]:
    return lambda tensors: tensors.update({name: tensors[name].to(dtype)})


def with_slots(**slots: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda extra: {**extra, "optimizer": {"weight": slots}}


MISFITS: dict[str, tuple[Callable[[Path], None], str]] = {
    "type": (
        lambda path: rewrite(path, as_type("model.weight", torch.float64)),
        "'model.weight' is torch.float64 in the checkpoint",
    ),
    "shape": (
        lambda path: rewrite(path, lambda t: t.update({"model.bias": torch.zeros(3)})),
        "'model.bias' is [3] in the checkpoint",
    ),
    "missing": (lambda path: rewrite(path, lambda t: t.pop("model.bias")), "it lacks 'model.bias'"),
    "extra": (lambda path: rewrite(path, lambda t: t.update({"model.c": torch.ones(1)})), "it also contains 'model.c'"),
    "slot": (
        lambda path: rewrite(path, as_type("optimizer.bias.exp_avg", torch.int32)),
        "is torch.int32 in the checkpoint",
    ),
    "text as slot": (lambda path: restate(path, with_slots(step="x")), "'step' of 'weight' has the wrong type"),
    "number as slot": (lambda path: restate(path, with_slots(exp_avg=1)), "'exp_avg' of 'weight' has the wrong type"),
    "micro-batch": (lambda path: restate(path, state_with(micro_batch=-1)), "'micro_batch' cannot be -1"),
    "huge batch": (
        lambda path: restate(path, state_with(global_batch=2**40)),
        "'global_batch' cannot be 1099511627776",
    ),
}


@pytest.mark.parametrize("attack", MISFITS)
def test_a_newest_checkpoint_that_does_not_fit_is_damaged_if_an_older_one_fits(
    tmp_path: Path, whole: Path, attack: str, capfd: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    newest = run / "checkpoints" / "step_00000006"
    change, reason = MISFITS[attack]
    change(newest)
    assert validate(newest) is None, "the attack must get past the hashes"
    capfd.readouterr()
    train(run, max_steps=7)
    assert json.loads((run / "run.json").read_text())["starts"][-1]["from_step"] == 5
    stderr = capfd.readouterr().err
    assert "step_00000006 skipped" in stderr and reason in stderr and "Traceback" not in stderr
    assert (run / "checkpoints" / "step_00000006.bad-1").is_dir()
    assert same(weights(run, 6), weights(whole, 6))


@pytest.mark.parametrize("optimizer", ["adafactor", "muon"])
def test_state_that_the_optimizer_does_not_have_is_refused(tmp_path: Path, optimizer: str) -> None:
    train(tmp_path / "run", max_steps=1, optimizer=optimizer)
    path = tmp_path / "run" / "checkpoints" / "step_00000001"
    rewrite(path, lambda tensors: tensors.update({"optimizer.weight.evil": torch.ones(3)}))
    with pytest.raises(UserError, match=r"it also contains 'optimizer\.weight\.evil'"):
        train(tmp_path / "run", max_steps=2)


def test_two_ranks_agree_on_the_older_checkpoint(tmp_path: Path, whole: Path) -> None:
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    MISFITS["shape"][0](run / "checkpoints" / "step_00000006")
    words = ["train", TINY, "--output_dir", run, "--nproc", 2, "--max_steps", 7, "--strategy", "fsdp"]
    done = command(*words, cwd=tmp_path)
    assert done.code == 0 and "step_00000006 skipped" in done.err, done.err
    assert json.loads((run / "run.json").read_text())["starts"][-1]["from_step"] == 5


@pytest.mark.parametrize("attack", ["shape", "missing", "text as slot"])
def test_if_no_checkpoint_fits_the_model_has_changed_and_none_is_renamed(
    tmp_path: Path, whole: Path, attack: str
) -> None:
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    change, reason = MISFITS[attack]
    for _, path in list_steps(run / "checkpoints"):
        change(path)
    before = sorted(os.listdir(run / "checkpoints"))
    with pytest.raises(UserError, match=re.escape(reason)) as refused:
        train(run, max_steps=7)
    assert "\n" not in str(refused.value) and "step_00000006" in str(refused.value)
    assert sorted(os.listdir(run / "checkpoints")) == before


def test_non_finite_weights_are_reported_with_the_checkpoint_to_resume_from(
    tmp_path: Path, whole: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    for step in (6, 5):
        rewrite(run / "checkpoints" / f"step_{step:08d}", lambda tensors: tensors["model.weight"].fill_(torch.nan))
    capfd.readouterr()
    with suppress(TrainingFailed):
        train(run, max_steps=7, max_skipped_steps=0)
    older = run / "checkpoints" / "step_00000004"
    stderr = capfd.readouterr().err
    assert f"step_00000006 holds weights that are not finite (weight); to go back: --resume {older}" in stderr
    train(run, max_steps=7, resume=str(older))
    assert same(weights(run, 6), weights(whole, 6))


HEADERS: dict[str, tuple[dict[str, Any], Any, str]] = {
    "no data_offsets": ({"data_offsets": None}, [0], "lacks valid data_offsets of 'model.a'"),
    "one offset": ({"data_offsets": [0]}, [0], "lacks valid data_offsets of 'model.a'"),
    "negative": ({"data_offsets": [-16, 0]}, [0], "lacks valid data_offsets of 'model.a'"),
    "backwards": ({"data_offsets": [16, 0]}, [0], "data_offsets of 'model.a' do not match"),
    "too short": ({"data_offsets": [0, 8]}, [0], "data_offsets of 'model.a' do not match"),
    "behind the end": ({"data_offsets": [16, 32]}, [0], "leave a gap or overlap"),
    "huge shape": ({"shape": [2**62, 4], "data_offsets": [0, 16]}, [0, 0], "lacks a valid shape of 'model.a'"),
    "unknown type": ({"dtype": "F6_E2M3"}, [0], "type F6_E2M3"),
    "no part": ({}, None, "lacks the offsets of 'model.a'"),
    "a part elsewhere": ({}, [7], "contains only a part of 'model.a'"),
    "a negative part": ({}, [-1], "lacks the offsets of 'model.a'"),
    "a part of more dimensions": ({}, [0, 0], "lacks the offsets of 'model.a'"),
}


@pytest.mark.parametrize("attack", HEADERS)
def test_a_shard_with_a_wrong_header_is_skipped_with_a_clear_reason(tmp_path: Path, attack: str) -> None:
    one, two = save(tmp_path / "checkpoints", 1, 2)
    changes, offsets, reason = HEADERS[attack]
    entry = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]} | changes
    entry = {key: value for key, value in entry.items() if value is not None}
    info = {} if offsets is None else {"model.a": {"saved_offsets": offsets}}
    text = json.dumps({"__metadata__": {"DCP_SHARDING_INFO": json.dumps(info)}, "model.a": entry}).encode()
    [shard] = two.glob("*.safetensors")
    shard.write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * 16)
    reseal(two)
    checkpoint = find_checkpoint("auto", tmp_path, "Tiny")
    assert checkpoint.path == one and reason in checkpoint.bad[two], checkpoint
    with pytest.raises(CheckpointError, match=re.escape(reason)):
        load(two, {"model.a": torch.zeros(4)}, group=None, world=1)


# --- renamed checkpoints are reported ------------------------------------------------------------------------------


def test_renamed_checkpoints_are_counted_at_each_start_with_the_command_that_removes_them(
    tmp_path: Path, whole: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(whole, tmp_path / "my run"))
    checkpoints = run / "checkpoints"
    newest = checkpoints / "step_00000006"
    for name in ("step_00000006.other-1", "step_00000006.other-2", "step_00000005.bad-1"):
        shutil.copytree(newest, checkpoints / name)
    (checkpoints / "step_mine.other-1").mkdir()  # not one of ours
    assert remark_on_asides(tmp_path) is None
    capfd.readouterr()
    train(run, max_steps=7)
    [line] = [line for line in capfd.readouterr().err.splitlines() if "set aside" in line]
    size = 3 * sum(file.stat().st_size for file in newest.iterdir())
    assert "has 3 checkpoints that were set aside" in line and f"{size / 1024:.1f} KiB" in line
    subprocess.run(["bash", "-c", line[line.index("rm -r") :]], check=True)
    assert remark_on_asides(checkpoints) is None
    assert {"step_00000006", "step_00000007", "step_mine.other-1"} <= set(os.listdir(checkpoints))


def test_run_json_names_the_libraries_that_the_numbers_depend_on(whole: Path) -> None:
    versions = json.loads((whole / "run.json").read_text())["versions"]
    for package in ("numpy", "safetensors", "diffusers", "transformers", "peft", "accelerate"):
        try:
            assert versions[package] == version(package)
        except PackageNotFoundError:
            assert package not in versions


# --- planted files: no code is run ------------------------------------------------------------------------------------


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return (Path.touch, (self.mark,))


def plant(file: Path, mark: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(pickle.dumps(Bomb(mark)))


def test_the_malicious_pickle_executes_code_when_unpickled(tmp_path: Path) -> None:
    plant(tmp_path / "bomb", tmp_path / "exploded")
    pickle.loads((tmp_path / "bomb").read_bytes())  # the only place that unpickles anything
    assert (tmp_path / "exploded").exists()


def test_pickles_next_to_a_good_checkpoint_are_ignored(tmp_path: Path, whole: Path) -> None:
    run, mark = Path(shutil.copytree(whole, tmp_path / "run")), tmp_path / "exploded"
    path = run / "checkpoints" / "step_00000006"
    for name in (".metadata", "__0_0.distcp", "pytorch_model.bin", "training_args.bin", "model.pt", "data.pkl"):
        plant(path / name, mark)
        plant(run / "checkpoints" / name, mark)
    (path / "__init__.py").write_text(f"open({str(mark)!r}, 'w')")
    assert train(run, max_steps=7).step == 7
    assert [start["from_step"] for start in json.loads((run / "run.json").read_text())["starts"]] == [0, 6]
    load_whole(path, "model.")
    assert not mark.exists()


@pytest.mark.parametrize("what", ["pickle", "torch.save", "header of objects", "no header"])
def test_a_shard_that_is_not_a_safetensors_file_is_skipped(tmp_path: Path, what: str) -> None:
    one, two = save(tmp_path / "checkpoints", 1, 2)
    shard, mark = next(two.glob("*.safetensors")), tmp_path / "exploded"
    if what == "pickle":
        plant(shard, mark)
    elif what == "torch.save":
        torch.save({"model.a": Bomb(mark)}, shard)
    else:
        header = {"model.a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}
        info = json.dumps([1, 2]) if what == "header of objects" else "[" * 100_000
        text = json.dumps({"__metadata__": {"DCP_SHARDING_INFO": info}, **header}).encode()
        shard.write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * 16)
    reseal(two)
    assert validate(two, identity=IDENTITY) is None, "the attack must get past the hashes"
    checkpoint = find_checkpoint("auto", tmp_path, "Tiny")
    assert checkpoint.path == one and "cannot be read" in checkpoint.bad[two]
    with pytest.raises(CheckpointError, match="cannot be read"):
        load(two, {"model.a": torch.zeros(4)}, group=None, world=1)
    with pytest.raises(CheckpointError, match="cannot be read"):
        describe(two)
    assert not mark.exists()


def name_outside(path: Path, name: str) -> None:
    reseal(path, files={**read_manifest(path).files, name: read_manifest(path).files["state.json"]})


def as_pipe(path: Path) -> None:
    (path / "manifest.json").unlink()
    os.mkfifo(path / "manifest.json")


def as_link(path: Path) -> None:
    os.rename(path / "manifest.json", path.parent / "elsewhere.json")
    (path / "manifest.json").symlink_to(path.parent / "elsewhere.json")


def with_number(path: Path, number: str) -> None:
    text = (path / "manifest.json").read_text().replace('"step": 2', f'"step": {number}')
    (path / "manifest.json").write_text(text)


MANIFESTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "upwards": (lambda p: name_outside(p, "../../x"), "not a file of this folder"),
    "absolute": (lambda p: name_outside(p, "/etc/passwd"), "not a file of this folder"),
    "windows": (lambda p: name_outside(p, "..\\x"), "not a file of this folder"),
    "a name that cannot be encoded": (lambda p: name_outside(p, "\ud800"), "not a file of this folder"),
    "a null byte": (lambda p: name_outside(p, "a\0b"), "not a file of this folder"),
    "an endless name": (lambda p: name_outside(p, "a" * 5000), "not a file of this folder"),
    "a pipe": (as_pipe, "not a regular file"),
    "a link": (as_link, "not a regular file"),
    "64 MiB": (lambda p: os.truncate(p / "manifest.json", 65 << 20), "larger than 64 MiB"),
    "deep": (lambda p: (p / "manifest.json").write_text("[" * 100_000), "nested too deeply"),
    "infinite": (lambda p: with_number(p, "1e999"), "damaged"),
    "infinite and sealed": (lambda p: reseal(p, step=float("inf")), "not a unisono manifest"),
    "of a huge step": (lambda p: reseal(p, step=10**30), "its manifest says step 1000"),
}


@pytest.mark.parametrize("attack", MANIFESTS)
def test_a_malicious_manifest_is_skipped_with_the_reason(tmp_path: Path, attack: str) -> None:
    one, two = save(tmp_path, 1, 2)
    apply, reason = MANIFESTS[attack]
    apply(two)
    checkpoint, skipped = newest_valid(tmp_path, IDENTITY)
    assert checkpoint == one and reason in skipped[0][1], skipped


@pytest.mark.parametrize("name", ["evil.yaml", "evil.json"])
def test_a_config_file_runs_no_code(tmp_path: Path, name: str) -> None:
    tag = '!!python/object/apply:os.system ["touch exploded"]'
    text = f"max_steps: {tag}" if name.endswith("yaml") else json.dumps({"max_steps": tag})
    (tmp_path / name).write_text(text)
    ended = command("train", f"{TESTS / 'tiny_recipe.py'}:Tiny", "--config", name, "--output_dir", "run", cwd=tmp_path)
    assert ended.code == 2 and len(ended.err.strip().splitlines()) == 1, ended
    assert [path.name for path in tmp_path.iterdir()] == [name]


FORBIDDEN = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "pandas"}
HARMLESS = {"src/unisono/observe/report/metrics_table.py": ["pandas"]}  # makes a DataFrame of numbers, reads no file
FORBIDDEN_CALLS = {"eval", "exec", "torch.load", "yaml.unsafe_load", "yaml.full_load"}
SAFE_YAML = {"_loader", "SafeLoader", "CSafeLoader"}


def dangers(source: str) -> list[str]:
    """Calls in a module that could execute code from a file."""
    result = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            taken = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                # The name of an exception is harmless, and messages between unisono's own processes do not come from
                # files.
                taken = [f"{node.module}.{name}" for name in taken if name != "PicklingError"]
            result += [name for name in taken if name.split(".")[0] in FORBIDDEN]
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in FORBIDDEN_CALLS:
                result.append(called)
            if called in ("np.load", "numpy.load"):
                output = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                result += [] if output.get("allow_pickle") == "False" else [called]  # the default has changed before
            if called == "yaml.load":
                loaders = [keyword.value for keyword in node.keywords if keyword.arg == "Loader"] + node.args[1:]
                words = {ast.unparse(loader).removesuffix("()").removeprefix("yaml.") for loader in loaders}
                result += [] if words and words <= SAFE_YAML else ["yaml.load"]
    return result


def test_nothing_in_the_package_executes_the_contents_of_a_file() -> None:
    sources = list((TESTS.parent / "src").rglob("*.py"))
    assert len(sources) > 50
    root = TESTS.parent
    dangerous = {str(path.relative_to(root)): result for path in sources if (result := dangers(path.read_text()))}
    assert dangerous == HARMLESS
    assert all("pandas.read" not in (root / path).read_text() for path in HARMLESS)
    bad = ["import pickle", "from marshal import loads", "torch.load(f)", "eval(x)", "yaml.load(t, Loader=yaml.Loader)"]
    bad += ["np.load(f)", "np.load(f, allow_pickle=True)"]
    assert all(len(dangers(text)) == 1 for text in [*bad, "yaml.load(text)"])


# --- folders that cannot be written, and disks that fill up ----------------------------------------------------------


@contextmanager
def small_disk(at: Path, size: str) -> Iterator[None]:
    """Mounts a small in-memory disk at a folder."""
    at.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(at)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(at)], check=True)


needs_mounts = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")


@pytest.mark.parametrize("what", ["file", "link"])
def test_a_file_named_checkpoints_is_detected_before_the_first_step(tmp_path: Path, what: str) -> None:
    run = tmp_path / "run"
    run.mkdir()
    if what == "file":
        (run / "checkpoints").write_text("mine")
    else:
        (run / "checkpoints").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"checkpoints is (not a folder|a broken link)"):
        train(run)
    assert [path.name for path in run.iterdir()] == ["checkpoints"]


def test_checkpoints_may_be_a_link_to_another_disk(tmp_path: Path) -> None:
    run, scratch = tmp_path / "run", tmp_path / "scratch"
    run.mkdir()
    scratch.mkdir()
    (run / "checkpoints").symlink_to(scratch)
    train(run, max_steps=2)
    assert train(run, max_steps=3).step == 3
    assert [step for step, path in list_steps(scratch) if validate(path) is None] == [1, 2, 3]


@needs_mounts
@pytest.mark.parametrize("what", ["read-only", "full"])
def test_a_checkpoint_folder_that_cannot_be_written_is_detected_before_the_first_step(
    tmp_path: Path, what: str
) -> None:
    run = tmp_path / "run"
    train(run, max_steps=2)
    shutil.rmtree(run / "checkpoints")
    with small_disk(run / "checkpoints", "64k"):
        if what == "full":
            with pytest.raises(OSError), open(run / "checkpoints" / "mine", "wb", buffering=0) as file:
                while True:
                    file.write(b"\0" * 4096)
        else:
            subprocess.run(["mount", "-o", "remount,ro", str(run / "checkpoints")], check=True)
        before = sorted(os.listdir(run / "checkpoints"))
        with pytest.raises(UserError, match=r"cannot be written \((Read-only file system|No space left on device)"):
            train(run)
        assert sorted(os.listdir(run / "checkpoints")) == before


@needs_mounts
def test_a_full_disk_makes_saves_fail_but_training_continues(
    tmp_path: Path, whole: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    with small_disk(run / "checkpoints", "48k"):
        with pytest.raises(TrainingFailed, match=r"last checkpoint \(step 6\) could not be saved.*No space") as failed:
            train(run, max_steps=6)
        assert failed.value.exit_code == 3
        events = lines(run, "events.jsonl")
        saved = [line["step"] for line in events if line["kind"] == "save"]
        lost = [line["step"] for line in events if line["kind"] == "save_failed"]
        assert saved and lost and saved + lost == [1, 2, 3, 4, 5, 6]
        stderr = capfd.readouterr().err
        assert all(f"checkpoint of step {step} was not saved" in stderr for step in lost)
        assert len([line for line in lines(run) if "loss" in line]) == 6, "training went on"
        valid = [step for step, path in list_steps(run / "checkpoints") if validate(path) is None]
        assert valid == saved and len(os.listdir(run / "checkpoints")) == len(saved), "half a checkpoint was left"
        shutil.rmtree(run / "checkpoints" / "step_00000001")
        train(run, max_steps=6, save_every=100)
        assert same(weights(run, 6), weights(whole, 6))


@pytest.mark.parametrize("phase", SAVE_PHASES[:-1])
def test_an_injected_full_disk_fails_one_save_and_the_run_continues(tmp_path: Path, whole: Path, phase: str) -> None:
    run = tmp_path / "run"
    train(run, max_steps=6, inject=f"disk-full@rank0:step3:{phase}")
    events = lines(run, "events.jsonl")
    (failed,) = [line for line in events if line["kind"] == "save_failed"]
    assert failed["step"] == 3 and "No space left on device" in failed["error"]
    assert [line["step"] for line in events if line["kind"] == "save"] == [1, 2, 4, 5, 6]
    assert sorted(os.listdir(run / "checkpoints")) == [f"step_{step:08d}" for step in (1, 2, 4, 5, 6)]
    assert same(weights(run, 6), weights(whole, 6))


def test_injected_faults_of_a_save_happen_in_the_order_of_its_phases(tmp_path: Path) -> None:
    passed: list[tuple[str, int, Path | None]] = []

    class Spy(Injector):
        def at(self, phase: str, step: int, saved: Path | None = None) -> None:
            passed.append((phase, step, saved))

    saver = Saver(
        tmp_path,
        rank=0,
        world=1,
        group=None,
        keep_last=0,
        asynchronous=True,
        identity=IDENTITY,
        injector=Spy(parse("")),
    )
    saver.save(7, {"model.a": torch.ones(2)}, {})
    assert saver.wait()[0].error is None
    assert [phase for phase, _, _ in passed] == list(SAVE_PHASES)
    assert {step for _, step, _ in passed} == {7} and passed[-1][2] == tmp_path / "step_00000007"
