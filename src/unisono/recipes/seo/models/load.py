"""Loads models and tokenizers by name: a folder, a hub model, `minilm` or `tiny`.

Weights are read from safetensors, and no code from a model's folder is run. New weights (a head, a LoRA, a tiny model)
are initialised from the run's seed, so that all ranks begin with the same weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from unisono.errors import ConfigError, UserError
from unisono.recipes.seo.models.encoder import Encoder, position_table
from unisono.recipes.seo.models.folders import Kind, check_folder, in_a_line, locate, quietly, read_layout
from unisono.recipes.seo.models.lora import add_lora
from unisono.recipes.seo.models.tiny import TINY, encoder_config, keep_tokenizer, train_tokenizer, writer_config

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from unisono.recipes.seo.settings import Config

_TOKENIZERS = (
    "tokenizer.json",
    "vocab.txt",
    "vocab.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
)
_TROUBLE = (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, ImportError, RecursionError)
_MULTIPLE = 8  # batches are padded to a multiple of this many tokens
_KEPT = "tokenizer"


# Tokenizers --------------------------------------------------------------------------------------------------------


def load_tokenizer(
    name: str, data: Callable[[], Iterable[str]] | None, folder: Path, *, writes: bool = False
) -> PreTrainedTokenizerBase:
    """Loads a model's tokenizer. For `tiny`, trains it on `data` first and stores it in `folder` for all ranks."""
    if name == TINY:
        place = folder / _KEPT
        if not (place / "tokenizer.json").is_file():
            if data is None:
                raise UserError(f"{place}, the tokenizer that this run trained, is missing; copy the whole run folder")
            keep_tokenizer(train_tokenizer(data(), writes=writes), place)
    else:
        place = place_of(name)
        if not any((place / file).is_file() for file in _TOKENIZERS):
            raise ConfigError(f"model_name {name}: {place} has no tokenizer (tokenizer.json)")
    return _tokenizer_of(place, name)


