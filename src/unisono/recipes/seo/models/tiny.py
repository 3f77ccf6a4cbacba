"""Small models for experiments without a download, with a tokenizer trained on the data.

The tokenizer is a byte-level BPE, because BPE training is deterministic. The result of WordPiece training depends on
the order of a hash table.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.atomic_files import atomic_folder
from unisono.errors import UserError
from unisono.recipes.seo.data.tokens import whole_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TINY = "tiny"
_VOCABULARY = 8192
_MOST_TEXTS = 200_000  # more texts would hardly change the vocabulary
_ENDLESS = re.compile(r"\S{256}")
_PAD, _BEGIN, _END, _MASK = "[PAD]", "[CLS]", "[SEP]", "[MASK]"
_WIDTH, _LAYERS, _HEADS = 128, 2, 4
_POSITIONS = 512


def train_tokenizer(texts: Iterable[str], *, writes: bool = False) -> PreTrainedTokenizerBase:
    """Trains a tokenizer deterministically; with `writes` it is reversible and preserves case, to generate text."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    pieces = Tokenizer(models.BPE())
    if not writes:
        pieces.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    # With a prefix space, a word has the same tokens at the beginning of a text as elsewhere.
    pieces.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=not writes)
    pieces.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=[_PAD, _BEGIN, _END, _MASK],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # Split very long words (embedded images, scripts without spaces), because training is quadratic in their length.
    words = (_ENDLESS.sub(r"\g<0> ", whole_text(text)) for text in islice(texts, _MOST_TEXTS))
    pieces.train_from_iterator(words, trainer)
    begin, end = (pieces.token_to_id(token) for token in (_BEGIN, _END))
    pieces.post_processor = processors.TemplateProcessing(
        single=f"$A {_END}" if writes else f"{_BEGIN} $A {_END}",
        pair=f"{_BEGIN} $A {_END} $B:1 {_END}:1",
        special_tokens=[(_BEGIN, begin), (_END, end)],
    )
    fast: Any = PreTrainedTokenizerFast  # untyped
    tokenizer: PreTrainedTokenizerBase = fast(
        tokenizer_object=pieces,
        pad_token=_PAD,
        cls_token=_BEGIN,
        sep_token=_END,
        eos_token=_END,
        mask_token=_MASK,
        # The tiny model that generates text is a T5, which has no token types.
        model_input_names=["input_ids", *([] if writes else ["token_type_ids"]), "attention_mask"],
    )
    return tokenizer


def keep_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Writes a tokenizer to a folder atomically; an existing folder is not changed."""
    try:
        with atomic_folder(folder) as temporary:
            save_tokenizer(tokenizer, temporary)
    except OSError as error:
        if not (folder / "tokenizer.json").is_file():  # otherwise all processes use the file of the first
            raise UserError(
                f"{folder} cannot be written ({error.strerror}); free some space, or use another folder"
            ) from None


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path, max_length: int | None = None) -> None:
    """Writes a tokenizer for transformers 4 and 5, without the truncation and padding settings of its last call."""
    tokenizer.save_pretrained(str(folder))
    file, config = folder / "tokenizer.json", folder / "tokenizer_config.json"
    pieces, settings = json.loads(file.read_text()), json.loads(config.read_text())
    if pieces.get("truncation") or pieces.get("padding"):  # stored settings would apply to every later call
        file.write_text(json.dumps(pieces | {"truncation": None, "padding": None}, ensure_ascii=False))
    if settings.get("tokenizer_class") == "TokenizersBackend":  # the name of this option in transformers 5
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    if max_length is not None:
        settings["model_max_length"] = max_length
    settings.pop("local_files_only", None)  # an option that unisono passed when loading
    config.write_text(json.dumps(settings, indent=2, ensure_ascii=False))


def encoder_config(tokenizer: PreTrainedTokenizerBase, max_length: int) -> Any:
    """Returns the config of a small BERT."""
    from transformers import BertConfig

    return BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=_WIDTH,
        num_hidden_layers=_LAYERS,
        num_attention_heads=_HEADS,
        intermediate_size=4 * _WIDTH,
        max_position_embeddings=max(_POSITIONS, -(-max_length // 8) * 8),
        # The model has no dropout, so that a run gives the same result on any number of ranks.
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        pad_token_id=tokenizer.pad_token_id,
    )


def writer_config(tokenizer: PreTrainedTokenizerBase) -> Any:
    """Returns the config of a small T5."""
    from transformers import T5Config

    config_class: Any = T5Config  # partly untyped
    return config_class(
        vocab_size=len(tokenizer),
        d_model=_WIDTH,
        d_kv=_WIDTH // _HEADS,
        d_ff=4 * _WIDTH,
        num_layers=_LAYERS,
        num_decoder_layers=_LAYERS,
        num_heads=_HEADS,
        dropout_rate=0.0,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.pad_token_id,
    )
