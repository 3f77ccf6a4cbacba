"""The model that is trained: its tokenizer, its labels, what it says of texts, and what a checkpoint keeps of that."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from unisono.engine.recipe import Loss
from unisono.errors import ConfigError
from unisono.multi_gpu import load_weights
from unisono.recipes.common.whole_files import write_whole
from unisono.recipes.seo.data.tokens import Tokenize
from unisono.recipes.seo.front.config import SEOConfig
from unisono.recipes.seo.front.labels import Labels
from unisono.recipes.seo.models.encoder import pad
from unisono.recipes.seo.models.load import load_classifier, load_tokenizer
from unisono.recipes.seo.models.tiny import TINY, keep_tokenizer
from unisono.recipes.seo.settings import Config

TRAINING, ABOUT = "training", "seo.json"
"""In the folder of a checkpoint: the engine's own, and what is to be known of it."""
_OF_MODEL = ("model_name", "max_length", "use_lora", "lora_r", "lora_alpha")
_MOST_BYTES = 2**20


class Learner:
    """A classifier of texts, made when it is known what its labels are."""

    def __init__(self, config: SEOConfig) -> None:
        self.config = config
        self.model: nn.Module | None = None
        self.tokenizer: Any = None
        self.labels: Labels | None = None
        self.learned_epochs = 0
        self._own = tempfile.TemporaryDirectory(prefix="unisono_seo_", ignore_cleanup_errors=True)

    def need_tokenizer(self, texts: Sequence[str] | None = None) -> Any:
        """The model's tokenizer; that of `tiny` is trained on these texts, the same in every process."""
        if self.tokenizer is None:
            self._load_tokenizer(Path(self._own.name), texts)
        return self.tokenizer

    def _load_tokenizer(self, folder: Path, texts: Sequence[str] | None) -> None:
        if self.config.model_name == TINY and self.config.use_lora:
            raise ConfigError("model_name tiny is new, and a LoRA would leave it so; use_lora=False trains all of it")
        self.tokenizer = load_tokenizer(self.config.model_name, None if texts is None else lambda: texts, folder)

    def need_model(self, labels: Labels, texts: Sequence[str] | None = None) -> nn.Module:
        """The model for these labels, with a new head; drawn from the config's seed."""
        if self.labels is not None and self.labels != labels:
            raise ConfigError("the labels are not those that this engine was trained on; make another engine")
        if self.model is None:
            tokenizer, config = self.need_tokenizer(texts), self.config
            told = Config(
                task="score",
                model_name=config.model_name,
                max_length=config.max_length,
                query_length=0,
                lora_rank=config.lora_r if config.use_lora else 0,
                lora_alpha=config.lora_alpha,
                lora_dropout=config.lora_dropout,
            )
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(config.seed)
                self.model = load_classifier(told, tokenizer, labels.num, labels.regression)
        self.labels = labels
        return self.model

    def forget(self) -> None:
        """Back to the beginning: the next model is made anew. The tokenizer stays."""
        self.model, self.labels, self.learned_epochs = None, None, 0

    # --- texts

    def tokens(self, texts: Sequence[str]) -> tuple[list[np.ndarray], int]:
        """The token ids of texts, cut to max_length, and how many were cut."""
        tokenize = Tokenize(self.need_tokenizer(texts), self.config.max_length)
        rows = tokenize(texts) if len(texts) else []
        return [np.array(row, dtype=np.int32) for row in rows], tokenize.num_cut

    def predict(self, texts: Sequence[str], precision: str = "no") -> np.ndarray:
        """What the model gives for each text, [texts, labels]; computed in this process."""
        assert self.model is not None and self.labels is not None
        rows, _ = self.tokens(texts)
        order = sorted(range(len(rows)), key=lambda place: len(rows[place]))
        found = np.zeros((len(rows), self.labels.num))
        device, before = next(self.model.parameters()).device, self.model.training
        dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(precision)
        self.model.eval()
        try:
            with torch.no_grad(), nullcontext() if dtype is None else torch.autocast(device.type, dtype):
                for start in range(0, len(order), self.config.batch_size):
                    some = order[start : start + self.config.batch_size]
                    ids, mask = pad([rows[place] for place in some], self.tokenizer.pad_token_id)
                    said = self.model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits
                    found[some] = said.double().cpu().numpy()
        finally:
            self.model.train(before)
        return found

    # --- checkpoints

    def write_about(self, folder: Path) -> None:
        """Writes what a checkpoint must say beside its weights."""
        assert self.labels is not None
        about = {name: getattr(self.config, name) for name in _OF_MODEL}
        about |= {"labels": self.labels.to_json(), "epochs": self.learned_epochs}
        if self.config.model_name == TINY:
            keep_tokenizer(self.tokenizer, folder / "tokenizer")
        write_whole(folder / ABOUT, (json.dumps(about, indent=2) + "\n").encode())

    def check_place(self, folder: Path) -> None:
        """Refuses to save where something lies that this engine did not put there."""
        if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
            raise ConfigError(f"{folder} is a file, and a checkpoint is a folder; choose another name, or move it away")
        ours = {TRAINING, ABOUT, "tokenizer"}
        there = sorted(each.name for each in folder.iterdir()) if folder.is_dir() else []
        if strange := [name for name in there if name not in ours and not name.endswith(".part")]:
            raise ConfigError(f"{folder} holds {strange[0]}, which is no part of a checkpoint; choose another name")
        if self.config.model_name == TINY and (folder / "tokenizer/tokenizer.json").is_file():
            theirs = load_tokenizer(TINY, None, folder)
            if theirs.get_vocab() != self.tokenizer.get_vocab():
                raise ConfigError(f"{folder} is a checkpoint with another tokenizer; choose another name")

    def read_about(self, folder: Path) -> Labels:
        """What a checkpoint's labels are; one that does not belong to this config, or to these labels, is refused."""
        about = _read_about(folder)
        for name in _OF_MODEL:
            if about.get(name) != getattr(self.config, name):
                mine, theirs = getattr(self.config, name), about.get(name)
                raise ConfigError(f"{folder} was saved with {name}={theirs!r}, and the config says {mine!r}; use that")
        labels, epochs = Labels.from_json(about.get("labels")), about.get("epochs")
        if self.labels is not None and labels != self.labels:
            raise ConfigError(f"{folder} was trained on other labels than this engine; make another engine for it")
        self.learned_epochs = epochs if isinstance(epochs, int) and epochs > 0 else 0
        return labels

    def read(self, folder: Path) -> None:
        """Takes up a checkpoint: labels, tokenizer and weights."""
        self.forget()
        labels = self.read_about(folder)
        if self.config.model_name == TINY:
            self._load_tokenizer(folder, None)
        model = self.need_model(labels)
        weights = load_weights(folder / TRAINING)
        try:
            model.load_state_dict(weights)
        except RuntimeError as error:
            said = " ".join(str(error).split())[:200]
            raise ConfigError(f"{folder}: its weights do not fit the model {self.config.model_name} ({said})") from None


