"""Groups of weights that are trained in turn: the same run on any ranks, and what each group has of its own."""

from __future__ import annotations

import io
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

import unisono
from command_line import TESTS, lines, losses
from command_line import unisono as unisono_command
from many_runs import Copy, Outcome, Run, identical, largest_difference, many_runs, selected, slow_unless
from turns_recipes import CYCLE, Pair
from unisono import Loss
from unisono.checkpoint.manifest import CheckpointError
from unisono.data.noise import Noise
from unisono.data.order import Order
from unisono.engine.checks import check_run
from unisono.engine.fit.model_memory import ModelMemory
from unisono.engine.start.run import configure
from unisono.engine.state import GroupState, TrainState
from unisono.engine.turns.rhythm import Rhythm
from unisono.errors import UserError
from unisono.observe.report.charts import learning_charts
from unisono.observe.report.read import Metrics
from unisono.observe.report.timeline import Timeline
from unisono.observe.training_line import TrainingLine
from unisono.settings import Settings

RECIPES = TESTS / "turns_recipes.py"
PAIR, DISTILLED = f"{RECIPES}:Pair", f"{RECIPES}:Distilled"
STEPS, BATCH = 14, 6
RUN = {
    "global_batch_size": BATCH,
    "max_steps": STEPS,
    "num_epochs": None,
    "save_every": 1,
    "keep_last": 0,
    "deterministic": True,
    "dtype": "float64",
}
ONE, DDP, FSDP = {"strategy": "single"}, {"strategy": "ddp"}, {"strategy": "fsdp"}
# name -> world and settings, each to be compared with the run on one device
VARIANTS = {
    "1 rank, 3 micro-batches": (1, ONE | {"batch_size": 2}),
    "1 rank, recomputing": (1, ONE | {"activation_checkpointing": True}),
    "2 ranks ddp": (2, DDP),
    "2 ranks ddp, 3 micro-batches": (2, DDP | {"batch_size": 1}),
    "2 ranks ddp, recomputing": (2, DDP | {"activation_checkpointing": True}),
    "2 ranks ddp, never guarded": (2, DDP | {"guard_steps": 0}),
    "2 ranks ddp, trying sizes": (2, DDP | {"micro_batch": "auto"}),
    "2 ranks ddp, finding unused": (2, DDP | {"find_unused_parameters": True}),
    "2 ranks ddp, outside the buckets": (2, DDP | {"gradient_as_bucket_view": False, "batch_size": 2}),
    "2 ranks ddp, static graph": (2, DDP | {"static_graph": True}),
    "3 ranks ddp, tiny buckets": (3, DDP | {"bucket_cap_mb": 0.001, "deterministic": False}),
    "2 ranks fsdp": (2, FSDP),
    "2 ranks fsdp, 3 micro-batches": (2, FSDP | {"batch_size": 1}),
    "2 ranks fsdp, one sum": (2, FSDP | {"batch_size": 1, "fsdp_sync": "last"}),
    "2 ranks fsdp, recomputing": (2, FSDP | {"activation_checkpointing": True}),
    "3 ranks fsdp": (3, FSDP),
    "2 ranks hsdp": (2, {"strategy": "hsdp", "shard_size": 1}),
}
# name -> world, settings, and the steps after which a copy of the run continues: in the middle of a cycle, and around
# the change from one group to the other
SAME_WORLD = {
    "1 rank": (1, ONE, (1, 3, 5, 6, 7, 12)),
    "2 ranks ddp": (2, DDP, (2, 4, 5, 6, 9)),
    "3 ranks ddp": (3, DDP, (3, 11)),
    "2 ranks fsdp": (2, FSDP, (2, 5, 6)),
}
OTHER_WORLD = {"1 rank": (2, FSDP, (3, 5)), "2 ranks ddp": (3, FSDP, (4, 6)), "2 ranks fsdp": (1, ONE, (5, 8))}


