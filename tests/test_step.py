"""One optimizer step equals a hand-written loop; ranks skip it together; loss scale and schedule work."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from command_line import unisono
from many_runs import Outcome, Run, identical, largest_difference, many_runs, selected, slow_unless
from recipes_for_tests import SentenceData, Sentences
from unisono.data.noise import Noise
from unisono.data.order import Order
from unisono.engine.step.learning_rate import learning_rate_factor, learning_rate_scale
from unisono.engine.step.sums import power_of_two_near
from unisono.parallel.buffers import BufferBackup
from unisono.settings import OptimSettings

NUM_SAMPLES, GLOBAL_BATCH = 20, 6
ORDER = Order(NUM_SAMPLES, 0)
RUN = {"global_batch_size": GLOBAL_BATCH, "num_samples": NUM_SAMPLES, "dtype": "float64", "max_steps": 6}
EVERY_STEP = {"save_every": 1, "keep_last": 0, "ema_decay": 0.8}
BY_HAND = RUN | {"augment": False, "max_steps": 5, "batch_size": 2}
CLIPS = {"not clipped": 0.0, "clipped": 0.05, "clipped at times": 0.6}
PLACES = [(1, "single"), (2, "ddp"), (2, "fsdp"), (3, "fsdp")]
CLIPPED = [(name, *place) for name in CLIPS for place in PLACES]
QUICK_CLIPPED = [
    *(("not clipped", 1, "single"), ("not clipped", 2, "ddp"), ("clipped", 3, "fsdp")),
    *(("clipped at times", 1, "single"), ("clipped at times", 2, "ddp"), ("clipped at times", 2, "fsdp")),
]
FP16 = {"mixed_precision": "fp16", "dtype": "float32"}
BF16 = {"mixed_precision": "bf16", "dtype": "float32"}


def ids_of_step(step: int) -> list[int]:
    """The samples of the `step`-th step (from 1)."""
    return [ORDER[position] for position in range((step - 1) * GLOBAL_BATCH, step * GLOBAL_BATCH)]


def sample_only_in(*steps: int) -> str:
    """For each step, a sample that enters none of the other first 6 steps."""
    result = []
    for step in steps:
        others = {i for other in range(1, 7) if other not in steps for i in ids_of_step(other)}
        result.append(next(i for i in ids_of_step(step) if i not in others))
    return ",".join(map(str, result))


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    cases = selected(request, "name", "world", "strategy")
    run_list: list[Run] = []

    def add(name: str, world: int, *settings: dict[str, Any], recipe: str = "Sentences") -> None:
        merged: dict[str, Any] = {}
        for part in settings:
            merged |= part
        run_list.append(Run(name, name, world, merged, recipe=recipe))

    for name, world, strategy in CLIPPED:
        if (name, world, strategy) in cases:
            add(f"{name} {world} {strategy}", world, BY_HAND, {"grad_clip": CLIPS[name], "strategy": strategy})
    add("sgd", 2, BY_HAND, {"optimizer": "sgd", "strategy": "ddp", "grad_clip": 0.0})
    for world, strategy in PLACES:
        place = {"strategy": strategy}
        add(f"nan {world} {strategy}", world, RUN, EVERY_STEP, place, {"nan_ids": sample_only_in(3)})
    for world, strategy in [(1, "single"), (3, "fsdp")]:
        place = {"strategy": strategy}
        add(f"inf {world} {strategy}", world, RUN, EVERY_STEP, place, {"inf_gradient_ids": sample_only_in(3)})
    for world, strategy in [(1, "single"), (2, "ddp"), (2, "fsdp")]:
        place = {"strategy": strategy, "batch_size": 3, "nan_ids": sample_only_in(3)}
        add(f"buffers {world} {strategy}", world, RUN, EVERY_STEP, place, recipe="SentencesWithBuffers")
        add(f"batch norm {world} {strategy}", world, RUN, EVERY_STEP, place, recipe="WithBatchNorm")
    loud = {"loud_ids": sample_only_in(3), "strategy": "single"}
    add("buffers, loud", 1, RUN, EVERY_STEP, FP16, loud, recipe="SentencesWithBuffers")
    add("rmsprop", 2, RUN, EVERY_STEP, {"strategy": "ddp", "optimizer": "rmsprop", "nan_ids": sample_only_in(3)})
    add("float32", 2, RUN, EVERY_STEP, {"strategy": "ddp", "dtype": "float32", "nan_ids": sample_only_in(3)})
    add("nan at first", 2, RUN, {"strategy": "ddp", "nan_ids": str(ids_of_step(1)[0])})
    add("nan three times", 2, RUN, {"strategy": "fsdp", "nan_ids": sample_only_in(3, 4, 5), "max_skipped_steps": 2})
    add(
        "nan three times allowed",
        2,
        RUN,
        {"strategy": "ddp", "nan_ids": sample_only_in(3, 4, 5), "max_skipped_steps": 3},
    )
    for world, strategy in [(1, "single"), (2, "ddp"), (2, "fsdp")]:
        place = {"strategy": strategy}
        add(f"fp16 {world} {strategy}", world, RUN, FP16, place)
        add(f"bf16 {world} {strategy}", world, RUN, BF16, place)
        add(f"loud {world} {strategy}", world, RUN, EVERY_STEP, FP16, place, {"loud_ids": sample_only_in(3)})
    add("float32 plain", 1, RUN, {"dtype": "float32"})
    add("cosine", 2, RUN, {"strategy": "ddp", "lr_schedule": "cosine", "warmup_steps": 2, "learning_rate": 0.01})
    add("scaled", 1, RUN, {"lr_scaling": "sqrt", "lr_scaling_batch": 24, "learning_rate": 0.01})
    return many_runs(run_list, tmp_path_factory.mktemp("step"))


def train_by_hand(
    clip: float, optimizer: Callable[[Any], torch.optim.Optimizer]
) -> tuple[dict[str, Tensor], list[float], list[float]]:
    """The loop anyone would write for one device: whole batches, the mean over all tokens, torch's own clipping."""
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(0)
        recipe = Sentences(Sentences.Config(num_samples=NUM_SAMPLES, augment=False))
        model = recipe.model()
        data = SentenceData(NUM_SAMPLES, augment=False)
        update = optimizer(model.parameters())
        losses, norms = [], []
        for step in range(1, 6):
            batch = recipe.collate([data[i] for i in ids_of_step(step)])
            batch["jitter"] = batch["jitter"].double()
            loss = recipe.loss(model, batch, Noise(0, torch.arange((step - 1) * 6, step * 6)))
            mean = loss.total / loss.count
            mean.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), clip or math.inf)
            update.step()
            update.zero_grad()
            losses.append(mean.item())
            norms.append(float(norm))
        return {name: tensor.detach() for name, tensor in model.named_parameters()}, losses, norms
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(("name", "world", "strategy"), slow_unless(CLIPPED, QUICK_CLIPPED))
def test_the_engine_trains_like_a_loop_written_by_hand(
    runs: dict[str, Outcome], world: int, strategy: str, name: str
) -> None:
    run = runs[f"{name} {world} {strategy}"]
    weights, losses, norms = train_by_hand(
        CLIPS[name], lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.01)
    )
    assert run.losses().tolist() == pytest.approx(losses, abs=1e-10)
    assert [line["grad_norm"] for line in run.steps()] == pytest.approx(norms, abs=1e-10)
    assert largest_difference(run.weights(), weights) < 1e-10
    if name == "clipped at times":
        assert min(norms) < CLIPS[name] < max(norms)


