"""LoRAs of language models on frozen weights in few bits: BERT, GPT-2 (whose layers are transposed) and T5."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from many_runs import Outcome, Run, largest_difference, many_runs
from seo_data import write_ranking
from seo_models import both_folder, decoder_folder, encoder_folder
from unisono.engine.export import export_run
from unisono.quantize.formats import FORMATS

pytestmark = pytest.mark.slow  # test_base_precision.py claims the same of a small recipe

NAMES = sorted(FORMATS)
COMMON: dict[str, Any] = {
    **{"lora_rank": 2, "num_workers": 0, "tensorboard": False, "log_every": 1, "disable_dropout": True},
    **{"learning_rate": 1e-2, "lr_schedule": "constant", "warmup_steps": 0, "global_batch_size": 6, "batch_size": 6},
    **{"max_steps": 2, "save_every": 0, "eval_every": -1, "preview_every": -1, "best_metric": None, "max_length": 40},
}
RANK = {"query_length": 16, "num_eval": 20}
SNIPPET = {"task": "snippet", "target_length": 12, "num_eval": 4}
SHARDS = {"strategy": "fsdp", "batch_size": 2}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("seo")
    write_ranking(root / "pairs.jsonl", 100)
    pages = [{"text": f"This page is about {what} in Oslo.", "title": f"{what} in Oslo"} for what in "abcdefghijklmnop"]
    (root / "pages.jsonl").write_text("".join(json.dumps(page) + "\n" for page in pages))
    for name, make in {"bert": encoder_folder, "gpt2": decoder_folder, "t5": both_folder}.items():
        make(root / name)
    return root


@pytest.fixture(scope="module")
def runs(root: Path) -> dict[str, Outcome]:
    run_list = []

    def add(name: str, world: int, model: str, **settings: Any) -> None:
        task = RANK if model in ("bert", "tiny") else SNIPPET
        data = {"data_path": str(root / ("pairs.jsonl" if task is RANK else "pages.jsonl"))}
        model_name = {"model_name": model if model == "tiny" else str(root / model), "cache_dir": str(root / "cache")}
        run_list.append(
            Run(name, f"runs/{name}", world, {**COMMON, **task, **data, **model_name, **settings}, recipe="seo")
        )

    for precision in ("auto", *NAMES):
        for model in ("bert", "gpt2"):
            add(f"{model} {precision}", 1, model, base_precision=precision)
    for model in ("bert", "gpt2", "t5", "tiny"):
        exact = {"base_precision": "nf4", "dtype": "float64"}
        add(f"{model}, 1 rank", 1, model, **exact)
        add(f"{model}, 3 ranks", 3, model, **exact, **SHARDS)
    add("nothing frozen", 1, "bert", base_precision="int8", lora_rank=0)
    return many_runs(run_list, root)


@pytest.mark.parametrize("model", ["bert", "gpt2"])
def test_each_format_trains_a_little_differently(model: str, runs: dict[str, Outcome]) -> None:
    exact = runs[f"{model} auto"].losses()
    distances = {name: float((runs[f"{model} {name}"].losses() - exact).abs().max()) for name in NAMES}
    assert 0 < max(distances["bf16"], distances["int8"]) < distances["nf4"] < 0.05 * exact.max(), distances
    assert distances["fp8"] < distances["nf4"]


@pytest.mark.parametrize("model", ["bert", "gpt2", "t5", "tiny"])
def test_ranks_and_shards_train_alike(model: str, runs: dict[str, Outcome]) -> None:
    one, three = runs[f"{model}, 1 rank"], runs[f"{model}, 3 ranks"]
    torch.testing.assert_close(three.losses(), one.losses(), rtol=1e-10, atol=0)
    assert largest_difference(three.weights(), one.weights()) < 1e-10


def test_an_exported_model_is_its_original_base_with_the_lora(
    root: Path, runs: dict[str, Outcome], tmp_path: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModel

    run = runs["bert nf4"]
    export_run(run.folder, tmp_path / "out")
    merged, base = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", root / "bert"))
    layer, weights = "encoder.layer.0.attention.self.query", run.weights()
    [down] = (tensor for name, tensor in weights.items() if f"{layer}.lora_A" in name)
    [up] = (tensor for name, tensor in weights.items() if f"{layer}.lora_B" in name)
    expected = base[f"{layer}.weight"] + 2 * up @ down  # alpha is twice the rank
    torch.testing.assert_close(merged[f"{layer}.weight"], expected, rtol=0, atol=1e-6)
    adapted: Any = PeftModel.from_pretrained(AutoModel.from_pretrained(root / "bert"), tmp_path / "out" / "adapter")
    loaded = adapted.merge_and_unload().state_dict()[f"{layer}.weight"]
    torch.testing.assert_close(loaded, merged[f"{layer}.weight"], rtol=0, atol=1e-6)


def test_the_tiny_models_frozen_weights_are_exported_from_their_codes(runs: dict[str, Outcome], tmp_path: Path) -> None:
    run = runs["tiny, 1 rank"]
    assert any(name.endswith("base_layer.weight_scales") for name in run.weights())
    export_run(run.folder, tmp_path / "out")
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert exported and all(tensor.is_floating_point() for tensor in exported.values())
    assert not any("scales" in name or "base_layer" in name for name in exported)


def test_a_precision_without_a_lora_is_refused(runs: dict[str, Outcome]) -> None:
    refused = runs["nothing frozen"]
    assert refused.main["exit_code"] == 2 and "train a LoRA" in refused.main["error"] and not refused.folder.exists()
