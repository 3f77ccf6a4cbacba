"""wan-distill --objective dmd2 from end to end: small real Wan teachers, real ranks, students of a few steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import UniPCMultistepScheduler, WanPipeline
from torch import Tensor

from many_runs import Copy, Outcome, Run, identical, many_runs
from test_wan_distill import PROMPTS
from test_wan_distill import RUN as REGRESSION_RUN
from unisono.data.noise import Noise
from unisono.engine.export import export_run, load_trained
from unisono.engine.recipe import Work
from unisono.errors import ConfigError
from unisono.recipes.wan.models.adapters import ADAPTER, activate
from unisono.recipes.wan.models.experts import Experts
from unisono.recipes.wan.models.load import build_meta
from unisono.recipes.wan.models.lora import add_lora, lora_state, open_lora, save_lora
from unisono.recipes.wan.objective import noised
from unisono.recipes.wan.tiny.measures import diversity, feature_distance
from unisono.recipes.wan.tiny.shapes import COLOURS, Shapes, labels
from unisono.recipes.wan_distill.dmd2.few_steps import FewSteps
from unisono.recipes.wan_distill.dmd2.loss import MatchingLoss
from unisono.recipes.wan_distill.dmd2.roles import OF_TEACHER, LoraRoles, is_score, is_student
from unisono.recipes.wan_distill.evaluation import generate
from unisono.recipes.wan_distill.models.teacher import Guidance
from unisono.recipes.wan_distill.recipe import WanDistill
from unisono.recipes.wan_distill.settings import Config
from wan_models import SMALL, model, save_pipelines

RUN = REGRESSION_RUN | {
    **{"objective": "dmd2", "lora_rank": 2, "score_steps": 2, "max_steps": 6, "score_learning_rate": 2e-3},
    **{"save_every": 6, "eval_every": 6, "preview_every": -1, "keep_last": 0},
}
TWO = {"batch_size": 2}
OWN = {"lora_path": "own"}
# name -> teacher, ranks, settings
RUNS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "one": ("2.1", 1, {"save_every": 1}),
    "2 ranks": ("2.1", 2, TWO),
    "3 ranks": ("2.1", 3, {"batch_size": 1}),
    "sharded": ("2.1", 2, {"strategy": "fsdp"} | TWO),
    "recomputed": ("2.1", 1, {"activation_checkpointing": True}),
    "whole": ("2.1", 1, {"lora_rank": 0}),
    "whole, sharded": ("2.1", 2, {"lora_rank": 0, "strategy": "fsdp"} | TWO),
    "experts": ("a14b", 1, {"few_steps": 3, "shift": 12.0, "guidance_2": 3.0}),
    "experts, 2 ranks": ("a14b", 2, {"few_steps": 3, "shift": 12.0, "guidance_2": 3.0} | TWO),
    "own": ("2.1", 1, OWN),
    "8 bits": ("2.1", 2, {"base_precision": "int8"} | TWO),
    "8 bits, one": ("2.1", 1, {"base_precision": "int8"}),
}
SAME = {
    **{"2 ranks": "one", "3 ranks": "one", "sharded": "one", "recomputed": "one"},
    **{"whole, sharded": "whole", "experts, 2 ranks": "experts", "8 bits": "8 bits, one"},
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with teachers, prompts and a LoRA."""
    root = tmp_path_factory.mktemp("dmd2")
    save_pipelines(root)
    (root / "prompts.txt").write_text("\n".join(PROMPTS))
    save_lora(root / "own", own_lora())
    return root


def own_lora() -> dict[str, Tensor]:
    """The weights of a LoRA that has an effect."""
    transformer = model()
    add_lora(transformer, 2)
    generator = torch.Generator().manual_seed(5)
    return {
        name: torch.randn(weight.shape, generator=generator) / 3 for name, weight in lora_state(transformer).items()
    }


def run_settings(root: Path, teacher: str, **changes: Any) -> dict[str, Any]:
    paths = {"teacher_path": str(root / teacher), "data_path": str(root / "prompts.txt")}
    if "lora_path" in changes:
        changes["lora_path"] = str(root / changes["lora_path"])
    return {**RUN, **paths, **changes}