def test_sgd_trains_like_a_loop_written_by_hand(runs: dict[str, Outcome]) -> None:
    weights, losses, _ = train_by_hand(
        0.0, lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, weight_decay=0.01)
    )
    assert runs["sgd"].losses().tolist() == pytest.approx(losses, abs=1e-10)
    assert largest_difference(runs["sgd"].weights(), weights) < 1e-10


SKIPPING = [f"nan {world} {strategy}" for world, strategy in PLACES]
SKIPPING += ["inf 1 single", "inf 3 fsdp", "rmsprop", "float32"]
WITH_BUFFERS = [f"{kind} {place}" for kind in ("buffers", "batch norm") for place in ("1 single", "2 ddp", "2 fsdp")]
SKIPPING += WITH_BUFFERS


@pytest.mark.parametrize("name", SKIPPING)
def test_a_non_finite_step_is_skipped_by_all_and_changes_nothing(runs: dict[str, Outcome], name: str) -> None:
    run = runs[name]
    assert run.main.get("step") == 6, run.main
    before, after = run.weights(2, ""), run.weights(3, "")  # weights, optimizer state and average
    assert any(key.startswith("optimizer.") for key in before) and any(key.startswith("ema.") for key in before)
    assert identical(before, after)
    assert not identical(run.weights(3), run.weights(4)) and not identical(run.weights(1), run.weights(2))
    for step in range(1, 7):
        assert all(bool(tensor.isfinite().all()) for tensor in run.weights(step, "").values())
    assert [line["skipped"] for line in run.steps()] == [0, 0, 1, 1, 1, 1]
    assert [line["samples"] for line in run.steps()] == [6, 12, 18, 24, 30, 36]  # its samples are consumed
    assert run.state()["skipped"] == 1 and run.state()["skipped_in_a_row"] == 0
    (event,) = run.events("nan")
    assert event["step"] == 3
    assert not math.isfinite(float(event["loss"])) or not math.isfinite(float(event["grad_norm"]))