SAME_CASES = [(name, step) for name, (_, _, steps) in SAME_WORLD.items() for step in steps]
OTHER_CASES = [(name, world, step) for name, (world, _, steps) in OTHER_WORLD.items() for step in steps]
# `make test-slow` adds the others.
QUICK_VARIANTS = [
    *("1 rank, 3 micro-batches", "2 ranks ddp, recomputing", "2 ranks ddp, never guarded", "2 ranks ddp, trying sizes"),
    *("3 ranks ddp, tiny buckets", "2 ranks fsdp, 3 micro-batches", "2 ranks fsdp, recomputing", "3 ranks fsdp"),
    "2 ranks hsdp",
]
QUICK_CASES = [("1 rank", 3), ("2 ranks ddp", 2), ("2 ranks ddp", 5), ("2 ranks fsdp", 5), ("2 ranks fsdp", 6)]
QUICK_OTHER = [("1 rank", 2, 3), ("2 ranks ddp", 3, 4), ("2 ranks fsdp", 1, 5)]
# A frozen base with two adapters, name -> world and settings
ADAPTED = {
    "2 ranks ddp": (2, DDP),
    "2 ranks fsdp": (2, FSDP | {"batch_size": 1}),
    "blocks on the host": (1, ONE | {"blocks_on_host": 3}),
    "blocks on the host, 2 ranks, recomputing": (2, DDP | {"blocks_on_host": 3, "activation_checkpointing": True}),
    "memory of activations": (1, ONE | {"activation_memory_gb": 1e-5, "batch_size": 2}),
}


def pair(name: str, world: int, settings: dict[str, Any], copy: Copy | None = None, folder: str | None = None) -> Run:
    return Run(name, folder or name, world, settings, copy, recipe=PAIR)


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    resumed, moved = selected(request, "name", "step"), selected(request, "name", "world", "step")
    compared = {"2 ranks ddp", "2 ranks fsdp", *selected(request, "name")}
    asked = [pair("one", 1, RUN | ONE)]
    asked += [pair(name, world, RUN | settings) for name, (world, settings) in VARIANTS.items() if name in compared]
    for name, (world, settings, steps) in SAME_WORLD.items():
        if name not in VARIANTS:
            asked.append(pair(name, world, RUN | settings))
        steps = [step for step in steps if (name, step) in resumed]
        asked += [pair(f"{name} @{step}", world, RUN | settings, Copy(name, step)) for step in steps]
    for name, (world, settings, steps) in OTHER_WORLD.items():
        steps = [step for step in steps if (name, world, step) in moved]
        asked += [pair(f"{name} then {world} @{step}", world, RUN | settings, Copy(name, step)) for step in steps]
    asked += [
        pair("nan", 2, RUN | DDP | {"inject": "nan@rank1:step3,nan@rank0:step12"}),
        pair("first nan", 1, RUN | ONE | {"inject": "nan@rank0:step6"}),
        pair("out of memory", 2, RUN | DDP | {"inject": "oom@rank1:step6,oom@rank0:step8"}),
        pair("fp16", 1, RUN | ONE | {"dtype": "float32", "mixed_precision": "fp16", "max_steps": 8}),
        pair("seldom", 1, RUN | ONE | {"log_every": CYCLE, "log_group_norms": True}),
        Run("evaluated", "evaluated", 2, RUN | FSDP | {"max_steps": 6}, recipe=f"{RECIPES}:WithEvaluation"),
        Run("adapted", "adapted", 1, RUN | ONE, recipe=DISTILLED),
        Run("adapted, int8", "adapted, int8", 1, RUN | ONE | {"base_precision": "int8"}, recipe=DISTILLED),
        Run("adapted, int8, fsdp", "adapted, int8, fsdp", 2, RUN | FSDP | {"base_precision": "int8"}, recipe=DISTILLED),
    ]
    for world in (1, 2):
        shared = RUN | {
            "context_parallel": world,
            "length": 31,
            "num_epochs": 5,
            "strategy": "auto",
            "max_steps": 7,
            "log_every": 1,
        }
        asked.append(Run(f"long, {world}", f"long, {world}", world, shared, recipe=f"{RECIPES}:LongSamples"))
    for name, (world, settings) in ADAPTED.items():
        asked.append(Run(f"adapted, {name}", f"adapted, {name}", world, RUN | settings, recipe=DISTILLED))
    return many_runs(asked, tmp_path_factory.mktemp("turns"))


@pytest.mark.parametrize("name", slow_unless(list(VARIANTS), QUICK_VARIANTS))
def test_ranks_and_strategies_train_like_one_device(runs: dict[str, Outcome], name: str) -> None:
    run, one = runs[name], runs["one"]
    assert run.main.get("status") == "done", run.main
    assert float((run.losses() - one.losses()).abs().max()) < 1e-10
    assert largest_difference(run.weights(prefix=""), one.weights(prefix="")) < 1e-10
    for key in ("group", "lr", "critic/lr", "generator/lr", "samples"):
        assert [line.get(key) for line in run.steps()] == [line.get(key) for line in one.steps()], key


