"""seo: packed texts without padding give the same vectors as padded texts."""

from __future__ import annotations

import json
import pickle
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from seo_data import write_ranking
from seo_models import decoder_folder, encoder_folder
from unisono import train
from unisono.engine.build.device import switches
from unisono.engine.export import export_run
from unisono.errors import ConfigError
from unisono.parallel.blocks.repeated import recompute_activations
from unisono.recipes.clips.recipe import Clips
from unisono.recipes.seo.models import packing
from unisono.recipes.seo.models.encoder import Encoder
from unisono.recipes.seo.models.groups import grouped
from unisono.recipes.seo.models.packing import Packed, pack, read_packed
from unisono.recipes.seo.recipe import Seo
from unisono.recipes.seo.tasks import bi_encoder as rank
from unisono.settings import Settings

NEW = int(transformers.__version__.split(".")[0]) >= 5
pytestmark = pytest.mark.skipif(not NEW, reason="transformers 4 cannot read packed texts")
FAMILIES = ("Bert", "Roberta", "XLMRoberta", "Camembert")


def encoder(family: str, pooling: Any = "mean", **changed: Any) -> Encoder:
    shape: dict[str, Any] = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape |= {"intermediate_size": 64, "max_position_embeddings": 48, "pad_token_id": 1, **changed}
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**shape)
    return Encoder(transformers.AutoModel.from_config(config).eval(), pooling)


def texts() -> list[Any]:
    """One text contains the pad token, one has no tokens at all."""
    drawn = np.random.default_rng(0)
    result = [drawn.integers(2, 60, length) for length in (5, 1, 40, 7, 7, 22, 0)]
    result[2][[3, 30]] = 1
    return result


def packed(model: Encoder) -> Packed:
    return pack(texts(), 1, model.uncounted)