def _read_about(folder: Path) -> dict[str, Any]:
    file = folder / ABOUT
    if not file.is_file():
        raise ConfigError(f"{folder} is no checkpoint of this engine: it has no {ABOUT}; save_checkpoint writes one")
    try:
        if file.stat().st_size > _MOST_BYTES:
            raise ValueError("it is too long")
        about = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read ({error}); take another checkpoint") from None
    if not isinstance(about, dict):
        raise ConfigError(f"{file} is not what save_checkpoint writes; take another checkpoint")
    return about


class Tokens(Dataset[tuple[np.ndarray, Any]]):
    """What is trained on: token ids, and the label as the model sees it."""

    def __init__(self, rows: Sequence[np.ndarray], labels: Sequence[Any]) -> None:
        self.rows, self.labels = rows, labels

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[np.ndarray, Any]:
        return self.rows[index], self.labels[index]


class Padded:
    """Makes a batch of such items, as wide as its longest text."""

    def __init__(self, pad_id: int, regression: bool) -> None:
        self.pad_id, self.regression = pad_id, regression

    def __call__(self, items: list[tuple[np.ndarray, Any]]) -> dict[str, Tensor]:
        ids, mask = pad([row for row, _ in items], self.pad_id)
        labels = torch.tensor([label for _, label in items], dtype=torch.float32 if self.regression else torch.int64)
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}


class Judge:
    """The loss of what a model gave for texts: a sum over them, as the engine wants it."""

    def __init__(self, labels: Labels) -> None:
        self.regression, self.scale = labels.regression, labels.scale

    def __call__(self, output: Any, target: Tensor) -> Loss:
        logits = output.logits
        if self.regression:
            said = logits[:, 0].to(torch.promote_types(logits.dtype, torch.float32))  # squares overflow 16 bit
            errors = said - target.to(said.dtype)
            return Loss(errors.square().sum(), len(target), {"mae": errors.detach().abs().sum() * self.scale})
        right = (logits.detach().argmax(1) == target).sum()
        return Loss(functional.cross_entropy(logits, target, reduction="sum"), len(target), {"accuracy": right})