def test_skipping_does_not_depend_on_the_number_of_ranks(runs: dict[str, Outcome]) -> None:
    for world, strategy in PLACES[1:]:
        run = runs[f"nan {world} {strategy}"]
        assert largest_difference(run.weights(prefix=""), runs["nan 1 single"].weights(prefix="")) < 1e-10
    ours, theirs = runs["inf 3 fsdp"].weights(prefix=""), runs["inf 1 single"].weights(prefix="")
    assert largest_difference(ours, theirs) < 1e-10


@pytest.mark.parametrize("name", ["1 single", "2 ddp", "2 fsdp"])
def test_a_skipped_step_does_not_change_batch_norm_statistics(runs: dict[str, Outcome], name: str) -> None:
    run = runs[f"batch norm {name}"]
    (evaluated,) = run.evaluations()
    assert math.isfinite(evaluated["eval/loss"])
    passes = [int(run.weights(step)["1.num_batches_tracked"]) for step in range(1, 7)]
    each = 2 if name == "1 single" else 1  # micro-batches of a step
    assert passes == [each * good for good in (1, 2, 2, 3, 4, 5)]


def test_a_buffer_that_was_replaced_is_restored_too(runs: dict[str, Outcome]) -> None:
    for name in ["buffers, loud", *(name for name in WITH_BUFFERS if name.startswith("buffers"))]:
        run = runs[name]
        assert run.main.get("step") == 6, run.main
        for buffer in ("passes", "mean", "latest"):
            values = [run.weights(step)[buffer] for step in range(1, 7)]
            assert [torch.equal(*pair) for pair in itertools.pairwise(values)] == [False, True, False, False, False]


def test_buffers_are_restored_on_the_device_without_a_host_sync() -> None:
    class Remembers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(2)
            self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
            self.register_buffer("latest", torch.zeros(2))
            self.register_buffer("table", torch.arange(9.0))

        def forward(self, x: Tensor) -> None:
            self.norm(x)
            self.seen += len(x)
            self.latest = x[-1]

    model, generator = Remembers(), torch.Generator().manual_seed(0)
    backup = BufferBackup(model)
    for step in range(6):
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        backup.save()
        assert backup.num_copied == (6 if step < 3 else 5), "the table is copied only until it is known to be one"
        model(torch.randn(4, 2, generator=generator))
        backup.find_constants()
        backup._undo_on_device(torch.tensor(step % 2 == 1))
        after = dict(model.named_buffers())
        changed = {name for name in before if not torch.equal(before[name], after[name])}
        assert changed == (set() if step % 2 else set(before) - {"table"})


def test_a_run_without_any_finite_step_ends_on_all_ranks(runs: dict[str, Outcome]) -> None:
    for outcome in runs["nan at first"].by_rank:
        assert outcome["exit_code"] == 3
        assert "step 1" in outcome["error"] and "before any step succeeded" in outcome["error"]


def test_too_many_skipped_steps_in_a_row_end_the_run_on_all_ranks(runs: dict[str, Outcome]) -> None:
    for outcome in runs["nan three times"].by_rank:
        assert outcome["exit_code"] == 3
        assert "step 5" in outcome["error"] and "3 steps in a row" in outcome["error"]
        assert "max_skipped_steps 2" in outcome["error"]
    allowed = runs["nan three times allowed"]
    assert allowed.main["step"] == 6 and allowed.state()["skipped"] == 3


