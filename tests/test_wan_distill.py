"""The recipe wan-distill from end to end: small real Wan teachers, real ranks, their roll-outs and students."""

from __future__ import annotations

import ast
import fcntl
import hashlib
import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import av
import pytest
import torch
from diffusers import WanPipeline
from torch import Tensor

import unisono
from command_line import marked, start, wait_until
from command_line import unisono as command
from many_runs import Outcome, Run, many_runs
from unisono.engine.export import export_run, load_trained
from unisono.engine.recipe import Work
from unisono.errors import ConfigError, UnisonoError, UserError
from unisono.observe import progress
from unisono.recipes.wan.objective import TIMESTEPS, noised
from unisono.recipes.wan_distill import loss_terms as losses
from unisono.recipes.wan_distill.data.datasets import EvalDataset, RolloutDataset
from unisono.recipes.wan_distill.data.prompts import labels, prompts_of, read_prompts
from unisono.recipes.wan_distill.data.rollouts import Rollouts
from unisono.recipes.wan_distill.evaluation import generate
from unisono.recipes.wan_distill.models.teacher import Guidance, load_teacher
from unisono.recipes.wan_distill.models.tiny_teacher import folder_of, make
from unisono.recipes.wan_distill.recipe import WanDistill
from unisono.recipes.wan_distill.settings import Config
from unisono.recipes.wan_flow.recipe import WanFlow
from unisono.recipes.wan_flow.settings import Config as FlowConfig
from wan_models import SMALL, save_pipelines

