"""Regression tests for bugs that reviews found."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from command_line import Ended, lines, unisono
from unisono.checkpoint.load import load_whole
from unisono.data.loader import to_device
from unisono.errors import RecipeError, UserError
from unisono.observe.folder import RunFolder
from unisono.parallel.blocks import repeated
from unisono.parallel.blocks.repeated import recompute_activations
from unisono.parallel.materialize import materialize
from unisono.parallel.strategy import cast_weights

RECIPE = '''
from dataclasses import dataclass
import numpy as np
import torch
from torch import nn
from unisono import Loss, Recipe

class Trap(Recipe):
    defaults = {"batch_size": 2, "num_workers": 0, "learning_rate": 0.1, "log_every": 1, "tensorboard": False}

    @dataclass
    class Config:
        names: str = "same"
        """same, by_rank (differ by sample) or later (change)"""
        fail_at: int = 0
        """Raise in this call of loss."""

    def __init__(self, config):
        super().__init__(config)
        self.calls = 0

    def model(self):
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        with torch.no_grad():
            model[0].weight.copy_(torch.from_numpy(np.random.randn(4, 3)))  # drawn by numpy
        return model

    def dataset(self, split):
        return torch.randn(12, 3)  # drawn without a seed of its own

    def loss(self, model, batch, noise):
        self.calls += 1
        if self.calls == self.config.fail_at:
            raise KeyError("a plain bug")
        metrics = {"a": batch.sum()}
        if self.config.names == "later" and self.calls > 2:
            metrics["b"] = 1.0
        if self.config.names == "by_rank":
            import os
            metrics[f"rank{os.environ['RANK']}"] = 1.0
        return Loss(model(batch).square().sum(), len(batch), metrics)
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("traps")
    (folder / "trap.py").write_text(RECIPE)
    return folder


def train(folder: Path, output: str, *words: object) -> Ended:
    return unisono("train", "trap.py:Trap", "--output_dir", output, *words, cwd=folder)


def test_the_best_checkpoint_does_not_swap_weights_and_average(folder: Path) -> None:
    flags = ["--max_steps", "4", "--ema_decay", "0.9", "--eval_every", "2", "--keep_last", "0"]
    assert train(folder, "plain", *flags, "--save_every", "2").code == 0
    assert train(folder, "best", *flags, "--save_every", "100", "--best_metric", "eval/loss").code == 0
    step = json.loads((folder / "best/checkpoints/best.json").read_text())["step"]
    for prefix in ("model.", "ema."):
        expected = load_whole(folder / f"plain/checkpoints/step_{step:08d}", prefix)
        result = load_whole(folder / f"best/checkpoints/step_{step:08d}", prefix)
        assert all(torch.equal(expected[name], result[name]) for name in expected), prefix


def test_resuming_from_an_earlier_step_renames_later_checkpoints_and_continues_on_the_new_branch(folder: Path) -> None:
    flags = ["--save_every", "2", "--keep_last", "0", "--eval_every", "-1"]
    assert train(folder, "back", "--max_steps", "6", *flags).code == 0
    checkpoints = folder / "back/checkpoints"
    old = load_whole(checkpoints / "step_00000006", "model.")
    again = ["--resume", checkpoints / "step_00000002", "--learning_rate", "0.5"]
    assert train(folder, "back", "--max_steps", "4", *flags, *again).code == 0
    assert (checkpoints / "step_00000006.later-1").is_dir() and not (checkpoints / "step_00000006").exists()
    ended = train(folder, "back", "--max_steps", "6", *flags, *again)  # the same command continues
    assert ended.code == 0 and "has already continued from" in ended.err
    assert [start["from_step"] for start in json.loads((folder / "back/run.json").read_text())["starts"]] == [0, 2, 4]
    new = load_whole(checkpoints / "step_00000006", "model.")
    assert not torch.equal(old["0.weight"], new["0.weight"])
    assert [line["step"] for line in lines(folder / "back")] == [1, 2, 3, 4, 5, 6]


def test_a_checkpoint_with_files_of_a_user_is_not_deleted(folder: Path) -> None:
    flags = ["--save_every", "2", "--keep_last", "1", "--eval_every", "-1"]
    assert train(folder, "notes", "--max_steps", "2", *flags).code == 0
    (folder / "notes/checkpoints/step_00000002/notes.txt").write_text("precious")
    assert train(folder, "notes", "--max_steps", "6", *flags).code == 0
    names = sorted(path.name for path in (folder / "notes/checkpoints").iterdir())
    assert names == ["step_00000002", "step_00000006"]
    assert (folder / "notes/checkpoints/step_00000002/notes.txt").read_text() == "precious"


@pytest.mark.parametrize(("closed", "words", "code"), [(">&-", "", 0), ("2>&-", "", 0), (">&-", "--max_steps nope", 2)])
def test_a_closed_stream_changes_neither_the_run_nor_its_exit_code(
    folder: Path, closed: str, words: str, code: int
) -> None:
    run = f"closed-{closed.replace('>&-', '')}-{code}"
    train = f"-m unisono train trap.py:Trap --output_dir {run} --max_steps 3 --log_every 1 --eval_every -1 {words}"
    ended = subprocess.run(
        ["bash", "-c", f"exec {shlex.quote(sys.executable)} {train} {closed}"], cwd=folder, capture_output=True
    )
    assert ended.returncode == code, ended.stderr
    assert len(lines(folder / run)) == (0 if code else 3)


def test_unusable_folders_are_rejected_before_anything_begins(folder: Path) -> None:
    home = folder / "home"
    home.mkdir()
    settings = folder / "home.yaml"
    settings.write_text("output_dir: ~/runs/a\n")
    words = ["train", "trap.py:Trap", "--max_steps", "1", "--eval_every", "-1"]
    assert unisono(*words, "--config", settings, cwd=folder, HOME=str(home)).code == 0
    assert (home / "runs/a/run.json").exists() and not (folder / "~").exists()
    for name, text in (
        ("~nobody-of-this-name/a", "no such user"),
        (b"e_\xff".decode(errors="surrogateescape"), "UTF-8"),
    ):
        ended = unisono(*words, "--output_dir", name, cwd=folder)
        assert ended.code == 2 and text in ended.err and len(ended.err.splitlines()) == 1, ended.err


def test_a_run_with_odd_starts_in_its_record_can_resume(folder: Path) -> None:
    assert train(folder, "odd", "--max_steps", "1", "--eval_every", "-1").code == 0
    file = folder / "odd/run.json"
    record = json.loads(file.read_text())
    record["starts"][0]["resume"] = []
    file.write_text(json.dumps(record))
    assert train(folder, "odd", "--max_steps", "2", "--eval_every", "-1").code == 0


def test_a_record_that_cannot_be_written_is_one_line_and_leaves_no_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("unisono.observe.folder.os.fsync", full)
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(UserError, match=r"run.json cannot be written \(No space left on device\); free some space"):
        folder.open({"recipe": "Trap"})
    folder.close()
    assert list(tmp_path.rglob("*.json*")) == []


@pytest.mark.parametrize(("names", "ranks"), [("later", 1), ("by_rank", 2)])
def test_changing_metric_names_raise_an_error_instead_of_a_hang(folder: Path, names: str, ranks: int) -> None:
    ended = train(folder, f"names-{names}", "--max_steps", "6", "--names", names, "--nproc", ranks)
    assert ended.code == 2 and "metrics" in ended.err and "keep their names" in ended.err


def test_random_numbers_drawn_while_a_recipe_is_built_are_the_same_at_every_start(folder: Path) -> None:
    for name in ("first", "second"):
        assert train(folder, name, "--max_steps", "2", "--eval_every", "-1").code == 0
    first, second = ([line["loss"] for line in lines(folder / name)] for name in ("first", "second"))
    assert first == second


@pytest.mark.slow
def test_batch_norm_resumes_bit_for_bit_on_two_ranks(folder: Path) -> None:
    flags = ["--nproc", "2", "--deterministic", "--eval_every", "-1"]
    assert train(folder, "whole", *flags, "--max_steps", "4").code == 0
    assert train(folder, "parts", *flags, "--max_steps", "3").code == 0
    assert train(folder, "parts", *flags, "--max_steps", "4").code == 0
    whole, parts = (load_whole(folder / f"{run}/checkpoints/step_00000004", "model.") for run in ("whole", "parts"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_a_bug_before_the_first_step_is_not_retried(folder: Path) -> None:
    ended = train(folder, "bug", "--nproc", "2", "--max_steps", "4", "--fail_at", "1")
    assert ended.code == 3 and "a plain bug" in ended.err and "restarting" not in ended.err
    assert not (folder / "bug").exists()


def test_complex_buffers_keep_their_imaginary_part() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("turn", torch.tensor([1 + 2j], dtype=torch.complex64))
    cast_weights(model, torch.float32)
    assert model.turn.dtype == torch.complex64 and model.turn[0].imag == 2
    cast_weights(model, torch.float64)
    assert model.turn.dtype == torch.complex128 and model.weight.dtype == torch.float64


def test_tied_weights_on_meta_stay_tied() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    materialize(model, seed=0)
    assert model[0].weight is model[1].weight and not model[0].weight.is_meta


def test_blocks_of_one_kind_share_a_class_and_are_compiled_once() -> None:
    blocks = [nn.Linear(2, 2) for _ in range(3)]
    for block in blocks:
        recompute_activations(block)
    assert len({type(block) for block in blocks}) == 1 and type(blocks[0]) is not nn.Linear


class Named(nn.Module):
    """A block with named inputs, one of which has the name of an argument of `checkpoint`."""

    def forward(self, x: torch.Tensor, *, early_stop: float = 1.0, mask: torch.Tensor | None = None) -> torch.Tensor:
        return x * early_stop if mask is None else x * mask * early_stop


@pytest.mark.parametrize("compiled", [False, True])
def test_recomputed_blocks_get_their_keyword_arguments(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    block, x, mask = Named(), torch.ones(3, requires_grad=True), torch.tensor([1.0, 0.0, 2.0])
    recompute_activations(block)
    if compiled:
        block.compile(backend="eager")
    text = block(x, early_stop=3.0, mask=mask)
    text.sum().backward()
    assert text.tolist() == [3.0, 0.0, 6.0] and x.grad is not None and x.grad.tolist() == [3.0, 0.0, 6.0]
    assert block(x, early_stop=2.0).tolist() == [2.0, 2.0, 2.0] and block(x=x).tolist() == [1.0, 1.0, 1.0]
    seen: list[Any] = []
    plain = repeated.checkpoint

    def looking(function: Any, *given: Any, **more: Any) -> Any:
        seen.append(([each for each in given if isinstance(each, torch.Tensor)], more))
        return plain(function, *given, **more)

    if not compiled:  # `checkpoint` finds the devices whose random state to save from the positional inputs
        monkeypatch.setattr(repeated, "checkpoint", looking)
        block(x=x, mask=mask)
        assert len(seen[0][0]) == 2 and seen[0][1] == {"use_reentrant": False}


def test_compiled_and_recomputed_blocks_train_like_plain_ones() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    other = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    other.load_state_dict(plain.state_dict())
    for block in other:
        recompute_activations(block)
        block.compile(backend="aot_eager")
    x = torch.randn(3, 4)
    for model in (plain, other):
        model(x).square().sum().backward()
    assert plain.state_dict().keys() == other.state_dict().keys()
    for a, b in zip(plain.parameters(), other.parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad)


def test_batches_of_any_mapping_can_be_moved_to_a_device() -> None:
    from collections import defaultdict

    batch = defaultdict(list, {"x": torch.ones(2), "y": [torch.zeros(1)]})
    assert torch.equal(to_device(batch, torch.device("cpu"))["x"], torch.ones(2))


def test_fsdp_refuses_scalar_weights_in_one_line() -> None:
    from unisono.parallel.fsdp import FSDP
    from unisono.parallel.strategy import Placement
    from unisono.settings import ParallelSettings

    model = nn.Linear(2, 2)
    model.scale = nn.Parameter(torch.ones(()))
    cpu = torch.device("cpu")
    with pytest.raises(RecipeError, match="scale"):
        FSDP(model, [], Placement(cpu, 0, 1, [cpu], None), ParallelSettings())
