"""A run on tar shards reads every sample once per epoch, on any number of ranks, also when it is killed."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from command_line import TESTS, unisono
from shards import write_shards
from shards_recipe import recorded
from unisono.data.order import Order
from unisono.data.windows import Windows

SIZES = [17, 23, 5, 30, 11, 19, 25, 20]
SIZE, WINDOW, BATCH = sum(SIZES), 60, 12


def test_killed_and_resumed_on_2_3_and_1_ranks_each_sample_is_trained_on_once_in_the_same_order(tmp_path: Path) -> None:
    write_shards(tmp_path / "shards", SIZES)
    (tmp_path / "record").mkdir()
    last = 0
    for launch, (ranks, steps, kill) in enumerate(
        [(2, 9, "kill@rank1:step5"), (3, 17, "kill@rank2:step14"), (1, 25, None)]
    ):
        words = [
            *("train", f"{TESTS / 'shards_recipe.py'}:OnShards", "--shards", tmp_path / "shards" / "{000..007}.tar"),
            *("--index_dir", tmp_path / "index", "--record", tmp_path / "record", "--output_dir", tmp_path / "run"),
            *("--nproc", ranks, "--global_batch_size", BATCH, "--batch_size", 3, "--max_steps", steps, "--seed", 3),
            *("--shuffle_window", WINDOW, *(() if kill is None else ("--inject", kill))),
        ]
        result = unisono(*words, cwd=tmp_path, LAUNCH=str(launch))
        assert result.code == 0, result.err
        assert ("indexed 8 files" in result.err) == (launch == 0), result.err
        assert (kill is None) or "restart" in result.err
        assert last < steps == len(recorded(tmp_path / "record"))
        last = steps
    order = Order(SIZE, 3, windows=Windows(WINDOW, np.cumsum([0, *SIZES[:-1]])))
    stream = [number for step in recorded(tmp_path / "record") for number in step]
    assert stream == order.indices(np.arange(25 * BATCH)).tolist()
    assert sorted(stream[:SIZE]) == list(range(SIZE)) and sorted(stream[SIZE : 2 * SIZE]) == list(range(SIZE))

    refused = unisono(*words, "--shuffle_window", 61, "--max_steps", 26, cwd=tmp_path, LAUNCH="9")
    assert refused.code == 2 and "shuffle_window 61 differs from this run's 60" in refused.err
    write_shards(tmp_path / "shards", [SIZES[1], SIZES[0], *SIZES[2:]])
    changed = unisono(*words, "--max_steps", 26, cwd=tmp_path, LAUNCH="9")
    assert changed.code == 0 and "the sample order differs from this step on" in changed.err, changed.err
    assert "8 files of 8 changed" in changed.err
