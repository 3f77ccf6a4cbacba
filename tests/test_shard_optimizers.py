"""Optimizers of unisono.optim: the published algorithms, and the same result however weights are sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import prodigyopt
import pytest
import schedulefree
import torch
from torch import Tensor, nn

import unisono
from many_runs import Copy, Outcome, Run, identical, largest_difference, many_runs
from ranks import run_ranks
from recipes_for_tests import Sentences
from unisono.checkpoint.find import read_extra
from unisono.engine.step.make_optimizer import not_for_muon
from unisono.engine.step.optimizer_wrapper import OptimizerWrapper
from unisono.errors import ConfigError
from unisono.optim.adafactor import Adafactor
from unisono.optim.base import ShardAwareOptimizer
from unisono.optim.low_bit_adamw import BlockCodes, LowBitAdamW, code_book, nearest_codes
from unisono.optim.muon import Muon, orthogonalise
from unisono.optim.named import OPTIMIZERS
from unisono.optim.prodigy import Prodigy
from unisono.optim.schedule_free import ScheduleFreeAdamW
from unisono.parallel.row_shards import RowShards
from unisono.settings import OptimSettings

NAMES = sorted(OPTIMIZERS)
Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


# The algorithms


def trained(make: Make, steps: int, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Any, list[float]]:
    """A small network after some steps, its optimizer and the losses."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(70, 90), nn.Tanh(), nn.Linear(90, 70)).to(dtype)
    inputs = torch.randn(64, 70, dtype=dtype)
    optimizer, losses = make(model.parameters()), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(inputs) - inputs.flip(1)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, optimizer, losses


def difference(a: nn.Module, b: nn.Module) -> float:
    return largest_difference(a.state_dict(), b.state_dict())


