"""A stream of samples on each rank: exact resume on the same number of ranks, and refused elsewhere with the reason."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from command_line import TESTS, Ended, lines, losses, unisono
from stream_recipe import Numbers
from unisono.data.cursor import Chunk
from unisono.data.order import Order
from unisono.data.state_json import from_json, to_json
from unisono.data.stream import ENDLESS, StreamPosition, StreamReader
from unisono.errors import RecipeError

RECIPE = f"{TESTS / 'stream_recipe.py'}:OnStream"
BATCH, STEPS = 7, 14


def train(folder: Path, run: str, *words: object, ranks: int = 2, launch: int = 0, record: bool = True) -> Ended:
    (folder / f"record-{run}").mkdir(exist_ok=True)
    return unisono(
        *("train", RECIPE, "--output_dir", folder / run, "--nproc", ranks, "--global_batch_size", BATCH, "--seed", 3),
        *("--batch_size", 2, *(("--record", folder / f"record-{run}") if record else ()), *words),
        cwd=folder,
        LAUNCH=str(launch),
    )


def recorded(folder: Path) -> list[list[list[list[float]]]]:
    """For each rank, the samples of each step, as they were last computed. A dummy is a copy of the next sample."""
    ranks = []
    for path in sorted(folder.iterdir()):
        steps: dict[int, dict[tuple[int, ...], list[list[float]]]] = {}
        for line in path.read_text().splitlines():
            record = json.loads(line)
            steps.setdefault(record["step"], {}).setdefault(tuple(record["attempt"]), []).extend(record["ids"])
        last = [attempts[max(attempts)] for _, attempts in sorted(steps.items())]
        ranks.append([[sample for sample, _ in itertools.groupby(samples)] for samples in last])
    return ranks


def expected(rank: int, count: int) -> list[float]:
    stream = Numbers(rank)
    numbers = itertools.chain.from_iterable(map(stream.order, itertools.count()))
    return [float(number) for number in itertools.islice(numbers, count)]


def test_a_killed_and_resumed_run_reads_each_stream_as_an_undisturbed_one(tmp_path: Path) -> None:
    whole = train(tmp_path, "whole", "--max_steps", STEPS)
    assert whole.code == 0, whole.err
    by_rank = recorded(tmp_path / "record-whole")
    for rank, steps in enumerate(by_rank):
        assert {len(step) for step in steps} == {3 + rank}  # shares of 7 samples
        assert [sample[0] for step in steps for sample in step] == expected(rank, STEPS * (3 + rank))

    for launch, (steps, faults) in enumerate([(6, "kill@rank1:step5"), (11, "kill-worker@rank0:step9"), (STEPS, None)]):
        more = () if faults is None else ("--inject", faults)
        ended = train(tmp_path, "run", "--max_steps", steps, *more, launch=launch)
        assert ended.code == 0, ended.err
        assert (launch == 0) == ("restart" in ended.err), ended.err
    assert recorded(tmp_path / "record-run") == by_rank
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")

    refused = train(tmp_path, "run", "--max_steps", STEPS + 1, ranks=3)
    assert refused.code == 2 and "was saved by 2 ranks with a stream each, and this run has 3" in refused.err
    by_index = train(tmp_path, "run", "--max_steps", STEPS + 1, "--kind", "map", record=False)
    assert by_index.code == 2 and "a dataset that is read by index cannot continue it" in by_index.err


@pytest.mark.parametrize("workers", [0, 1])
def test_a_step_that_runs_out_of_memory_is_repeated_with_the_same_samples(tmp_path: Path, workers: int) -> None:
    options = ("--max_steps", 6, "--num_workers", workers)
    assert train(tmp_path, "whole", *options).code == 0
    ended = train(tmp_path, "run", *options, "--inject", "oom@rank1:step4")
    assert ended.code == 0, ended.err
    assert any(event.get("in_place") for event in lines(tmp_path / "run", "events.jsonl"))
    whole, run = (recorded(tmp_path / f"record-{name}") for name in ("whole", "run"))
    for rank in range(2):
        for step, (before, after) in enumerate(zip(whole[rank], run[rank], strict=True)):
            if step == 3:  # computed in part before the memory ran out
                assert after[-len(before) :] == before
            else:
                assert after == before
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "whole"), rel=1e-6)


def test_what_a_stream_cannot_do_is_one_line(tmp_path: Path) -> None:
    for words, reason in (
        ((), "is a stream, which has no length: set the length of the run with max_steps"),
        (("--num_epochs", 2), "set the length of the run with max_steps"),
        (("--max_steps", 2, "--shuffle_window", 9), "shuffle_window: dataset"),
        (("--max_steps", 2, "--kind", "stateless"), "Stateless, an IterableDataset without state_dict"),
    ):
        ended = train(tmp_path, "run", *words, ranks=1, record=False)
        assert ended.code in (2, 3) and reason in ended.err and "Traceback" not in ended.err, ended.err
    assert train(tmp_path, "map", "--max_steps", 2, "--kind", "map", ranks=1, record=False).code == 0
    refused = train(tmp_path, "map", "--max_steps", 3, "--kind", "stream", ranks=1, record=False)
    assert refused.code == 2 and "does not store the position of a stream" in refused.err
    verified = unisono("verify", RECIPE, "--ranks", "1,2", "--steps", 2, "--gpus", 0, cwd=tmp_path)
    assert verified.code == 2 and "verify compares numbers of ranks" in verified.err, verified.err


class Iterating:
    """An iterator with its own state, as in torchdata."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterating:
        return self

    def __next__(self) -> int:
        if self.at == 6:
            raise StopIteration
        self.at += 1
        return self.at - 1

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class WithStatefulIterator(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return Iterating()


class Once(IterableDataset[int]):
    """A stream that does not begin again."""

    at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < 6:
            self.at += 1
            yield self.at - 1

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def reader(dataset: Any, position: StreamPosition | None = None) -> StreamReader:
    begin = StreamPosition.beginning(dataset, 1) if position is None else position
    return StreamReader(dataset, list, Order(ENDLESS, 0), (0, 1), begin)


def read(of: StreamReader, count: int, *, dummy: bool = False) -> list[Any]:
    positions = range(count)
    return list(of(Chunk(positions, True, dummy, positions)).data)


def test_the_state_of_an_iterator_is_restored_also_at_its_end() -> None:
    first = reader(WithStatefulIterator())
    assert read(first, 1, dummy=True) == [0] and read(first, 4) == [0, 1, 2, 3]
    for done, rest in ((0, [4, 5, 0, 1]), (2, [0, 1, 2, 3])):
        read(first, done) if done else None
        stored = StreamPosition.from_json(json.loads(json.dumps(first.position.to_json())))
        assert read(reader(WithStatefulIterator(), stored), 4) == rest
    assert first.position.samples == 6 and first.position.epoch == 0


def test_a_dummy_does_not_move_the_position() -> None:
    stream = reader(Numbers(0))
    read(stream, 3)
    before = stream.position
    [dummy] = read(stream, 1, dummy=True)
    assert stream.position == before
    [following] = read(stream, 1)
    assert torch.equal(dummy, following)
    again = read(reader(Numbers(0), before), 1)
    assert torch.equal(again[0], following)  # with the same random numbers


def test_a_dummy_leaves_the_next_sample_as_it_is() -> None:
    def doubled(items: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([item.mul_(2) for item in items])

    plain = read(reader(Numbers(0)), 1)
    stream = StreamReader(Numbers(0), doubled, Order(ENDLESS, 0), (0, 1), StreamPosition.beginning(Numbers(0), 1))
    read(stream, 1, dummy=True)
    assert torch.equal(read(stream, 1)[0], 2 * plain[0])


def test_a_stream_that_does_not_begin_again_is_an_error_and_no_endless_loop() -> None:
    stream = reader(Once())
    assert read(stream, 6) == list(range(6))
    with pytest.raises(RecipeError, match="has no samples in epoch 1"):
        read(stream, 1)


def test_states_of_all_kinds_survive_json_and_others_are_refused() -> None:
    random.seed(1)
    state = {
        "python": random.getstate(),
        "torch": torch.arange(5, dtype=torch.uint8),
        "numpy": np.arange(4.0).reshape(2, 2),
        "nothing": None,
        "bytes": b"\0\xff",
        "inf": float("inf"),
        7: ["a", {"$key": np.int64(3)}],
    }
    back = from_json(json.loads(json.dumps(to_json(state))))
    random.setstate(back["python"])
    assert torch.equal(back["torch"], state["torch"]) and np.array_equal(back["numpy"], state["numpy"])
    assert (back["bytes"], back["inf"], back[7]) == (b"\0\xff", float("inf"), ["a", {"$key": 3}])
    with pytest.raises(RecipeError, match=r"has a object at state\.a\[1\]"):
        to_json({"a": [1, object()]})
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(RecipeError, match="nested too deeply"):
        to_json(endless)


@pytest.mark.parametrize(
    "damage",
    [
        {"$array": ["O", [1], "AAAAAAAAAAA="]},
        {"$array": ["<i8", [9], "AAAAAAAAAAA="]},
        {"$bytes": "ä"},
        {"$bytes": 3},
        {"$tuple": 3},
        {"$dict": [[1]]},
        {"$dict": [[[], 1]]},
        {"$other": 1},
        {"$tuple": [], "more": 1},
    ],
)
def test_a_damaged_state_is_an_error(damage: Any) -> None:
    with pytest.raises(ValueError, match="it has"):
        StreamPosition.from_json({"epoch": 0, "samples": 0, "state": {"a": damage}})


def test_a_streaming_dataset_of_hugging_face_is_resumed() -> None:
    datasets = pytest.importorskip("datasets")

    def stream() -> Any:
        rows = datasets.Dataset.from_dict({"n": list(range(20))}).to_iterable_dataset(num_shards=4)
        return rows.shuffle(seed=1, buffer_size=1)

    whole = [row["n"] for row in read(reader(stream()), 45)]
    assert sorted(whole[:20]) == sorted(whole[20:40]) == list(range(20))
    first = reader(stream())
    before = [row["n"] for row in read(first, 27)]
    stored = StreamPosition.from_json(json.loads(json.dumps(first.position.to_json())))
    assert before + [row["n"] for row in read(reader(stream(), stored), 18)] == whole