@pytest.fixture(scope="module")
def runs(root: Path) -> dict[str, Outcome]:
    """All runs of this module, by name."""
    planned = [
        Run(name, f"runs/{name}", world, run_settings(root, teacher, **changes), recipe="wan-distill")
        for name, (teacher, world, changes) in RUNS.items()
    ]
    planned += [
        Run(f"from {step}", f"runs/from {step}", 1, run_settings(root, "2.1"), Copy("runs/one", step), "wan-distill")
        for step in (1, 2, 3)
    ]
    outcomes = many_runs(planned, root)
    for name, outcome in outcomes.items():
        assert "error" not in outcome.main, (name, outcome.main)
    return outcomes


def recipe_of(root: Path, teacher: str = "2.1", folder: str = "by hand", **changes: Any) -> WanDistill:
    """A recipe that was prepared without a run."""
    values = run_settings(root, teacher, **changes)
    recipe = WanDistill(Config(**{name: value for name, value in values.items() if name in vars(Config())}))
    recipe.prepare(Work(root / folder))
    return recipe


@pytest.mark.parametrize(("name", "reference"), SAME.items())
def test_any_number_of_ranks_and_recomputed_blocks_train_the_same(
    name: str, reference: str, runs: dict[str, Outcome]
) -> None:
    torch.testing.assert_close(runs[name].losses(), runs[reference].losses(), rtol=3e-4, atol=1e-6)


@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_run_continues_anywhere_in_a_cycle_to_the_bit(step: int, runs: dict[str, Outcome]) -> None:
    assert identical(runs[f"from {step}"].weights(), runs["one"].weights())
    assert torch.equal(runs[f"from {step}"].losses(), runs["one"].losses())


def test_score_and_student_are_trained_in_turn(runs: dict[str, Outcome]) -> None:
    run = runs["one"]
    assert [line["group"] for line in run.steps()] == ["score", "score", "student"] * 2
    for step, group in enumerate(("score", "student", "score", "score"), start=2):
        before, after = run.weights(step - 1), run.weights(step)
        changed = {name for name in before if not torch.equal(before[name], after[name])}
        is_of_group = is_student if group == "student" else is_score
        assert changed and all(map(is_of_group, changed)), (step, group)


def test_a_run_generates_no_samples_of_the_teacher_to_train_on(runs: dict[str, Outcome], root: Path) -> None:
    files = list((root / "runs" / "one" / "prepared" / "rollouts").glob("*.safetensors"))
    assert len(files) == 2  # held-out prompts and previews
    [line] = runs["one"].evaluations()
    assert line["eval/latent_error"] > 0


@pytest.mark.parametrize("few_steps", [1, 2, 4])
def test_training_samples_like_the_exported_scheduler(few_steps: int, root: Path) -> None:
    recipe = recipe_of(root, few_steps=few_steps)
    setup = recipe.setup
    student = Experts({"transformer": model()}, None)
    noise = setup.rollout_spec.initial_noise("x", 0)[None]
    text = setup.text(PROMPTS[0])[None].float()
    steps = FewSteps.of(*setup.student_scheduler())
    with torch.no_grad():
        last = few_steps - 1
        simulated = steps.predict(student, steps.simulate(student, noise, text, last), text, last)
    torch.testing.assert_close(simulated, generate(setup, student, noise, text), rtol=1e-4, atol=1e-5)


def test_every_step_of_the_sampler_is_trained_equally_often() -> None:
    steps = FewSteps([1.0] * 4, [1.0] * 5)
    counts = torch.bincount(torch.tensor([steps.exit_at(3, step) for step in range(4000)]))
    assert counts.min() > 900 and len(counts) == 4


def matching(guidance: float = 3.0, *, own: bool = False) -> tuple[MatchingLoss, Experts]:
    """The loss and the model with LoRAs, both of which have no effect yet."""
    transformer = model()
    for adapter in (*([OF_TEACHER] if own else []), ADAPTER, "score"):
        add_lora(transformer, 2, adapter=adapter)
    experts = Experts({"transformer": transformer}, None)
    for name, parameter in experts.named_parameters():
        parameter.requires_grad_(is_student(name) or is_score(name))
    from unisono.recipes.wan.objective import NoiseLevels

    steps = FewSteps([1.0, 0.5], [1.0, 0.5, 0.0])
    roles = LoraRoles(Guidance(guidance, guidance), has_own_lora=own)
    return MatchingLoss(roles, steps, (16, 1, 2, 4), NoiseLevels("uniform"), torch.zeros(3, 32)), experts


def text_of(number: int) -> Tensor:
    return torch.randn(number, 3, 32, generator=torch.Generator().manual_seed(1))


def noise_of(number: int) -> Noise:
    return Noise(7, torch.arange(number))