def matrices(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    return [parameter for parameter in parameters if parameter.dim() == 2]


def schedule_free_reference(parameters: Iterable[nn.Parameter]) -> Any:
    optimizer = schedulefree.AdamWScheduleFree(parameters, lr=1e-2, weight_decay=0.01)
    optimizer.train()
    return optimizer


@pytest.mark.parametrize(
    ("ours", "reference", "steps"),
    [
        (
            lambda weights: Adafactor(weights, lr=1e-2, weight_decay=0.01),
            lambda weights: torch.optim.Adafactor(weights, lr=1e-2, weight_decay=0.01),
            50,
        ),
        (
            lambda weights: Prodigy(weights, weight_decay=0.01),
            lambda weights: prodigyopt.Prodigy(weights, weight_decay=0.01),
            200,
        ),
        (lambda weights: ScheduleFreeAdamW(weights, lr=1e-2, weight_decay=0.01), schedule_free_reference, 50),
    ],
    ids=["adafactor", "prodigy", "schedule_free_adamw"],
)
def test_each_step_equals_the_published_optimizers(ours: Make, reference: Make, steps: int) -> None:
    (model, _, losses), (other, _, expected) = trained(ours, steps), trained(reference, steps)
    assert difference(model, other) < 1e-9
    assert losses == pytest.approx(expected, rel=1e-6) and losses[-1] < 0.5 * losses[0]


def test_muon_steps_like_torchs_up_to_16_bit_rounding() -> None:
    options: dict[str, Any] = {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.01}
    losses = trained(lambda weights: Muon(matrices(weights), **options), 50, torch.float32)[2]
    reference = trained(
        lambda weights: torch.optim.Muon(matrices(weights), **options, adjust_lr_fn="match_rms_adamw"),
        50,
        torch.float32,
    )[2]
    assert losses == pytest.approx(reference, rel=0.02) and losses[-1] < 0.5 * losses[0]


def test_orthogonalised_matrices_have_singular_values_of_about_1() -> None:
    for shape in ((30, 70), (70, 30)):
        values = torch.linalg.svdvals(orthogonalise(torch.randn(shape, dtype=torch.float64)))
        assert values.min() > 0.3 and values.max() < 1.4


def test_the_schedule_free_average_is_what_the_reference_evaluates() -> None:
    model, optimizer, _ = trained(lambda weights: ScheduleFreeAdamW(weights, lr=1e-2, weight_decay=0.01), 50)
    reference, other, _ = trained(schedule_free_reference, 50)
    other.eval()  # loads the averaged weights
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(optimizer.average(ours), theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("bits", "within"), [(8, 1.1), (4, 2.5)])
def test_low_bit_optimizers_learn_like_32_bit_ones(bits: int, within: float) -> None:
    plain = trained(lambda weights: torch.optim.AdamW(weights, lr=1e-2), 50, torch.float32)[2]
    compressed = trained(lambda weights: LowBitAdamW(weights, bits, lr=1e-2), 50, torch.float32)[2]
    assert compressed[-1] < within * plain[-1] < 0.05 * plain[0]


@pytest.mark.parametrize(("bits", "bytes_per_weight"), [(8, 2.1), (4, 1.1)])
def test_low_bit_optimizers_use_little_memory(bits: int, bytes_per_weight: float) -> None:
    weight = nn.Parameter(torch.randn(512, 1024))
    weight.grad = torch.randn_like(weight)
    optimizer = LowBitAdamW([weight], bits)
    optimizer.step()
    assert sum(slot.nbytes for slot in optimizer.state[weight].values()) < bytes_per_weight * weight.numel()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("signed", [True, False])
def test_a_stored_moment_is_the_nearest_that_codes_can_express(bits: int, signed: bool) -> None:
    book, storage = code_book(bits, signed=signed), BlockCodes(bits, signed)
    assert len(book.unique()) == 2**bits
    values = torch.randn(5, 301, dtype=torch.float64)
    values = values if signed else values.square()
    codes, scales = storage.encode(values)
    decoded = storage.decode(codes, scales, 301)
    for row, actual in zip(values, decoded, strict=True):
        for start in range(0, 301, size := 256 if bits == 8 else 128):
            block = row[start : start + size]
            nearest = (block[:, None] / block.abs().max() - book).abs().min(dim=1).values * block.abs().max()
            torch.testing.assert_close((actual[start : start + size] - block).abs(), nearest, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("signed", [True, False])
def test_the_quick_search_for_codes_is_exact(bits: int, signed: bool) -> None:
    book = code_book(bits, signed=signed)
    borders = ((book[1:] + book[:-1]) / 2).float()
    near = torch.cat([torch.nextafter(borders, torch.tensor(to)) for to in (-9.0, 9.0)])
    tiny = 10 ** -(torch.rand(20_000) * 12)
    values = torch.cat([book.float(), borders, near, tiny, torch.rand(20_000), torch.tensor([0.0, -0.0])])
    values = torch.cat([values, -values]) if signed else values.abs()
    exact = torch.bucketize(
        values, ((code_book(bits, signed=signed)[1:] + code_book(bits, signed=signed)[:-1]) / 2).float()
    )
    assert torch.equal(nearest_codes(values, bits, signed), exact)


def made(name: str, weights: list[nn.Parameter], shards: RowShards | None = None) -> ShardAwareOptimizer:
    if name in ("adamw8bit", "adamw4bit"):
        return LowBitAdamW(weights, 8 if name == "adamw8bit" else 4, shards=shards)
    return OPTIMIZERS[name](weights, shards=shards)  # type: ignore[call-arg, return-value]


@pytest.mark.parametrize("name", NAMES)
def test_a_skipped_step_changes_nothing_and_gradients_are_scaled(name: str) -> None:
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(70, 70)), nn.Parameter(torch.randn(70, 70))]
    plain, scaled = (made(name, [weight]) for weight in weights)
    with torch.no_grad():
        weights[1].copy_(weights[0])
    for step in range(3):
        gradient = torch.randn(70, 70, generator=torch.Generator().manual_seed(step))
        weights[0].grad, weights[1].grad = gradient.clone(), gradient * 8
        scaled.grad_scale, scaled.found_inf = torch.tensor(8.0), torch.tensor(0.0)
        plain.step()
        scaled.step()
        weights[1].grad.fill_(float("nan"))
        before = {slot: value.clone() for slot, value in scaled.state[weights[1]].items()}
        scaled.found_inf = torch.tensor(1.0)
        scaled.step()
        assert identical(before, scaled.state[weights[1]])
    assert torch.equal(weights[0], weights[1]) and weights[0].isfinite().all()


