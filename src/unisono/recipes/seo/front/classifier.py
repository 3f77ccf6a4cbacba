"""The classifier that the engine trains: model, tokenizer, labels, predictions, and checkpoint files."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
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
from unisono.plain_files import read_json
from unisono.recipes.common.cache_files import write_cache_file
from unisono.recipes.seo.data.labelled import Kind, encode_labels, label_value
from unisono.recipes.seo.data.tokens import Tokenize
from unisono.recipes.seo.front.config import SEOConfig
from unisono.recipes.seo.metrics.calibration import Calibration
from unisono.recipes.seo.models.encoder import pad
from unisono.recipes.seo.models.load import load_classifier, load_tokenizer
from unisono.recipes.seo.models.tiny import TINY, keep_tokenizer
from unisono.recipes.seo.settings import Config
from unisono.recipes.seo.trained import Scorer

TRAINING, DESCRIPTION = "training", "seo.json"
"""Names inside a checkpoint folder: the trainer's checkpoint, and the description of its model and labels."""
_MODEL_FIELDS = ("model_name", "max_length", "use_lora", "lora_r", "lora_alpha")
_LORA_DROPOUT = 0.1
_NOT_TRAINED = "no score: this engine is not trained yet; train it on labelled texts, or call load_checkpoint"
_NO_SCORE = "no score: the labels are three or more classes that are not numbers; see label and probabilities"