@pytest.mark.parametrize(("name", "step"), slow_unless(SAME_CASES, QUICK_CASES))
def test_a_run_that_resumes_within_a_cycle_is_the_same_to_the_bit(
    runs: dict[str, Outcome], name: str, step: int
) -> None:
    run, whole = runs[f"{name} @{step}"], runs[name]
    assert run.main.get("status") == "done", run.main
    assert identical(run.weights(prefix=""), whole.weights(prefix=""))  # weights, optimizer state and averages
    assert run.state() == whole.state() | {"last_metrics": run.state()["last_metrics"]}
    for line, expected in zip(run.steps(), whole.steps(), strict=True):
        assert line["loss"] == expected["loss"]
        own = {key for key in expected if key.startswith(("critic/", "generator/"))}
        assert {key: line.get(key) for key in own} == {key: expected[key] for key in own}


@pytest.mark.parametrize(("name", "world", "step"), slow_unless(OTHER_CASES, QUICK_OTHER))
def test_a_run_resumes_within_a_cycle_on_other_ranks(
    runs: dict[str, Outcome], name: str, world: int, step: int
) -> None:
    run, whole = runs[f"{name} then {world} @{step}"], runs["one"]
    assert run.main.get("status") == "done", run.main
    assert largest_difference(run.weights(prefix=""), whole.weights(prefix="")) < 1e-10


@pytest.mark.parametrize("name", ADAPTED)
def test_two_adapters_of_a_frozen_base_take_turns(runs: dict[str, Outcome], name: str) -> None:
    run, one = runs[f"adapted, {name}"], runs["adapted"]
    assert run.main.get("status") == "done", run.main
    assert float((run.losses() - one.losses()).abs().max()) < 1e-10
    assert largest_difference(run.weights(prefix=""), one.weights(prefix="")) < 1e-10


def test_a_base_in_few_bits_is_the_same_on_any_number_of_ranks(runs: dict[str, Outcome]) -> None:
    run, one = runs["adapted, int8, fsdp"], runs["adapted, int8"]
    assert float((run.losses() - one.losses()).abs().max()) < 1e-10
    assert float((runs["adapted"].losses() - one.losses()).abs().max()) > 1e-10


def test_ranks_that_share_a_sample_train_groups_like_one_rank(runs: dict[str, Outcome]) -> None:
    one, two = runs["long, 1"], runs["long, 2"]
    assert [line["group"] for line in two.steps()] == ["blocks", "ends", "ends"] * 2 + ["blocks"]
    assert largest_difference(one.weights(prefix=""), two.weights(prefix="")) < 1e-10


def by_hand(steps: int) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """The same training as a plain loop: losses, weights, averages of the generator's weights."""
    recipe = Pair(Pair.Config())
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(0)
        model, data = recipe.model(), recipe.dataset("train")
        parts = {"critic": model.critic, "generator": model.generator}
        optimizers = {
            "critic": torch.optim.AdamW(model.critic.parameters(), lr=2e-2, betas=(0.5, 0.999), weight_decay=0.01),
            "generator": torch.optim.Adam(model.generator.parameters(), lr=1e-3, weight_decay=0.01),
        }
        average = {name: weight.detach().clone() for name, weight in model.generator.named_parameters()}
        order, losses, updates = Order(len(data), 0), [], 0
        for step in range(steps):
            recipe.group = "generator" if step % CYCLE == CYCLE - 1 else "critic"
            for name, part in parts.items():
                part.requires_grad_(name == recipe.group)
            positions = torch.arange(step * BATCH, (step + 1) * BATCH)
            batch = default_collate([data[order[p]] for p in positions.tolist()])
            loss = recipe.loss(model, batch, Noise(0, positions))
            (loss.total / loss.count).backward()
            own, total = step // CYCLE, steps // CYCLE
            if recipe.group == "critic":
                torch.nn.utils.clip_grad_norm_(model.critic.parameters(), 0.1)
            else:
                torch.nn.utils.clip_grad_norm_(model.generator.parameters(), 1.0)
                factor = (own + 1) / 2 if own < 2 else 0.5 * (1 + math.cos(math.pi * (own - 2) / max(1, total - 2)))
                optimizers["generator"].param_groups[0]["lr"] = 1e-3 * factor
            optimizers[recipe.group].step()
            optimizers[recipe.group].zero_grad()
            losses.append(float(loss.total / loss.count))
            if recipe.group == "generator":
                amount = 1 - min(0.9, (1 + updates) / (10 + updates))
                updates += 1
                for name, weight in model.generator.named_parameters():
                    average[name].lerp_(weight.detach(), amount)
        return losses, dict(model.state_dict()), average
    finally:
        torch.set_default_dtype(torch.float32)