def test_a_score_that_equals_the_teacher_leaves_the_student_unchanged() -> None:
    loss, experts = matching(guidance=1.0)
    result = loss.of_student(experts, text_of(3), noise_of(3), 1)
    assert float(result.total.detach()) == 0
    loss, experts = matching(guidance=3.0)
    assert float(loss.of_student(experts, text_of(3), noise_of(3), 1).total.detach()) > 0


def test_the_students_gradient_is_the_normalised_difference_of_the_scores() -> None:
    """Compared with the formula of DMD, computed here from scores instead of from predictions of the data."""
    loss, experts = matching()
    text, step = text_of(3), 0
    result = loss.of_student(experts, text, noise_of(3), step)
    result.total.backward()
    mine = {name: weight.grad for name, weight in experts.named_parameters() if weight.grad is not None}
    assert mine and all(map(is_student, mine))

    experts.zero_grad()
    noise = noise_of(3)
    initial, sigma = noise.normal(16, 1, 2, 4), 0.02 + 0.96 * noise.uniform(1, dtype=torch.float64)[:, 0].float()
    activate(experts, [ADAPTER])
    ones = torch.ones(3)
    data = initial - experts(initial, ones, text)
    wide = sigma.view(-1, 1, 1, 1, 1)
    noisy = noised(data.detach(), noise.normal(16, 1, 2, 4), sigma)
    with torch.no_grad():
        activate(experts, ["score"])
        fake = experts(noisy, sigma, text)
        activate(experts, [])
        with_prompt, without = experts(noisy, sigma, text), experts(noisy, sigma, torch.zeros_like(text))
        real = without + 3 * (with_prompt - without)
        scores = [((1 - wide) * (noisy - wide * each) - noisy) / wide**2 for each in (fake, real)]
        gradient = (scores[0] - scores[1]) * wide**2 / (1 - wide)
        gradient /= (data - (noisy - wide * real)).abs().mean((1, 2, 3, 4), keepdim=True)
    activate(experts, [ADAPTER])
    (data * gradient / data[0].numel()).sum().backward()
    for name, grad in mine.items():
        torch.testing.assert_close(grad, experts.get_parameter(name).grad, rtol=2e-3, atol=1e-6)


def test_the_score_learns_the_students_samples_only() -> None:
    loss, experts = matching()
    loss.of_score(experts, text_of(3), noise_of(3), 1).total.backward()
    trained = [name for name, weight in experts.named_parameters() if weight.grad is not None]
    assert trained and all(map(is_score, trained))


def test_a_lora_of_the_users_is_part_of_the_teacher_the_student_and_the_score(root: Path) -> None:
    recipe = recipe_of(root, **OWN)
    assert recipe.setup.fingerprint != recipe_of(root).setup.fingerprint
    merged = model()
    state = own_lora()
    with torch.no_grad():
        for name in {key.partition(".lora_")[0] for key in state}:
            merged.get_submodule(name).weight += state[f"{name}.lora_B.weight"] @ state[f"{name}.lora_A.weight"]
    loss, experts = matching(guidance=1.0, own=True)
    transformer = experts.get_submodule("transformer")
    for name, weight in transformer.named_parameters():
        if f".{OF_TEACHER}." in name:
            weight.data = state[name.replace(f".{OF_TEACHER}", "")]
    noisy, sigma, text = torch.randn(2, 16, 1, 2, 4), torch.tensor([0.3, 0.9]), text_of(2)
    with torch.no_grad():
        expected = Experts({"transformer": merged}, None)(noisy, sigma, text)
        for velocity in (
            loss.roles.teacher(experts, noisy, sigma, text, torch.zeros_like(text)),
            loss.roles.student(experts)(noisy, sigma, text),
            loss.roles.score(experts)(noisy, sigma, text),
        ):
            torch.testing.assert_close(velocity, expected, rtol=1e-4, atol=1e-5)


def test_choosing_loras_changes_no_requires_grad() -> None:
    _, experts = matching()
    before = [weight.requires_grad for weight in experts.parameters()]
    for adapters in (["score"], [], [ADAPTER]):
        activate(experts, adapters)
        assert [weight.requires_grad for weight in experts.parameters()] == before


