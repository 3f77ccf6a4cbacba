"""Wan with a sample's tokens divided between ranks: gradients, memory, and runs of both recipes like one rank's."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from many_runs import Outcome, Run, many_runs, selected, slow_unless
from ranks import run_ranks
from unisono.parallel.blocks.repeated import recompute_activations
from unisono.parallel.context import Context, make_context
from unisono.recipes.wan.models.context import divide_tokens
from unisono.recipes.wan.models.kernels.block import make_fast
from wan_models import SMALL, model, save_data, save_pipelines

CLOSE = 1e-5  # relative: diffusers' norms compute in float32


def divided(context: Context, heads: int, *, fast: bool = False, **changed: Any) -> Any:
    made = model({**SMALL, "num_attention_heads": heads, "attention_head_dim": 12, **changed})
    with torch.no_grad():  # initially many weights are 0 or 1, which would hide errors
        for parameter in made.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)))
    for block in made.blocks if fast else ():
        make_fast(block, ("cpu",))
    if context.size > 1:
        divide_tokens(made, context)
    return made


def gradient_of(made: Any, context: Context, times: Tensor) -> Tensor:
    drawn = torch.Generator().manual_seed(1)
    noisy, text = torch.randn(2, 16, 3, 4, 6, generator=drawn), torch.randn(2, 5, 32, generator=drawn)  # 18 tokens
    velocity = made(noisy, times, text, return_dict=False)[0]
    target = torch.randn(velocity.shape, generator=drawn)
    ((velocity - target).square().mean() / context.size).backward()
    gradient = torch.cat([parameter.grad.double().flatten() for parameter in made.parameters()])
    if context.size > 1:
        dist.all_reduce(gradient)
    return gradient


def compare_gradients() -> dict[str, float]:
    """In each rank: differences between all ranks together and this rank alone."""
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    context, alone = make_context(rank, world, world), Context()
    by_sample, by_token = torch.tensor([100.0, 900.0]), torch.linspace(0, 999, 36).view(2, 18)
    differences = {}
    for name, heads, fast, times, recomputed in (
        ("exchanges heads", 4, False, by_sample, False),
        ("gathers keys", 1, False, by_sample, False),
        ("fast", 4, True, by_sample, False),
        ("fast, gathers keys, recomputed", 1, True, by_sample, True),
        ("recomputed", 4, False, by_sample, True),
        ("time by token", 4, False, by_token, False),
    ):
        together = divided(context, heads, fast=fast)
        for block in together.blocks if recomputed else ():
            recompute_activations(block)
        expected = gradient_of(divided(alone, heads), alone, times)
        result = gradient_of(together, context, times)
        differences[name] = float((expected - result).norm() / expected.norm())
        with context.apart():
            torch.testing.assert_close(gradient_of(divided(context, heads), context, times), expected)
    dist.destroy_process_group()
    return differences


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_gradients_are_those_of_one_rank(ranks: int) -> None:
    for differences in run_ranks("compare_gradients", __file__, ranks):
        assert max(differences.values()) < CLOSE, differences


def stored_bytes() -> list[list[int]]:
    """In each of 4 ranks: bytes that the blocks store for their backward pass, in groups of 1, 2 and 4 ranks."""
    dist.init_process_group("gloo")
    contexts = [make_context(int(os.environ["RANK"]), 4, size) for size in (1, 2, 4)]
    stored = [[num_stored(context, heads, fast=fast) for context in contexts] for heads, fast in KINDS]
    dist.destroy_process_group()
    return stored


KINDS = [(4, False), (4, True), (1, False), (1, True)]  # heads, fast


def num_stored(context: Context, heads: int, *, fast: bool) -> int:
    made = divided(context, heads, fast=fast, attention_head_dim=48 // heads, ffn_dim=192)
    weights = {parameter.untyped_storage().data_ptr() for parameter in made.parameters()}
    sizes: dict[int, int] = {}
    kept = []  # so that no address is used twice

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            sizes[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        made(torch.randn(1, 16, 5, 32, 32), torch.tensor([500.0]), torch.randn(1, 5, 32), return_dict=False)
    return sum(sizes.values())


@pytest.mark.slow
def test_a_rank_stores_its_part_of_the_activations() -> None:
    for by_kind in run_ranks("stored_bytes", __file__, 4):
        for kind, (one, two, four) in zip(KINDS, by_kind, strict=True):
            assert two <= 0.55 * one and four <= 0.30 * one, (kind, two / one, four / one)


# Runs of the recipes --------------------------------------------------------------------------------------------------

COMMON: dict[str, Any] = {
    **{"mixed_precision": "no", "compile": False, "num_workers": 0, "log_every": 1, "warmup_steps": 0},
    **{"learning_rate": 1e-3, "tensorboard": False, "ema_decay": 0.9, "global_batch_size": 4, "batch_size": 4},
    **{"num_eval": 2, "eval_levels": 2, "num_previews": 3, "max_steps": 4, "save_every": 2, "eval_every": 4},
}
FLOW = COMMON | {"fps": 8.0, "num_frames": 9, "preview_steps": 2}
DISTILL = COMMON | {
    **{"height": 32, "width": 32, "rollouts": 2, "rollout_batch": 3, "teacher_steps": 2, "pairs": 3},
    **{"online": True, "refresh_every": 2, "flow_weight": 0.5, "feature_weight": 0.1},
}
BY = {2: {"strategy": "ddp", "context_parallel": 2}, 3: {"strategy": "fsdp", "context_parallel": 3}}
FIRST_FRAME = {"first_frame": 0.5, "height": 32, "width": 64}
SHARDED = {"teacher_device_strategy": "balanced"}
# name -> recipe, model, ranks, settings
RUNS: dict[str, tuple[str, str, int, dict[str, Any]]] = {
    "flow": ("wan-flow", "2.1", 1, {}),
    "flow, 1 x 2": ("wan-flow", "2.1", 2, BY[2]),
    "flow, 1 x 3": ("wan-flow", "2.1", 3, BY[3]),
    "flow, 2 x 2": ("wan-flow", "2.1", 4, BY[2] | {"batch_size": 1}),
    "experts": ("wan-flow", "a14b", 1, {}),
    "experts, 1 x 2": ("wan-flow", "a14b", 2, BY[2] | {"strategy": "fsdp"}),
    "first frame": ("wan-flow", "5b", 1, FIRST_FRAME),
    "first frame, 1 x 2": ("wan-flow", "5b", 2, BY[2] | FIRST_FRAME),
    "lora": ("wan-flow", "2.1", 1, {"lora_rank": 2}),
    "lora, 1 x 2": ("wan-flow", "2.1", 2, BY[2] | {"lora_rank": 2, "activation_checkpointing": True}),
    "distill": ("wan-distill", "2.1", 1, {}),
    "distill, 1 x 2": ("wan-distill", "2.1", 2, BY[2]),
    "distill, 1 x 3": ("wan-distill", "2.1", 3, BY[3] | SHARDED),
}


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    names = {each for pair in selected(request, "name", "alone") for each in pair} | {"flow", "distill"}
    names |= selected(request, "name")
    root = tmp_path_factory.mktemp("wan_context")
    save_pipelines(root)
    save_data(root / "data")
    (root / "prompts.txt").write_text("a red ball\na ball\na red red ball\nball a\na a ball\nred")

    def settings(recipe: str, model: str, **changes: Any) -> dict[str, Any]:
        if recipe == "wan-distill":
            return {**DISTILL, "teacher_path": str(root / model), "data_path": str(root / "prompts.txt"), **changes}
        paths = {"model_path": str(root / model), "dataset_path": str(root / "data"), "cache_dir": str(root / "cache")}
        return {**FLOW, **paths, **changes}

    planned = [
        Run(name, f"runs/{name}", world, settings(recipe, model, **changes), recipe=recipe)
        for name, (recipe, model, world, changes) in RUNS.items()
        if name in names
    ]
    half = {"max_steps": 2}
    for first, second in ((1, 4), (4, 1)):
        if f"from {first}" not in names:
            continue
        one = settings("wan-flow", "2.1", **half, **({} if first == 1 else BY[2]))
        other = settings("wan-flow", "2.1", **({} if second == 1 else BY[2]))
        planned.append(Run(f"from {first}, before", f"runs/from {first}", first, one, recipe="wan-flow"))
        planned.append(Run(f"from {first}", f"runs/from {first}", second, other, recipe="wan-flow"))
    tokens = settings("wan-flow", "2.1", height=16, width=16, num_frames=1, cache_dir="", **BY[2])
    planned.append(Run("too few", "runs/too few", 2, tokens, recipe="wan-flow"))
    return many_runs(planned, root)


SLOW = ["flow, 1 x 3", "experts, 1 x 2", "lora, 1 x 2", "from 4"]
COMPARED = [(name, name.partition(",")[0]) for name in RUNS if "," in name] + [("from 1", "flow"), ("from 4", "flow")]


@pytest.mark.parametrize(("name", "alone"), slow_unless(COMPARED, [case for case in COMPARED if case[0] not in SLOW]))
def test_ranks_that_share_a_sample_train_like_one(name: str, alone: str, runs: dict[str, Outcome]) -> None:
    one, other = runs[alone], runs[name]
    assert "error" not in other.main, other.main
    torch.testing.assert_close(other.losses(), one.losses(), rtol=2e-5, atol=0)
    expected, result = one.evaluations()[-1], other.evaluations()[-1]
    for key in {"eval/loss", "eval/velocity_cosine", "eval/velocity_error", "eval/latent_error"} & expected.keys():
        assert result[key] == pytest.approx(expected[key], rel=1e-3), key
    previews = [{file.name for file in (run.folder / "previews").glob("step_00000004*")} for run in (one, other)]
    assert previews[0] and previews[0] == previews[1]


@pytest.mark.parametrize("name", ["distill, 1 x 2", "distill, 1 x 3"])
def test_the_hidden_state_loss_covers_all_tokens(name: str, runs: dict[str, Outcome]) -> None:
    # 0 at first: the student begins as a copy of the teacher.
    expected, result = ([step["feature_loss"] for step in runs[each].steps()[1:]] for each in ("distill", name))
    assert min(expected) > 0
    assert result == pytest.approx(expected, rel=1e-3)


def test_a_sample_with_too_few_tokens_is_refused(runs: dict[str, Outcome]) -> None:
    assert "error" in runs["too few"].main
    expected = "context_parallel 2: a sample has only 1 token; use a context_parallel of at most 1, or larger"
    assert all(expected in rank["error"] for rank in runs["too few"].by_rank), runs["too few"].main
    assert not (runs["too few"].folder / "run.json").exists()
