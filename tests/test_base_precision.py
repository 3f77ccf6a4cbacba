"""Frozen weights in few bits: what a format loses, that ranks and shards lose the same, and what a layer computes."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from many_runs import Outcome, Run, identical, largest_difference, many_runs
from ranks import run_ranks
from unisono.parallel.blocks.repeated import compile_blocks, recompute_activations
from unisono.parallel.integer_weights import can_shard_integers
from unisono.quantize.formats import FORMATS, NF4, Format
from unisono.quantize.layers import dequantize, frozen_linears, quantize
from unisono.quantize.products import FrozenProduct, has_fp8_products

NAMES = sorted(FORMATS)
FEW_BITS = [name for name in NAMES if name != "bf16"]
SCALES_OF_PRODUCT = ("scale_a", "scale_b")


def matrix(rows: int = 37, columns: int = 150, seed: int = 0) -> Tensor:
    """Rows of very different sizes, one of zeros."""
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    values *= 10.0 ** torch.linspace(-6, 3, rows)[:, None]
    values[3] = 0
    return values


def decoded(kind: Format, values: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    return kind.decode(*kind.encode(values), values.shape[1], dtype)


# Formats


@pytest.mark.parametrize("name", NAMES)
def test_a_weight_is_rounded_to_the_nearest_code(name: str) -> None:
    kind, values = FORMATS[name], matrix()
    error = (decoded(kind, values) - values).abs()
    largest = values.abs().amax(dim=1, keepdim=True)
    if name == "nf4":
        padded = torch.nn.functional.pad(values, (0, 42)).view(37, 3, 64).abs().amax(dim=-1)
        largest = padded.repeat_interleave(64, dim=1)[:, :150]
    gap = max(high - low for low, high in pairwise(NF4))
    rounded_up = 1 + 2**-7  # of the scale
    bound = {
        "bf16": values.abs() * 2**-8,
        "fp8": torch.maximum(values.abs() * 2**-4, largest / 448 * 2**-10 * rounded_up),
        "int8": largest / 127 / 2 * rounded_up,
        "nf4": largest * gap / 2 * rounded_up,
    }[name]
    assert (error <= bound * (1 + 1e-6)).all()
    assert error.max() > 0 and (decoded(kind, values)[3] == 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_rows_have_the_same_codes_whether_they_are_encoded_together_or_in_parts(name: str) -> None:
    kind, values = FORMATS[name], matrix()
    whole = kind.encode(values)
    for start, stop in ((0, 13), (13, 26), (26, 37), (5, 5)):
        part = kind.encode(values[start:stop])
        assert torch.equal(part.codes, whole.codes[start:stop])
        assert part.scales is None or torch.equal(part.scales, whole.scales[start:stop])
    assert torch.equal(kind.encode(values.double()).codes, whole.codes)


@pytest.mark.parametrize("columns", [1, 31, 64, 65, 128, 150])
@pytest.mark.parametrize("name", NAMES)
def test_codes_and_scales_have_the_documented_sizes(name: str, columns: int) -> None:
    kind, values = FORMATS[name], matrix(columns=columns)
    codes, scales = kind.encode(values)
    assert codes.shape[1] == kind.num_code_columns(columns) and codes.dtype == kind.code_dtype
    size = codes.nbytes + (0 if scales is None else scales.nbytes)
    assert size == kind.num_bytes(37, columns)
    assert decoded(kind, values).shape == values.shape


@pytest.mark.parametrize("name", FEW_BITS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_decoding_to_16_bits_adds_only_16_bit_rounding(name: str, dtype: torch.dtype) -> None:
    kind, values = FORMATS[name], matrix()[10:30]
    exact, rounded = decoded(kind, values), decoded(kind, values, dtype)
    roundings = 2 if name == "nf4" and dtype == torch.bfloat16 else 1  # its values are no bfloat16 numbers
    slack = torch.finfo(dtype).eps / 2 * roundings * exact.abs() + torch.finfo(dtype).smallest_normal
    assert ((rounded.double() - exact).abs() <= slack * 1.01).all()


def test_compiled_nf4_decoding_gives_the_same_values(monkeypatch: pytest.MonkeyPatch) -> None:
    kind, values = FORMATS["nf4"], matrix()
    table = decoded(kind, values, torch.float32)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert torch.equal(decoded(kind, values, torch.float32), table)


def test_non_finite_weights_stay_non_finite() -> None:
    for bad in (torch.inf, torch.nan):
        values = matrix()
        values[7, 9] = bad
        for name in NAMES:
            result = decoded(FORMATS[name], values)
            assert not result[7].isfinite().all() and result[8].isfinite().all()


# Layers


class Layers(nn.Module):
    """Frozen linear layers of both kinds with a LoRA beside them."""

    def __init__(self, in_features: int = 48, out_features: int = 80) -> None:
        from transformers.pytorch_utils import Conv1D

        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(in_features, out_features).requires_grad_(False)
        self.conv = Conv1D(in_features, out_features).requires_grad_(False)
        self.down = nn.Linear(in_features, 4, bias=False)
        self.up = nn.Linear(4, in_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(torch.tanh(self.linear(x + self.up(self.down(x)))))


def gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    output = model(x)
    output.float().square().sum().backward()
    trained = {name: weight.grad for name, weight in model.named_parameters() if weight.requires_grad}
    return {"output": output.detach(), "x": x.grad, **trained}


@pytest.mark.parametrize("name", NAMES)
def test_outputs_and_gradients_are_those_of_the_decoded_weights(name: str) -> None:
    model, reference = Layers().double(), Layers().double()
    names = frozen_linears(model, ())
    assert names == ["linear", "conv"]
    for each in (model, reference):
        quantize(each, names, name)
    dequantize(reference, torch.float64)
    assert type(reference.linear) is nn.Linear and not reference.linear.weight.requires_grad
    x = torch.randn(3, 7, 48, dtype=torch.float64)
    ours, theirs = gradients(model, x), gradients(reference, x)
    assert largest_difference(ours, theirs) < 1e-12
    assert not any(weight.grad is not None for weight in (model.linear.weight, model.linear.bias))


@pytest.mark.parametrize("name", FEW_BITS)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_strategy_is_chosen_by_the_size_of_the_quantised_weights(name: str, device: str) -> None:
    from unisono.engine.build.choose_strategy import _num_bytes

    model = Layers().to(device)
    before = _num_bytes(model, lambda parameter: not parameter.requires_grad)
    converted = quantize(model, ["linear", "conv"], name)
    after = _num_bytes(model, lambda parameter: not parameter.requires_grad)
    assert before - after == converted.bytes_before - converted.bytes_after > 0.7 * converted.bytes_before


def test_a_trained_bias_of_a_frozen_weight_gets_its_gradient() -> None:
    model, reference = Layers().double(), Layers().double()
    for each in (model, reference):
        quantize(each, ["linear", "conv"], "int8")
        each.linear.bias.requires_grad_()
    dequantize(reference, torch.float64)
    x = torch.randn(5, 48, dtype=torch.float64)
    assert largest_difference(gradients(model, x), gradients(reference, x)) < 1e-12


@pytest.mark.parametrize("name", NAMES)
def test_autocast_computes_in_16_bits_and_keeps_only_codes_for_backward(name: str) -> None:
    model = Layers()
    quantize(model, ["linear", "conv"], name)
    saved: list[Tensor] = []
    x = torch.randn(64, 48, requires_grad=True)
    with (
        torch.autocast("cpu", torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda it: it),
    ):
        output = model.linear(x)
    assert output.dtype == torch.bfloat16
    kept = {tensor.untyped_storage().data_ptr() for tensor in saved}
    assert kept <= {tensor.untyped_storage().data_ptr() for tensor in model.linear.parameters()}
    output.float().sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.float32


def fp8_device() -> str:
    """A device whose products take a scale per row: a GPU with fp8 units, or the CPU since torch 2.13."""
    if torch.cuda.is_available() and has_fp8_products(torch.device("cuda", 0)):
        return "cuda"
    if torch.__version__ < (2, 13):
        pytest.skip("needs a GPU with fp8 products: before torch 2.13 those of the CPU take one scale per matrix")
    return "cpu"


def test_fp8_products_are_those_of_decoded_operands() -> None:
    """Layouts and scales, forward and backward."""
    device = fp8_device()
    weight, x = matrix(48, 80)[5:37].to(device), torch.randn(2, 17, 80, device=device)
    for transposed in (True, False):
        values = weight if transposed else weight.t().contiguous()
        values = values / values.abs().amax(dim=1, keepdim=True).clamp(min=1e-9)
        values *= torch.linspace(0.5, 2, len(values), device=device)[:, None]
        codes, scales = FORMATS["fp8"].encode(values)
        exact = FORMATS["fp8"].decode(codes, scales, values.shape[1], torch.float64)
        results = []
        for fp8_products in (False, True):
            inputs = x.bfloat16().requires_grad_()
            columns = values.shape[1]
            output = FrozenProduct.apply(inputs, codes, scales, None, "fp8", columns, transposed, fp8_products)
            gradient = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)
            output.backward(gradient)
            results.append((output.double(), inputs.grad.double()))
        products = exact.T if transposed else exact
        true_output, true_gradient = x.bfloat16().double() @ products, gradient.double() @ products.T
        for number, true in enumerate((true_output, true_gradient)):
            decoded_error, fp8_error = ((result[number] - true).norm() / true.norm() for result in results)
            assert decoded_error < 0.005
            assert 0.005 < fp8_error < 0.04, "activations in fp8 lose a few percent, and no more"


def test_fp8_products_get_rows_in_the_layout_that_gpus_need(monkeypatch: pytest.MonkeyPatch) -> None:
    multiply = torch._scaled_mm

    def as_on_a_gpu(rows: Tensor, columns: Tensor, **others: Any) -> Tensor:
        assert rows.is_contiguous() and columns.t().is_contiguous()
        assert others["scale_a"].shape == (len(rows), 1) and others["scale_b"].shape == (1, columns.shape[1])
        assert all(others[name].is_contiguous() and others[name].dtype == torch.float32 for name in SCALES_OF_PRODUCT)
        return multiply(rows, columns, **others)

    monkeypatch.setattr(torch, "_scaled_mm", as_on_a_gpu)
    codes, scales = FORMATS["fp8"].encode(torch.randn(32, 80, device=(device := fp8_device())))
    for x in (torch.randn(1, 80, 17).bfloat16().transpose(1, 2), torch.randn(80).bfloat16()):
        inputs = (x := x.to(device)).detach().requires_grad_()
        output = FrozenProduct.apply(inputs, codes, scales, None, "fp8", 80, True, True)
        output.backward(torch.randn(output.shape[::-1]).bfloat16().permute(*reversed(range(x.dim()))).to(device))
        decoded_output = FrozenProduct.apply(x, codes, scales, None, "fp8", 80, True, False)
        assert (output - decoded_output).norm() / decoded_output.norm() < 0.06


def test_compiled_and_recomputed_layers_compute_the_same() -> None:
    plain, compiled = Layers(), Layers()
    for each in (plain, compiled):  # both formats in one compilation, which takes most of the time
        quantize(each, ["linear"], "nf4")
        quantize(each, ["conv"], "fp8")
    recompute_activations(compiled)
    compile_blocks(compiled, [compiled])
    x = torch.randn(6, 48)
    before = torch._dynamo.utils.counters["graph_break"].copy()
    assert largest_difference(gradients(compiled, x), gradients(plain, x)) < 1e-4
    assert torch._dynamo.utils.counters["graph_break"] == before


def test_compiled_nf4_is_right_if_the_last_block_of_a_row_is_shorter() -> None:
    nf4, values = FORMATS["nf4"], matrix(6, 70)
    codes, scales = nf4.encode(values)
    compiled = torch.compile(lambda codes, scales: nf4.decode(codes, scales, 70, torch.float32))
    torch.testing.assert_close(compiled(codes, scales), decoded(nf4, values, torch.float32))


def test_layers_whose_weights_are_shared_or_read_directly_are_not_quantised() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2)
            self.encoder = nn.TransformerEncoderLayer(8, 2, 16)
            self.decoder = nn.TransformerDecoderLayer(8, 2, 16)
            self.tied, self.head, self.plain = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
            self.head.weight = self.tied.weight
            self.trained = nn.Linear(8, 8)

    model = Model().requires_grad_(False)
    model.trained.requires_grad_(True)
    assert frozen_linears(model, ()) == ["decoder.linear1", "decoder.linear2", "plain"]
    assert frozen_linears(model, (), exact=["plain.weight"]) == ["decoder.linear1", "decoder.linear2"]
    assert frozen_linears(model, [model.plain]) == ["plain"]


# Runs

SETTINGS: dict[str, Any] = {
    **{"global_batch_size": 6, "batch_size": 6, "max_steps": 4, "save_every": 2, "width": 70, "num_blocks": 2},
    **{"dtype": "float64", "dropout": 0.0, "keep_last": 0},
}
VARIANTS: dict[str, tuple[int, dict[str, Any]]] = {
    "1 rank": (1, {}),
    "2 ranks ddp": (2, {"strategy": "ddp", "batch_size": 2}),
    "3 ranks fsdp": (3, {"strategy": "fsdp", "batch_size": 1, "activation_checkpointing": True}),
}
HERE, ELSEWHERE = "SentencesWithLora", "SentencesWithLoraFromElsewhere"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    root: Path = tmp_path_factory.mktemp("base_precision")
    run_list = []
    for precision in ("auto", *NAMES):
        settings = SETTINGS | {"base_precision": precision}
        for variant, (world, more) in VARIANTS.items():
            for recipe in (HERE, ELSEWHERE):
                if (recipe, world) != (HERE, 2):
                    name = f"{recipe} {precision} {variant}"
                    run_list.append(Run(name, name, world, settings | more, recipe=recipe))
    longer = SETTINGS | {"base_precision": "nf4", "max_steps": 6}
    for recipe in (HERE, ELSEWHERE):
        first = f"{recipe} nf4 3 ranks fsdp"
        run_list.append(Run(f"{recipe} straight on", f"{recipe} straight on", 1, longer, recipe=recipe))
        run_list.append(Run(f"{recipe} resumed", first, 2, longer | {"strategy": "fsdp"}, recipe=recipe))
    one, same = f"{ELSEWHERE} nf4 1 rank", SETTINGS | {"max_steps": 8}
    run_list.append(Run("other precision", one, 1, same | {"base_precision": "int8"}, recipe=ELSEWHERE))
    run_list.append(Run("nothing frozen", "nothing", 2, SETTINGS | {"base_precision": "fp8"}, recipe="Sentences"))
    fp8 = SETTINGS | {"base_precision": "fp8", "dtype": "float32", "mixed_precision": "bf16", "strategy": "fsdp"}
    run_list.append(Run("16 bit", "16 bit", 2, fp8, recipe=ELSEWHERE))
    return many_runs(run_list, root)


@pytest.mark.parametrize("precision", NAMES)
@pytest.mark.parametrize("recipe", [HERE, ELSEWHERE])
def test_every_strategy_trains_the_same(recipe: str, precision: str, runs: dict[str, Outcome]) -> None:
    one = runs[f"{recipe} {precision} 1 rank"]
    for variant in VARIANTS:
        if (other := runs.get(f"{recipe} {precision} {variant}")) is not None:
            torch.testing.assert_close(other.losses()[:4], one.losses()[:4], rtol=1e-10, atol=0)
            assert largest_difference(other.weights(4), one.weights(4)) < 1e-10


def test_each_format_changes_the_run_slightly(runs: dict[str, Outcome]) -> None:
    exact = runs[f"{HERE} auto 1 rank"].losses()
    distances = {name: float((runs[f"{HERE} {name} 1 rank"].losses() - exact).abs().max()) for name in NAMES}
    assert 0 < max(distances["bf16"], distances["int8"]) < distances["fp8"] < distances["nf4"] < 0.1, distances


def test_frozen_weights_take_as_few_bytes_in_a_checkpoint_as_in_memory(runs: dict[str, Outcome]) -> None:
    for name in FEW_BITS:
        here = runs[f"{HERE} {name} 1 rank"].weights(4)
        codes = here["blocks.0.up.base_layer.weight"]
        assert codes.dtype == torch.int8 and codes.shape == (140, FORMATS[name].num_code_columns(70))
        assert not any("base_layer" in each for each in runs[f"{ELSEWHERE} {name} 1 rank"].weights(4))


SHARDS_INTEGERS = pytest.mark.skipif(not can_shard_integers(), reason="fsdp of this torch cannot shard integers")


@SHARDS_INTEGERS
def test_a_rank_reads_only_its_own_rows_once(runs: dict[str, Outcome]) -> None:
    whole = int((runs[f"{ELSEWHERE} nf4 1 rank"].record / "asked.0").read_text())
    assert whole == int((runs[f"{ELSEWHERE} auto 1 rank"].record / "asked.0").read_text())
    sharded = runs[f"{ELSEWHERE} nf4 3 ranks fsdp"]
    assert max(int((sharded.record / f"asked.{rank}").read_text()) for rank in range(3)) < 0.5 * whole


@pytest.mark.parametrize("recipe", [HERE, ELSEWHERE])
def test_a_run_resumes_on_other_ranks(recipe: str, runs: dict[str, Outcome]) -> None:
    resumed, straight = runs[f"{recipe} resumed"], runs[f"{recipe} straight on"]
    torch.testing.assert_close(resumed.losses(), straight.losses(), rtol=1e-10, atol=0)
    assert largest_difference(resumed.weights(6), straight.weights(6)) < 1e-10


def test_a_base_precision_cannot_change_within_a_run_or_apply_to_nothing(runs: dict[str, Outcome]) -> None:
    changed, nothing = runs["other precision"].main, runs["nothing frozen"]
    assert changed["exit_code"] == 2 and "base_precision int8 differs from this run's nf4" in changed["error"]
    assert all(rank["exit_code"] == 2 and "no frozen linear layers" in rank["error"] for rank in nothing.by_rank)
    assert not nothing.folder.exists()


def test_fsdp_with_16_bit_gathers_transfers_the_codes_unchanged(runs: dict[str, Outcome]) -> None:
    exact = runs[f"{ELSEWHERE} fp8 1 rank"].losses()
    torch.testing.assert_close(runs["16 bit"].losses(), exact, rtol=2e-2, atol=0)


def train_without_sharded_integers(folder: str) -> tuple[float, int]:
    """Runs in each rank: training on a torch whose FSDP cannot shard integers."""
    import unisono
    from recipes_for_tests import SentencesWithLoraFromElsewhere
    from unisono.parallel import integer_weights

    assert integer_weights.can_shard_integers()  # of the installed torch
    integer_weights.can_shard_integers = lambda: False  # type: ignore[assignment]
    settings = SETTINGS | {"strategy": "fsdp", "batch_size": 3, "base_precision": "nf4", "output_dir": folder}
    result = unisono.train(SentencesWithLoraFromElsewhere, **settings, record=f"{folder} record")
    return result.last["loss"], int(Path(f"{folder} record", f"asked.{os.environ['RANK']}").read_text())


@SHARDS_INTEGERS
def test_older_versions_of_torch_replicate_the_codes_and_train_the_same(
    runs: dict[str, Outcome], tmp_path: Path
) -> None:
    results = run_ranks("train_without_sharded_integers", __file__, 2, {"folder": str(tmp_path / "run")})
    one = runs[f"{ELSEWHERE} nf4 1 rank"]
    whole = int((one.record / "asked.0").read_text())
    for loss, num_read in results:
        assert loss == pytest.approx(float(one.losses()[3]), rel=1e-10) and num_read > 0.9 * whole


def test_exported_weights_are_not_quantised(runs: dict[str, Outcome]) -> None:
    from recipes_for_tests import __file__ as recipes
    from unisono.engine.export import load_trained

    plain = runs[f"{HERE} auto 1 rank"].weights(4)
    for recipe in (HERE, ELSEWHERE):
        run = runs[f"{recipe} nf4 1 rank"]
        _, model, _ = load_trained(run.folder, reference=f"{recipes}:{recipe}")
        layer, name = model.blocks[0].up.base_layer, "blocks.0.up.base_layer.weight"
        assert type(layer) is nn.Linear and model.state_dict().keys() == plain.keys()
        expected = plain[name]
        if recipe == HERE:  # only the codes are left
            expected = decoded(FORMATS["nf4"], expected)
        torch.testing.assert_close(layer.weight.double(), expected.double(), rtol=1e-6, atol=1e-7)
        trained = {"up": run.weights(4)["blocks.0.up.up"]}
        assert identical({"up": model.blocks[0].up.up.detach()}, {"up": trained["up"].float()})
