"""Writes trained models as folders for transformers and sentence-transformers.

The files have the format of sentence-transformers 2, which newer versions also read. A LoRA is merged into the weights
and also written separately.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.errors import UserError
from unisono.recipes.seo.models.folders import quietly
from unisono.recipes.seo.models.lora import merged, write_adapter
from unisono.recipes.seo.models.tiny import save_tokenizer

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerBase

    from unisono.recipes.seo.models.encoder import Encoder

_POOLING = {"mean": "pooling_mode_mean_tokens", "cls": "pooling_mode_cls_token", "last": "pooling_mode_lasttoken"}
_OTHERS = ("max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens")


def write_sentence_transformer(
    encoder: Encoder, tokenizer: PreTrainedTokenizerBase, folder: Path, max_length: int, *, base: str = ""
) -> None:
    """Writes a folder for SentenceTransformer and AutoModel.from_pretrained; `base` is the name of the base model."""
    model = _write(encoder.backbone, tokenizer, folder, max_length, base)
    modules = ("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")
    listed = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (kind, path) in enumerate(modules)
    ]
    _json(folder / "modules.json", listed)
    pooling = {"word_embedding_dimension": model.config.hidden_size}
    pooling |= {key: mode == encoder.pooling for mode, key in _POOLING.items()}
    pooling |= {f"pooling_mode_{other}": False for other in _OTHERS}
    _json(folder / "1_Pooling" / "config.json", pooling | {"include_prompt": True})
    _json(folder / "2_Normalize" / "config.json", {})
    _json(folder / "sentence_bert_config.json", {"max_seq_length": max_length, "do_lower_case": False})
    prompts = {"query": encoder.prompts["query"], "document": encoder.prompts["page"]}
    _json(
        folder / "config_sentence_transformers.json",
        {"__version__": {}, "prompts": prompts, "default_prompt_name": None, "similarity_fn_name": "cosine"},
    )


def write_cross_encoder(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, folder: Path, max_length: int, *, base: str = ""
) -> None:
    """Writes a folder for transformers and for CrossEncoder, whose predict() returns the model's raw scores."""
    # By default CrossEncoder applies a sigmoid to a single output.
    extra_config = {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}
    _write(model, tokenizer, folder, max_length, base, extra_config)


def write_classifier(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    max_length: int,
    *,
    names: Sequence[str] | None = None,
    base: str = "",
) -> None:
    """Writes a folder for AutoModelForSequenceClassification.from_pretrained(folder), with the classes' names."""
    extra_config: dict[str, Any] = {}
    if names is not None:
        extra_config["id2label"] = dict(enumerate(map(str, names)))
        extra_config["label2id"] = {str(name): number for number, name in enumerate(names)}
    _write(model, tokenizer, folder, max_length, base, extra_config)


def write_writer(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, folder: Path, max_length: int, *, base: str = ""
) -> None:
    """Writes a folder for AutoModelForSeq2SeqLM or AutoModelForCausalLM."""
    _write(model, tokenizer, folder, max_length, base)


def _write(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    max_length: int,
    base: str,
    extra_config: dict[str, Any] | None = None,
) -> Any:
    """Writes weights, config and tokenizer; returns the merged model."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "model.safetensors", "tokenizer.json", "modules.json"):
        if (folder / name).exists():
            raise UserError(f"{folder} already contains {name}; choose another folder")
    whole = merged(model)
    with quietly():
        write_adapter(model, folder, base)
        whole.save_pretrained(str(folder))
        save_tokenizer(tokenizer, folder, max_length)
    file = folder / "config.json"
    config = json.loads(file.read_text()) | (extra_config or {})
    config.pop("_name_or_path", None)  # may be a local path
    _json(file, config)
    return whole


def _json(file: Path, value: Any) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