PROMPTS = ["a red ball", "a ball", "a red red ball", "ball a", "a a ball", "red"]
RUN: dict[str, Any] = {
    **{"mixed_precision": "no", "compile": False, "num_workers": 0, "log_every": 1, "warmup_steps": 0},
    **{"learning_rate": 1e-3, "tensorboard": False, "ema_decay": 0.9, "global_batch_size": 4, "batch_size": 4},
    **{"height": 16, "width": 32, "num_eval": 2, "rollouts": 2, "rollout_batch": 3, "teacher_steps": 3, "pairs": 3},
    **{"eval_levels": 2, "num_previews": 2, "max_steps": 6, "save_every": 3, "eval_every": 3, "preview_every": 6},
}
ONLINE = {"online": True, "refresh_every": 2, "flow_weight": 0.5}
TWO = {"batch_size": 2}
SHORT = {"max_steps": 3}
# name -> teacher, ranks, settings
RUNS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "one": ("2.1", 1, {}),
    "2 ranks ddp": ("2.1", 2, {"strategy": "ddp"} | TWO),
    "2 ranks fsdp": ("2.1", 2, {"strategy": "fsdp"} | TWO),
    "online": ("2.1", 1, ONLINE),
    "never refreshed": ("2.1", 1, ONLINE | {"refresh_every": 0}),
    "online, 2 ranks": ("2.1", 2, {"strategy": "ddp"} | ONLINE | TWO),
    "online, shared out": ("2.1", 2, {"strategy": "ddp", "teacher_device_strategy": "balanced"} | ONLINE | TWO),
    "experts": ("a14b", 1, {"guidance": 4.0, "guidance_2": 3.0} | ONLINE | SHORT),
    "experts, shared out": (
        "a14b",
        2,
        {"guidance": 4.0, "guidance_2": 3.0, "strategy": "fsdp", "teacher_device_strategy": "balanced"}
        | ONLINE
        | TWO
        | SHORT,
    ),
    "video": ("5b", 1, {"num_frames": 5, "height": 32} | SHORT),
    "paths": ("2.1", 1, {"trajectory_weight": 1.0, "trajectory_points": 2} | SHORT),
    "few steps": (
        "2.1",
        1,
        {"few_step_weight": 1.0, "velocity_weight": 0.0, "few_steps": 3} | SHORT,
    ),
    "features": ("2.1", 1, {"online": True, "feature_weight": 0.1} | SHORT),
    "fresh": ("2.1", 1, {"init": "fresh"} | SHORT),
    "last batch": (
        "2.1",
        1,
        {"num_epochs": 1, "max_steps": None, "velocity_weight": 0.0, "flow_weight": 1.0, "rollouts": 3},
    ),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with teachers and prompts."""
    root = tmp_path_factory.mktemp("distill")
    save_pipelines(root)
    (root / "prompts.txt").write_text("\n".join(PROMPTS))
    return root


def run_settings(root: Path, teacher: str, **changes: Any) -> dict[str, Any]:
    paths = {"teacher_path": str(root / teacher), "data_path": str(root / "prompts.txt")}
    return {**RUN, **paths, **changes}


@pytest.fixture(scope="module")
def runs(root: Path) -> dict[str, Outcome]:
    """All runs of this module, by name."""
    planned = [
        Run(name, f"runs/{name}", world, run_settings(root, teacher, **changes), recipe="wan-distill")
        for name, (teacher, world, changes) in RUNS.items()
    ]
    before = {"strategy": "ddp", "max_steps": 3} | ONLINE | TWO
    planned.append(Run("moved, before", "runs/moved", 2, run_settings(root, "2.1", **before), recipe="wan-distill"))
    planned.append(Run("moved", "runs/moved", 1, run_settings(root, "2.1", **ONLINE), recipe="wan-distill"))
    outcomes = many_runs(planned, root)
    for name, outcome in outcomes.items():
        assert "error" not in outcome.main, (name, outcome.main)
    return outcomes


def unprepared(root: Path, teacher: str = "2.1", **changes: Any) -> WanDistill:
    """A recipe before its preparation."""
    values = run_settings(root, teacher, **changes)
    return WanDistill(Config(**{name: value for name, value in values.items() if name in vars(Config())}))


def recipe_of(root: Path, teacher: str = "2.1", folder: str = "by hand", **changes: Any) -> WanDistill:
    """A recipe that was prepared without a run."""
    recipe = unprepared(root, teacher, **changes)
    recipe.prepare(Work(root / folder))
    return recipe


def bytes_of(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.glob("*.safetensors")}


def close(some: Outcome, other: Outcome, rtol: float = 2e-5) -> None:
    torch.testing.assert_close(some.losses(), other.losses(), rtol=rtol, atol=0)


@pytest.mark.parametrize("name", ["2 ranks ddp", "2 ranks fsdp"])
def test_two_ranks_generate_the_same_samples_and_train_like_one(
    name: str, runs: dict[str, Outcome], root: Path
) -> None:
    close(runs[name], runs["one"])
    one, two = (bytes_of(root / "runs" / each / "prepared" / "rollouts") for each in ("one", name))
    assert len(one) == 3 + 1 + 1  # blocks for training, evaluation and previews
    assert one == two


@pytest.mark.parametrize("name", ["online, 2 ranks", "online, shared out"])
def test_an_online_teacher_is_the_same_on_two_ranks_and_sharded(name: str, runs: dict[str, Outcome]) -> None:
    close(runs[name], runs["online"])


def test_two_experts_sharded_over_two_ranks_generate_like_one_process(runs: dict[str, Outcome]) -> None:
    close(runs["experts, shared out"], runs["experts"])


def test_an_online_run_resumes_on_another_number_of_ranks(runs: dict[str, Outcome]) -> None:
    assert runs["moved, before"].main["step"] == 3
    close(runs["moved"], runs["online"])


def test_refresh_every_generates_new_samples(runs: dict[str, Outcome], root: Path) -> None:
    blocks, once = (bytes_of(root / "runs" / name / "prepared" / "rollouts") for name in ("online", "never refreshed"))
    assert (len(blocks), len(once)) == (3 * 3 + 1 + 1, 3 + 1 + 1)
    always, never = runs["online"].losses(), runs["never refreshed"].losses()
    torch.testing.assert_close(always[:2], never[:2], rtol=1e-5, atol=0)
    assert not torch.isclose(always[2:], never[2:], rtol=1e-4).any()


def test_held_out_prompts_are_evaluated(runs: dict[str, Outcome]) -> None:
    first, last = runs["one"].evaluations()
    assert first["eval/sigma_by_level"] == last["eval/sigma_by_level"] == pytest.approx([0.5, 0.9])
    assert last["eval/velocity_error"] < first["eval/velocity_error"]
    assert last["eval/velocity_error"] == pytest.approx(sum(last["eval/velocity_error_by_level"]) / 2)
    assert 0 < last["eval/latent_error"] < 1


def test_the_speed_up_is_reported_if_enough_blocks_were_timed(runs: dict[str, Outcome]) -> None:
    metrics = {name: runs[name].evaluations()[-1] for name in ("one", "last batch", "2 ranks fsdp")}
    student, teacher, ratio = "eval/seconds_per_sample", "eval/teacher_seconds_per_sample", "eval/times_as_fast"
    assert metrics["one"][student] > 0 and metrics["one"][teacher] > 0
    assert ratio not in metrics["one"], "two blocks after the first one"
    line = metrics["last batch"]  # four blocks for training
    assert line[ratio] == pytest.approx(line[teacher] / line[student])
    assert not {student, ratio} & metrics["2 ranks fsdp"].keys(), "gathering weights would be timed too"


def test_a_speed_up_is_computed_only_from_three_or_more_blocks() -> None:
    from unisono.recipes.wan_distill.evaluation import SampleTime, speed

    assert speed(None, None) == {}
    assert speed(SampleTime(6.0, 2), SampleTime(2.0, 3)) == {
        "seconds_per_sample": 2.0,
        "teacher_seconds_per_sample": 6.0,
    }
    assert speed(SampleTime(6.0, 3), SampleTime(2.0, 1))["times_as_fast"] == 3.0


def test_the_student_is_timed_once_with_the_teachers_batch_size(root: Path) -> None:
    recipe = recipe_of(root, folder="timed", rollouts=4)
    model = recipe.model()
    model.to_empty(device="cpu")
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.02)
    passes: list[int] = []
    next(model.children()).register_forward_pre_hook(lambda module, given: passes.append(len(given[0])))
    recipe.before_evaluation(model)
    assert recipe.student_time is not None
    assert recipe.student_time.number == 3
    assert passes == [3] * (1 + 3) * 3  # one warm-up roll-out and three timed ones, each of three steps
    recipe.before_evaluation(model)
    assert len(passes) == 12
    note = json.loads(recipe.setup.times_file.read_text())
    assert note["blocks"] == 6 - 1  # four prompts, four samples each, three at once; the first block is not timed


def test_the_teachers_time_is_the_median_of_its_blocks(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    took = iter([90.0, 3.0, 3.3, 60.0, 2.7, 3.0])  # the first block compiles, another one hits a busy moment
    drawn = Rollouts._generate

    def busy(self: Rollouts, number: int, *rest: Any) -> tuple[dict[str, Tensor], float]:
        return drawn(self, number, *rest)[0], next(took, 1.0) * len(self._blocks[number])

    monkeypatch.setattr(Rollouts, "_generate", busy)
    setup = recipe_of(root, folder="busy", rollouts=4).setup
    measured = setup.teacher_time()
    assert measured is not None
    assert (measured.seconds, measured.number) == (pytest.approx(3.0), 5)
    setup.num_ranks = 2
    assert setup.teacher_time() is None, "other company, another time"


def test_an_incomplete_last_batch_is_trained_on(runs: dict[str, Outcome]) -> None:
    assert [line["samples"] for line in runs["last batch"].steps()] == [4, 8, 12]
    assert runs["few steps"].main["step"] == runs["paths"].main["step"] == runs["features"].main["step"] == 3


def test_each_loss_is_logged_under_its_name(runs: dict[str, Outcome]) -> None:
    line = runs["paths"].steps()[0]
    assert line["loss"] == pytest.approx(line["velocity_loss"] + line["trajectory_loss"], rel=1e-5)
    assert "few_step_loss" in runs["few steps"].steps()[0]
    features = runs["features"].steps()[0]
    assert features["loss"] == pytest.approx(features["velocity_loss"] + 0.1 * features["feature_loss"], rel=1e-5)


# Roll-outs of the teacher
# ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("teacher", ["2.1", "a14b"])
def test_the_teacher_generates_what_its_pipeline_generates(teacher: str, root: Path) -> None:
    recipe = recipe_of(root, teacher, f"pipeline {teacher}", guidance=4.0, guidance_2=3.0, teacher_steps=8)
    samples = recipe.setup.rollouts("train").open()
    pipeline = WanPipeline.from_pretrained(root / teacher)
    pipeline.set_progress_bar_config(disable=True)
    for number in (0, 3):
        prompt, _ = samples.items[number]
        two = {"guidance_scale_2": 3.0} if teacher == "a14b" else {}
        theirs = pipeline(
            prompt_embeds=recipe.setup.text(prompt)[None].float(),
            negative_prompt_embeds=recipe.setup.text("")[None].float(),
            latents=samples.spec.initial_noise(*samples.items[number])[None],
            **{"height": 16, "width": 32, "num_frames": 1, "num_inference_steps": 8, "guidance_scale": 4.0, **two},
            output_type="latent",
        ).frames
        torch.testing.assert_close(samples.data(number)[None], theirs, rtol=1e-4, atol=1e-4)


def test_stored_velocities_equal_those_of_the_guided_teacher(root: Path) -> None:
    recipe = recipe_of(root, folder="answers", guidance=4.0)
    samples, setup = recipe.setup.rollouts("train").open(), recipe.setup
    teacher, _ = load_teacher(setup.teacher, setup.guidance, "float32", "auto", "cpu", compiled=False)
    transformer = next(teacher.experts.children())
    data = RolloutDataset(samples, setup.text)
    assert len(data) == 8 * 3
    for index in (0, 4, 23):
        item = data[index]
        noise = setup.rollout_spec.noise(item["position"][None])
        at, time = noised(item["data"][None], noise, item["sigma"][None]), item["sigma"][None] * TIMESTEPS
        with torch.no_grad():
            with_prompt = transformer(at, time, item["text"][None].float(), return_dict=False)[0]
            without = transformer(at, time, setup.text("")[None].float(), return_dict=False)[0]
        torch.testing.assert_close(item["velocity"][None], without + 4 * (with_prompt - without), rtol=1e-4, atol=1e-4)


def test_the_noise_levels_of_a_sample_are_stratified(root: Path) -> None:
    samples = recipe_of(root, folder="answers", guidance=4.0).setup.rollouts("train").open()
    levels = torch.stack(
        [torch.stack([samples.pair(number, place)["sigma"] for place in range(3)]) for number in range(8)]
    )
    thirds = [3 * share / (1 + 2 * share) for share in (0, 1 / 3, 2 / 3, 1)]  # shifted by 3
    for place in range(3):
        assert (levels[:, place] >= thirds[place]).all()
        assert (levels[:, place] < thirds[place + 1]).all()
    assert len(set(levels.flatten().tolist())) == 24


def test_stored_points_lie_on_the_trajectory(root: Path) -> None:
    settings = {"trajectory_weight": 1.0, "trajectory_points": 4, "teacher_steps": 4, "teacher_sampler": "euler"}
    samples = recipe_of(root, folder="path", **settings).setup.rollouts("train").open()
    assert samples.spec.points == (0, 1, 2, 3)
    torch.testing.assert_close(samples.point(1, 0)["point"], samples.spec.initial_noise(*samples.items[1]))
    assert samples.spec.sigmas[0] == pytest.approx(0.9997, abs=1e-3)
    sigmas = [samples.point(1, place)["point_sigma"] for place in range(4)] + [torch.tensor(0.0)]
    reached = samples.point(1, 0)["point"]
    for place in range(4):
        point = samples.point(1, place)
        torch.testing.assert_close(point["point"], reached, rtol=1e-3, atol=1e-3)
        reached = point["point"] + (sigmas[place + 1] - sigmas[place]) * point["point_velocity"]
    torch.testing.assert_close(samples.data(1), reached, rtol=1e-3, atol=1e-3)


def test_noise_depends_only_on_seed_prompt_and_sample_number(root: Path) -> None:
    spec = recipe_of(root, folder="answers", guidance=4.0).setup.rollout_spec
    some = spec.initial_noise("a", 0)
    assert torch.equal(some, spec.initial_noise("a", 0))
    others = [spec.initial_noise("a", 1), spec.initial_noise("b", 0), replace(spec, seed=1).initial_noise("a", 0)]
    assert all((some - other).abs().mean() > 0.5 for other in others)
    assert abs(float(some.mean())) < 0.2
    assert abs(float(some.std()) - 1) < 0.2


def test_a_roll_outs_file_name_depends_on_everything_that_affects_it(root: Path) -> None:
    def names(seed: int = 0, **changes: Any) -> set[str]:
        teacher = changes.pop("teacher", "2.1")
        setup = unprepared(root, teacher, **changes).setup
        setup.seed = seed
        return set(setup.rollouts("train")._keys)

    base = names()
    assert names() == base
    assert not names(seed=1) & base
    for change in (
        {"guidance": 3.0},
        {"teacher_steps": 4},
        {"shift": 5.0},
        {"negative_prompt": "ball"},
        {"rollout_batch": 4},
        {"teacher_sampler": "euler"},
        {"width": 16},
        {"teacher_dtype": "bfloat16"},
        {"num_frames": 5},
        {"teacher": "a14b", "guidance_2": 3.0},
        {"sigma_sampling": "mode"},
        {"pairs": 4},
    ):
        assert not names(**change) & base, change  # type: ignore[arg-type]


def test_adding_prompts_does_not_change_full_blocks(root: Path, tmp_path: Path) -> None:
    (tmp_path / "more.txt").write_text("\n".join([*PROMPTS, "red red"]))
    before = recipe_of(root, folder="added", num_eval=0).setup.rollouts("train")._keys
    after = (
        recipe_of(root, folder="added", num_eval=0, data_path=str(tmp_path / "more.txt")).setup.rollouts("train")._keys
    )
    assert (len(before), len(after), len(set(before) & set(after))) == (4, 5, 4)


@pytest.mark.parametrize(("prompts", "rollouts", "blocks"), [(1, 18, 5), (5, 3, 4), (4, 2, 2), (3, 1, 1), (9, 3, 7)])
def test_the_number_of_blocks_is_no_larger_than_needed(prompts: int, rollouts: int, blocks: int, root: Path) -> None:
    spec = replace(recipe_of(root, folder="answers", guidance=4.0).setup.rollout_spec, block=4)
    names = [f"prompt {number}" for number in range(prompts)]
    made = Rollouts(root, spec, names, rollouts)
    assert [len(block) for block in made._blocks[:-1]] == [4] * (blocks - 1)
    assert sorted(item for block in made._blocks for item in block) == sorted(made.items)
    assert made.items[: prompts + 1] == [(name, 0) for name in names] + [(names[0], 1)][: rollouts - 1]


def test_samples_of_one_prompt_have_different_noise(root: Path) -> None:
    samples = recipe_of(root, folder="one prompt", rollouts=5, num_eval=5).setup.rollouts("train").open()
    alone = recipe_of(root, folder="one at a time", rollouts=5, num_eval=5, rollout_batch=1).setup
    assert len(bytes_of(root / "one prompt" / "rollouts")) == 2 + 2 + 1
    assert [number for _, number in samples.items] == [0, 1, 2, 3, 4]
    for number in range(5):
        same = alone.rollouts("train").open().data(number)
        torch.testing.assert_close(samples.data(number), same, rtol=1e-4, atol=1e-4)


def test_samples_in_an_incomplete_last_block_equal_those_of_a_full_block_bit_for_bit(root: Path) -> None:
    recipe = recipe_of(root, folder="filled", rollout_batch=3, rollouts=1)  # four prompts: blocks of 3 and of 1
    setup, prompt = recipe.setup, recipe.setup.prompts.train[3]
    full = Rollouts(root / "full", setup.rollout_spec, [prompt], 1)
    full._blocks = [[(prompt, 0)] * 3]
    teacher, _ = load_teacher(setup.teacher, setup.guidance, "float32", "auto", "cpu", compiled=False)
    drawn, _ = full._generate(0, teacher, setup.text, Work(root / "full"))
    assert torch.equal(setup.rollouts("train").open().data(3), drawn["data"][0])


def test_missing_roll_outs_give_a_one_line_error(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unisono.recipes.wan_distill.data.rollouts._VISIBLE_WITHIN_S", 0.1)
    rollouts = recipe_of(root, folder="gone").setup.rollouts("train")
    rollouts._file(1).unlink()
    with pytest.raises(UserError, match="one folder that all machines share"):
        rollouts.open()


@pytest.mark.slow
def test_a_killed_run_generates_nothing_twice(root: Path, tmp_path: Path) -> None:
    changes = {"rollouts": 12, "rollout_batch": 2, "teacher_steps": 6, "max_steps": 2}
    values = run_settings(root, "2.1", **changes, eval_every=-1, preview_every=-1)
    train = ["train", "wan-distill", *(f"--{name}={value}" for name, value in values.items()), "--output_dir", "killed"]
    blocks = tmp_path / "killed" / "prepared" / "rollouts"
    process = start(["-m", "unisono", *train], cwd=tmp_path)
    wait_until(lambda: len(bytes_of(blocks)) >= 3 or process.poll() is not None, "three blocks", seconds=90)
    assert process.poll() is None, process.communicate()
    process.kill()
    process.communicate()
    before = {file.name: (file.stat().st_mtime_ns, file.stat().st_ino) for file in blocks.glob("*.safetensors")}
    assert 3 <= len(before) < 24
    done = command(*train, cwd=tmp_path)
    assert done.code == 0, done.err
    after = {file.name: (file.stat().st_mtime_ns, file.stat().st_ino) for file in blocks.glob("*.safetensors")}
    assert len(after) == 24 + 1 + 1
    assert {name: after[name] for name in before} == before
    never_killed = command(*train[:-1], "whole", cwd=tmp_path)
    assert never_killed.code == 0, never_killed.err
    assert bytes_of(tmp_path / "whole" / "prepared" / "rollouts") == bytes_of(blocks)


# Losses --------------------------------------------------------------------------------------------------------------


def test_losses_match_their_formulas() -> None:
    torch.manual_seed(0)
    output, teacher, data, noise, point = torch.randn(5, 2, 3, 1, 2, 2)
    sigma = torch.tensor([0.25, 1.0])

    def mean(value: Tensor) -> Tensor:
        return value.square().flatten(1).mean(1)

    torch.testing.assert_close(losses.velocity_matching(output, teacher), mean(output - teacher))
    torch.testing.assert_close(losses.flow_matching(output, data, noise), mean(output - (noise - data)))
    torch.testing.assert_close(losses.trajectory_matching(output, teacher), mean(output - teacher))
    reached = point - sigma.view(2, 1, 1, 1, 1) * output
    torch.testing.assert_close(losses.few_step_regression(point, output, sigma, data), mean(reached - data) / 2)
    ours, theirs = [torch.randn(2, 4, 3) for _ in range(2)], [torch.randn(2, 4, 3) for _ in range(2)]
    expected = sum(((a - b) ** 2).sum((1, 2)) / (b**2).sum((1, 2)) for a, b in zip(ours, theirs, strict=True)) / 2
    torch.testing.assert_close(losses.feature_matching(ours, theirs), expected)


def test_the_guidance_scale_changes_at_the_boundary_between_experts() -> None:
    scales = Guidance(4.0, 3.0).at(torch.tensor([0.0, 0.874, 0.875, 1.0]), 0.875)
    assert scales.tolist() == [3.0, 3.0, 4.0, 4.0]
    assert Guidance(4.0, 3.0).at(torch.tensor([0.0, 1.0]), None).tolist() == [4.0, 4.0]


def test_a_student_equal_to_its_teacher_has_zero_loss(root: Path, tmp_path: Path) -> None:
    (tmp_path / "same.json").write_text(json.dumps({"num_layers": 2}))
    values = run_settings(
        root, "2.1", guidance=1.0, student_config=str(tmp_path / "same.json"), max_steps=1, learning_rate=0.0
    )
    values |= {"online": True, "feature_weight": 1.0, "rollouts": 4, "output_dir": str(tmp_path / "run")}
    result = unisono.train("wan-distill", **values)
    assert result.last["loss"] < 1e-10
    assert result.last["eval/latent_error"] < 1e-9
    assert result.last["eval/times_as_fast"] > 0, "measured; its value depends on what else the machine does"
    guided = unisono.train("wan-distill", **{**values, "guidance": 3.0, "output_dir": str(tmp_path / "guided")})
    assert guided.last["loss"] > 1e-5


def test_an_8_bit_teacher_computes_nearly_the_same(root: Path) -> None:
    setup = recipe_of(root, folder="answers", guidance=4.0).setup
    item = EvalDataset(setup.rollouts("eval").open(), setup.text, has_labels=False)[0]
    text, empty = item["text"][None].float(), setup.text("")[None].float()
    velocities = {}
    for kind in ("bfloat16", "float8"):
        teacher, line = load_teacher(setup.teacher, setup.guidance, kind, "auto", "cpu", compiled=False)
        velocities[kind] = teacher.velocity(item["data"][None], torch.tensor([0.5]), text, empty)
        assert f"{sum(it.numel() for it in teacher.experts.parameters()):,} weights in" in line
        size = {it.dtype for it in teacher.experts.parameters()}
        assert (torch.float8_e4m3fn in size) == (kind == "float8")
    difference = (velocities["float8"] - velocities["bfloat16"]).norm() / velocities["bfloat16"].norm()
    assert 0 < difference < 0.2


# Out -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["one", "video", "few steps", "experts"])
def test_an_exported_student_generates_the_same_in_a_pipeline(
    name: str, runs: dict[str, Outcome], root: Path, tmp_path: Path
) -> None:
    run = root / "runs" / name
    export_run(run, tmp_path / "out")
    pipeline = WanPipeline.from_pretrained(tmp_path / "out")
    pipeline.set_progress_bar_config(disable=True)
    assert pipeline.transformer_2 is None
    recipe, model, _ = load_trained(run)
    setup = recipe.setup  # type: ignore[attr-defined]
    setup.folder = run / "prepared"
    initial_noise, text = setup.rollout_spec.initial_noise("x", 0)[None], setup.text(PROMPTS[0])[None].float()
    steps = setup.student_scheduler()[1]
    assert steps == 3
    assert pipeline.scheduler.config.solver_order == (1 if name == "few steps" else 2)
    frames = 5 if name == "video" else 1
    theirs = pipeline(
        prompt_embeds=text,
        latents=initial_noise,
        **{"height": setup.config.height, "width": 32, "num_frames": frames, "guidance_scale": 1.0},
        num_inference_steps=steps,
        output_type="latent",
    ).frames
    torch.testing.assert_close(generate(setup, model, initial_noise, text), theirs, rtol=1e-4, atol=1e-4)  # type: ignore[arg-type]


def test_the_call_that_export_prints_generates_the_preview(
    runs: dict[str, Outcome], root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = root / "runs" / "one", tmp_path / "out"
    export_run(run, out)
    line = capsys.readouterr().err.strip().rpartition("use it with ")[2]
    call = ast.parse(line, mode="eval").body  # WanPipeline.from_pretrained(folder)(prompt, name=value, …)
    assert isinstance(call, ast.Call) and isinstance(call.func, ast.Call)
    assert [ast.literal_eval(argument) for argument in call.func.args] == [str(out)]
    prompt, settings = ast.literal_eval(call.args[0]), {it.arg: ast.literal_eval(it.value) for it in call.keywords}
    assert json.loads((out / "how_to_draw.json").read_text()) == settings
    pipeline = WanPipeline.from_pretrained(out)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.text_encoder.to(torch.bfloat16)  # as in the run
    recipe, model, _ = load_trained(run)
    setup = recipe.setup  # type: ignore[attr-defined]
    setup.folder = run / "prepared"
    samples = setup.rollouts("preview").open()
    assert samples.items[0][0] == prompt
    initial_noise, rows = samples.spec.initial_noise(*samples.items[0])[None], setup.text(prompt)[None].float()
    drawn = pipeline(prompt, latents=initial_noise, output_type="latent", **settings).frames
    # Another text length gives other images: 0.01 away here, because the student has hardly learned to use text.
    torch.testing.assert_close(drawn, generate(setup, model, initial_noise, rows), rtol=1e-4, atol=1e-4)  # type: ignore[arg-type]


def test_previews_show_teacher_and_student(runs: dict[str, Outcome], root: Path) -> None:
    from PIL import Image

    folder = root / "runs" / "one" / "previews"
    image = Image.open(folder / "step_00000006_teacher_student.png")
    assert image.size == (4 * 128 + 3 * 2, 64 + 14), "below each image: teacher or student, and the prompt"
    assert (folder / "step_00000006_prompts.txt").read_text().splitlines() == ["a ball", "a a ball"]
    videos = sorted(file.name for file in (root / "runs" / "video" / "previews").glob("*.mp4"))
    assert videos == ["step_00000003_teacher_student_00.mp4", "step_00000003_teacher_student_01.mp4"]
    with av.open(str(root / "runs" / "video" / "previews" / videos[0])) as video:
        frame = next(video.decode(video=0))
    assert (frame.width, frame.height) == (2 * 128, 128 + 14), "above each side: teacher or student"


def test_the_students_sampling_steps_are_a_subset_of_the_teachers(root: Path) -> None:
    changes = {"few_step_weight": 1.0, "velocity_weight": 0.0, "few_steps": 4, "teacher_steps": 12, "shift": 5.0}
    samples = recipe_of(root, folder="few", **changes).setup.rollouts("train").open()
    levels = [float(samples.point(0, place)["point_sigma"]) for place in range(4)]
    expected = [5 * share / (1 + 4 * share) for share in (1, 0.75, 0.5, 0.25)]
    assert levels == pytest.approx(expected, abs=2e-3)
    scheduler, steps = recipe_of(root, folder="few", **changes).setup.student_scheduler()
    scheduler.set_timesteps(steps)
    assert scheduler.sigmas[:4].tolist() == pytest.approx(levels, abs=1e-6)
    initial_noise, velocity = samples.spec.initial_noise("x", 0)[None], torch.ones(1, *samples.spec.shape)
    reached = initial_noise
    for step in scheduler.timesteps:
        reached = scheduler.step(velocity, step, reached, return_dict=False)[0]
    torch.testing.assert_close(reached, initial_noise - levels[0] * velocity, rtol=1e-4, atol=1e-4)  # straight steps


@pytest.mark.slow
def test_with_a_sharded_teacher_a_rank_out_of_memory_does_not_block_the_others(root: Path, tmp_path: Path) -> None:
    values = run_settings(
        root, "2.1", **ONLINE, strategy="ddp", teacher_device_strategy="balanced", batch_size=2, save_every=1
    )
    values |= {"inject": "oom@rank1:step3:forward", "eval_every": -1, "preview_every": -1}
    flags = [f"--{name}={value}" for name, value in values.items()]
    done = command("train", "wan-distill", *flags, "--nproc", "2", "--output_dir", "run", cwd=tmp_path)
    assert done.code == 0, done.err
    assert "restarting all ranks" in done.err or "out of memory" in done.err


def test_a_fresh_student_starts_with_a_zero_output_layer(runs: dict[str, Outcome], root: Path) -> None:
    weights = runs["fresh"].weights(3)
    assert weights["transformer.proj_out.weight"].abs().max() < 0.01  # it was zero three steps ago
    assert weights["transformer.blocks.0.ffn.net.0.proj.weight"].abs().max() > 0.05


# Input ---------------------------------------------------------------------------------------------------------------


def test_every_line_is_a_prompt_and_duplicates_are_removed(tmp_path: Path) -> None:
    file = tmp_path / "p.txt"
    file.write_bytes(b"\xef\xbb\xbfa red ball\r\n\r\n  \r\nzwei B\xc3\xa4lle\na red ball\n")
    actual, remarks = read_prompts(str(file), "data_path")
    assert actual == ["a red ball", "zwei Bälle"]
    assert remarks == ["data_path: 1 duplicate prompts are ignored"]


def test_held_out_prompts_are_not_trained_on(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("\n".join(f"prompt {number}" for number in range(20)))
    (tmp_path / "e.txt").write_text("prompt 3\nsomething else\n")
    spread = prompts_of(str(tmp_path / "p.txt"), None, 4)
    assert spread.held_out == ["prompt 2", "prompt 7", "prompt 12", "prompt 17"]
    assert len(spread.train) == 16
    assert not set(spread.train) & set(spread.held_out)
    other = prompts_of(str(tmp_path / "p.txt"), str(tmp_path / "e.txt"), 0)
    assert other.held_out == ["prompt 3", "something else"]
    assert "prompt 3" not in other.train


def test_num_eval_holds_out_that_many_built_in_prompts(tmp_path: Path) -> None:
    usual = prompts_of("shapes", None, None)
    assert (len(usual.train), len(usual.held_out)) == (72, 24)
    assert len(set(labels(usual.held_out))) == 24
    for number in (0, 1, 6, 24):
        prompts = prompts_of("shapes", None, number)
        assert len(prompts.held_out) == number and set(prompts.held_out) <= set(usual.held_out)
        assert {*prompts.train, *prompts.held_out} == {*usual.train, *usual.held_out}
        assert len(prompts.train) == 96 - number
    with pytest.raises(ConfigError, match="num_eval 25: at most 24 built-in prompts"):
        prompts_of("shapes", None, 25)
    (tmp_path / "e.txt").write_text(f"{usual.train[0]}\na grey dot\n")
    other = prompts_of("shapes", str(tmp_path / "e.txt"), None)
    assert (len(other.train), other.held_out) == (95, [usual.train[0], "a grey dot"])


def test_the_text_encoder_computes_in_text_dtype_and_each_dtype_is_cached(root: Path) -> None:
    pipeline = WanPipeline.from_pretrained(root / "2.1")
    rows = {}
    for dtype in ("bfloat16", "float32", "bfloat16"):  # in one folder: entries of one run are not used by the other
        setup = recipe_of(root, folder="text types", text_dtype=dtype).setup
        rows[dtype] = setup.text(PROMPTS[0])
        flow = WanFlow(FlowConfig(model_path=str(root / "2.1"), text_dtype=dtype))  # type: ignore[arg-type]
        assert flow.setup.encoders.text_dtype == setup.encoders.text_dtype == rows[dtype].dtype == getattr(torch, dtype)
        assert flow.setup.encoders.fingerprints() == setup.encoders.fingerprints()
        length = setup.encoders.text_length
    theirs, _ = pipeline.encode_prompt(PROMPTS[0], do_classifier_free_guidance=False, max_sequence_length=length)
    torch.testing.assert_close(rows["float32"], theirs[0], rtol=1e-4, atol=1e-5)
    assert 0 < (rows["bfloat16"].float() - theirs[0]).abs().max() < 0.1


def test_a_stopped_run_does_not_announce_work_that_it_skips(root: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    recipe = unprepared(root)

    def asked_to_stop() -> bool:  # a signal arrives while the first samples are generated
        return any("teacher samples for training" in line for line in lines)

    recipe.prepare(Work(tmp_path, _asked_to_stop=asked_to_stop, _say=lines.append))
    assert asked_to_stop()
    assert not [line for line in lines if "for evaluation" in line or "for previews" in line]


def test_training_the_tiny_teacher_shows_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of(tmp_path)
    lines: list[str] = []
    shown: list[float] = []
    monkeypatch.setattr(progress.Advance, "to", lambda advance, done, note="": shown.append(done))
    (folder / "run").mkdir(parents=True)
    with (folder / "lock").open("a") as held:  # another process makes it
        fcntl.flock(held, fcntl.LOCK_EX)
        records = "".join(f'{{"step": {step}, "loss": 1.0}}\n' for step in (5, 10, 15))
        (folder / "run" / "metrics.jsonl").write_text(records + '{"step": 2')
        make(Work(tmp_path, _asked_to_stop=lambda: len(shown) > 0, _say=lines.append), tmp_path)
    assert shown == [15]
    assert lines[0].startswith("training the tiny teacher (")
    assert lines[1] == "training the tiny teacher: 600 steps"
    assert not (folder / "pipeline").exists()


@pytest.mark.slow
def test_progress_shows_the_steps_of_the_process_that_trains_the_tiny_teacher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNISONO_TINY_TEACHER_STEPS", "12")
    shown: list[float] = []
    monkeypatch.setattr(progress.Advance, "to", lambda advance, done, note="": shown.append(done))
    make(Work(tmp_path), tmp_path)
    assert shown[0] == 0 and max(shown) >= 5, "steps of the run that makes it"
    lines: list[str] = []
    make(Work(tmp_path, _say=lines.append), tmp_path)
    assert lines == [], "it is there"


def test_training_the_tiny_teacher_ends_when_the_run_is_killed(tmp_path: Path) -> None:
    ours = {"A_MARK": tmp_path.name}  # variables that begin with UNISONO_ are not passed on
    words = ["-m", "unisono", "train", "wan-distill", "--teacher_path", "tiny", "--output_dir", "run"]
    process = start(words, cwd=tmp_path, UNISONO_CACHE=str(tmp_path / "cache"), **ours)
    try:
        wait_until(lambda: len(marked(ours)) >= 3 or process.poll() is not None, "the run, its child, and a rank of it")
        assert process.poll() is None, process.communicate()
        process.kill()
        process.communicate()
        wait_until(lambda: not marked(ours), "no process is left", seconds=15)
    finally:
        for pid in marked(ours):
            os.kill(pid, signal.SIGKILL)


def test_prompts_unknown_to_the_tiny_teacher_are_reported_before_it_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNISONO_CACHE", str(tmp_path / "cache"))

    def said(prompts: str) -> list[str]:
        messages: list[str] = []
        (tmp_path / "p.txt").write_text(prompts)
        recipe = WanDistill(Config(teacher_path="tiny", data_path=str(tmp_path / "p.txt")))
        recipe.prepare(Work(tmp_path / "work", _asked_to_stop=lambda: True, _say=messages.append))
        return messages

    strange, making, *_ = said("a red circle\na cat\na blue dog\n")
    assert strange.startswith("the tiny teacher does not understand 2 of 3 prompts ('a ")
    assert "training the tiny teacher" in making
    assert not [line for line in said("a red circle\na blue square\n") if "does not understand" in line]


def refused(root: Path, **changes: Any) -> str:
    with pytest.raises(UnisonoError) as caught:
        recipe_of(root, **changes)
    assert isinstance(caught.value, ConfigError)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_impossible_settings_are_refused_with_the_fix(root: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n  \n")
    (tmp_path / "image.txt").write_bytes(b"\x89PNG\xff\xfe\x00")
    assert "has no prompts" in refused(root, data_path=str(tmp_path / "empty.txt"))
    assert "UTF-8" in refused(root, data_path=str(tmp_path / "image.txt"))
    assert "no such file" in refused(root, data_path=str(tmp_path / "nothing.txt"))
    assert "6 distinct prompts" in refused(root, num_eval=6)
    assert "there is no loss" in refused(root, velocity_weight=0.0)
    assert "add --online" in refused(root, refresh_every=3)
    assert "add --online" in refused(root, feature_weight=1.0)
    assert "balanced needs --online" in refused(root, teacher_device_strategy="balanced")
    assert "multiple of 16" in refused(root, width=24)
    assert "1, 5, 9" in refused(root, num_frames=4)
    assert "needs the tiny teacher" in refused(root, data_path="shapes")
    assert "no teacher" in refused(root, teacher_path="")
    assert "multiple of few_steps" in refused(root, few_step_weight=1.0, few_steps=2)
    assert "two experts" in refused(root, teacher="a14b", online=True, feature_weight=1.0)
    (tmp_path / "narrow.json").write_text(json.dumps({"num_attention_heads": 1}))
    narrow = refused(root, online=True, feature_weight=1.0, student_config=str(tmp_path / "narrow.json"))
    assert "student's is 12 and the teacher's 24" in narrow


def test_mistakes_are_reported_before_anything_is_generated(root: Path, tmp_path: Path) -> None:
    def early(**changes: Any) -> str:
        message = refused(root, folder="early", **changes)
        assert not (root / "early" / "rollouts").exists()
        return message

    assert "expected even, importance, or numbers" in early(layers="foo")
    (tmp_path / "deep.json").write_text(json.dumps({"num_layers": 9}))
    assert "use --init fresh" in early(student_config=str(tmp_path / "deep.json"))
    for part, file, expected in (
        ("vae", "diffusion_pytorch_model.safetensors", "cannot be read as safetensors"),
        ("transformer", "diffusion_pytorch_model.safetensors", "cannot be read as safetensors"),
        ("tokenizer", "tokenizer.json", "lacks tokenizer_config.json, or tokenizer.json"),
    ):
        broken = tmp_path / f"broken {part}"
        shutil.copytree(root / "2.1", broken)
        (broken / part / file).unlink()
        if part != "tokenizer":
            (broken / part / file).write_bytes(b"nothing")
        assert expected in early(teacher_path=str(broken))


@pytest.mark.parametrize("content", ["", "[]", "{}", "null", '{"layers": [9]}', '{"seconds_per_sample": "x"}'])
def test_damaged_plan_and_time_files_are_rewritten(content: str, root: Path, tmp_path: Path) -> None:
    recipe = recipe_of(root, folder=str(tmp_path / "notes"))
    plan, took = recipe.setup.pruning_plan(), recipe.setup.teacher_time()
    assert took is not None
    for file in (recipe.setup.pruning_plan_file, recipe.setup.times_file):
        file.write_text(content)
    assert recipe.setup.teacher_time() is None
    again = recipe_of(root, folder=str(tmp_path / "notes"))
    assert again.setup.pruning_plan() == plan


def test_a_run_refuses_to_resume_with_another_student(root: Path, tmp_path: Path) -> None:
    file = tmp_path / "student.json"
    file.write_text(json.dumps({"num_layers": 1}))
    recipe_of(root, folder="other student", student_config=str(file))
    file.write_text(json.dumps({"num_layers": 2}))
    with pytest.raises(ConfigError, match="differs from the student that this run started with"):
        recipe_of(root, folder="other student", student_config=str(file))


def test_a_teacher_that_lacks_a_part_is_refused_with_its_name(root: Path, tmp_path: Path) -> None:
    for part in ("vae", "text_encoder", "tokenizer"):
        folder = tmp_path / part
        folder.mkdir()
        for file in (root / "2.1").iterdir():
            if file.name != part:
                (folder / file.name).symlink_to(file)
        with pytest.raises(ConfigError, match=f"has no {part}"):
            recipe_of(root, teacher_path=str(folder), folder=f"without {part}")


def test_a_teacher_that_is_only_a_transformer_gets_its_other_parts_from_parts_path(root: Path) -> None:
    folder = root / "2.1" / "transformer"
    with pytest.raises(ConfigError, match="--parts_path FOLDER"):
        recipe_of(root, teacher_path=str(folder))
    recipe = recipe_of(root, teacher_path=str(folder), parts_path=str(root / "2.1"), folder="file")
    whole = recipe_of(root, folder="names").setup.rollouts("train").open()
    torch.testing.assert_close(recipe.setup.rollouts("train").open().data(0), whole.data(0), rtol=1e-4, atol=1e-5)


def test_truncated_prompts_are_reported_once(root: Path, tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("a red ball " * 40 + "\na ball\nred\n")
    messages: list[str] = []
    recipe = unprepared(root, data_path=str(tmp_path / "long.txt"), num_eval=0)
    recipe.prepare(Work(tmp_path / "work", _say=messages.append))
    truncated = [line for line in messages if "truncated" in line]
    assert truncated == ["1 prompts have 24 tokens or more; the rest is truncated"]
    assert recipe.setup.text("red").shape == (24, SMALL["text_dim"])
