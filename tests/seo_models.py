"""Small real models in folders, as people have them: an encoder with WordPiece, decoders without a pad token, T5."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

TEXTS = [
    "A tool to look at pictures",
    "the fastest web server of the world, with many modules " * 4,
    "Ünïcode ② text, 3.5 times",
    "x",
    "mail for people who read mail",
]


def decoder_folder(folder: Path, *, words: list[str] = TEXTS, positions: int = 64, width: int = 32) -> Path:
    """A small GPT-2 whose tokenizer has an end token but no pad token."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    pieces = Tokenizer(models.BPE())
    pieces.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pieces.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    pieces.train_from_iterator(words, trainer)
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=pieces, eos_token="<|end|>", bos_token="<|end|>")
    end = tokenizer.eos_token_id
    torch.manual_seed(1)
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_embd=width,
        n_layer=2,
        n_head=2,
        n_positions=positions,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=end,
        eos_token_id=end,
    )
    GPT2LMHeadModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def encoder_folder(folder: Path, *, layers: int = 2) -> Path:
    """A small BERT as transformers saves it, without a pooling config."""
    import torch
    from transformers import BertConfig, BertModel

    from unisono.recipes.seo.models.tiny import save_tokenizer, train_tokenizer

    tokenizer: Any = train_tokenizer(TEXTS)
    torch.manual_seed(2)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
        pad_token_id=tokenizer.pad_token_id,
    )
    BertModel(config).save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    return folder


def both_folder(folder: Path) -> Path:
    """T5, small."""
    import torch
    from transformers import T5ForConditionalGeneration

    from unisono.recipes.seo.models.tiny import save_tokenizer, train_tokenizer, writer_config

    tokenizer = train_tokenizer(TEXTS, writes=True)
    torch.manual_seed(3)
    T5ForConditionalGeneration(writer_config(tokenizer)).save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    return folder
