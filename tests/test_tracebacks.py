"""A bug in a recipe is shown on one screen, with the full traceback in a file; a bug in unisono in full."""

from __future__ import annotations

import re
import sys
import traceback
from pathlib import Path

import pytest
import torch
from torch import nn

import unisono as package
from buggy_recipe import Broken, Buggy
from command_line import TESTS, end, start, unisono
from unisono import tracebacks
from unisono.cli.main import main
from unisono.data.order import share_of
from unisono.engine.build.model import build_model

BUGGY = f"{TESTS / 'buggy_recipe.py'}:Buggy"
SCREEN = 40


def shown_traceback(text: str) -> list[str]:
    """The lines of the only traceback in a program's output, up to the line that names the file."""
    assert text.count("Traceback (most recent call last)") == 1, text
    lines = text[text.index("Traceback (most recent call last)") :].splitlines()
    (last,) = (i for i, line in enumerate(lines) if line.startswith("full traceback: "))
    return lines[: last + 1]


def kept_file(lines: list[str]) -> Path:
    return Path(lines[-1].removeprefix("full traceback: "))


def frames(lines: list[str]) -> list[str]:
    return [re.sub(r'.*/(\S+)", line \d+, in (\S+)', r"\1 \2", line) for line in lines if line.startswith("  File ")]


def test_the_traceback_of_a_recipes_bug_fits_on_one_screen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", BUGGY, "--output_dir", str(tmp_path / "run")]) == 3
    lines = shown_traceback(capsys.readouterr().err)
    assert frames(lines) == [
        "accumulate.py _loss",
        "buggy_recipe.py loss",
        "buggy_recipe.py score",
        "buggy_recipe.py forward",
        "linear.py forward",
    ]
    assert any("shapes cannot be multiplied" in line for line in lines) and len(lines) < SCREEN
    whole = kept_file(lines).read_text()
    assert len(whole.splitlines()) > 2 * len(lines) and "in run_session" in whole and "in _call_impl" in whole
    kept_file(lines).unlink()
    assert not (tmp_path / "run").exists(), "a bug before the first step leaves nothing in the run's folder"


def test_tracebacks_of_chained_and_recursive_errors_fit_on_one_screen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tmp_path / "run")
    assert main(["train", BUGGY, "--output_dir", folder, "--bug", "recursion"]) == 3
    lines = shown_traceback(capsys.readouterr().err)
    assert len(lines) < SCREEN + 10 and any("RecursionError" in line for line in lines)
    kept_file(lines).unlink()
    assert main(["train", BUGGY, "--output_dir", folder, "--bug", "chained", "--from_call", "4"]) == 3
    text = capsys.readouterr().err
    assert "KeyError: 'missing'" in text and "direct cause" in text and "Broken: broken with code 8" in text
    lines = text[text.index("Traceback") :].splitlines()
    assert len(lines) < SCREEN
    kept = next(line for line in lines if line.startswith("full traceback: "))
    assert kept_file([kept]).parent == tmp_path / "run" / "tracebacks", "the run has begun: the file lies in its folder"
    assert "in run_session" in kept_file([kept]).read_text()


@pytest.mark.slow
def test_only_one_rank_prints_its_traceback_under_any_launcher(tmp_path: Path) -> None:
    done = unisono("train", BUGGY, "--nproc", "2", "--output_dir", "a", "--max_restarts", "0", cwd=tmp_path)
    assert done.code == 3
    lines = shown_traceback(done.err)
    assert len(lines) < SCREEN and "buggy_recipe.py forward" in frames(lines) and kept_file(lines).exists()
    kept_file(lines).unlink()

    torchrun = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "-m", "unisono", "train", BUGGY]
    done = end(start([*torchrun, "--output_dir", "b"], cwd=tmp_path), seconds=180)
    assert done.err.count("in score") == 1, "the other rank says in one line what happened"
    assert re.search(r"^unisono: \[rank [01]\] RuntimeError: mat1 and mat2", done.err, re.MULTILINE)
    kept = Path(re.search(r"^full traceback: (.*)$", done.err, re.MULTILINE)[1])  # type: ignore[index]
    assert "in run_session" in kept.read_text()
    kept.unlink()
    assert done.err.count("full traceback: ") == 1


def test_the_exception_itself_reaches_the_caller_of_train(tmp_path: Path) -> None:
    with pytest.raises(Broken) as caught:
        package.train(Buggy, output_dir=str(tmp_path / "run"), bug="raises", gpus="0")
    assert caught.value.code == 7
    text = traceback.format_exception(caught.value)
    lines = "".join(text).splitlines()
    assert len(lines) < SCREEN and "in score" in "".join(text)
    assert "buggy_recipe.py score" in frames(lines) and "accumulate.py _loss" in frames(lines)
    path = next(line for line in lines if line.startswith("full traceback: "))
    kept_file([path]).unlink()


def test_a_bug_in_unisono_shows_every_frame() -> None:
    try:
        share_of("rank", 2, 0, 8)  # type: ignore[arg-type]
    except TypeError as error:
        assert not tracebacks.is_in_user_code(error)
        assert tracebacks.format_short(error) == "".join(traceback.format_exception(error)).rstrip("\n")
        before = error.__traceback__
        tracebacks.prune(error)
        assert error.__traceback__ is before


def test_each_frame_is_attributed_to_the_recipe_torch_or_unisono() -> None:
    for module, owner in (
        (tracebacks, "unisono"),
        (re, "library"),
        (pytest, "library"),
        (sys.modules[__name__], "user"),
    ):
        assert tracebacks.owner_of(str(module.__file__)) == owner
    assert tracebacks.owner_of("<frozen importlib._bootstrap>") == "library"
    assert tracebacks.owner_of("<stdin>") == "user"


def test_a_call_that_our_torch_function_mode_forwards_belongs_to_the_recipe() -> None:
    class WithWrongShapes(Buggy):
        def model(self) -> nn.Module:
            model = super().model()
            torch.cat([torch.zeros(2, 3), torch.zeros(4, 5)])  # a torch-function mode is active in model()
            return model

    with pytest.raises(RuntimeError, match="Sizes of tensors must match") as caught:
        build_model(WithWrongShapes(Buggy.Config()))
    assert tracebacks.is_in_user_code(caught.value)


def test_the_location_of_an_error_is_the_users_line() -> None:
    try:
        re.compile("(")
    except re.error as error:
        assert re.fullmatch(r"test_tracebacks\.py:\d+", tracebacks.location(error))