# On ranks

COMMON = {"global_batch_size": 6, "max_steps": 6, "save_every": 3, "keep_last": 0, "dtype": "float64", "width": 70}
RESUMED = {"3 to 1": (1, {}), "3 to 2": (2, {"strategy": "fsdp"}), "3 to 3": (3, {"strategy": "fsdp"})}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    worlds = {
        "1": (1, {}),
        "2 ddp": (2, {"strategy": "ddp"}),
        "2 fsdp": (2, {"strategy": "fsdp"}),
        "3 fsdp": (3, {"strategy": "fsdp"}),
    }
    settings = {name: COMMON | {"optimizer": name} for name in NAMES}
    plan = [
        Run(f"{name} on {where}", f"{name} {where}", world, settings[name] | more)
        for name in NAMES
        for where, (world, more) in worlds.items()
    ]
    plan += [
        Run(f"{name} {where}", f"{name} {where}", world, settings[name] | more, copy=Copy(f"{name} 3 fsdp", 3))
        for name in NAMES
        for where, (world, more) in RESUMED.items()
    ]
    return many_runs(plan, tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize("where", ["2 ddp", "2 fsdp", "3 fsdp"])
@pytest.mark.parametrize("name", NAMES)
def test_ranks_and_shards_do_not_change_the_run(runs: dict[str, Outcome], name: str, where: str) -> None:
    one, other = runs[f"{name} on 1"], runs[f"{name} on {where}"]
    assert largest_difference(one.weights(), other.weights()) < 1e-9
    assert largest_difference(one.weights(3), one.weights()) > 1e-7, "it has learned nothing"
    torch.testing.assert_close(one.losses(), other.losses(), rtol=1e-9, atol=0)
    state, sharded = (run.weights(prefix="optimizer.") for run in (one, other))
    assert largest_difference(state, sharded) < 1e-9, "its state differs"


@pytest.mark.parametrize("where", RESUMED)
@pytest.mark.parametrize("name", NAMES)
def test_a_run_resumes_on_other_shards(runs: dict[str, Outcome], name: str, where: str) -> None:
    straight, resumed = runs[f"{name} on 3 fsdp"], runs[f"{name} {where}"]
    assert resumed.main["step"] == 6
    assert largest_difference(straight.weights(), resumed.weights()) < 1e-9
    if where == "3 to 3":
        assert identical(straight.weights(), resumed.weights())
        assert identical(straight.weights(prefix="optimizer."), resumed.weights(prefix="optimizer."))


def test_the_state_in_8_bits_is_8_bits_in_the_checkpoint(runs: dict[str, Outcome]) -> None:
    state = runs["adamw8bit on 3 fsdp"].weights(prefix="optimizer.")
    compressed = {name: tensor for name, tensor in state.items() if name.endswith("_codes")}
    assert compressed and all(tensor.dtype == torch.uint8 for tensor in compressed.values())
    assert read_extra(runs["adamw8bit on 3 fsdp"].checkpoint())["state"]["step"] == 6


def map_on_rank(rows: list[int]) -> bool:
    """Each rank holds its rows of some matrices; `map_whole` must see them whole, and return the rank's own rows."""
    import os

    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    whole = [torch.randn(count, 5 + number) for number, count in enumerate(rows)]
    local = []
    for matrix in whole:
        parts = matrix.chunk(world)
        local.append(parts[rank] if rank < len(parts) else matrix[:0])
    weights = [part.clone() for part in local]
    shapes = {id(weight): matrix.shape for weight, matrix in zip(weights, whole, strict=True)}
    shards = RowShards(shapes, rank, world, torch.device("cpu"))

    def reversed_rows(matrix: Tensor) -> Tensor:
        return matrix.flip(0)

    mapped = shards.map_whole(weights, local, reversed_rows)
    good = True
    for matrix, result in zip(whole, mapped, strict=True):
        parts = matrix.flip(0).chunk(world)
        good &= torch.equal(result, parts[rank] if rank < len(parts) else matrix[:0])
    sums = shards.sum([part.sum() for part in local])
    good &= all(torch.allclose(total, matrix.sum()) for total, matrix in zip(sums, whole, strict=True))
    dist.destroy_process_group()
    return good


def test_a_function_of_whole_matrices_runs_on_shards_of_any_size() -> None:
    assert run_ranks("map_on_rank", __file__, 3, {"rows": [7, 1, 3, 8, 2]}) == [True] * 3


def step_on_rank(names: list[str]) -> dict[str, float]:
    """By optimizer: the largest difference between this rank's rows, trained as shards, and those of whole weights."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    gaps = {name: gap_on_rank(name, dist.get_rank(), dist.get_world_size()) for name in names}
    dist.destroy_process_group()
    return gaps


def gap_on_rank(name: str, rank: int, world: int) -> float:
    shapes = [(1, 4100), (2, 2050), (7, 600), (3, 4)] + ([] if name == "muon" else [(2,), (4, 3, 5, 80)])

    def rows_of(tensor: Tensor) -> Tensor:
        parts = tensor.chunk(world)
        return (parts[rank] if rank < len(parts) else tensor[:0]).clone()

    torch.manual_seed(0)
    whole = [nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in shapes]
    cut = [nn.Parameter(rows_of(weight.detach())) for weight in whole]
    sizes = {id(shard): weight.shape for shard, weight in zip(cut, whole, strict=True)}
    shards = RowShards(sizes, rank, world, torch.device("cpu"))
    optimizers = [made(name, whole), made(name, cut, shards)]
    for step in range(4):
        for weight, shard in zip(whole, cut, strict=True):
            weight.grad = torch.randn_like(weight)
            shard.grad = rows_of(weight.grad)
        for optimizer in optimizers:
            optimizer.found_inf = torch.tensor(float(step == 0))
            optimizer.step()
    gaps = [(rows_of(weight.detach()) - shard).abs() for weight, shard in zip(whole, cut, strict=True)]
    return float(max(gap.max() for gap in gaps if gap.numel()))


def test_a_rank_may_hold_no_rows_of_a_weight() -> None:
    for gaps in run_ranks("step_on_rank", __file__, 3, {"names": list(NAMES)}):
        assert set(gaps) == set(NAMES) and max(gaps.values()) < 1e-9, gaps


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("devices", [("cuda", "cpu"), ("cpu", "cuda")])
@pytest.mark.parametrize("name", NAMES)
def test_offloaded_shards_train_next_to_weights_on_the_gpu(name: str, devices: tuple[str, str]) -> None:
    settings = OptimSettings(optimizer=name, weight_decay=0.01)
    weights = [nn.Parameter(torch.ones(70, 70, device=device)) for device in devices]
    named = [(f"blocks.{number}", weight) for number, weight in enumerate(weights)]
    wrapper = OptimizerWrapper(named, settings, lambda _: None, 1.0)
    for weight in weights:
        weight.grad = torch.eye(70, device=weight.device)
    gradients = [weight.grad for weight in weights]
    wrapper.step(gradients, torch.ones((), device="cuda"), torch.zeros((), device="cuda"))  # type: ignore[arg-type]
    assert not torch.equal(weights[0].cpu(), torch.ones(70, 70))
    torch.testing.assert_close(weights[0].cpu(), weights[1].cpu())


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"muon"}))
def test_the_layout_of_a_weight_in_memory_does_not_matter(name: str) -> None:
    weights = [nn.Parameter(torch.randn(64, 33, 3, 3)) for _ in range(2)]
    weights[1].data = weights[0].detach().clone(memory_format=torch.channels_last)
    for weight in weights:
        optimizer, generator = made(name, [weight]), torch.Generator().manual_seed(0)
        for _ in range(3):
            weight.grad = torch.empty_like(weight).copy_(torch.randn(weight.shape, generator=generator))
            optimizer.step()
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-5, atol=1e-6)


# Settings and refusals


def test_muon_takes_the_matrices_of_blocks() -> None:
    model = Sentences(Sentences.Config()).model()
    blocks = list(model.blocks)  # type: ignore[arg-type]
    others = not_for_muon(model, blocks)
    assert "embedding.weight" in others and not any(name.startswith("blocks.") for name in others)
    assert set(not_for_muon(model, [])) == {"embedding.weight"}


def test_defaults_follow_from_the_optimizer(tmp_path: Path) -> None:
    done = unisono.train(
        Sentences, optimizer="prodigy", gpus="0", batch_size=4, max_steps=1, output_dir=str(tmp_path / "run")
    )
    assert done.last["lr"] == 1.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr_schedule": "cosine"}, "replaces a schedule"),
        ({"ema_decay": 0.9}, "averages the weights itself"),
        ({"beta1": 0.0}, "beta1, which must be above 0"),
    ],
)
def test_settings_that_schedule_free_replaces_are_rejected(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        unisono.train(
            Sentences,
            optimizer="schedule_free_adamw",
            gpus="0",
            batch_size=4,
            **settings,
            output_dir=str(tmp_path / "run"),
        )
    assert not (tmp_path / "run").exists()


class OwnScheduleFree(Sentences):
    """Creates a schedule-free optimizer itself."""

    def optimizer(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> Any:
        return ScheduleFreeAdamW(list(parameters), shards=self.shards)


def test_an_average_is_not_dropped_silently_for_a_recipes_own_schedule_free_optimizer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="use ema_decay 0"):
        unisono.train(OwnScheduleFree, gpus="0", batch_size=4, ema_decay=0.9, output_dir=str(tmp_path / "run"))


class UnawareOfShards(Sentences):
    """A recipe that creates an optimizer of unisono.optim without passing the shards."""

    def optimizer(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> Any:
        return LowBitAdamW(list(parameters), 8)


class AwareOfShards(Sentences):
    """A recipe that creates an optimizer of unisono.optim as documented."""

    def optimizer(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> Any:
        return LowBitAdamW(list(parameters), 8, shards=self.shards)


def test_a_recipes_own_optimizer_must_support_shards(tmp_path: Path) -> None:
    common = {"global_batch_size": 4, "max_steps": 2, "strategy": "fsdp"}
    done = many_runs(
        [
            Run("unaware", "unaware", 2, common, recipe=f"{Path(__file__)}:UnawareOfShards"),
            Run("aware", "aware", 2, common, recipe=f"{Path(__file__)}:AwareOfShards"),
        ],
        tmp_path,
    )
    assert "pass it shards=self.shards" in done["unaware"].main["error"]
    assert done["aware"].main["step"] == 2


def test_evaluation_and_export_use_the_schedule_free_average(tmp_path: Path) -> None:
    settings = {"optimizer": "schedule_free_adamw", "gpus": "0", "batch_size": 4, "max_steps": 4, "save_every": 4}
    runs = {
        every: unisono.train(Sentences, **settings, num_eval=5, eval_every=every, output_dir=str(tmp_path / str(every)))
        for every in (1, 4)
    }
    trained_weights, average = (
        Outcome(runs[1].folder, tmp_path, [{}]).weights(prefix=prefix) for prefix in ("model.", "ema.")
    )
    assert largest_difference(trained_weights, average) > 1e-6
    often, seldom = (Outcome(run.folder, tmp_path, [{}]).weights() for run in runs.values())
    assert identical(often, seldom), "an evaluation changed the run"
