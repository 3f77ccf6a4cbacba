"""Training with quantised products: what a layer computes, which layers are converted, and that ranks train alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unisono
from many_runs import Outcome, Run, largest_difference, many_runs, slow_unless
from recipes_for_tests import Reader, Sentences
from recipes_for_tests import __file__ as RECIPES
from unisono.config.resolve import resolve
from unisono.engine.checks import check_settings
from unisono.engine.export import load_trained
from unisono.errors import ConfigError
from unisono.parallel.blocks.repeated import compile_blocks, recompute_activations
from unisono.quantize.layers import quantize
from unisono.quantize.operands import multiply, quantised_rows, transposed
from unisono.quantize.reduced_layers import ReducedLinear, prune_weights, reduce_products
from unisono.quantize.reduced_products import Products
from unisono.quantize.sparse import pruned
from unisono.settings import Settings

FORMATS = ["fp8", "int8"]
ERROR = {"fp8": 0.06, "int8": 0.02}  # relative error of a product of normally distributed numbers


def name_of(products: Products) -> str:
    return f"{products.format_name or 'sparse'}{' whole' if products.weight_gradient else ''}"


WHOLE_FP8 = Products("fp8", True)
PRODUCTS = pytest.mark.parametrize(
    "products", [Products(name, whole) for name in FORMATS for whole in (False, True)], ids=name_of
)


def rows(count: int = 40, width: int = 64, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows of very different sizes, one of zeros."""
    values = torch.randn(count, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    values *= 10.0 ** torch.linspace(-9, 3, count, dtype=torch.float64)[:, None]
    values[3] = 0
    return values.to(dtype)


def close(actual: Tensor, expected: Tensor, error: float) -> None:
    assert (actual.double() - expected.double()).norm() <= error * expected.double().norm()


# Operands


@pytest.mark.parametrize("name", FORMATS)
def test_each_row_has_its_own_scale_and_is_rounded_to_the_nearest_code(name: str) -> None:
    values = rows()
    codes, scales = quantised_rows(values, name)
    error, largest = (codes.float() * scales - values).abs(), values.abs().amax(1, keepdim=True)
    if name == "int8":
        assert (error <= largest / 127 / 2 * 1.001).all() and (codes.abs().amax(1)[values.any(1)] == 127).all()
    else:
        assert (error <= torch.maximum(values.abs() / 16, largest * 2.0**-16)).all()
        assert (torch.frexp(scales)[0] == 0.5).all(), "scales are powers of two"
        units = codes.float().abs().amax(1)
        assert (units[values.any(1)] > 208).all(), "the largest codes are used"
    for number in (0, 3, 17):
        alone, scale = quantised_rows(values[number : number + 1], name)
        assert torch.equal(alone.float(), codes[number : number + 1].float())
        assert torch.equal(scale, scales[number : number + 1])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_non_finite_numbers_stay_non_finite(name: str, bad: float) -> None:
    layer = linear(name)
    x = rows(8)
    x[2, 5] = bad
    y = layer(x)
    assert not y[2].isfinite().any() and y[[0, 1, 3, 4]].isfinite().all()


def test_transposed_codes_have_rows_of_a_multiple_of_16() -> None:
    for name in FORMATS:
        codes, _ = quantised_rows(rows(40), name)
        swapped = transposed(codes)
        assert swapped.shape == (64, 48) and swapped.is_contiguous() and swapped.dtype == codes.dtype
        assert torch.equal(swapped.float()[:, :40], codes.float().t()) and not swapped.float()[:, 40:].any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FORMATS)
def test_a_product_of_codes_is_exact_up_to_rounding(name: str, dtype: torch.dtype) -> None:
    a, b, bias = rows(40, seed=1), rows(32, seed=2), torch.randn(32)
    (a_codes, a_scales), (b_codes, b_scales) = quantised_rows(a, name), quantised_rows(b, name)
    expected = (a_codes.double() * a_scales) @ (b_codes.double() * b_scales).t() + bias.to(dtype).double()
    actual = multiply(a_codes, a_scales, b_codes, b_scales.t(), dtype, bias.to(dtype))
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), expected, rtol=4 * torch.finfo(dtype).eps, atol=1e-6)


# Layers


def linear(name: str | Products, bias: bool = True, seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    layer = nn.Linear(64, 96, bias=bias)
    products = Products(name) if isinstance(name, str) else name
    reduce_products(layer, [layer], products, 16)
    assert type(layer) is ReducedLinear
    return layer


def passes(model: nn.Module, x: Tensor, dtype: torch.dtype | None = None) -> list[Tensor]:
    """The output, and the gradients of the input and of all weights."""
    x = x.clone().requires_grad_()
    with torch.autocast(x.device.type, dtype or torch.bfloat16, enabled=dtype is not None):
        y = model(x)
    target = torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).to(y)
    return [
        y.detach(),
        *torch.autograd.grad(y, [x, *(each for each in model.parameters() if each.requires_grad)], target),
    ]


