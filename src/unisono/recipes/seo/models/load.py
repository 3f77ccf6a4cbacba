"""Models and tokenizers by name: a folder, a model of the hub, `minilm` or `tiny`.

Whatever is loaded comes from safetensors and runs no code of its own. What is new in it (a head, a LoRA, a tiny model)
is drawn from the run's seed, so that all ranks begin with the same weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from unisono.errors import ConfigError, UserError
from unisono.recipes.seo.data.tokens import whole_text
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
_MULTIPLE = 8  # to which batches are padded
_KEPT = "tokenizer"


# Tokenizers --------------------------------------------------------------------------------------------------------


def load_tokenizer(
    name: str, data: Callable[[], Iterable[str]] | None, folder: Path, *, writes: bool = False
) -> PreTrainedTokenizerBase:
    """The tokenizer of a model; that of `tiny` is trained on `data` and kept in `folder`, where all ranks find it."""
    if name == TINY:
        place = folder / _KEPT
        if not (place / "tokenizer.json").is_file():
            if data is None:
                raise UserError(f"{place} is not there, the tokenizer that this run has trained for itself")
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
            found: Any = AutoTokenizer.from_pretrained(str(place), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # which is what the library of tokenizers itself raises
        raise ConfigError(f"model_name {name}: its tokenizer cannot be loaded ({in_a_line(error)})") from None
    if not hasattr(found, "backend_tokenizer"):
        raise ConfigError(f"model_name {name}: its tokenizer has no fast form (tokenizer.json); use another model")
    if found.pad_token is None:  # GPT-2 and others: any token will do, because the mask says what is padding
        found.pad_token = found.eos_token or found.unk_token
        if found.pad_token is None:
            raise ConfigError(f"model_name {name}: its tokenizer has no pad, end or unknown token; give it one of them")
    found.padding_side = "right"
    made: PreTrainedTokenizerBase = found
    return made


def tokenizing(tokenizer: Any, max_length: int | None) -> Callable[[Sequence[str]], list[list[int]]]:
    """Turns texts into ids, special tokens included, cut to `max_length` if there is one; none without a token."""

    def tokens(texts: Sequence[str]) -> list[list[int]]:
        cut = {} if max_length is None else {"truncation": True, "max_length": max_length}
        found = tokenizer([whole_text(text) for text in texts], **cut, return_attention_mask=False, verbose=False)[
            "input_ids"
        ]
        return [row or [tokenizer.pad_token_id] for row in found]

    return tokens


def prompts_of(name: str) -> dict[Kind, str]:
    """What a model wants to read before a query and before a page; most want nothing."""
    told = {} if name == TINY else read_layout(locate(name), name, any_pooling=True).prompts
    return {"query": "", "page": "", **told}


# Models ------------------------------------------------------------------------------------------------------------


def place_of(name: str) -> Path:
    """The folder with the config and the weights of a model that is not `tiny`; it can be loaded safely."""
    place = read_layout(locate(name), name, any_pooling=True).transformer
    check_folder(place, name)
    return place


def load_encoder(config: Config, tokenizer: PreTrainedTokenizerBase) -> Encoder:
    """The model that turns a text into a vector."""
    from transformers import AutoModel

    name, length = config.model_name, max(config.max_length, config.query_length)
    if name == TINY:
        backbone = _made(AutoModel, encoder_config(tokenizer, length))
        pooling, prompts, decoder = None, None, False
    else:
        layout = read_layout(locate(name), name, any_pooling=config.pooling != "auto")
        check_folder(layout.transformer, name)
        told = _config_of(layout.transformer, name)
        if told.is_encoder_decoder:
            raise ConfigError(
                f"model_name {name}: {told.model_type} has an encoder and a decoder and cannot embed texts; use a "
                "model with one of them"
            )
        pooling, prompts, decoder = layout.pooling, layout.prompts, is_decoder(told)
        backbone, _ = _loaded(AutoModel, layout.transformer, name)
    chosen = config.pooling if config.pooling != "auto" else pooling or ("last" if decoder else "mean")
    check_fit(backbone, tokenizer, length, name)
    encoder = Encoder(backbone, chosen, prompts, decoder=decoder)
    with _seeded():
        encoder.backbone = add_lora(backbone, config)
    return encoder


def load_classifier(
    config: Config, tokenizer: PreTrainedTokenizerBase, num_labels: int, regression: bool = False, *, beside: int = 0
) -> nn.Module:
    """The model that gives a text a number, or one for each class; `beside`: tokens that it reads with each text."""
    from transformers import AutoModelForSequenceClassification as AutoClassifier

    name = config.model_name
    problem = "regression" if regression else "single_label_classification" if num_labels > 1 else None
    head = {"num_labels": num_labels, "problem_type": problem}
    if name == TINY:
        made = encoder_config(tokenizer, config.max_length + beside)
        made.num_labels, made.problem_type = num_labels, problem
        model, new = _made(AutoClassifier, made), list[str]()
    else:
        model, new = _loaded(AutoClassifier, place_of(name), name, **head)
    model.config.pad_token_id = tokenizer.pad_token_id  # by which a decoder's head finds the last token
    check_fit(model, tokenizer, config.max_length, name, beside)
    # With a LoRA the backbone is frozen, but for what of it nobody has trained yet.
    heads = {key for key, part in model.named_children() if key != model.base_model_prefix and list(part.parameters())}
    heads |= {"pooler" for key in new if ".pooler." in key}
    with _seeded():
        found: nn.Module = add_lora(model, config, sorted(heads))
    return found


def load_cross_encoder(config: Config, tokenizer: PreTrainedTokenizerBase) -> nn.Module:
    """The model that reads a query and a page together and gives one number."""
    around: Any = tokenizer.num_special_tokens_to_add(pair=True)
    return load_classifier(config, tokenizer, 1, beside=config.query_length + around)


def load_writer(config: Config, tokenizer: PreTrainedTokenizerBase) -> nn.Module:
    """The model that writes: one with encoder and decoder, or a decoder alone, as its folder says."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    name, two = config.model_name, reads_first(config.model_name)
    if name == TINY:
        model = _made(AutoModelForSeq2SeqLM, writer_config(tokenizer))
    else:
        model, _ = _loaded(AutoModelForSeq2SeqLM if two else AutoModelForCausalLM, locate(name), name)
    check_fit(model, tokenizer, config.max_length, name, 0 if two else config.target_length)
    with _seeded():
        found: nn.Module = add_lora(model, config)
    return found


