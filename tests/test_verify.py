"""`unisono verify` says "same" where runs are the same, and finds the ones that are not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from command_line import unisono
from unisono.engine.verify import Question, uneven_batch, variants

HONEST = """
import torch
from torch import nn
from unisono import Loss, Recipe

class Honest(Recipe):
    defaults = {"batch_size": 3, "num_workers": 0}

    def model(self):
        return nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 1))

    def dataset(self, split):
        return [(torch.tensor([i / 7, 1 - i / 5]), torch.tensor([float(i % 3)])) for i in range(11)]

    def loss(self, model, batch, noise):
        x, y = batch
        return Loss((model(x + 0.1 * noise.normal(2)) - y).square().sum(), len(x))

class Mean(Honest):
    def loss(self, model, batch, noise):
        x, y = batch
        return Loss((model(x) - y).square().mean(), 1)

class Normed(Honest):
    def model(self):
        return nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))

class Crashes(Honest):
    def loss(self, model, batch, noise):
        raise ValueError("the loss is broken")
"""


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("verify") / "honest.py"
    file.write_text(HONEST)
    return file


def test_an_invariant_recipe_is_the_same_run_on_one_and_two_ranks(recipes: Path, tmp_path: Path) -> None:
    done = unisono(
        "verify", f"{recipes}:Honest", "--ranks", "1,2", "--strategies", "ddp,fsdp", cwd=tmp_path, seconds=240
    )
    assert done.code == 0, done.err
    assert done.out.count(" same ") == 5 and "Same run" in done.out and "DIFFERS" not in done.out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("recipe", ["Mean", "Normed"])
def test_a_recipe_that_depends_on_the_micro_batch_is_found_with_its_first_weight(
    recipes: Path, tmp_path: Path, recipe: str
) -> None:
    done = unisono("verify", f"{recipes}:{recipe}", "--ranks", "1", "--batch_size", "10", cwd=tmp_path)
    assert done.code == 1
    named = re.search(r"DIFFERS \((\S+)\)", done.out)
    assert named is not None and re.fullmatch(r"[012]\.(weight|bias|running_\w+)", named[1])
    assert f"first weight that differs is {named[1]}" in " ".join(done.out.split())


def test_a_run_that_crashes_is_shown_with_its_reason(recipes: Path, tmp_path: Path) -> None:
    done = unisono("verify", f"{recipes}:Crashes", "--ranks", "1", cwd=tmp_path)
    assert done.code == 3
    assert "the loss is broken" in done.err


def test_micro_batches_and_shares_are_uneven_so_that_a_mean_cannot_hide() -> None:
    for batch in range(2, 60):
        uneven = uneven_batch(batch, (1, 2, 3))
        assert uneven % 3 and batch <= uneven <= batch + 1
        for variant in variants(Question((1, 2, 3), 5, ("ddp",), "float64"), uneven):
            assert variant.micro_batches == 1 or uneven % (variant.ranks * variant.micro_batches)
        assert batch < 5 or len(variants(Question((1, 2), 5, ("ddp",), "float64"), uneven_batch(batch, (1, 2)))) == 4


def test_questions_that_make_no_sense_are_refused(recipes: Path, tmp_path: Path) -> None:
    for words in (
        ["--ranks", "0"],
        ["--ranks", "two"],
        ["--strategies", "zero"],
        ["--precision", "float8"],
        ["--steps"],
    ):
        done = unisono("verify", f"{recipes}:Honest", *words, cwd=tmp_path)
        assert done.code == 2 and words[0] in done.err and "Traceback" not in done.err, words