class Classifier:
    """A classifier of texts; its model is built once the labels are known."""

    def __init__(self, config: SEOConfig) -> None:
        self.config = config
        self.model: nn.Module | None = None
        self.tokenizer: Any = None
        self.labels: Calibration | None = None
        """The meaning of the model's outputs: class names, or the mean and standard deviation of numeric labels."""
        self.num_epochs = 0
        """Number of epochs trained so far."""
        self._folder = tempfile.TemporaryDirectory(prefix="unisono_seo_", ignore_cleanup_errors=True)

    def load_tokenizer(self, texts: Sequence[str] | None = None, folder: Path | None = None) -> Any:
        """Returns the model's tokenizer; for `tiny`, trains it on these texts or reads it from a checkpoint."""
        if self.tokenizer is None or folder is not None:
            if self.config.model_name == TINY and self.config.use_lora:
                raise ConfigError("model_name tiny has no pretrained weights for a LoRA to adapt; set use_lora=False")
            source = None if texts is None else lambda: texts
            self.tokenizer = load_tokenizer(self.config.model_name, source, folder or Path(self._folder.name))
        return self.tokenizer

    def settings(self) -> Config:
        """Returns the settings of the recipe for this model."""
        config = self.config
        return Config(
            task="score",
            model_name=config.model_name,
            max_length=config.max_length,
            query_length=0,
            lora_rank=config.lora_r if config.use_lora else 0,
            lora_alpha=config.lora_alpha,
            lora_dropout=_LORA_DROPOUT,
        )

    def build(self, labels: Calibration, texts: Sequence[str] | None = None) -> nn.Module:
        """Returns the model; the first call loads it and initialises a head for these labels from the config's seed."""
        if self.model is None:
            tokenizer = self.load_tokenizer(texts)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self.config.seed)
                num_outputs = len(labels.names) or 1
                self.model = load_classifier(self.settings(), tokenizer, num_outputs, regression=not labels.names)
            self.labels = labels
        return self.model

    def tokenize(self, texts: Sequence[str]) -> tuple[list[np.ndarray], int]:
        """Returns the token ids of texts, truncated to max_length, and how many texts were truncated."""
        tokenize = Tokenize(self.load_tokenizer(texts), self.config.max_length)
        return [np.array(row, dtype=np.int32) for row in tokenize(texts)], tokenize.num_cut

    def predict(self, texts: Sequence[str]) -> Tensor:
        """Returns probabilities [texts, classes] or numbers [texts], computed in this process in float32."""
        assert self.model is not None
        was_training = self.model.training
        try:
            return Scorer(self.model, self.tokenizer, self.settings(), "", self.labels).scores(texts)
        finally:
            self.model.train(was_training)

    def score(self, text: str) -> dict[str, Any]:
        """Returns score, label and class probabilities of a text, or the reason why there is no score."""
        if self.labels is None or not self.num_epochs:
            return {"seo_score": None, "label": None, "probabilities": None, "reason": _NOT_TRAINED}
        row, names = self.predict([text])[0].numpy(), self.labels.names
        if not names:
            return {"seo_score": float(row), "label": float(row), "probabilities": None, "reason": None}
        values = [_number(name) for name in names]
        score = float(row[1]) if len(names) == 2 else None
        if len(names) > 2 and not any(isinstance(value, str) for value in values):
            score = float(row @ np.array(values))
        return {
            "seo_score": score,
            "label": values[int(row.argmax())],
            "probabilities": dict(zip(names, row.tolist(), strict=True)),
            "reason": _NO_SCORE if score is None else None,
        }

    def write(self, folder: Path) -> None:
        """Writes the description of a checkpoint."""
        assert self.labels is not None
        description: dict[str, Any] = {name: getattr(self.config, name) for name in _MODEL_FIELDS}
        description |= {"labels": vars(self.labels), "epochs": self.num_epochs}
        if self.config.model_name == TINY:
            keep_tokenizer(self.tokenizer, folder / "tokenizer")
        write_cache_file(folder / DESCRIPTION, (json.dumps(description, indent=2) + "\n").encode())

    def check_folder(self, folder: Path) -> None:
        """Rejects a folder that contains anything but a checkpoint of this model."""
        names = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
        foreign = [name for name in names if name not in (TRAINING, DESCRIPTION, "tokenizer") and name[-5:] != ".part"]
        if foreign or folder.is_symlink() or (folder.exists() and not folder.is_dir()):
            content = f" and contains {foreign[0]}" if foreign else ""
            raise ConfigError(f"{folder} exists{content} but is not a checkpoint of this engine; choose another name")
        own_tokenizer = self.config.model_name == TINY and (folder / "tokenizer/tokenizer.json").is_file()
        if own_tokenizer and load_tokenizer(TINY, None, folder).get_vocab() != self.tokenizer.get_vocab():
            raise ConfigError(f"{folder} is a checkpoint with another tokenizer; choose another name")

    def read_description(self, folder: Path) -> Calibration:
        """Returns the labels of a checkpoint, which must match this engine's config and labels."""
        file = folder / DESCRIPTION
        if not file.is_file():
            raise ConfigError(f"{folder} is not a checkpoint of this engine: {DESCRIPTION} is missing")
        try:
            description = read_json(file)
            labels = Calibration.from_json(description["labels"])
            epochs = int(description["epochs"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{file} is damaged ({error!r}); use another checkpoint") from None
        for name in _MODEL_FIELDS:
            saved, configured = description.get(name), getattr(self.config, name)
            if saved != configured:
                raise ConfigError(f"{folder} was saved with {name}={saved!r}, but the config has {configured!r}")
        if self.labels is not None and labels != self.labels:
            raise ConfigError(f"{folder} was trained with different labels; create a new engine to load it")
        self.num_epochs = max(0, epochs)
        return labels

    def read(self, folder: Path) -> None:
        """Reads a checkpoint: labels, tokenizer and weights."""
        self.model, self.labels = None, None
        labels = self.read_description(folder)
        if self.config.model_name == TINY:
            self.load_tokenizer(folder=folder)
        model = self.build(labels)
        try:
            model.load_state_dict(load_weights(folder / TRAINING))
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:200]
            raise ConfigError(f"{folder}: its weights do not fit {self.config.model_name} ({reason})") from None


def labels_of(values: Sequence[Any], kind: str) -> Calibration:
    """Returns the meaning of labels: the class names, or the mean and standard deviation of numbers."""
    kinds: dict[str, Kind] = {"auto": "auto", "class": "class", "number": "number"}
    encoded, names = encode_labels([_label(value, index) for index, value in enumerate(values)], kinds[kind], "labels")
    if names is not None:
        return Calibration(names=names)
    return Calibration(mean=float(np.mean(encoded)), std=float(np.std(encoded)))


def encode(values: Sequence[Any], labels: Calibration) -> list[Any]:
    """Encodes labels for training: as class indices, or as standardised numbers."""
    plain = [_label(value, index) for index, value in enumerate(values)]
    if not labels.names:
        return [(float(value) - labels.mean) / labels.std for value in plain]
    indices = {name: index for index, name in enumerate(labels.names)}
    names = [value if isinstance(value, str) else f"{value:g}" for value in plain]
    for index, name in enumerate(names):
        if name not in indices:
            raise ConfigError(f"labels: number {index} is {name!r}; the classes are {', '.join(labels.names[:8])}")
    return [indices[name] for name in names]


def _label(value: Any, index: int) -> float | str:
    plain = value.item() if hasattr(value, "item") and not isinstance(value, str) else value
    label = label_value(int(plain) if isinstance(plain, bool) else plain)
    if label is None:
        raise ConfigError(f"labels: number {index} is {plain!r}; expected a class or a finite number")
    return label


def _number(name: str) -> int | float | str:
    """Converts the name of a class to a number if it is one; otherwise returns the name unchanged."""
    try:
        value = float(name)
    except ValueError:
        return name
    return int(value) if value.is_integer() else value


class Tokens(Dataset[tuple[np.ndarray, Any]]):
    """Token ids with encoded labels."""

    def __init__(self, rows: Sequence[np.ndarray], labels: Sequence[Any]) -> None:
        self.rows, self.labels = rows, labels

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[np.ndarray, Any]:
        return self.rows[index], self.labels[index]


class Collate:
    """Pads the texts of a batch to the longest."""

    def __init__(self, pad_id: int, label_type: torch.dtype) -> None:
        self.pad_id, self.label_type = pad_id, label_type

    def __call__(self, items: list[tuple[np.ndarray, Any]]) -> dict[str, Tensor]:
        ids, mask = pad([row for row, _ in items], self.pad_id)
        labels = torch.tensor([label for _, label in items], dtype=self.label_type)
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def classification_loss(output: Any, target: Tensor) -> Loss:
    """Returns the cross entropy, summed over the texts."""
    correct = (output.logits.detach().argmax(1) == target).sum()
    return Loss(functional.cross_entropy(output.logits, target, reduction="sum"), len(target), {"accuracy": correct})


def regression_loss(output: Any, target: Tensor) -> Loss:
    """Returns the squared error of the standardised numbers, summed over the texts."""
    values = output.logits[:, 0].to(torch.promote_types(output.logits.dtype, torch.float32))  # squares overflow 16 bit
    return Loss((values - target.to(values.dtype)).square().sum(), len(target))
