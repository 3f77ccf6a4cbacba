"""What a recipe may return and read, the same on any number of ranks, and what is refused before training."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import unisono
from many_runs import Copy, Outcome, Run, largest_difference, many_runs
from recipes_for_tests import Pairs
from tiny_recipe import Tiny
from unisono import Loss
from unisono.data.order import Order
from unisono.data.reading import BadSample, ChunkReader
from unisono.engine.batch import overruled
from unisono.engine.build.dropout import disable_dropout
from unisono.engine.clock import Clock
from unisono.errors import ConfigError, RecipeError, TrainingFailed
from unisono.multi_gpu.loss import loss_of
from unisono.settings import BatchSettings

WHOLE = {"global_batch_size": 6, "num_samples": 20, "num_eval": 7, "max_steps": 5, "dtype": "float64"}
WHOLE |= {"log_group_norms": True, "save_every": 3, "batch_size": 6}
LAYOUTS = {
    "micro-batches": (1, {"batch_size": 1}),
    "2 ranks": (2, {"strategy": "ddp", "batch_size": 2}),
    "2 shards": (2, {"strategy": "fsdp", "batch_size": 3}),
    "memory ran out": (2, {"strategy": "ddp", "batch_size": 3, "inject": "oom@rank1:step4:backward"}),
    "recomputed": (1, {"activation_checkpointing": True}),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    run_list = [Run("one", "one", 1, WHOLE, recipe="Annealed")]
    run_list += [Run(name, name, world, WHOLE | more, recipe="Annealed") for name, (world, more) in LAYOUTS.items()]
    run_list.append(Run("went on", "went on", 1, WHOLE, Copy("2 ranks", 3), recipe="Annealed"))
    pairs = {"global_batch_size": 6, "max_steps": 3, "dtype": "float64"}
    run_list.append(Run("pairs", "pairs", 1, pairs | {"batch_size": 6}, recipe="AnnealedPairs"))
    run_list.append(Run("pairs on 2", "pairs on 2", 2, pairs | {"batch_size": 2}, recipe="AnnealedPairs"))
    for name, world in {"single": 1, "ddp": 2, "fsdp": 2}.items():
        run_list.append(Run(f"unused {name}", f"unused {name}", world, pairs | {"strategy": name}, recipe="Unused"))
        sparse = pairs | {"strategy": name}
        run_list.append(Run(f"sparse {name}", f"sparse {name}", world, sparse, recipe="SparseGradient"))
    exactly = pairs | {"strategy": "ddp", "deterministic": True}
    run_list.append(Run("unused ddp, deterministic", "exactly", 2, exactly, recipe="Unused"))
    allowed = pairs | {"find_unused_parameters": True}
    run_list.append(Run("unused, allowed", "allowed", 1, allowed, recipe="Unused"))
    run_list.append(Run("unused, allowed on 2", "allowed2", 2, allowed | {"strategy": "ddp"}, recipe="Unused"))
    return many_runs(run_list, tmp_path_factory.mktemp("contract"))


@pytest.mark.parametrize("name", [*LAYOUTS, "went on"])
def test_a_loss_that_reads_the_step_is_the_same_run_in_any_layout(name: str, runs: dict[str, Outcome]) -> None:
    one, other = runs["one"], runs[name]
    assert other.main.get("status") == "done", other.main
    torch.testing.assert_close(other.losses(), one.losses(), rtol=1e-10, atol=0)
    assert largest_difference(other.weights(), one.weights()) < 1e-10
    for line in other.steps():
        assert line["at"] == line["step"] - 1 and line["done"] == pytest.approx((line["step"] - 1) / 5)
    (evaluated,) = other.evaluations()
    assert evaluated["eval/at"] == 5 and evaluated["eval/done"] == 1


def test_a_coupled_loss_can_read_the_step_too(runs: dict[str, Outcome]) -> None:
    assert [line["at"] for line in runs["pairs"].steps()] == [0, 1, 2]
    torch.testing.assert_close(runs["pairs on 2"].losses(), runs["pairs"].losses(), rtol=1e-10, atol=0)


def test_a_recorded_step_may_not_read_the_clock() -> None:
    clock = Clock()
    clock.set(3, 4)
    assert (clock.step, clock.progress) == (3, 0.75)
    with clock.recorded(), pytest.raises(ConfigError, match="cuda_graph: loss"):
        _ = clock.progress
    assert clock.step == 3


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_metric_with_its_own_count_is_exact_in_any_layout(name: str, runs: dict[str, Outcome]) -> None:
    order = Order(20, 0)
    for line in runs[name].steps():
        ids = [order[position] for position in range((line["step"] - 1) * 6, line["step"] * 6)]
        even = [number for number in ids if number % 2 == 0]
        assert line["even"] == pytest.approx(sum(even) / len(even), rel=1e-12)
        assert line["ids"] == pytest.approx(sum(ids) / line["count"], rel=1e-12)
    (evaluated,) = runs[name].evaluations()
    assert evaluated["eval/even"] == pytest.approx((0 + 2 + 4 + 6) / 4, rel=1e-12)


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_gradient_norm_of_each_group_is_logged(name: str, runs: dict[str, Outcome]) -> None:
    for one, line in zip(runs["one"].steps(), runs[name].steps(), strict=True):
        groups = [line["grad_norm/blocks"], line["grad_norm/1"]]
        assert groups == pytest.approx([one["grad_norm/blocks"], one["grad_norm/1"]], rel=1e-9)
        assert math.hypot(*groups) == pytest.approx(line["grad_norm"], rel=1e-9) and min(groups) > 0


@pytest.mark.parametrize("name", ["single", "ddp", "ddp, deterministic", "fsdp"])
def test_unused_weights_are_refused_on_any_number_of_ranks(name: str, runs: dict[str, Outcome]) -> None:
    for ended in runs[f"unused {name}"].by_rank:
        assert ended.get("exit_code") == 2, ended
        assert ended["error"].startswith("the loss does not use 2 of the trained weights, for instance idle.weight")
    assert not runs[f"unused {name}"].folder.exists()


@pytest.mark.parametrize("name", ["single", "ddp", "fsdp"])
def test_a_sparse_gradient_is_refused_on_any_number_of_ranks(name: str, runs: dict[str, Outcome]) -> None:
    for ended in runs[f"sparse {name}"].by_rank:
        assert ended.get("exit_code") == 2, ended
        weight = "a weight" if name == "fsdp" else "embedding.weight"
        assert ended["error"].startswith(f"the gradient of {weight} is sparse")
    assert not runs[f"sparse {name}"].folder.exists()


def test_unused_weights_can_be_allowed(runs: dict[str, Outcome]) -> None:
    one, two = runs["unused, allowed"], runs["unused, allowed on 2"]
    assert one.main.get("status") == two.main.get("status") == "done"
    assert largest_difference(one.weights(), two.weights()) < 1e-10


# ---- mistakes ----


class NegativeLength:
    def __len__(self) -> int:
        return -3

    def __getitem__(self, index: int) -> float:
        return 0.0


class Odd(Tiny):
    """A recipe with one error."""

    what: ClassVar[str] = ""

    def model(self) -> nn.Module:
        if self.what == "lazy":
            return nn.LazyLinear(1)
        if self.what == "huge":
            return nn.Linear(10**6, 10**9)
        model = nn.Sequential(nn.Linear(1, 1))
        if self.what == "complex":
            model.phase = nn.Parameter(torch.ones(2, dtype=torch.complex64))
        if self.what == "sparse":
            model.table = nn.Embedding(3, 2, sparse=True)
        if self.what in ("scalar", "empty"):
            model.extra = nn.Parameter(torch.zeros(() if self.what == "scalar" else (0, 4)))
        return model

    def dataset(self, split: str) -> Any:
        return NegativeLength() if self.what == "length" and split == "train" else super().dataset(split)

    def remember(self) -> Any:
        return {"seen": {1, 2}} if self.what == "remember" else None

    def loss(self, model: nn.Module, batch: Any, noise: Any) -> Loss:
        x, y = (column.float().unsqueeze(1) for column in batch)
        each = (model(x) - y).square()
        if self.what == "mean":
            return Loss(each.mean(), 1)
        if self.what == "pair":
            return Loss(each.sum(), len(x), {"three": (1.0, 2.0, 3.0)})  # type: ignore[dict-item]
        count = {"nothing": 0, "minus": -4, "nan": math.nan}.get(self.what, len(x))
        return Loss(each.sum(), count)


def train_odd(what: str, tmp_path: Path, **settings: Any) -> unisono.Result:
    Odd.what = what
    return unisono.train(Odd, gpus="0", output_dir=str(tmp_path / "run"), **settings)


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("lazy", r"model\(\): weight has no shape yet \(a lazy module\)"),
        ("huge", r"a tensor of 1000000000 x 1000000 takes 3,725,290\.3 GiB, and this machine has .* of memory"),
        ("complex", r"model\(\): phase is complex"),
        ("sparse", r"model\(\): table is an embedding with sparse gradients"),
        ("length", r'dataset\("train"\): its __len__\(\) is not a number of samples'),
        ("remember", r"remember\(\) returned a value that JSON cannot hold \(Object of type set"),
        ("pair", r"loss\(\): three has 3 parts; return a sum, or \(sum, count\)"),
    ],
)
def test_untrainable_models_are_rejected_before_anything_is_written(what: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=told) as caught:
        train_odd(what, tmp_path)
    assert "\n" not in str(caught.value) and not (tmp_path / "run").exists()


@pytest.mark.parametrize(("what", "told"), [("scalar", "the scalar weight extra"), ("empty", "which has no elements")])
def test_weights_that_fsdp_cannot_shard_are_refused(what: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=f"fsdp cannot shard .*{told}"):
        train_odd(what, tmp_path, strategy="fsdp")
    assert not (tmp_path / "run").exists()


def test_a_remembered_value_is_checked_when_it_is_saved(tmp_path: Path) -> None:
    class ForgetsJson(Tiny):
        """remember() returns JSON at first, and something else for the save of the second step."""

        num_calls = 0

        def remember(self) -> Any:
            self.num_calls += 1
            return {"calls": {self.num_calls}} if self.num_calls == 3 else {"calls": self.num_calls}

    with pytest.raises(RecipeError, match=r"remember\(\) returned a value that JSON cannot hold \(Object of type set"):
        unisono.train(ForgetsJson, gpus="0", output_dir=str(tmp_path / "run"), save_every=1, max_steps=3)
    assert [path.name for path in (tmp_path / "run/checkpoints").glob("step_*")] == ["step_00000001"]


@pytest.mark.parametrize(("what", "count"), [("nothing", "0"), ("minus", "-4"), ("nan", "nan")])
def test_an_invalid_count_is_named_as_the_cause(what: str, count: str, tmp_path: Path) -> None:
    with pytest.raises(TrainingFailed, match=rf"loss\(\) counted {count} items in the whole batch") as caught:
        train_odd(what, tmp_path)
    assert "learning_rate" not in str(caught.value)


def test_a_mean_instead_of_a_sum_is_noted_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train_odd("mean", tmp_path / "mean", max_steps=5)
    assert capsys.readouterr().err.count("note: loss() counted 1 in every micro-batch of up to 4 samples") == 1
    train_odd("mean", tmp_path / "short", max_steps=1)
    assert capsys.readouterr().err.count("Loss(mean * n, n)") == 1
    train_odd("", tmp_path / "sum", max_steps=5)
    train_odd("mean", tmp_path / "one by one", max_steps=5, batch_size=1)
    unisono.train(CouplesToMean, max_steps=4, batch_size=4, gpus="0", output_dir=str(tmp_path / "coupled"))
    assert "loss() counted 1" not in capsys.readouterr().err


class CouplesToMean(Pairs):
    """A recipe whose coupled loss is the mean of the global batch."""

    def couple(self, rows: Any) -> Loss:
        result = super().couple(rows)
        return Loss(result.total / result.count, 1)


class CouplesInVain(Pairs):
    """A recipe whose coupled loss does not fit into memory."""

    def couple(self, rows: Any) -> Loss:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def test_running_out_of_memory_in_a_coupled_loss_is_distinguished_from_a_sample_that_does_not_fit(
    tmp_path: Path,
) -> None:
    with pytest.raises(TrainingFailed, match=r"the loss of a whole global batch .4 samples. does not fit") as caught:
        unisono.train(CouplesInVain, batch_size=2, global_batch_size=4, gpus="0", output_dir=str(tmp_path / "run"))
    assert "global_batch_size" in str(caught.value) and "one sample does not fit" not in str(caught.value)


def test_only_dropout_is_disabled() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside, self.attention = nn.Dropout(0.5), nn.MultiheadAttention(4, 2, dropout=0.2)
            self.memory = nn.LSTM(2, 2, num_layers=2, dropout=0.3)
            self.dropout_p = self.drop_path_rate = self.hidden_dropout_prob = self.attn_drop = 0.1
            self.attn_pdrop = self.cond_drop_prob = 0.1
            self.drop_threshold = self.droplet_size = self.pressure_drop = self.dropout_scale = 0.25
            self.dropout = 2.5  # no probability

    model = Layer()
    disable_dropout(model)
    assert model.inside.p == model.attention.dropout == model.memory.dropout == 0
    assert model.dropout_p == model.drop_path_rate == model.hidden_dropout_prob == model.attn_drop == 0
    assert model.attn_pdrop == model.cond_drop_prob == 0
    assert model.drop_threshold == model.droplet_size == model.pressure_drop == model.dropout_scale == 0.25
    assert model.dropout == 2.5


def test_a_resumed_run_says_which_flags_it_ignores(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = {"gpus": "0", "output_dir": str(tmp_path / "run"), "batch_size": 4}
    unisono.train(Tiny, max_steps=2, **common)
    capsys.readouterr()
    unisono.train(Tiny, max_steps=3, **common)
    assert "keeps the effective batch" not in capsys.readouterr().err
    unisono.train(Tiny, max_steps=4, **common | {"batch_size": 2, "gradient_accumulation_steps": 8})
    stderr = capsys.readouterr().err
    kept = "note: this run keeps its effective batch of 4 samples: "
    assert f"{kept}batch_size 2 only limits the micro-batch per device" in stderr
    assert f"{kept}gradient_accumulation_steps 8 is ignored; the effective batch is fixed" in stderr
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["samples"] for line in lines] == [4, 8, 12, 16]


def test_flags_that_give_the_same_batch_are_not_noted() -> None:
    settings = BatchSettings(batch_size=2, gradient_accumulation_steps=4)
    assert overruled(settings, lambda name: True, 1, 8) == []
    assert overruled(settings, lambda name: True, 1, None) == []
    assert len(overruled(settings, lambda name: True, 1, 4)) == 2
    assert overruled(settings, lambda name: False, 1, 4) == []


def test_a_sample_is_retried_after_a_growing_pause() -> None:
    import time

    class Flaky:
        def __init__(self) -> None:
            self.tries: list[tuple[int, float]] = []

        def __getitem__(self, index: int) -> int:
            self.tries.append((index, time.monotonic()))
            if index < 3:
                raise OSError(116, "Stale file handle")
            return index

    data = Flaky()
    reader = ChunkReader(data, list, Order(8, 0, shuffle=False))  # type: ignore[arg-type]
    result = [reader._read(position) for position in (0, 1, 2, 3, 0)]
    assert [isinstance(each, BadSample) for each in result] == [True, True, True, False, True]
    times = [when for index, when in data.tries if index != 3]
    pauses = [later - earlier for earlier, later in zip(times[::2], times[1::2], strict=True)]
    assert pauses[0] >= 0.1 and pauses[1] >= 0.2 and pauses[2] >= 0.4 and pauses[3] >= 0.1


def test_a_batch_with_names_that_the_model_does_not_accept_is_rejected() -> None:
    class Line(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.slope = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.slope

    x = torch.ones(3, 1)
    with pytest.raises(
        RecipeError, match=r"a mapping with x, weight, but Line\.forward\(x: .*does not accept these names"
    ) as caught:
        loss_of(Line(), {"x": x, "weight": x}, None)
    assert "name the target labels, target or y" in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(RecipeError, match=r"Line\.forward"):
        loss_of(Line(), {"points": x, "y": x}, nn.functional.mse_loss)
    assert loss_of(Line(), {"x": x, "y": x + 1}, nn.functional.mse_loss).count == 3


def test_the_list_of_rooms_is_complete() -> None:
    project = Path(__file__).parent.parent
    rooms = re.findall(r"^\| `([a-z_]+(?:/|\.py))` \|", (project / "CONTRIBUTING.md").read_text(), flags=re.MULTILINE)
    assert len(rooms) > 8 and [room for room in rooms if not (project / "src/unisono" / room).exists()] == []
    demo = (project / "Makefile").read_text().partition("\ndemo:")[2].partition("\n\n")[0]
    assert "train darkroom" in demo
    assert "`make demo` trains another recipe, darkroom" in (project / "examples/own_model/README.md").read_text()