def test_a_failed_run_prints_the_reason_and_exits_with_3(tmp_path: Path) -> None:
    flags = {"nan_ids": ids_of_step(1)[0], "output_dir": tmp_path / "run", "gpus": 0} | RUN
    words = [word for name, value in flags.items() for word in (f"--{name}", value)]
    recipe = f"{Path(__file__).with_name('recipes_for_tests.py')}:Sentences"
    ended = unisono("train", recipe, *words, cwd=tmp_path)
    assert ended.code == 3, ended.err
    assert "before any step succeeded" in ended.err.strip().splitlines()[-1]
    assert "Traceback" not in ended.err


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize(("world", "strategy"), [(1, "single"), (2, "ddp"), (2, "fsdp")])
def test_mixed_precision_trains_like_float32_up_to_rounding(
    runs: dict[str, Outcome], world: int, strategy: str, precision: str
) -> None:
    run, plain = runs[f"{precision} {world} {strategy}"], runs["float32 plain"]
    assert run.main.get("step") == 6, run.main
    difference = float((run.losses() - plain.losses()).abs().max())
    assert 0 < difference < (0.01 if precision == "fp16" else 0.05)
    assert {tensor.dtype for tensor in run.weights().values()} == {torch.float32}
    assert run.state()["skipped"] == 0


@pytest.mark.parametrize(("world", "strategy"), [(1, "single"), (2, "ddp"), (2, "fsdp")])
def test_fp16_overflow_halves_the_scale_and_skips_on_all_ranks(
    runs: dict[str, Outcome], world: int, strategy: str
) -> None:
    run = runs[f"loud {world} {strategy}"]
    assert run.main.get("step") == 6, run.main
    scales = [run.state(step)["loss_scale"]["value"] for step in range(1, 7)]
    assert scales == [2.0**16, 2.0**16, 2.0**15, 2.0**15, 2.0**15, 2.0**15]
    assert identical(run.weights(2), run.weights(3)) and not identical(run.weights(3), run.weights(4))
    assert [line["skipped"] for line in run.steps()] == [0, 0, 1, 1, 1, 1]


def factors(total: int, **settings: Any) -> list[float]:
    return [learning_rate_factor(step, total, OptimSettings(**settings)) for step in range(total)]


def test_learning_rate_schedules() -> None:
    assert factors(5) == [1] * 5
    assert factors(5, lr_schedule="linear") == pytest.approx([1, 0.8, 0.6, 0.4, 0.2])
    assert factors(4, lr_schedule="linear", min_lr_ratio=0.2) == pytest.approx([1, 0.8, 0.6, 0.4])
    half = math.sqrt(0.5) / 2
    assert factors(4, lr_schedule="cosine") == pytest.approx([1, 0.5 + half, 0.5, 0.5 - half])
    assert factors(10, lr_schedule="wsd", wsd_decay_ratio=0.4) == pytest.approx([1] * 7 + [0.75, 0.5, 0.25])
    assert factors(6, warmup_steps=3) == pytest.approx([1 / 3, 2 / 3, 1, 1, 1, 1])
    warm = factors(8, warmup_steps=4, lr_schedule="linear", min_lr_ratio=0.5)
    assert warm == pytest.approx([0.25, 0.5, 0.75, 1, 1, 0.875, 0.75, 0.625])
    assert learning_rate_factor(100, None, OptimSettings(lr_schedule="cosine")) == 1
    beyond = learning_rate_factor(12, 10, OptimSettings(lr_schedule="cosine", min_lr_ratio=0.1))
    assert beyond == pytest.approx(0.1)


def test_a_run_follows_its_schedule_in_optimizer_steps(runs: dict[str, Outcome]) -> None:
    half = math.sqrt(0.5) / 2
    expected = [0.005, 0.01, 0.01, 0.01 * (0.5 + half), 0.005, 0.01 * (0.5 - half)]
    assert [line["lr"] for line in runs["cosine"].steps()] == pytest.approx(expected)


def test_the_learning_rate_scales_with_the_effective_batch(runs: dict[str, Outcome]) -> None:
    assert [line["lr"] for line in runs["scaled"].steps()] == pytest.approx([0.005] * 6)
    for scaling, expected in (("none", 1), ("linear", 0.25), ("sqrt", 0.5)):
        assert learning_rate_scale(64, OptimSettings(lr_scaling=scaling)) == expected  # type: ignore[arg-type]


def test_dividing_by_the_expected_count_is_exact() -> None:
    assert [power_of_two_near(value) for value in (1, 3, 100, 0.3, 0)] == [1, 4, 128, 0.25, 1]
