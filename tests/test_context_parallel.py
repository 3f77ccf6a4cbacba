"""Several ranks share one sample: gradients, runs, resumes, memory and refusals, with one's own model."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import SumMetric

from command_line import unisono as command
from many_runs import Outcome, Run, largest_difference, many_runs
from ranks import run_ranks
from unisono import Loss
from unisono.errors import ConfigError
from unisono.parallel.context import Context, Tokens, make_context

EXAMPLE = Path(__file__).parents[1] / "examples/own_model/long_sequences.py"
RECIPE = f"{EXAMPLE}:LongSequences"
EXACT = 1e-10


def example() -> Any:
    spec = importlib.util.spec_from_file_location("long_sequences", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Signals(list[Tensor]):
    """The first three samples cannot be read."""

    def __getitem__(self, index: Any) -> Any:
        if index < 3:
            raise ValueError(f"sample {index} is damaged")
        return super().__getitem__(index)


class Counting(example().LongSequences):  # type: ignore[misc]
    """Counts what must happen once per sample: unreadable ones, evaluated ones, random numbers."""

    def dataset(self, split: str) -> Any:
        return Signals(super().dataset(split)[:8])

    def loss(self, model: nn.Module, batch: Any, noise: Any) -> Loss:
        loss = super().loss(model, batch, noise)
        drawn = torch.rand(())  # as dropout does
        difference = (self.context.sum(drawn) - self.context.size * drawn).abs()
        return Loss(loss.total, loss.count, {"drawn": (drawn, 1), "difference": (difference, 1)})

    def evaluate(self, model: nn.Module, batch: Any, noise: Any) -> Any:
        if not hasattr(self, "number"):
            self.number = SumMetric()
        self.number.update(len(batch))
        return {**super().evaluate(model, batch, noise), "number": self.number}


# The operations: in each case, all ranks are one context group -------------------------------------------------------


class Mixer(nn.Module):
    """Attention between tokens, with everything around it that a model may have."""

    def __init__(self, heads: int, key_heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.key_heads, self.causal = heads, key_heads, causal
        self.first, self.shift = nn.Linear(3, 12), nn.Linear(1, 12)
        self.query, self.out = nn.Linear(12, 12), nn.Linear(12, 3)
        self.key, self.value = (nn.Linear(12, 12 // heads * key_heads) for _ in range(2))

    def forward(self, x: Tensor, condition: Tensor, context: Context) -> tuple[Tensor, Tokens]:
        tokens = context.tokens(x.shape[1])
        h = tokens.split(self.first(x), 1) + self.shift(condition)[:, None]  # the shift is computed on every rank
        for _ in range(2):
            query = self.query(h).unflatten(-1, (self.heads, -1))
            key, value = (layer(h).unflatten(-1, (self.key_heads, -1)) for layer in (self.key, self.value))
            h = h + tokens.attention(query, key, value, causal=self.causal).flatten(2)
        return self.out(h), tokens


def gradients_of(context: Context, heads: int, key_heads: int, length: int, causal: bool) -> Tensor:
    """Of a loss over gathered outputs, and a loss over each rank's own tokens."""
    torch.manual_seed(0)
    model = Mixer(heads, key_heads, causal)
    x, condition, target = torch.randn(2, length, 3), torch.randn(2, 1), torch.randn(2, length, 3)
    own, tokens = model(x, condition, context)
    whole = tokens.gather(own, 1)
    gathered_loss = (whole - target).square().sum() + whole.norm()  # the norm is no sum over tokens
    own_loss = context.sum((own - tokens.split(target, 1)).abs().sum())
    ((gathered_loss + 2 * own_loss) / context.size).backward()
    gradients = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])  # type: ignore[union-attr]
    if context.size > 1:
        dist.all_reduce(gradients)
    return gradients


# heads of queries, heads of keys and values, tokens, causal; 2, 3 and 4 ranks divide 12 heads, none of them 1
CASES = [
    (12, 12, 7, False),
    (12, 12, 12, True),
    (4, 4, 25, False),
    (4, 4, 11, True),
    (6, 2, 9, False),
    (12, 6, 10, True),
]
CASES += [(1, 1, 5, False), (1, 1, 14, True)]


