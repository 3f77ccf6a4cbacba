"""--activation_memory_gb: blocks recompute as little as the limit allows, alike on all ranks, with the same result."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import command_line
import unisono
from many_runs import Run, many_runs
from recipes_for_tests import Sentences
from test_wan_block import LEVELS, assert_same, fast_copy, plain_model, step
from unisono.errors import ConfigError
from unisono.parallel.blocks import mixed
from unisono.parallel.blocks.mixed import MixedBlocks, choose_levels

COST = {"none": 0.0, "selective": 0.05, "products": 0.55, "whole": 1.05}
WAN = {"none": 33, "selective": 16, "products": 6, "whole": 1}


@pytest.mark.parametrize(
    ("limit", "levels"),
    [
        (1000, ["none"] * 4),
        (132, ["none"] * 4),
        (131, ["selective", "none", "none", "none"]),
        (64, ["selective"] * 4),
        (50, ["products", "products", "selective", "selective"]),
        (24, ["products"] * 4),
        (20, ["whole", "products", "products", "products"]),
        (0, ["whole"] * 4),
    ],
)
def test_levels_fit_into_the_limit_at_the_smallest_cost(limit: int, levels: list[str]) -> None:
    chosen = choose_levels(limit, [(WAN, COST)] * 4)
    assert chosen == levels
    assert limit < 4 or sum(WAN[level] for level in chosen) <= limit


def test_a_level_that_frees_little_for_its_cost_is_skipped() -> None:
    sizes, cost = {"none": 30, "selective": 28, "whole": 1}, {"none": 0.0, "selective": 0.55, "whole": 1.05}
    assert choose_levels(40, [(sizes, cost)] * 2) == ["whole", "none"]


def test_blocks_that_the_trial_did_not_reach_recompute_everything() -> None:
    assert choose_levels(100, [({}, COST), (WAN, COST)]) == ["whole", "none"]


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
def test_wan_blocks_train_the_same_at_every_mixture(compiles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if compiles:
        monkeypatch.setattr(
            mixed, "compiled_forward", lambda kind: torch.compile(kind.forward, backend="aot_eager", fullgraph=True)
        )
        mixed._mixed.cache_clear()
    plain = plain_model()
    model = fast_copy(plain)
    blocks = MixedBlocks(list(model.blocks), compiles=compiles)
    assert_same(copy.deepcopy(model), plain, LEVELS)  # everything is recomputed
    plain.zero_grad()
    with blocks.measuring():
        step(model, LEVELS)
    model.zero_grad()
    (sizes,) = blocks.measured()
    assert sizes["none"] > sizes["selective"] > sizes["products"] > sizes["whole"] > 0
    for levels in (("none", "selective"), ("products", "whole")):
        for block, level in zip(model.blocks, levels, strict=True):
            block._unisono_level = level
        assert_same(model, plain, LEVELS)
        model.zero_grad()
        plain.zero_grad()
    limit = sizes["none"] + sizes["selective"]
    larger = {level: size + 1 for level, size in sizes.items()}
    counts, stored = blocks.choose(limit, [[sizes], [larger]])
    assert stored <= limit and counts.total() == 2 and counts["none"] < 2
    assert blocks.choose(limit, [[sizes], [sizes]])[0] == {"none": 1, "selective": 1}
    mixed._mixed.cache_clear()


def runs_settings(**more: Any) -> dict[str, Any]:
    return {"global_batch_size": 8, "batch_size": 4, "max_steps": 3, "log_every": 1, **more}


def test_all_ranks_make_the_same_choice_and_the_run_stays_the_same(tmp_path: Path) -> None:
    planned = {
        "without": (1, {}),
        "little": (1, {"activation_memory_gb": 0.001}),
        "much": (1, {"activation_memory_gb": 10.0}),
        "ddp": (2, {"activation_memory_gb": 0.00001, "strategy": "ddp"}),
        "fsdp": (2, {"activation_memory_gb": 0.00001, "strategy": "fsdp"}),
    }
    runs = many_runs(
        [Run(name, name, world, runs_settings(**more)) for name, (world, more) in planned.items()], tmp_path
    )
    for name, run in runs.items():
        assert "error" not in run.main, (name, run.main)
        torch.testing.assert_close(run.losses(), runs["without"].losses(), rtol=1e-5, atol=0, msg=name)
    events = {name: run.events("activation_memory") for name, run in runs.items()}
    assert not events["without"]
    assert events["much"][0]["blocks"].keys() == {"none"}
    assert events["ddp"][0]["blocks"].keys() == {"whole"}, "nothing fits into 10 KiB"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--activation_checkpointing"], "remove it, or activation_checkpointing"),
        (["--recompute_every", "2"], "remove it, or recompute_every"),
        (["--blocks_on_host", "1"], "remove blocks_on_host"),
        (["--strategy", "dp"], "not with dp"),
    ],
)
def test_contradictory_settings_are_rejected_in_one_line(flags: list[str], message: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    ended = command_line.unisono(
        "train", command_line.TINY, "--activation_memory_gb", "5", *flags, "--output_dir", folder, cwd=tmp_path
    )
    assert ended.code == 2 and message in ended.err and not folder.exists(), ended.err
    assert "Traceback" not in ended.err


def test_a_model_without_blocks_is_refused(tmp_path: Path) -> None:
    class NoBlocks(Sentences):
        def model(self) -> Any:
            return torch.nn.Linear(2, 2)

    with pytest.raises(ConfigError, match="no repeated blocks"):
        unisono.train(NoBlocks, gpus="0", activation_memory_gb=1.0, max_steps=1, output_dir=str(tmp_path / "run"))
