"""The student of a distillation: its sizes, and its initial weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from unisono.errors import ConfigError
from unisono.parallel.materialize import fill
from unisono.recipes.wan.models.experts import Experts
from unisono.recipes.wan.models.load import CONFIGS, build, build_meta
from unisono.recipes.wan.models.weights import Weights, open_weights
from unisono.recipes.wan_distill.models.pruned_weights import PrunedWeights
from unisono.recipes.wan_distill.models.pruning import (
    PruningPlan,
    measured_importance,
    plan,
)
from unisono.recipes.wan_distill.models.random_weights import initialise_randomly, random_rows
from unisono.recipes.wan_distill.models.student import num_weights, student_of
from wan_models import SMALL, model

KNOWN: dict[str, Any] = {
    **{"model_type": "WanLiteStudent", "hidden_size": 1024, "depth": 16, "num_heads": 16, "num_channels": 16},
    **{"image_size": 1024, "patch_size": 16, "text_max_length": 77, "text_encoder_output_dim": 4096},
}
TEACHER: dict[str, Any] = {**SMALL, "num_layers": 5, "num_attention_heads": 4, "ffn_dim": 64}
NARROW: dict[str, Any] = {**SMALL, "num_layers": 3}


def described(folder: Path, values: Any) -> str:
    """A student_config file."""
    (folder / "student.json").write_text(json.dumps(values))
    return str(folder / "student.json")


def saved(transformer: nn.Module, folder: Path) -> Weights:
    """The file of a transformer."""
    transformer.save_pretrained(folder)  # type: ignore[operator]
    return open_weights(folder)


def inherited(weights: Weights, plan: PruningPlan, config: Mapping[str, Any]) -> Any:
    """The student as the engine builds it."""
    student = Experts({"transformer": build_meta(config)}, None)
    fill(student, PrunedWeights(lambda: (weights, plan)))
    return student.transformer


def inputs(config: Mapping[str, Any] = SMALL) -> tuple[Tensor, Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(0)
    noisy = torch.randn(2, config["in_channels"], 2, 4, 4, generator=drawn)
    return noisy, torch.tensor([300.0, 900.0]), torch.randn(2, 5, config["text_dim"], generator=drawn)


@torch.no_grad()
def velocity(transformer: Any) -> Tensor:
    predicted: Tensor = transformer.eval()(*inputs(transformer.config), return_dict=False)[0]
    return predicted


def refused(action: Callable[[], object], *words: str) -> None:
    """Checks that the action raises a one-line user error that contains these words."""
    with pytest.raises(ConfigError) as caught:
        action()
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value), caught.value


# Its sizes


def test_without_a_file_the_student_has_half_of_the_teachers_layers() -> None:
    student = student_of(None, TEACHER, 8)
    assert {**TEACHER, "num_layers": 2}.items() <= student.config.items()
    assert (student.pixels, student.text_tokens, student.factor, student.remarks) == (None, None, 1.0, ())
    assert student_of(None, {**TEACHER, "num_layers": 1}, 8).config["num_layers"] == 1


def test_the_original_scripts_keys_describe_a_wan_transformer(tmp_path: Path) -> None:
    student = student_of(described(tmp_path, {**KNOWN, "projection_factor": 0.5}), CONFIGS["1.3b"], 8)
    sizes = {"num_attention_heads": 16, "attention_head_dim": 64, "num_layers": 16, "ffn_dim": 5976}
    assert {**CONFIGS["1.3b"], **sizes}.items() <= student.config.items()
    assert (student.pixels, student.text_tokens, student.factor) == (1024, 77, 0.5)
    remarks = " ".join(student.remarks)
    for word in ("WanLiteStudent", "image_size 1024", "64 × 64 tokens", "text_max_length 77", "projection_factor 0.5"):
        assert word in remarks
    assert not any(
        "projection_factor" in it for it in student_of(described(tmp_path, KNOWN), CONFIGS["1.3b"], 8).remarks
    )


def test_missing_diffusers_keys_are_taken_from_the_teacher(tmp_path: Path) -> None:
    values = {"_class_name": "WanTransformer3DModel", "num_layers": 2, "eps": 1e-5, "patch_size": [1, 2, 2]}
    student = student_of(described(tmp_path, values), TEACHER, 8)
    assert {**TEACHER, "num_layers": 2, "eps": 1e-5}.items() <= student.config.items()
    assert build(student.config).config.num_layers == 2


def test_a_student_larger_than_its_teacher_is_built_with_a_note(tmp_path: Path) -> None:
    student = student_of(described(tmp_path, {"num_layers": 9}), TEACHER, 8)
    assert student.config["num_layers"] == 9
    assert f"{num_weights(student.config):,}" in student.remarks[-1] and "more than its teacher" in student.remarks[-1]


def test_weights_are_counted_without_allocating_them() -> None:
    assert num_weights(TEACHER) == sum(parameter.numel() for parameter in build(TEACHER).parameters())
    assert num_weights(CONFIGS["14b"]) == 14_288_491_584


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({**KNOWN, "num_channels": 4}, ("num_channels 4", "16", "latent space")),
        ({**KNOWN, "patch_size": 8}, ("patch_size 8", "use 16")),
        ({**KNOWN, "patch_size": [1, 2, 2]}, ("patch_size [1, 2, 2]", "whole number")),
        ({**KNOWN, "text_encoder_output_dim": 768}, ("text_encoder_output_dim 768", "use 4096")),
        ({**KNOWN, "image_size": 1000}, ("image_size 1000", "992 or 1008")),
        ({**KNOWN, "num_heads": 15}, ("hidden_size 1024 / num_heads 15", "num_heads 8")),
        ({**KNOWN, "num_heads": 256}, ("num_heads 256", "at least 6")),
        ({**KNOWN, "depth": 0}, ("depth 0",)),
        ({**KNOWN, "depth": True}, ("depth True",)),
        ({**KNOWN, "hidden_size": 10**9}, ("hidden_size",)),
        ({**KNOWN, "projection_factor": 0}, ("projection_factor 0",)),
        ({**KNOWN, "projection_factor": float("nan")}, ("projection_factor nan",)),
        ({**KNOWN, "projection_factor": "one"}, ("projection_factor 'one'",)),
        ({**KNOWN, "model_type": None}, ("model_type None",)),
        ({name: KNOWN[name] for name in KNOWN if name not in ("depth", "model_type")}, ("lacks depth, model_type",)),
        ({"patch_size": 16}, ("lacks hidden_size",)),
        ({**KNOWN, "num_layers": 3}, ("num_layers", "use only one kind")),
        ({**KNOWN, "deepth": 3}, ("'deepth'", "did you mean depth?")),
        ({"in_channels": 4}, ("in_channels 4", "16", "latent space")),
        ({"out_channels": 32}, ("out_channels 32", "16")),
        ({"text_dim": 32}, ("text_dim 32", "4096")),
        ({"patch_size": [1, 1, 1]}, ("patch_size (1, 1, 1)",)),
        ({"image_dim": 20}, ("image_dim 20",)),
        ({"attention_head_dim": 13}, ("attention_head_dim 13",)),
        ({"num_layers": "many"}, ("num_layers 'many'",)),
        ([1], ("JSON object",)),
    ],
)
def test_an_impossible_student_config_is_rejected(values: Any, words: tuple[str, ...], tmp_path: Path) -> None:
    refused(lambda: student_of(described(tmp_path, values), CONFIGS["1.3b"], 8), "student.json", *words)


def test_a_missing_file_is_rejected(tmp_path: Path) -> None:
    refused(lambda: student_of(str(tmp_path / "none.json"), TEACHER, 8), "none.json", "no such file")


# Which layers


@pytest.mark.parametrize(
    ("layers", "count", "expected"),
    [
        ("even", 3, [0, 2, 4]),
        ("even", 2, [0, 4]),
        ("even", 1, [0]),
        ("even", 5, [0, 1, 2, 3, 4]),
        ("even", 4, [0, 1, 3, 4]),
        ("importance", 2, [1, 4]),
        ("1,2,4", 3, [1, 2, 4]),
    ],
)
def test_the_configured_teacher_layers_are_copied(layers: str, count: int, expected: list[int], tmp_path: Path) -> None:
    teacher, config = model(TEACHER), {**TEACHER, "num_layers": count}
    weights = saved(teacher, tmp_path)
    pruning = plan(weights, TEACHER, config, layers, [0.1, 0.9, 0.2, 0.3, 0.4])
    assert pruning.layers == expected
    assert count == 5 or f"the teacher's {', '.join(map(str, expected))}" in pruning.summary
    student = inherited(weights, pruning, config)
    for mine, theirs in zip(student.blocks, expected, strict=True):
        other = dict(teacher.blocks[theirs].named_parameters())
        assert all(torch.equal(weight, other[name]) for name, weight in mine.named_parameters())


@pytest.mark.parametrize(
    ("layers", "importance", "word"),
    [
        ("0,1", None, "3 distinct numbers"),
        ("0,1,5", None, "from 0 to 4"),
        ("-1,1,2", None, "from 0 to 4"),
        ("0,0,2", None, "distinct"),
        ("2,1,0", None, "order"),
        ("first", None, "layers first"),
        ("", None, "expected even"),
        ("importance", None, "each of the teacher's 5 layers"),
        ("importance", [1.0], "each of the teacher's 5 layers"),
        ("importance", [float("nan")] * 5, "finite"),
    ],
)
def test_layers_that_the_teacher_does_not_have_are_rejected(
    layers: str, importance: list[float] | None, word: str, tmp_path: Path
) -> None:
    weights = saved(model(TEACHER), tmp_path)
    refused(lambda: plan(weights, TEACHER, {**TEACHER, "num_layers": 3}, layers, importance), word)


def test_importance_is_how_much_a_block_changes_the_residual_stream() -> None:
    teacher = model(TEACHER)
    idle = teacher.blocks[2]
    with torch.no_grad():
        for layer in (idle.attn1.to_out[0], idle.attn2.to_out[0], idle.ffn.net[2]):
            layer.weight.zero_(), layer.bias.zero_()
        teacher.blocks[3].ffn.net[2].weight.mul_(30)
    importance = measured_importance(teacher, *inputs())
    assert len(importance) == 5 and abs(importance[2]) < 1e-6
    assert max(range(5), key=importance.__getitem__) == 3 and min(importance[:2] + importance[3:]) > 1e-4
    assert measured_importance(teacher, *inputs()) == importance  # the hooks are gone


# Whole and narrower


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_student_of_the_same_size_equals_the_teacher_bit_for_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    teacher = model(TEACHER).to(dtype)
    pruning = plan(weights := saved(teacher, tmp_path), TEACHER, TEACHER)
    source = PrunedWeights(lambda: (weights, pruning))
    for name, weight in teacher.named_parameters():
        taken = source.rows(f"transformer.{name}", 0, len(weight))
        assert taken.dtype == weight.dtype and torch.equal(taken, weight), name
    assert "all 5 layers" in pruning.summary


def test_the_inheritance_factor_scales_all_inherited_weights(tmp_path: Path) -> None:
    weights = saved(teacher := model(TEACHER), tmp_path)
    student = inherited(weights, plan(weights, TEACHER, TEACHER, factor=0.5), TEACHER)
    for (name, mine), theirs in zip(student.named_parameters(), teacher.parameters(), strict=True):
        assert torch.equal(mine, theirs * 0.5), name


INNER: dict[str, Any] = {**SMALL, "ffn_dim": 40}  # 2 heads of 12
OUTER: dict[str, Any] = {**INNER, "num_attention_heads": 4, "ffn_dim": 64}
PLACES = {
    "channels": torch.tensor([0, 2, 3, 5, 6, 7, 11, 12, 14, 15, 17, 20, *range(24, 36)]),
    "text": torch.arange(1, 48, 2),
    "words": torch.arange(24, 48),
    "time": torch.arange(0, 48, 2),
    "heads": torch.tensor([*range(12, 24), *range(36, 48)]),
    "neurons": torch.arange(10, 50),
    "modulation": torch.arange(6).repeat_interleave(24) * 48,
}
PLACES["modulation"] += PLACES["channels"].repeat(6)


def units(name: str, dimensions: int) -> list[str | None]:
    """The dimensions of a weight, derived independently of the code under test."""
    layer = name.split(".")[-2:][0]
    if ".attn" in name:
        source = "text" if ".attn2.to_k" in name or ".attn2.to_v" in name else "channels"
        kinds: list[str | None] = ["channels", "heads"] if ".to_out." in name else ["heads", source]
    elif ".ffn." in name:
        kinds = ["neurons", "channels"] if ".proj." in name else ["channels", "neurons"]
    elif "_embedder.linear" in name:
        inside, outside = ("words", "text") if "text_embedder" in name else ("time", "channels")
        kinds = [inside, None] if "linear_1" in name else [outside, inside]
    else:
        kinds = {"time_proj": ["modulation", "channels"], "proj_out": [None, "channels"]}.get(layer, ["channels"])
    return [*kinds, None, None, None, None][:dimensions]


@torch.no_grad()
def a_model_and_a_wider_equivalent() -> tuple[Any, Any]:
    """The wide model contains the small one; its other units are silent."""
    inner, outer = model(INNER, seed=1), model(OUTER, seed=2)
    # A norm over channels subtracts their mean; silent channels change that mean unless it is 0.
    for layer in [inner.patch_embedding, *(block.attn1.to_out[0] for block in inner.blocks)]:
        layer.weight -= layer.weight.mean(0)
        layer.bias -= layer.bias.mean()
    for block in inner.blocks:
        for layer in (block.attn2.to_out[0], block.ffn.net[2]):
            layer.weight -= layer.weight.mean(0)
            layer.bias -= layer.bias.mean()
    gates = [number for gate in (2, 5) for number in range(gate * 24, gate * 24 + 24)]
    for block in inner.blocks:
        block.scale_shift_table[:, [2, 5]] = torch.tensor([0.7, 0.4])[:, None]
    inner.condition_embedder.time_proj.weight[gates] = inner.condition_embedder.time_proj.weight[gates].mean(0)
    inner.condition_embedder.time_proj.bias[gates] = 0.3
    # The time embedding is added to the last norm's shift and scale: both fit at another width only if it is small.
    for weight in inner.condition_embedder.time_embedder.linear_2.parameters():
        weight.mul_(1e-6)
    wide, scales = dict(outer.named_parameters()), torch.tensor([1, 4]) * 24
    for name, weight in inner.named_parameters():
        value, target = weight.clone(), wide[name]
        # Half of the units are silent, so the mean square over all units is half of that over the others.
        if name.endswith("scale_shift_table"):
            rows = [1, 4] if "blocks" in name else [1]
            value[:, rows] = (1 + value[:, rows]) * 0.5**0.5 - 1
        elif ".norm" in name and name.endswith("weight"):
            value *= 0.5**0.5
        elif "time_proj" in name:
            value[(scales[:, None] + torch.arange(24)).flatten()] *= 0.5**0.5
        if name.endswith("scale_shift_table"):
            target.zero_()
            target[..., PLACES["channels"]] = value
            continue
        of = units(name, weight.dim())
        if of[0] is not None and not name.endswith(("norm_q.weight", "norm_k.weight", "norm2.weight")):
            silent = torch.ones(len(target), dtype=torch.bool)
            silent[PLACES[of[0]]] = False
            target[silent] = 0
        rows = torch.arange(len(target)) if of[0] is None else PLACES[of[0]]
        if weight.dim() > 1 and of[1] is not None:
            target[rows[:, None], PLACES[of[1]]] = value
        else:
            target[rows] = value
    return inner, outer


def test_a_narrower_student_recovers_a_model_embedded_in_its_teacher(tmp_path: Path) -> None:
    inner, outer = a_model_and_a_wider_equivalent()
    torch.testing.assert_close(velocity(outer), velocity(inner), rtol=1e-4, atol=1e-4)  # eps has twice the effect
    pruning = plan(weights := saved(outer, tmp_path), OUTER, INNER)
    assert pruning.kept["channels"] == PLACES["channels"].tolist()
    assert pruning.kept["1.attn2"] == PLACES["heads"].tolist() and pruning.kept["0.ffn"] == PLACES["neurons"].tolist()
    assert "24 of 48 channels; 2 of 4 heads; 40 of 64 neurons" in pruning.summary
    student = inherited(weights, pruning, INNER)
    for (name, mine), theirs in zip(student.named_parameters(), inner.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6, msg=name)
    torch.testing.assert_close(velocity(student), velocity(inner), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "config",
    [NARROW, {**TEACHER, "ffn_dim": 24}, {**NARROW, "num_attention_heads": 3, "attention_head_dim": 6}],
    ids=["narrower", "fewer neurons", "other heads"],
)
def test_rows_of_pruned_weights_equal_rows_of_the_whole_matrix(config: dict[str, Any], tmp_path: Path) -> None:
    weights = saved(model(TEACHER), tmp_path)
    source = PrunedWeights(lambda: (weights, plan(weights, TEACHER, config)))
    for name, weight in build_meta(config).named_parameters():
        whole = source.rows(f"transformer.{name}", 0, len(weight))
        assert whole.shape == weight.shape, name
        parts = [(start, min(start + 7, len(weight))) for start in range(0, len(weight), 7)]
        assert torch.equal(whole, torch.cat([source.rows(f"transformer.{name}", *part) for part in parts])), name


def test_only_the_range_between_the_first_and_last_row_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = saved(model(TEACHER), tmp_path)
    pruning = plan(weights, TEACHER, NARROW)
    source, read = PrunedWeights(lambda: (weights, pruning)), []
    plain = Weights.rows

    def counted(self: Weights, name: str, start: int, stop: int) -> Tensor:
        read.append(stop - start)
        return plain(self, name, start, stop)

    monkeypatch.setattr(Weights, "rows", counted)
    monkeypatch.setattr(Weights, "tensor", lambda *_: pytest.fail("read whole"))
    places = pruning.kept["2.ffn"]
    source.rows("transformer.blocks.1.ffn.net.0.proj.weight", 3, 9)
    assert read == [places[8] - places[3] + 1]


def test_a_pruning_plan_survives_a_json_round_trip(tmp_path: Path) -> None:
    weights = saved(model(TEACHER), tmp_path)
    pruning = plan(weights, TEACHER, NARROW, factor=0.5)
    again = PruningPlan(**json.loads(json.dumps(asdict(pruning))))
    assert again == pruning
    assert torch.equal(velocity(inherited(weights, again, NARROW)), velocity(inherited(weights, pruning, NARROW)))


def test_the_most_important_attention_heads_are_inherited_as_a_whole(tmp_path: Path) -> None:
    teacher = model(TEACHER)
    with torch.no_grad():
        for block in teacher.blocks:
            for head, strength in enumerate((1.0, 3.0, 0.1, 2.0)):
                block.attn1.to_v.weight[head * 12 : head * 12 + 12] *= strength
    pruning = plan(saved(teacher, tmp_path), TEACHER, NARROW)
    assert pruning.layers == [0, 2, 4]
    for layer in (0, 2, 4):
        assert pruning.kept[f"{layer}.attn1"] == [*range(12, 24), *range(36, 48)]


def test_attention_with_another_number_of_heads_starts_random_with_zero_output(tmp_path: Path) -> None:
    config = {**TEACHER, "num_attention_heads": 8, "attention_head_dim": 6}
    weights = saved(teacher := model(TEACHER), tmp_path)
    pruning = plan(weights, TEACHER, config, seed=3)
    assert all(text in pruning.summary for text in ("attention starts from random weights", "6 wide", "12"))
    student = inherited(weights, pruning, config)
    own = dict(student.named_parameters())
    for name, theirs in teacher.named_parameters():
        if ".attn" not in name:
            assert torch.equal(own[name], theirs), name
        elif ".to_out." in name:
            assert not own[name].any()
        else:
            assert torch.equal(own[name], random_rows(name, theirs.shape, 0, len(theirs), 3))


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"num_layers": 6}, ("6 layers", "--init fresh")),
        ({"num_attention_heads": 5}, ("60 channels", "--init fresh")),
        ({"ffn_dim": 72}, ("72 neurons", "--init fresh")),
        ({"freq_dim": 128}, ("freq_dim 128", "--init fresh")),
        ({"cross_attn_norm": False}, ("cross_attn_norm False", "--init fresh")),
        ({"in_channels": 8}, ("in_channels 8",)),
    ],
)
def test_weights_that_cannot_be_inherited_are_rejected(
    other: dict[str, Any], words: tuple[str, ...], tmp_path: Path
) -> None:
    teacher = student_of(None, TEACHER, 8).config | {"num_layers": 5}
    weights = saved(model(TEACHER), tmp_path)
    refused(lambda: plan(weights, teacher, {**teacher, **other}), *words)


# Fresh


def test_a_randomly_initialised_student_outputs_zero_and_is_the_same_on_every_rank() -> None:
    one, other = model(TEACHER, seed=1), model(TEACHER, seed=2)
    initialise_randomly(one, 7), initialise_randomly(other, 7)
    assert not velocity(one).any()
    for (name, mine), theirs in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs), name
    initialise_randomly(other, 8)
    assert not torch.equal(one.patch_embedding.weight, other.patch_embedding.weight)


def test_randomly_initialised_weights_have_the_scale_of_the_original_models() -> None:
    initialise_randomly(one := model(TEACHER), 0)
    embedder, block = one.condition_embedder, one.blocks[0]
    for weight, spread in (
        (block.ffn.net[0].proj.weight, (2 / (48 + 64)) ** 0.5),
        (one.patch_embedding.weight, (2 / (48 + 64)) ** 0.5),
        (embedder.time_proj.weight, (2 / (48 + 288)) ** 0.5),
        (embedder.time_embedder.linear_1.weight, 0.02),
        (embedder.text_embedder.linear_2.weight, 0.02),
        (block.scale_shift_table, 48**-0.5),
    ):
        assert abs(weight.std() / spread - 1) < 0.1 and abs(weight.mean()) < 0.15 * spread
    assert not block.attn1.to_q.bias.any() and (block.attn1.norm_q.weight == 1).all()
    assert not torch.equal(block.ffn.net[0].proj.weight, one.blocks[1].ffn.net[0].proj.weight)