@PRODUCTS
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_a_layer_computes_almost_what_it_did_before(products: Products, bias: bool, autocast: Any) -> None:
    torch.manual_seed(5)
    x, layer = torch.randn(3, 7, 64), linear(products, bias)
    plain = nn.Linear(64, 96, bias=bias)
    plain.load_state_dict(layer.state_dict())
    for actual, expected in zip(passes(layer, x, autocast), passes(plain, x, autocast), strict=True):
        assert actual.dtype == expected.dtype and actual.shape == expected.shape
        close(actual, expected, ERROR[products.format_name])
    names = ("input", "weight")
    for number, name in enumerate(names, start=1):
        exact = name == "weight" and not products.weight_gradient
        gap = (passes(layer, x)[number] - passes(plain, x)[number]).norm()
        assert (gap < 1e-4) == exact, (name, gap)


@pytest.mark.parametrize("name", FORMATS)
def test_a_token_depends_on_no_other_token(name: str) -> None:
    layer, x, few = linear(name).double(), rows(16, dtype=torch.float64), slice(4, 7)

    def gradient(x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
        y = layer(x := x.clone().requires_grad_())
        return y.detach(), torch.autograd.grad(y, x, dy)[0]

    dy = rows(16, 96, seed=1, dtype=torch.float64)
    for whole, alone in zip(gradient(x, dy), gradient(x[few], dy[few]), strict=True):
        torch.testing.assert_close(alone, whole[few], rtol=1e-12, atol=0)


@PRODUCTS
def test_a_row_of_zero_weights_is_trained(products: Products) -> None:
    layer = linear(products)
    with torch.no_grad():
        layer.weight[7] = 0
    x = torch.randn(20, 64, generator=torch.Generator().manual_seed(1))
    plain = nn.Linear(64, 96)
    plain.load_state_dict(layer.state_dict())
    for actual, expected in zip(passes(layer, x), passes(plain, x), strict=True):
        close(actual, expected, ERROR[products.format_name])
    close(passes(layer, x)[2][7], passes(plain, x)[2][7], ERROR[products.format_name])


@PRODUCTS
def test_tokens_of_very_different_magnitude_have_accurate_gradients(products: Products) -> None:
    """A scale for the whole micro-batch must not erase the tokens whose gradients are small."""
    layer, plain = linear(products), nn.Linear(64, 96)
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    x[::2] *= 30
    close(passes(layer, x)[2], passes(plain, x)[2], ERROR[products.format_name])


@pytest.mark.parametrize(
    "products",
    slow_unless([Products(name, whole) for name in FORMATS for whole in (False, True)], [WHOLE_FP8]),
    ids=name_of,
)
def test_compiled_and_recomputed_blocks_compute_the_same(products: Products) -> None:
    def made(recomputed: bool = False, selective: bool = False, compiled: bool = False) -> Reader:
        torch.manual_seed(0)
        torch._dynamo.reset()
        model = Reader(32, 2, 0.0)
        assert len(reduce_products(model, model.blocks, products, 16).converted) == 8
        for block in model.blocks if recomputed else ():
            recompute_activations(block, selective=selective)
        if compiled:
            compile_blocks(model, model.blocks)
        return model

    def gradients(model: Reader) -> list[Tensor]:
        tokens = torch.arange(30).view(5, 6) % 13
        jitter, shift = torch.ones(5, 3) / 3, torch.ones(5, 32) / 5
        model(tokens, torch.ones(5, 6, dtype=torch.bool), jitter, shift).square().mean().backward()
        return [parameter.grad for parameter in model.parameters()]

    expected = gradients(made())
    with torch._dynamo.config.patch(error_on_recompile=False, suppress_errors=False):
        for options in ({"compiled": True}, {"recomputed": True}, {"recomputed": True, "compiled": True}):
            for actual, target in zip(gradients(made(**options)), expected, strict=True):
                # A number next to the border between two codes may fall to its other side.
                close(actual, target, ERROR[products.format_name])
    for actual, target in zip(gradients(made(recomputed=True, selective=True)), expected, strict=True):
        torch.testing.assert_close(actual, target, rtol=1e-5, atol=1e-7)


def test_compiling_a_layer_breaks_no_graph() -> None:
    for products in (Products("fp8"), Products("fp8", True), Products("int8", True), Products(sparse=True)):
        torch._dynamo.reset()
        layer, x = linear(products), torch.randn(20, 64)
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        for actual, expected in zip(passes(compiled, x, torch.bfloat16), passes(layer, x, torch.bfloat16), strict=True):
            torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("products", [Products("fp8"), Products("int8"), Products(sparse=True)], ids=name_of)
def test_compiled_code_keeps_no_copy_of_a_gathered_weight(products: Products) -> None:
    def kept(products: Products) -> set[tuple[int, ...]]:
        torch._dynamo.reset()
        layer, shapes = linear(products), set()

        def pack(tensor: Tensor) -> Tensor:
            if tensor.data_ptr() != layer.weight.data_ptr():
                shapes.add(tuple(tensor.shape))
            return tensor

        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager_decomp_partition")
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            compiled(torch.randn(20, 64, requires_grad=True)).sum().backward()
        return shapes & {(64, 96), (96, 64)}

    assert not kept(products._replace(gathered=True))
    assert bool(kept(products)) != products.sparse, "otherwise it keeps the codes, which are cheaper to keep"


def test_only_trained_layers_of_blocks_that_fit_are_converted() -> None:
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.frozen, self.base = nn.Linear(64, 32), nn.Linear(64, 64), nn.Linear(64, 64)
            self.narrow, self.odd = nn.Linear(64, 16), nn.Linear(64, 40)
            self.attention = nn.MultiheadAttention(64, 2)
            self.exact = nn.Linear(64, 64)
            self.frozen.requires_grad_(False)

    model = nn.Module()
    model.parts = nn.ModuleList([Part(), Part()])
    model.head = nn.Linear(64, 64)
    for part in model.parts:
        part.base.requires_grad_(False)
    quantize(model, ["parts.0.base", "parts.1.base"], "fp8")
    model.parts[0].tied = model.parts[1].tied = nn.Linear(64, 64)
    names = {name: parameter.shape for name, parameter in model.named_parameters()}
    done = reduce_products(model, model.parts, Products("fp8"), 32, exact=["parts.0.exact.weight"])
    assert done.converted == ["parts.0.wide", "parts.0.tied", "parts.1.wide", "parts.1.exact"]
    assert done.unfit == ["parts.0.narrow", "parts.0.odd", "parts.1.narrow", "parts.1.odd"]
    assert names == {name: parameter.shape for name, parameter in model.named_parameters()}
    assert type(model.parts[0].base).__name__ == "FrozenLinear" and type(model.head) is nn.Linear


# Sparse layers


def test_pruning_keeps_the_two_largest_of_every_four_weights() -> None:
    weight = torch.tensor([[1.0, -3, 2, 0, 5, 5, 5, -5], [0, 0, 0, 0, -1, -2, -3, -4]])
    assert pruned(weight).tolist() == [[0, -3, 2, 0, 5, 5, 0, 0], [0, 0, 0, 0, 0, 0, -3, -4]]


@pytest.mark.parametrize("frozen", [False, True])
def test_a_sparse_layer_multiplies_by_the_pruned_weight_and_trains_all_of_it(frozen: bool) -> None:
    layer, plain, x = nn.Linear(64, 96), nn.Linear(64, 96), torch.randn(20, 64)
    plain.load_state_dict({"weight": pruned(layer.weight), "bias": layer.bias})
    for each in (layer, plain):
        each.weight.requires_grad_(not frozen)
    before = layer.weight.clone()
    reduce_products(layer, [layer], Products(sparse=True), 16)
    (
        layer(x.requires_grad_()).square().sum() + plain(x2 := x.detach().clone().requires_grad_()).square().sum()
    ).backward()
    torch.testing.assert_close(x.grad, x2.grad)
    assert torch.equal(layer.weight, before) and (layer.weight.grad is None) == frozen
    if not frozen:
        torch.testing.assert_close(layer.weight.grad, plain.weight.grad)
    prune_weights(layer)
    assert type(layer) is nn.Linear and torch.equal(layer.weight, plain.weight)


# Runs

SETTINGS: dict[str, Any] = {
    **{"global_batch_size": 6, "batch_size": 6, "max_steps": 4, "save_every": 2, "width": 32, "num_blocks": 2},
    **{"dtype": "float64", "keep_last": 0, "quantize_min_size": 32, "ema_decay": 0.9},
}
VARIANTS: dict[str, tuple[int, dict[str, Any]]] = {
    "1 rank": (1, {}),
    "2 ranks ddp": (2, {"strategy": "ddp", "batch_size": 2}),
    "2 ranks fsdp": (2, {"strategy": "fsdp", "batch_size": 1}),
    "3 ranks fsdp": (3, {"strategy": "fsdp", "batch_size": 2, "activation_checkpointing": True}),
}
WHOLE = {"quantize_weight_gradient": True, "batch_size": 1}
BF16 = SETTINGS | {"dtype": "float32", "mixed_precision": "bf16"}
FP8 = BF16 | {"mixed_precision": "fp8"}
LEARNING = {"max_steps": 60, "save_every": 0, "width": 64, "ema_decay": 0.0, "learning_rate": 2e-3}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    run_list = []
    for variant, (world, more) in VARIANTS.items():
        run_list.append(Run(f"no {variant}", f"no {variant}", world, SETTINGS | more))
        for name in FORMATS:
            for kind, also in {"": {}, " whole": WHOLE}.items():
                run = f"{name}{kind} {variant}"
                run_list.append(Run(run, run, world, SETTINGS | more | {"quantize": name} | also))
        run_list.append(Run(f"sparse {variant}", f"sparse {variant}", world, SETTINGS | more | {"sparsity": "2:4"}))
    lora = SETTINGS | {"sparsity": "2:4", "width": 32}
    run_list.append(Run("sparse base", "sparse base", 1, lora, recipe="SentencesWithLoraFromElsewhere"))
    lora |= {"strategy": "fsdp", "batch_size": 2}
    run_list.append(Run("sparse base fsdp", "sparse base fsdp", 3, lora, recipe="SentencesWithLoraFromElsewhere"))
    run_list.append(Run("fp8, other micro-batches", "other", 1, SETTINGS | {"quantize": "fp8", "batch_size": 2}))
    lossy = SETTINGS | {"quantize": "fp8"} | WHOLE | {"batch_size": 2}
    run_list.append(Run("fp8 whole, other micro-batches", "other whole", 1, lossy))
    for name, settings in {"bf16": BF16, "fp8": FP8}.items():
        run_list.append(Run(f"{name} alone", f"{name} alone", 1, settings | {"max_steps": 6}))
    run_list += [
        Run("bf16 first", "changing", 1, BF16 | {"max_steps": 2}),
        Run("then fp8", "changing", 2, FP8 | {"max_steps": 4, "strategy": "fsdp", "batch_size": 3}),
        Run("then bf16", "changing", 1, BF16 | {"max_steps": 6}),
    ]
    for seed in range(4):
        run_list.append(Run(f"seed {seed}", f"seed {seed}", 1, BF16 | LEARNING | {"seed": seed}))
    run_list.append(Run("learning", "learning", 1, FP8 | LEARNING))
    run_list.append(Run("learning whole", "learning whole", 1, FP8 | LEARNING | {"quantize_weight_gradient": True}))
    int8 = BF16 | LEARNING | {"quantize": "int8", "quantize_weight_gradient": True}
    run_list.append(Run("learning int8", "learning int8", 1, int8))
    run_list.append(Run("nothing fits", "nothing", 2, FP8 | {"quantize_min_size": 33}))
    return many_runs(run_list, tmp_path_factory.mktemp("quantized_training"))


@pytest.mark.parametrize("name", ["fp8", "fp8 whole", "int8", "int8 whole", "sparse"])
def test_every_strategy_trains_the_same(name: str, runs: dict[str, Outcome]) -> None:
    one = runs[f"{name} 1 rank"]
    for variant in VARIANTS:
        other = runs[f"{name} {variant}"]
        torch.testing.assert_close(other.losses(), one.losses(), rtol=1e-10, atol=0)
        assert largest_difference(other.weights(4), one.weights(4)) < 1e-10
    exact = runs["no 1 rank"]
    assert 1e-6 < float((one.losses() - exact.losses()).abs().max()) < (0.5 if name == "sparse" else 0.05)
    assert one.weights(4).keys() == exact.weights(4).keys()


def test_a_frozen_base_can_be_sparse(runs: dict[str, Outcome]) -> None:
    one, sharded = runs["sparse base"], runs["sparse base fsdp"]
    torch.testing.assert_close(sharded.losses(), one.losses(), rtol=1e-10, atol=0)
    assert not any("base_layer" in name for name in one.weights(4))


def test_an_export_of_a_sparse_run_has_pruned_weights(runs: dict[str, Outcome]) -> None:
    run = runs["sparse 1 rank"]
    _, model, _ = load_trained(run.folder, reference=f"{RECIPES}:Sentences", weights="model")
    stored, name = run.weights(4), "blocks.0.up.weight"
    assert all(type(block.up) is nn.Linear for block in model.blocks)
    torch.testing.assert_close(model.state_dict()[name], pruned(stored[name]).float())
    assert (stored[name] != 0).all(), "the run goes on with all weights"


def test_only_quantised_weight_gradients_depend_on_micro_batches(runs: dict[str, Outcome]) -> None:
    one, other = runs["fp8 1 rank"], runs["fp8, other micro-batches"]
    torch.testing.assert_close(other.losses(), one.losses(), rtol=1e-10, atol=0)
    whole, other = runs["fp8 whole 1 rank"], runs["fp8 whole, other micro-batches"]
    torch.testing.assert_close(other.losses(), whole.losses(), rtol=1e-2, atol=0)


def test_a_run_resumes_with_other_products(runs: dict[str, Outcome]) -> None:
    changed, bf16, fp8 = runs["then bf16"], runs["bf16 alone"], runs["fp8 alone"]
    assert all(runs[name].main["status"] == "done" for name in ("bf16 first", "then fp8", "then bf16"))
    assert torch.equal(changed.losses()[:2], bf16.losses()[:2])
    assert not torch.equal(changed.losses()[2:4], bf16.losses()[2:4])
    torch.testing.assert_close(changed.losses(), bf16.losses(), rtol=2e-2, atol=0)
    for prefix in ("model.", "optimizer.", "ema."):
        here, there = changed.weights(6, prefix), fp8.weights(6, prefix)
        assert here.keys() == there.keys() == bf16.weights(6, prefix).keys()
        assert all(here[name].dtype == there[name].dtype == torch.float32 for name in here)


def test_the_loss_stays_within_the_spread_over_seeds(runs: dict[str, Outcome]) -> None:
    seeds = [runs[f"seed {seed}"].losses() for seed in range(4)]
    ends = [float(losses[-10:].mean()) for losses in seeds]
    assert ends[0] < 0.9 * float(seeds[0][:5].mean()), "it learns"
    for name in ("learning", "learning whole", "learning int8"):
        losses = runs[name].losses()
        assert 0 < float((losses - seeds[0]).abs().mean()) < float((seeds[1] - seeds[0]).abs().mean()), name
        assert abs(float(losses[-10:].mean()) - ends[0]) < max(ends) - min(ends), name


def test_a_model_without_suitable_layers_is_rejected_in_one_line(runs: dict[str, Outcome]) -> None:
    nothing = runs["nothing fits"]
    for rank in nothing.by_rank:
        assert rank["exit_code"] == 2
        assert rank["error"] == (
            "mixed_precision fp8: none of the 8 linear layers has sizes that fit (multiples of 16, at least "
            "33 (quantize_min_size)); lower quantize_min_size, or remove it"
        )
    assert not nothing.folder.exists()


def test_the_banner_names_the_layers_that_are_not_quantised(capsys: Any, tmp_path: Path) -> None:
    class Odd(Sentences):
        def model(self) -> nn.Module:
            model = super().model()
            for block in model.blocks:
                block.up, block.down = nn.Linear(32, 40), nn.Linear(40, 32)
            return model

    unisono.train(Odd, **FP8 | {"max_steps": 1, "output_dir": str(tmp_path / "run"), "gpus": "0"})
    printed = " ".join(capsys.readouterr().err.split())
    assert (
        "note: mixed_precision fp8: 4 linear layers multiply in fp8; 4 do not, because their sizes are not multiples "
        "of 16, at least 32 (quantize_min_size): blocks.*.up, blocks.*.down" in printed
    )
    assert "note: mixed_precision fp8: the CPU has no fp8 products; they are emulated, which is slower" in printed
    assert "fp8 (mixed)" in printed


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mixed_precision": "fp8", "quantize": "int8"}, "mixed_precision fp8 and quantize int8 contradict each other"),
        ({"mixed_precision": "fp16", "quantize": "int8"}, "quantize int8 works with mixed_precision bf16 or no"),
        ({"quantize_weight_gradient": True}, "quantize_weight_gradient needs mixed_precision fp8, or quantize"),
        ({"sparsity": "2:4", "quantize": "fp8"}, "sparsity 2:4: no product is both sparse and fp8; use one of them"),
        ({"sparsity": "2:4", "base_precision": "nf4"}, "sparsity 2:4: no product is both sparse and nf4; use one"),
        ({"quantize_min_size": 0}, "quantize_min_size: expected at least 1, got 0"),
    ],
)
def test_settings_that_contradict_each_other_are_rejected(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_settings(resolve((Settings,), overrides=settings).build(Settings))
    assert str(error.value).startswith(message) and "\n" not in str(error.value)