def _tokenizer_of(place: Path, name: str) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    try:
        with quietly():
            tokenizer: Any = AutoTokenizer.from_pretrained(str(place), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises plain Exception
        raise ConfigError(f"model_name {name}: its tokenizer cannot be loaded ({in_a_line(error)})") from None
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise ConfigError(f"model_name {name}: it has no fast tokenizer (tokenizer.json); use another model")
    if tokenizer.pad_token is None:  # as in GPT-2; any token will do, because padding is masked
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
        if tokenizer.pad_token is None:
            raise ConfigError(f"model_name {name}: its tokenizer has no pad, eos or unk token; add one of them")
    tokenizer.padding_side = "right"
    typed: PreTrainedTokenizerBase = tokenizer
    return typed


def prompts_of(name: str) -> dict[Kind, str]:
    """Returns the prefixes of queries and pages; empty for most models."""
    prompts = {} if name == TINY else read_layout(locate(name), name, any_pooling=True).prompts
    return {"query": "", "page": "", **prompts}


# Models ------------------------------------------------------------------------------------------------------------


def place_of(name: str) -> Path:
    """Returns the folder with a model's config and weights, after safety checks; not for `tiny`."""
    place = read_layout(locate(name), name, any_pooling=True).transformer
    check_folder(place, name)
    return place


def load_encoder(config: Config, tokenizer: PreTrainedTokenizerBase) -> Encoder:
    """Loads the text encoder for the method bi."""
    from transformers import AutoModel

    name, length = config.model_name, max(config.max_length, config.query_length)
    if name == TINY:
        backbone = _made(AutoModel, encoder_config(tokenizer, length))
        pooling, prompts, decoder = None, None, False
    else:
        layout = read_layout(locate(name), name, any_pooling=config.pooling != "auto")
        check_folder(layout.transformer, name)
        model_config = _config_of(layout.transformer, name)
        if model_config.is_encoder_decoder:
            raise ConfigError(
                f"model_name {name}: {model_config.model_type} is an encoder-decoder, which cannot embed texts; use "
                "an encoder or a decoder"
            )
        pooling, prompts, decoder = layout.pooling, layout.prompts, is_decoder(model_config)
        backbone, _ = _loaded(AutoModel, layout.transformer, name)
    chosen = config.pooling if config.pooling != "auto" else pooling or ("last" if decoder else "mean")
    check_fit(backbone, tokenizer, length, name)
    encoder = Encoder(backbone, chosen, prompts, decoder=decoder)
    with _seeded():
        encoder.backbone = add_lora(backbone, config)
    return encoder


def load_classifier(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    num_labels: int,
    regression: bool = False,
    *,
    extra_tokens: int = 0,
) -> nn.Module:
    """Loads a text classifier; `extra_tokens` is the number of tokens that it reads beyond max_length."""
    from transformers import AutoModelForSequenceClassification as AutoClassifier

    name = config.model_name
    problem = "regression" if regression else "single_label_classification" if num_labels > 1 else None
    head = {"num_labels": num_labels, "problem_type": problem}
    if name == TINY:
        model_config = encoder_config(tokenizer, config.max_length + extra_tokens)
        model_config.num_labels, model_config.problem_type = num_labels, problem
        model, new = _made(AutoClassifier, model_config), list[str]()
    else:
        model, new = _loaded(AutoClassifier, place_of(name), name, **head)
    model.config.pad_token_id = tokenizer.pad_token_id  # a decoder's head uses it to find the last token
    check_fit(model, tokenizer, config.max_length, name, extra_tokens)
    # With a LoRA, the backbone is frozen, so train its newly initialised parts besides the head.
    heads = {key for key, part in model.named_children() if key != model.base_model_prefix and list(part.parameters())}
    heads |= {"pooler" for key in new if ".pooler." in key}
    with _seeded():
        with_lora: nn.Module = add_lora(model, config, sorted(heads))
    return with_lora


def load_cross_encoder(config: Config, tokenizer: PreTrainedTokenizerBase) -> nn.Module:
    """Loads a classifier of query-page pairs with one output."""
    around: Any = tokenizer.num_special_tokens_to_add(pair=True)
    return load_classifier(config, tokenizer, 1, extra_tokens=config.query_length + around)


def load_writer(config: Config, tokenizer: PreTrainedTokenizerBase) -> nn.Module:
    """Loads the model for the task `snippet`, an encoder-decoder or a decoder."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    name, two = config.model_name, reads_first(config.model_name)
    if name == TINY:
        model = _made(AutoModelForSeq2SeqLM, writer_config(tokenizer))
    else:
        model, _ = _loaded(AutoModelForSeq2SeqLM if two else AutoModelForCausalLM, locate(name), name)
    check_fit(model, tokenizer, config.max_length, name, 0 if two else config.target_length)
    with _seeded():
        with_lora: nn.Module = add_lora(model, config)
    return with_lora


def reads_first(name: str) -> bool:
    """Returns whether a text generation model is an encoder-decoder, not a decoder."""
    if name == TINY:
        return True
    place = locate(name)
    check_folder(place, name)
    model_config = _config_of(place, name)
    if not model_config.is_encoder_decoder and not is_decoder(model_config):
        raise ConfigError(
            f"model_name {name} cannot generate text: {model_config.model_type} is an encoder; use a model such as T5 "
            f"or GPT-2 (a folder or a hub id), or `{TINY}`"
        )
    return bool(model_config.is_encoder_decoder)


def is_decoder(model_config: Any) -> bool:
    """Returns whether a model is a decoder."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )

    # BERT and similar encoders are in both lists.
    kind = model_config.model_type
    return kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and kind not in MODEL_FOR_MASKED_LM_MAPPING_NAMES


def check_fit(model: Any, tokenizer: Any, length: int, name: str, extra_tokens: int = 0) -> None:
    """Rejects lengths beyond the model's position embedding, and tokenizers with more tokens than the model."""
    most = most_tokens(model)
    if most is not None and -(-(length + extra_tokens) // _MULTIPLE) * _MULTIPLE > most:
        best = most // _MULTIPLE * _MULTIPLE - extra_tokens
        needed = f"max_length {length} plus {extra_tokens} more" if extra_tokens else f"{length}"
        use = f"use --max_length {best} or less" if best > 0 else "use another model"
        raise ConfigError(f"model_name {name} reads at most {most} tokens, not {needed}; {use}")
    num_embeddings, used = model.get_input_embeddings().num_embeddings, max(tokenizer.get_vocab().values()) + 1
    if used > num_embeddings:
        raise ConfigError(
            f"model_name {name}: its tokenizer has {used} tokens, but the model has only {num_embeddings} embeddings; "
            "use the model's own tokenizer"
        )


def most_tokens(model: nn.Module) -> int | None:
    """Returns the number of tokens that a model can read; None if it has no position embedding."""
    table = position_table(model)
    if table is None:
        return None
    taken = 0 if table.padding_idx is None else table.padding_idx + 1  # RoBERTa's positions start after its padding id
    return table.num_embeddings - taken - getattr(table, "offset", 0)  # OPT and BART skip the first positions


def _config_of(folder: Path, name: str) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except _TROUBLE as error:
        raise ConfigError(f"model_name {name}: {folder / 'config.json'} cannot be used ({in_a_line(error)})") from None


def _made(kind: Any, model_config: Any) -> Any:
    return _attending(lambda attention: kind.from_config(model_config, attn_implementation=attention).float())


def _loaded(kind: Any, folder: Path, name: str, **further: Any) -> tuple[Any, list[str]]:
    """Loads a model in 32 bit; also returns the names of newly initialised weights, such as a head's or a pooler's."""
    from safetensors import SafetensorError

    try:
        model, info = _attending(
            lambda attention: kind.from_pretrained(
                str(folder),
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=False,
                dtype=torch.float32,
                attn_implementation=attention,
                ignore_mismatched_sizes=bool(further),
                output_loading_info=True,
                **further,
            )
        )
    except (*_TROUBLE, SafetensorError) as error:
        raise ConfigError(f"model_name {name}: {folder} cannot be loaded ({in_a_line(error)})") from None
    others = [key if isinstance(key, str) else key[0] for key in info["mismatched_keys"]]
    new = sorted({*info["missing_keys"], *others})
    prefix = f"{model.base_model_prefix}."
    whole = kind.__name__ == "AutoModel"
    lacking = [key for key in new if "pooler." not in key and (whole or key.startswith(prefix) or not further)]
    if lacking:
        raise ConfigError(
            f"model_name {name}: {len(lacking)} of the weights that config.json requires are missing from {folder}, "
            f"such as {lacking[0]}; use a complete copy of the model"
        )
    return model, new


def _attending(load: Callable[[str], Any]) -> Any:
    """Loads a model with PyTorch's SDPA attention if the model supports it; T5 in transformers 4 does not."""
    with quietly():
        try:
            with _seeded():
                return load("sdpa")
        except ValueError as error:
            if "scaled_dot_product" not in str(error):
                raise
            with _seeded():
                return load("eager")


@contextmanager
def _seeded() -> Iterator[None]:
    """Makes new weights depend only on the run's seed, not on random numbers drawn earlier."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(torch.initial_seed())
        yield