@pytest.mark.parametrize("name", ["one", "own", "experts", "whole"])
def test_an_exported_student_samples_the_same_in_plain_diffusers(
    name: str, runs: dict[str, Outcome], root: Path, tmp_path: Path
) -> None:
    run, out = root / "runs" / name, tmp_path / "out"
    export_run(run, out)
    arguments = json.loads((out / "how_to_draw.json").read_text())
    teacher = root / ("a14b" if name == "experts" else "2.1")
    pipeline = WanPipeline.from_pretrained(out if name == "whole" else teacher)
    if name != "whole":
        pipeline.scheduler = UniPCMultistepScheduler.from_pretrained(out / "scheduler")
        pipeline.load_lora_weights(str(out), adapter_name="fast")
        if name == "experts":
            pipeline.load_lora_weights(str(out / "transformer_2"), load_into_transformer_2=True, adapter_name="fast")
        if name == "own":
            pipeline.load_lora_weights(str(root / "own"), adapter_name="own")
            pipeline.set_adapters(["fast", "own"])
    pipeline.set_progress_bar_config(disable=True)
    recipe, trained, _ = load_trained(run)
    setup = recipe.setup  # type: ignore[attr-defined]
    setup.folder = run / "prepared"
    noise, text = setup.rollout_spec.initial_noise("x", 0)[None], setup.text(PROMPTS[0])[None].float()
    assert arguments["num_inference_steps"] == setup.config.few_steps and arguments["guidance_scale"] == 1
    theirs = pipeline(prompt_embeds=text, latents=noise, output_type="latent", **arguments).frames
    student = recipe.objective.student(trained)  # type: ignore[attr-defined]
    torch.testing.assert_close(generate(setup, student, noise, text), theirs, rtol=1e-4, atol=1e-4)


def test_an_exported_lora_has_comfyuis_names_too(runs: dict[str, Outcome], root: Path, tmp_path: Path) -> None:
    export_run(root / "runs" / "one", tmp_path / "out")
    transformer = build_meta(SMALL)
    ours, comfy = (open_lora(transformer, tmp_path / "out" / file) for file in ("", "comfyui_lora.safetensors"))
    assert identical(dict(ours.state), dict(comfy.state)) and ours.rank == 2


def refused(root: Path, **changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        recipe_of(root, folder="early", **changes)
    assert not (root / "early" / "rollouts").exists()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_settings_that_the_objective_does_not_have_are_refused_with_the_fix(root: Path) -> None:
    for name, value in (
        *(("student_config", str(root / "prompts.txt")), ("init", "fresh"), ("layers", "importance")),
        *(("online", True), ("few_step_weight", 1.0), ("flow_weight", 1.0)),
    ):
        message = refused(root, **{name: value})
        assert message.startswith(f"{name}: the objective dmd2") and "--objective regression" in message
    assert "lora_rank" in refused(root, lora_rank=-1)
    assert "score_steps" in refused(root, score_steps=0)
    assert "score_learning_rate" in refused(root, score_learning_rate=-1.0)
    assert "with lora_rank 0" in refused(root, lora_rank=0, lora_alpha=2.0)
    assert "base_precision" in refused(root, teacher_dtype="float8")
    assert "no linear layer's name ends in nothing" in refused(root, lora_targets="nothing")
    assert "no such LoRA" in refused(root, lora_path="missing")
    transformer = model()
    add_lora(transformer, 2, kind="dora")
    save_lora(root / "dora", lora_state(transformer))
    assert "only a plain LoRA can be part of the teacher, not a dora" in refused(root, lora_path="dora")
    assert "only --objective dmd2" in refused(root, objective="regression", **OWN)


def test_measures_of_diversity_and_distance() -> None:
    shapes = Shapes(24 * 6)
    plans = [shapes.plan(number) for number in range(len(shapes))]
    images = torch.stack([shapes[number]["frames"][:, 0] for number in range(len(shapes))])
    colours, kinds = labels(plans)
    captions = colours * 4 + kinds
    assert diversity(images, images, colours, captions) == pytest.approx(1)
    assert feature_distance(images, images) == pytest.approx(0, abs=1e-2)
    first = torch.stack([images[(captions == caption).nonzero()[0, 0]] for caption in captions])
    assert diversity(first, images, colours, captions) == pytest.approx(0, abs=1e-6)
    assert feature_distance(first, images) > 0.1
    assert len(COLOURS) * 4 == len(captions.unique())
    from unisono.recipes.wan.tiny.measures import places_and_sizes

    centres = torch.tensor([plan.centre for plan in plans])
    error = places_and_sizes(images, colours)[:, :2] - centres
    assert error[kinds == 0].abs().max() < 0.01  # a circle's centre is that of its area