def test_it_trains_like_a_plain_loop_with_two_optimizers(runs: dict[str, Outcome]) -> None:
    """Each group has its own loss, optimizer, clipping, schedule of its own steps, and average."""
    losses, weights, average = by_hand(STEPS)
    run = runs["one"]
    assert run.losses().tolist() == pytest.approx(losses, abs=1e-12)
    assert largest_difference(run.weights(), weights) < 1e-12
    averaged = {name.removeprefix("generator."): each for name, each in run.weights(prefix="ema.").items()}
    assert largest_difference(averaged, average) < 1e-12  # only the generator has an average


def test_a_line_of_metrics_has_the_newest_numbers_of_every_group(runs: dict[str, Outcome]) -> None:
    records = {line["step"]: line for line in runs["one"].steps()}
    assert [records[step]["group"] for step in (5, 6, 7)] == ["critic", "generator", "critic"]
    assert "generator/loss" not in records[5]
    for step in range(CYCLE, STEPS + 1):
        assert records[step]["generator/loss"] == records[step // CYCLE * CYCLE]["loss"]
        assert records[step]["critic/loss"] == records[step - (step % CYCLE == 0)]["loss"]
        assert {"critic/right", "generator/size", "critic/grad_norm", "generator/lr"} <= records[step].keys()
    # The critic is logged even if every logged step trains the generator.
    assert [line["group"] for line in runs["seldom"].steps()] == ["generator", "generator", "critic"]
    assert all(line["critic/loss"] == records[line["step"]]["critic/loss"] for line in runs["seldom"].steps())
    last = runs["seldom"].steps()[-1]
    assert last["generator/grad_norm/0"] == pytest.approx(last["generator/grad_norm"])


def test_a_step_that_is_not_finite_counts_for_its_group(runs: dict[str, Outcome]) -> None:
    run = runs["nan"]
    assert [line["step"] for line in run.steps() if math.isnan(float(line["loss"]))] == [3, 12]
    assert [event["group"] for event in run.events("nan")] == ["critic", "generator"]
    state = run.state()
    assert state["skipped"] == 2
    assert {name: group["skipped"] for name, group in state["groups"].items()} == {"critic": 1, "generator": 1}
    before, after = run.weights(2, prefix=""), run.weights(3, prefix="")
    assert identical(before, after)  # weights, optimizer state and average of both
    assert not identical(run.weights(3), run.weights(4))
    assert runs["first nan"].main["error"].startswith("step 6: the loss was nan before any step of generator succeeded")


def test_running_out_of_memory_repeats_the_turn(runs: dict[str, Outcome]) -> None:
    run, one = runs["out of memory"], runs["one"]
    assert [event["step"] for event in run.events("oom")] == [6, 8]
    assert all(event["in_place"] for event in run.events("oom"))
    assert largest_difference(run.weights(prefix=""), one.weights(prefix="")) < 1e-10


def test_each_group_has_its_own_loss_scale(runs: dict[str, Outcome]) -> None:
    groups = runs["fp16"].state()["groups"]
    assert all(group["loss_scale"]["value"] > 0 for group in groups.values())
    good = {name: group["loss_scale"]["good_steps"] + group["skipped"] for name, group in groups.items()}
    assert good == {"critic": 7, "generator": 1}


@pytest.mark.parametrize(
    ("flaw", "message"),
    [
        ("overlap", "critic.last.weight is in critic and in generator; every weight belongs to one group"),
        ("uncovered", r"the trainable weight generator.first.weight is in no group; add it to one, or freeze it"),
        (
            "empty",
            r"actor has no weights: .* \(beginning with .actor.*\); the first trainable weight is generator.first",
        ),
        ("same name", "two groups are called critic; use distinct names"),
        ("name", "'a/b' cannot be the name of a group; use letters, digits, _ and -"),
        ("eval", "'eval' cannot be the name of a group"),
        ("steps", "steps of generator must be a number from 1 to 1,000,000, not 0"),
        ("weights", "weights of generator must be prefixes of names, or a function of a name"),
        ("strings", r"groups\(\) returned a list with str; expected a list of unisono.Group"),
        ("none", r"groups\(\) returned NoneType; expected a list of unisono.Group"),
        ("rate", r"groups\(\), generator: learning_rate: expected at least 0, got -1.0"),
        ("text", "learning_rate of generator cannot be 'fast'"),
        ("schedule", "lr_schedule of generator must be one of constant, linear, cosine, wsd, not 'cosin'"),
        ("optimizer", r"groups\(\), generator: optimizer: expected one of .*; got 'adamm'"),
        ("average", r"groups\(\), generator: ema_decay: with 1 the average would never change"),
    ],
)
def test_groups_that_cannot_be_used_are_refused_in_one_line(flaw: str, message: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(UserError, match=message) as refused:
        unisono.train(f"{RECIPES}:Misdeclared", {"flaw": flaw}, output_dir=str(folder), gpus="0", max_steps=1)
    assert "\n" not in str(refused.value)
    assert not (folder / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("recipe", "settings", "message"),
    [
        ("Pair", {"cuda_graph": True}, "cuda_graph cannot record several groups of weights that are trained in turn"),
        (
            "Pair",
            {"blocks_on_host": 2},
            r"blocks whose weights are trained cannot be stored on the host in a recipe with gr",
        ),
        ("Compares", {}, r"groups\(\) does not work with couple\(\) and couple_rows\(\)"),
    ],
)
def test_what_does_not_work_with_groups_is_refused_in_one_line(
    recipe: str, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        unisono.train(f"{RECIPES}:{recipe}", output_dir=str(tmp_path / "run"), gpus="0", max_steps=1, **settings)


@pytest.mark.parametrize(
    ("flaw", "message"),
    [
        ({"skipped": -1}, "'skipped' of the group 'critic' cannot be -1"),
        ({"steps": 0}, "'steps' of the group 'critic' cannot be 0"),
        ({"latest": {"loss": "low"}}, "'latest' of the group 'critic' cannot be this dict"),
        ({"loss_scale": {"value": 1.0}}, "'loss_scale' of the group 'critic' cannot be this dict"),
        ({"more": 1}, "the state of the group 'critic' does not match this version"),
    ],
)
def test_a_state_from_a_file_is_checked_for_each_group(flaw: dict[str, Any], message: str) -> None:
    state = TrainState(8, groups={"critic": GroupState(5)}).to_json()
    assert TrainState.from_json(state) == TrainState(8, groups={"critic": GroupState(5)})
    state["groups"]["critic"] |= flaw
    with pytest.raises(CheckpointError, match=message):
        TrainState.from_json(state)
    assert "groups" not in TrainState(8).to_json()  # as before there were groups


def test_predicted_memory_is_that_of_the_group_that_needs_most() -> None:
    resolved = configure(Pair)
    recipe = check_run(Pair, resolved)
    memory = ModelMemory(recipe, lambda copy: copy.dataset("train")[0].float())
    trace = memory._trace(resolved.build(Settings), micro_batch=6)
    parts = (recipe.model().critic, recipe.model().generator)
    assert trace.gradients == 512 * max(len(list(part.parameters())) for part in parts)  # 512 bytes or less each


@pytest.mark.parametrize(("changed", "message"), [(2, "critic for 5 steps, .* trains in turn critic for 2 steps")])
def test_a_run_keeps_its_rhythm(runs: dict[str, Outcome], changed: int, message: str, tmp_path: Path) -> None:
    shutil.copytree(runs["one"].folder, tmp_path / "run")
    with pytest.raises(UserError, match=message):
        unisono.train(PAIR, {"critic_steps": changed}, output_dir=str(tmp_path / "run"), gpus="0", max_steps=20)


@pytest.mark.parametrize("steps", [(1,), (5, 1), (1, 1), (2, 3, 1)])
def test_whose_turn_it_is_follows_from_the_step_alone(steps: tuple[int, ...]) -> None:
    rhythm = Rhythm(steps)
    order = [number for number, own in enumerate(steps) for _ in range(own)] * 5
    assert [rhythm.group_at(step) for step in range(len(order))] == order
    for number in range(len(steps)):
        counts = [rhythm.own_steps(number, step) for step in range(len(order))]
        assert counts == [order[:step].count(number) for step in range(len(order))]


def test_a_rank_that_is_killed_within_a_cycle_changes_no_bit(runs: dict[str, Outcome], tmp_path: Path) -> None:
    """Step 9 is the critic's third step in a row; the restart begins after its first one."""
    flags = [f"--{name}={value}" for name, value in (RUN | DDP | {"save_every": 7, "num_epochs": "none"}).items()]
    ended = unisono_command(
        *("train", PAIR, "--nproc", 2, "--inject", "kill@rank1:step9", "--output_dir", tmp_path / "run", *flags),
        cwd=tmp_path,
    )
    assert ended.code == 0, ended.err
    whole = runs["2 ranks ddp"]
    killed = Outcome(tmp_path / "run", tmp_path, [])
    assert [event["kind"] for event in killed.events("restart")] == ["restart"]
    assert identical(killed.weights(prefix=""), whole.weights(prefix=""))
    assert losses(tmp_path / "run") == whole.losses().tolist()


def test_verify_trains_every_group(tmp_path: Path) -> None:
    ended = unisono_command("verify", PAIR, "--ranks", "1,2", "--strategies", "ddp,fsdp", cwd=tmp_path)
    assert ended.code == 0, ended.err
    assert f"{CYCLE + 1} steps in float64" in ended.out and "Same run" in ended.out


def test_the_report_draws_each_group(runs: dict[str, Outcome]) -> None:
    metrics = Metrics()
    for line in runs["one"].lines():
        metrics.add(line)
    charts = {chart.title: [line.name for line in chart.lines] for chart in learning_charts(metrics, Timeline())}
    assert charts["Loss of critic"] == charts["Loss of generator"] == ["training"]
    assert charts["Learning rate"] == charts["Gradient norm"] == ["critic", "generator"]
    assert "Loss" not in charts and "critic/right" in charts and "critic/loss" not in charts


def test_the_progress_line_shows_the_newest_loss_of_each_group(runs: dict[str, Outcome]) -> None:
    stream = io.StringIO()
    line = TrainingLine(STEPS, stream=stream)
    line.update(**runs["one"].steps()[CYCLE])
    shown = runs["one"].steps()[CYCLE]
    assert f"critic {shown['critic/loss']:.4f}  generator {shown['generator/loss']:.4f}" in stream.getvalue()


def test_an_evaluation_computes_the_loss_of_every_group(runs: dict[str, Outcome]) -> None:
    [evaluation] = runs["evaluated"].evaluations()
    assert {"eval/critic/loss", "eval/critic/right", "eval/generator/loss", "eval/generator/size"} <= evaluation.keys()
    assert runs["evaluated"].main["metrics"]["eval/critic/loss"] == evaluation["eval/critic/loss"]


def test_what_is_compiled_for_a_group_is_compiled_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The weights that require gradients change with every turn: they must not cause compilations forever."""

    def compile_without_inductor(module: nn.Module, **_: Any) -> None:
        module._compiled_call_impl = torch.compile(module._call_impl, backend="eager")

    monkeypatch.setattr(nn.Module, "compile", compile_without_inductor)
    counts: list[int] = []

    class Counting(Pair):
        def loss(self, model: Any, batch: Any, noise: Any) -> Loss:
            counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
            return super().loss(model, batch, noise)

    settings = {"compile": True, "max_steps": 3 * CYCLE, "batch_size": BATCH, "num_samples": 6}
    unisono.train(Counting, output_dir=str(tmp_path / "run"), gpus="0", **settings)
    assert counts[0] < counts[CYCLE] == counts[-1]


def test_the_example_learns_to_draw_both_half_circles(tmp_path: Path) -> None:
    example = TESTS.parent / "examples/own_model/two_networks.py"
    ended = unisono_command(
        *("train", f"{example}:Duel", "--max_steps", 1000, "--gpus", 0, "--output_dir", "run", "--log_every", 500),
        cwd=tmp_path,
    )
    assert ended.code == 0, ended.err
    last = lines(tmp_path / "run")[-1]  # before training, all points lie in one place, of neither
    assert last["eval/outside"] < 0.45 and 0.35 < last["eval/upper"] < 0.65