def step(model: Encoder, laid_out: Any) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    vectors = laid_out.through(model)
    torch.manual_seed(1)
    (vectors * torch.randn(vectors.shape, dtype=vectors.dtype).to(vectors.device)).sum().backward()
    return vectors.detach(), {name: part.grad for name, part in model.named_parameters() if part.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_packing_gives_the_vectors_and_gradients_of_padding(family: str, pooling: str) -> None:
    model = encoder(family, pooling).double()
    vectors, gradients = step(model, grouped(texts(), 1, 2))
    assert read_packed(model.backbone) is None
    ours, our_gradients = step(model, packed(model))
    torch.testing.assert_close(ours, vectors, rtol=0, atol=1e-12)
    assert gradients.keys() == our_gradients.keys() and len(gradients) > 20
    for name, gradient in gradients.items():
        torch.testing.assert_close(our_gradients[name], gradient, rtol=0, atol=1e-12, msg=name)
    again, _ = step(model, grouped(texts(), 1, 2))
    assert torch.equal(again, vectors), "with padding it must still be what it was"


def test_attention_gets_no_mask_that_grows_with_the_square_of_all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def noted(module: Any, *parts: Any, **told: Any) -> Any:
        seen.append((parts[3], type(told["packed"])))
        return attend(module, *parts, **told)

    attend = packing.attend
    monkeypatch.setattr(packing, "attend", noted)
    model = encoder("Bert")
    read_packed(model.backbone)
    packed(model).through(model)
    assert seen == [(None, Packed)] * 2


def test_recomputed_activations_use_the_same_dropout() -> None:
    model = encoder("Bert", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.5).double()
    read_packed(model.backbone)
    without, _ = step(model, packed(model))
    model.train()
    torch.manual_seed(3)
    vectors, gradients = step(model, packed(model))
    assert not torch.allclose(vectors, without, atol=1e-3)
    for block in model.backbone.encoder.layer:
        recompute_activations(block)
    torch.manual_seed(3)
    again, our_gradients = step(model, packed(model))
    assert torch.equal(again, vectors)
    assert all(torch.equal(our_gradients[name], gradient) for name, gradient in gradients.items())


def test_unsupported_models_are_reported_with_the_reason(tmp_path: Path) -> None:
    pairs = write_ranking(tmp_path / "pairs.jsonl", 60)
    common: dict[str, Any] = {"data_path": str(pairs), "num_workers": 0, "nproc": 1, "max_steps": 1, "batch_size": 4}
    common |= {"tensorboard": False, "max_length": 40, "query_length": 16, "padding": "none"}
    decoder = decoder_folder(tmp_path / "decoder")
    with pytest.raises(ConfigError, match=r"padding none: gpt2 is not a BERT or RoBERTa model.*--padding groups"):
        train("seo", **common, model_name=str(decoder), output_dir=str(tmp_path / "run"))
    for changed, output in (
        ({"hidden_size": 24}, "head width is 6"),
        ({"is_decoder": True}, "a decoder"),
        ({"chunk_size_feed_forward": 8}, "chunk_size_feed_forward"),
    ):
        model = encoder("Bert", **changed).backbone
        assert output in (read_packed(model) or "") and model.config._attn_implementation == "sdpa"
    model = encoder("Bert").backbone
    model.set_attn_implementation = lambda name: None  # the result if transformers only warns
    assert read_packed(model) == "transformers cannot change the model's attention"


def test_a_run_without_padding_leaves_a_usual_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with a LoRA, whose model is wrapped. The exported model also works where packing is impossible."""
    pairs = write_ranking(tmp_path / "pairs.jsonl", 60)
    common: dict[str, Any] = {"data_path": str(pairs), "num_workers": 0, "nproc": 1, "max_steps": 2, "batch_size": 8}
    common |= {"model_name": str(encoder_folder(tmp_path / "base")), "tensorboard": False, "max_length": 40}
    common |= {"query_length": 16, "log_every": 1, "eval_every": 2, "disable_dropout": True, "lora_rank": 2}
    losses, numbers = {}, list[int]()

    def noted(rows: Any, pad_id: int, number: int, *more: Any) -> Any:
        numbers.append(number)
        return grouped(rows, pad_id, number, *more)

    monkeypatch.setattr(rank, "grouped", noted)
    for padding in ("none", "groups"):
        numbers.clear()
        folder = tmp_path / padding
        train("seo", **common, padding=padding, output_dir=str(folder))
        assert set(numbers) == ({1} if padding == "none" else {1, 4})  # 1: evaluation
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        losses[padding] = [line["loss"] for line in lines if "loss" in line]
    assert losses["none"] == pytest.approx(losses["groups"], rel=1e-5) and len(losses["none"]) == 2
    monkeypatch.setattr(rank, "read_packed", lambda backbone: "it is impossible here")
    for padding in ("none", "groups"):
        export_run(tmp_path / padding, tmp_path / f"out {padding}")
    one, two = (load_file(tmp_path / f"out {padding}/model.safetensors") for padding in ("none", "groups"))
    assert one.keys() == two.keys() and all(torch.allclose(one[name], two[name], atol=1e-5) for name in one)


@pytest.mark.parametrize(
    ("flash", "padding", "packs"),
    [(False, "auto", False), (True, "auto", True), (True, "groups", False), (False, "none", True)],
)
def test_auto_packs_where_there_is_flash_attention(
    flash: bool, padding: Any, packs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unisono.recipes.seo.models.load.load_encoder", lambda *_: encoder("Roberta"))
    monkeypatch.setattr(rank.BiEncoder, "tokenizer", SimpleNamespace(pad_token_id=1))
    monkeypatch.setattr(rank.BiEncoder, "_most_negatives", 0)
    recipe = Seo(Seo.Config(data_path="debian", padding=padding))
    recipe.flash_attention, recipe.global_batch = flash, 8
    recipe.model()
    items = [rank.Pair(query, query, 0, [], [], np.array([0])) for query in texts()[:3]]
    in_a_worker = pickle.loads(ForkingPickler.dumps(recipe.task))
    result = in_a_worker.collate(items)["texts"]
    assert isinstance(result, Packed) is packs
    if packs:
        assert result.places.max() == 37 and result.places.min() == -1  # two of the 40 tokens do not count


def test_a_model_that_cannot_be_packed_is_padded_with_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unisono.recipes.seo.models.load.load_encoder", lambda *_: encoder("Bert", hidden_size=24))
    monkeypatch.setattr(rank.BiEncoder, "tokenizer", None)
    monkeypatch.setattr(rank.BiEncoder, "_most_negatives", 0)
    recipe = Seo(Seo.Config(data_path="debian"))
    recipe.flash_attention, recipe.global_batch = True, 8
    recipe.model()
    assert not recipe.task.packs and "head width is 6" in recipe.remarks[0]  # type: ignore[attr-defined]


def test_with_many_shapes_attention_avoids_cudnn_during_the_run() -> None:
    assert Seo.many_shapes and Clips.many_shapes
    enabled = torch.backends.cuda.cudnn_sdp_enabled
    before = enabled()
    for many_shapes in (True, False):
        with switches(Settings(), many_shapes=many_shapes):
            assert enabled() == (before and not many_shapes)
        assert enabled() == before


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("pooling", "dtype"), [("mean", torch.bfloat16), ("cls", torch.float16), ("last", torch.bfloat16)]
)
def test_flash_attention_on_a_gpu_agrees_to_rounding(family: str, pooling: str, dtype: torch.dtype) -> None:
    """Errors are no larger than those of padded texts in 16 bit; two runs are bit-identical."""
    model, device = encoder(family, pooling).cuda(), torch.device("cuda")
    exact, exact_gradients = step(model, grouped(texts(), 1, 2).on(device))
    read_packed(model.backbone)
    result, again = {}, {}
    torch.use_deterministic_algorithms(True)
    try:
        for name, laid_out in (("padded", grouped(texts(), 1, 2)), ("packed", packed(model))):
            for kept in (result, again):
                with torch.autocast("cuda", dtype):
                    kept[name] = step(model, laid_out.on(device))
    finally:
        torch.use_deterministic_algorithms(False)
    whole, off = torch.stack([each.norm() for each in exact_gradients.values()]).norm(), {}
    for name, (vectors, gradients) in result.items():
        apart = [(gradients[key] - exact_gradients[key]).norm() for key in exact_gradients]
        off[name] = float((vectors - exact).norm()), float(torch.stack(apart).norm() / whole)
        assert torch.equal(vectors, again[name][0])
        assert all(torch.equal(gradients[key], again[name][1][key]) for key in gradients)
    assert off["packed"][0] < 1.5 * off["padded"][0] and off["packed"][1] < 1.5 * off["padded"][1]
    assert off["packed"][1] < 0.05


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_recomputed_flash_attention_uses_the_same_dropout() -> None:
    model, result = encoder("Bert", attention_probs_dropout_prob=0.5).cuda().train(), []
    read_packed(model.backbone)
    for recompute in (False, True):
        if recompute:
            for block in model.backbone.encoder.layer:
                recompute_activations(block)
        torch.manual_seed(3)
        with torch.autocast("cuda", torch.bfloat16):
            result.append(step(model, packed(model).on(torch.device("cuda"))))
    assert torch.equal(result[0][0], result[1][0])
    for name, gradient in result[0][1].items():
        torch.testing.assert_close(result[1][1][name], gradient, rtol=1e-2, atol=1e-4, msg=name)