def reads_first(name: str) -> bool:
    """Whether a model that writes has an encoder to read with; otherwise it goes on with what it has read."""
    if name == TINY:
        return True
    place = locate(name)
    check_folder(place, name)
    told = _config_of(place, name)
    if not told.is_encoder_decoder and not is_decoder(told):
        raise ConfigError(
            f"model_name {name} cannot write: {told.model_type} is an encoder; use a model such as T5 or GPT-2 (a "
            f"folder or a hub id), or `{TINY}`"
        )
    return bool(told.is_encoder_decoder)


def is_decoder(told: Any) -> bool:
    """Whether a model reads from left to right only."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )

    # BERT and its like are in both lists.
    kind = told.model_type
    return kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and kind not in MODEL_FOR_MASKED_LM_MAPPING_NAMES


def check_fit(model: Any, tokenizer: Any, length: int, name: str, beside: int = 0) -> None:
    """Refuses texts longer than a model has positions for, and a tokenizer with more tokens than it knows."""
    most = most_tokens(model)
    if most is not None and -(-(length + beside) // _MULTIPLE) * _MULTIPLE > most:
        best = most // _MULTIPLE * _MULTIPLE - beside
        told = f"{length} and {beside} beside them" if beside else f"{length}"
        use = f"use --max_length {best} or less" if best > 0 else "use another model"
        raise ConfigError(f"model_name {name} reads {most} tokens at most, not {told}; {use}")
    known, used = model.get_input_embeddings().num_embeddings, max(tokenizer.get_vocab().values()) + 1
    if used > known:
        raise ConfigError(
            f"model_name {name}: its tokenizer has {used} tokens and the model knows {known}; they do not "
            "belong together"
        )


def most_tokens(model: nn.Module) -> int | None:
    """How many tokens a model has positions for; None where it counts them without a table."""
    table = position_table(model)
    if table is None:
        return None
    taken = 0 if table.padding_idx is None else table.padding_idx + 1  # RoBERTa begins after its padding
    return table.num_embeddings - taken - getattr(table, "offset", 0)  # OPT and BART leave some out


def _config_of(folder: Path, name: str) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except _TROUBLE as error:
        raise ConfigError(f"model_name {name}: {folder / 'config.json'} cannot be used ({in_a_line(error)})") from None


def _made(kind: Any, told: Any) -> Any:
    return _attending(lambda attention: kind.from_config(told, attn_implementation=attention).float())


def _loaded(kind: Any, folder: Path, name: str, **further: Any) -> tuple[Any, list[str]]:
    """A model in 32 bit, and which of its weights are new: of a head, or a pooler that its folder does not have."""
    from safetensors import SafetensorError

    try:
        model, told = _attending(
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
    others = [key if isinstance(key, str) else key[0] for key in told["mismatched_keys"]]
    new = sorted({*told["missing_keys"], *others})
    prefix = f"{model.base_model_prefix}."
    whole = kind.__name__ == "AutoModel"
    lacking = [key for key in new if "pooler." not in key and (whole or key.startswith(prefix) or not further)]
    if lacking:
        raise ConfigError(
            f"model_name {name}: the weights in {folder} lack {len(lacking)} that the model of its config.json has, "
            f"such as {lacking[0]}; they do not belong together"
        )
    return model, new


def _attending(load: Callable[[str], Any]) -> Any:
    """What `load` gives for PyTorch's own attention, where the model can use it: T5 in transformers 4 cannot."""
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
    """What is drawn follows from the run's seed alone, whatever was drawn before."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(torch.initial_seed())
        yield