def compare_gradients() -> list[float]:
    """In each rank: the largest difference of each case between all ranks together and this rank alone."""
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    context = make_context(rank, world, world)
    with context.apart():
        assert context.size == 1
    differences = []
    for case in CASES:
        alone, together = gradients_of(Context(), *case), gradients_of(context, *case)
        differences.append(float((alone - together).abs().max() / alone.abs().max()))
    dist.destroy_process_group()
    return differences


@pytest.mark.parametrize("ranks", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_gradients_equal_those_of_one_rank_for_any_number_of_heads_and_tokens(ranks: int) -> None:
    """Each number of ranks exchanges heads in some cases, and gathers keys and values in others."""
    for differences in run_ranks("compare_gradients", __file__, ranks):
        assert max(differences) < 1e-12, dict(zip(CASES, differences, strict=True))


def stored_bytes() -> dict[str, list[int]]:
    """In each of 4 ranks: bytes that a forward pass stores for its backward pass, in groups of 1, 2 and 4 ranks."""
    dist.init_process_group("gloo")
    rank, stored = int(os.environ["RANK"]), {}
    for heads in (4, 3):  # exchanges heads; gathers keys and values
        stored[str(heads)] = [num_stored(make_context(rank, 4, size), heads) for size in (1, 2, 4)]
    dist.destroy_process_group()
    return stored


def num_stored(context: Context, heads: int) -> int:
    torch.manual_seed(0)
    model = example().Smoother(context, width=24, heads=heads, layers=3)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    sizes: dict[int, int] = {}
    kept = []  # so that no address is used twice

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            sizes[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = model(torch.randn(1, 400))
    del output
    return sum(sizes.values())


@pytest.mark.slow
def test_a_rank_stores_its_part_of_the_activations() -> None:
    for by_heads in run_ranks("stored_bytes", __file__, 4):
        for one, two, four in by_heads.values():
            assert two <= 0.55 * one and four <= 0.30 * one, by_heads


def test_more_ranks_than_tokens_are_refused() -> None:
    context = Context()
    context.__class__ = type("Three", (Context,), {"size": 3})
    with pytest.raises(ConfigError, match=r"context_parallel 3: a sample has only 2 tokens to divide; use a .* most 2"):
        context.tokens(2)


# Runs of the example --------------------------------------------------------------------------------------------------

COMMON: dict[str, Any] = {
    **{"dtype": "float64", "optimizer": "sgd", "learning_rate": 0.1, "length": 37, "global_batch_size": 5},
    **{"batch_size": 3, "max_steps": 6, "save_every": 3, "eval_every": 3, "log_every": 1, "tensorboard": False},
    **{"ema_decay": 0.5, "num_workers": 0},
}
HALF = {"max_steps": 3}


def of(name: str, world: int, context: int, folder: str = "", **changes: Any) -> Run:
    strategy = {} if world == 1 else {"strategy": "ddp"}
    settings = {**COMMON, **strategy, "context_parallel": context, **changes}
    return Run(name, f"runs/{folder or name}", world, settings, recipe=RECIPE)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    planned = [
        of("one", 1, 1),
        of("2 x 2", 4, 2),
        of("2 x 2 fsdp", 4, 2, strategy="fsdp"),
        of("1 x 3", 3, 3),
        of("1 x 3 recomputed", 3, 3, activation_checkpointing=True, max_steps=2),
        of("to one, before", 4, 2, "to one", **HALF),
        of("to one", 1, 1, "to one"),
        of("from one, before", 1, 1, "from one", **HALF),
        of("from one", 4, 2, "from one", strategy="fsdp"),
        of("3 ranks", 3, 2),
        of("counted", 2, 2, max_steps=3, shuffle=False, max_bad_samples=6),
    ]
    planned[-1].recipe = f"{__file__}:Counting"
    return many_runs(planned, tmp_path_factory.mktemp("context"))


@pytest.mark.parametrize("name", ["2 x 2", "2 x 2 fsdp", "1 x 3", "to one", "from one"])
def test_ranks_that_share_a_sample_train_like_one(name: str, runs: dict[str, Outcome]) -> None:
    one, other = runs["one"], runs[name]
    assert "error" not in other.main, other.main
    assert largest_difference(one.weights(), other.weights()) < EXACT
    assert largest_difference(one.weights(prefix="ema."), other.weights(prefix="ema.")) < EXACT
    for expected, line in zip(one.lines(), other.lines(), strict=True):
        for key in {"loss", "grad_norm", "count", "samples", "eval/loss"} & expected.keys():
            assert line[key] == pytest.approx(expected[key], rel=EXACT), (key, line)


def test_work_that_ranks_share_is_counted_once(runs: dict[str, Outcome]) -> None:
    counted = runs["counted"]
    assert "error" not in counted.main, counted.main
    assert counted.evaluations()[-1]["eval/number"] == 5  # of 8 samples, 3 are damaged
    assert [step["difference"] for step in counted.steps()] == [0, 0, 0]
    assert len({step["drawn"] for step in counted.steps()}) == 3
    assert counted.state()["bad_samples"] == 6  # 15 samples of a data set of 8: two epochs
    positions = [event["position"] for event in counted.events("bad_sample") if event["split"] == "train"]
    assert positions == [0, 1, 2, 8, 9, 10]


def test_recomputed_blocks_train_the_same(runs: dict[str, Outcome]) -> None:
    recomputed = runs["1 x 3 recomputed"]
    assert "error" not in recomputed.main, recomputed.main
    torch.testing.assert_close(recomputed.losses(), runs["one"].losses()[:2], rtol=EXACT, atol=0)


def test_a_group_counts_as_one_device_of_the_effective_batch(tmp_path: Path) -> None:
    flags = "--nproc 2 --context_parallel 2 --length 9 --batch_size 3 --max_steps 1 --eval_every -1 --tensorboard false"
    done = command("train", RECIPE, *flags.split(), "--output_dir", "run", cwd=tmp_path)
    assert done.code == 0, done.err
    assert "3 = 3 per group × 1 group × 1 accumulation" in done.err
    assert "2, in groups of 2 that share each sample" in done.err
    assert json.loads((tmp_path / "run/run.json").read_text())["global_batch"] == 3


def test_ranks_that_cannot_be_grouped_are_refused_with_numbers_that_work(runs: dict[str, Outcome]) -> None:
    expected = "context_parallel 2 does not divide 3 ranks; use a context_parallel of 1 or 3, or 2 or 4 ranks"
    assert [rank["error"] for rank in runs["3 ranks"].by_rank] == [expected] * 3
    assert {rank["exit_code"] for rank in runs["3 ranks"].by_rank} == {2}
    assert not (runs["3 ranks"].folder / "run.json").exists()


@pytest.mark.parametrize(
    ("recipe", "flags", "expected"),
    [
        ("tiny_recipe.py:Tiny", "--nproc 2 --context_parallel 2", "Tiny does not say how to divide a sample"),
        (RECIPE, "--nproc 3 --context_parallel 2", "use a context_parallel of 1 or 3, or 2 or 4 ranks"),
        (
            RECIPE,
            "--context_parallel 2",
            "context_parallel 2 does not divide 1 rank; use a context_parallel of 1, or 2",
        ),
        (RECIPE, "--context_parallel 0", "context_parallel: expected at least 1, got 0"),
        (
            RECIPE,
            "--strategy dp --context_parallel 2",
            "needs one process per GPU; use --strategy ddp or fsdp, or auto",
        ),
        (RECIPE, "--nproc 2 --context_parallel 2 --cuda_graph", "cannot be recorded; remove cuda_graph"),
    ],
)
def test_models_that_cannot_be_split_along_the_sequence_are_rejected_in_one_line(
    recipe: str, flags: str, expected: str, tmp_path: Path
) -> None:
    path = recipe if recipe is RECIPE else str(Path(__file__).parent / recipe)
    refused = command("train", path, *flags.split(), "--gpus", "0", "--output_dir", "run", cwd=tmp_path)
    assert refused.code == 2, refused.err
    assert expected in refused.err.splitlines()[-1]
    assert not (tmp_path / "run").exists()


def test_verify_compares_with_one_rank_alone(tmp_path: Path) -> None:
    flags = "--ranks 1,2 --context_parallel 2 --steps 2 --length 7 --heads 2 --batch_size 2"
    verified = command("verify", RECIPE, *flags.split(), cwd=tmp_path)
    assert verified.code == 0, verified.out + verified.err
    assert "running 2 ranks, ddp, context 2, 1 x 3" in verified.err
    assert "running 1 rank, single, 1 x 3" in verified.err
