"""The task `score`: predicts a number or a class for a page, learned from the user's labels.

Evaluations on held-out pages include baselines that do not read the page (`metrics/scores.py`), and an exported model
contains a calibration of its outputs (`metrics/calibration.py`).
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from unisono.data.order import Order
from unisono.engine.recipe import Loss, Work
from unisono.errors import ConfigError, UserError
from unisono.recipes.common.cache_files import write_cache_file
from unisono.recipes.common.fingerprint import combined, of_tokenizer
from unisono.recipes.seo.data.labelled import Kind, Labelled, read_labelled
from unisono.recipes.seo.data.store import Texts, fill_texts, open_texts
from unisono.recipes.seo.data.tokens import Tokenize
from unisono.recipes.seo.export import write_classifier
from unisono.recipes.seo.metrics.calibration import FILE, Calibration, fit
from unisono.recipes.seo.metrics.scores import Baselines, ScoreMetrics
from unisono.recipes.seo.models.encoder import pad
from unisono.recipes.seo.models.load import load_classifier, load_tokenizer
from unisono.recipes.seo.tasks.matching import default_num_eval, few_held_out_remarks
from unisono.recipes.seo.tasks.task import Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from unisono.data.noise import Noise

_HELD_OUT = "held_out.npz"
_MOST_CALIBRATED = 1000  # maximum number of held-out pages for calibration, because an export may run on a CPU
_SHORTEST = 32  # shortest padded length in tokens; padding up to this length costs next to nothing
_BATCH = 32


class Scored(Dataset[dict[str, Any]]):
    """Pages with labels, in micro-batches of similar length."""

    def __init__(
        self, texts: Texts, rows: NDArray[np.int64], labels: NDArray[Any], characters: NDArray[np.int64]
    ) -> None:
        self._texts, self._rows, self.labels, self.characters = texts, rows, labels, characters
        self._tokens = np.asarray(texts.lengths)[rows]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = self._texts[int(self._rows[index])]
        return {"ids": ids, "label": self.labels[index], "length": self.characters[index], "index": index}

    def shape(self, index: int) -> int:
        """Returns a page's length, rounded up to a power of two: few distinct shapes keep micro-batches large."""
        return max(_SHORTEST, 1 << (int(self._tokens[index]) - 1).bit_length())

    def cost(self, index: int) -> float:
        """Returns the cost of a page, its number of tokens."""
        return float(max(1, self._tokens[index]))


class Score(Task):
    """Predicts a number or a class for a page."""

    headline: Sequence[str] = (
        *("eval/loss", "eval/AUC", "eval/AUC_length", "eval/F1", "eval/accuracy", "eval/accuracy_majority", "eval/ECE"),
        *("eval/Spearman", "eval/Spearman_length", "eval/RMSE", "eval/RMSE_mean"),
    )

    # Before training -----------------------------------------------------------------------------------------------

    def prepare(self, work: Work) -> None:
        """Reads the labels, holds out pages, and tokenizes all pages."""
        self.folder = work.folder
        data = self._read(self.config.data_path, self.config.label)
        held_out = self._read_held_out(data)
        rows = {"train": np.arange(len(data.texts)), "eval": np.zeros(0, np.int64)}
        if held_out is None:
            rows["train"], rows["eval"] = self._split(data.texts)
            self.remarks += few_held_out_remarks(len(rows["eval"]), "pages")
        if len({data.labels[row] for row in rows["train"]}) < 2:
            raise ConfigError(
                f"data_path {self.config.data_path}: after holding out {len(rows['eval'])} pages, all remaining labels "
                "are the same; hold out fewer (--num_eval), or add more pages"
            )
        self._check_labels(data.names or [])
        for _ in work.share([0]):  # one process trains the tokenizer of a tiny model; the others load it
            load_tokenizer(self.config.model_name, lambda: (data.texts[row] for row in rows["train"]), work.folder)
        if work.meet():
            return
        store = self._store(data.texts, work)
        other_store = store if held_out is None else self._store(held_out.texts, work)
        for _ in work.share([0]):
            self._note_labels(data, rows["train"])
        if work.meet():
            return
        train = self._open(store, data, rows["train"])
        held = None
        if held_out is not None:
            held = self._open(other_store, held_out, np.arange(len(held_out.texts)))
        elif len(rows["eval"]):
            held = self._open(store, data, rows["eval"])
        self._data = {"train": train, "eval": held}
        baselines = Baselines.fit(train.characters, train.labels, len(self.uncalibrated.names))
        self.metrics["scores"] = ScoreMetrics(self.uncalibrated, baselines)
        for _ in work.share([0]):
            if held is not None:
                self._keep_held_out(held)

    def _read(self, path: str | None, kind: Kind) -> Labelled:
        if not path:
            raise ConfigError("data_path: expected a .csv or .jsonl file with the columns text and label")
        return read_labelled(path, remark=self._remark, leave_out_bad=self.config.leave_out_bad, kind=kind)

    def _read_held_out(self, data: Labelled) -> Labelled | None:
        """Reads the pages of eval_data_path, with labels encoded as in data_path; None if eval_data_path is not set."""
        path = self.config.eval_data_path
        if not path:
            return None
        held_out = self._read(path, "number" if data.names is None else "class")
        train_texts = set(data.texts)
        if again := sum(text in train_texts for text in held_out.texts):
            self._remark(f"{again:,} of {len(held_out.texts):,} evaluation pages also occur in the training data")
        if data.names is None or held_out.names is None:
            return held_out
        unknown = [name for name in held_out.names if name not in data.names]
        if unknown:
            raise ConfigError(
                f"eval_data_path {path}: the class {unknown[0]!r} does not occur in data_path, whose classes are "
                f"{', '.join(data.names[:10])}; remove its rows, or add rows of this class to data_path"
            )
        number = [data.names.index(name) for name in held_out.names]
        return Labelled(held_out.texts, [number[int(label)] for label in held_out.labels], data.names)

    def _split(self, texts: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the training rows and the held-out rows; identical texts are in the same part."""
        number = self.config.num_eval
        if number is None:
            number = default_num_eval(len(texts))
        first: dict[str, int] = {}
        same = np.array([first.setdefault(text, len(first)) for text in texts])
        if number >= len(first):
            raise ConfigError(
                f"num_eval {number}: data_path {self.config.data_path} has {len(first)} distinct pages; some must "
                "remain for training"
            )
        # Do not use the run's seed for the split, so that runs with different seeds can be compared.
        drawn = Order(len(first), seed=0).indices(np.arange(number))
        out = np.isin(same, drawn)
        return np.flatnonzero(~out), np.flatnonzero(out)

    def _store(self, texts: Sequence[str], work: Work) -> Path:
        digest = hashlib.sha256()
        for text in texts:
            digest.update(hashlib.sha256(text.encode(errors="surrogatepass")).digest())
        most = self.config.max_length
        name = combined("score", digest.hexdigest(), of_tokenizer(self._tokenizer), most)
        base = Path(self.config.cache_dir).expanduser() if self.config.cache_dir else work.folder
        return fill_texts(base / "tokens", lambda: texts, Tokenize(self._tokenizer, most), name, work, "pages")

    def _open(self, folder: Path, data: Labelled, rows: NDArray[np.int64]) -> Scored:
        texts = open_texts(folder)
        if texts.num_cut:
            self._remark(f"{texts.num_cut:,} of {len(texts):,} pages are longer than max_length and were truncated")
        labels = np.array(data.labels, np.int64 if data.names else np.float32)[rows]
        return Scored(texts, rows, labels, np.array([len(data.texts[row]) for row in rows], np.int64))

    def _check_labels(self, names: list[str]) -> None:
        """Rejects labels that differ from the labels the run began with."""
        if (self.folder / FILE).is_file() and self.uncalibrated.names != names:
            before, now = (", ".join(some[:10]) or "numbers" for some in (self.uncalibrated.names, names))
            raise ConfigError(
                f"data_path {self.config.data_path}: the labels are {now}, but this run began with {before}; use "
                "another output_dir"
            )

    def _note_labels(self, data: Labelled, rows: NDArray[np.int64]) -> None:
        if (self.folder / FILE).is_file():  # a resumed run keeps the mean and std that it began with
            return
        numbers = np.array(data.labels, np.float64)[rows]
        if data.names:
            calibration = Calibration(names=data.names)
        else:
            calibration = Calibration(mean=float(numbers.mean()), std=float(numbers.std()))
        calibration.write(self.folder)

    def _keep_held_out(self, data: Scored) -> None:
        """Stores some of the held-out pages, so that an export can calibrate without reading the data again."""
        chosen = np.sort(Order(len(data), seed=0).indices(np.arange(min(len(data), _MOST_CALIBRATED))))
        items = [data[int(index)] for index in chosen]
        content = io.BytesIO()
        np.savez(
            content,
            ids=np.concatenate([item["ids"] for item in items]),
            tokens=np.array([len(item["ids"]) for item in items]),
            labels=np.array([item["label"] for item in items]),
        )
        write_cache_file(self.folder / _HELD_OUT, content.getvalue())

    def _remark(self, text: str) -> None:
        if text not in self.remarks:
            self.remarks.append(text)

    # Model and data ------------------------------------------------------------------------------------------------

    @cached_property
    def uncalibrated(self) -> Calibration:
        """The meaning of the model's outputs before calibration: the class names, or mean and std of the labels."""
        calibration = Calibration.read(self.folder)
        if calibration is None:
            raise UserError(
                f"{self.folder} has no {FILE}, which defines the model's outputs; copy the whole run folder"
            )
        return calibration

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(self.config.model_name, None, self.folder)

    def model(self) -> nn.Module:
        """Builds a transformer with a classification head."""
        names = self.uncalibrated.names
        return load_classifier(self.config, self._tokenizer, len(names) or 1, regression=not names)

    def dataset(self, split: str) -> Scored | None:
        """Returns the labelled pages of a split; None if no pages are held out."""
        return self._data[split]

    def collate(self, items: list[dict[str, Any]]) -> dict[str, Tensor]:
        """Pads a batch to its longest page."""
        pad_id: Any = self._tokenizer.pad_token_id
        ids, mask = pad([item["ids"] for item in items], pad_id)
        rest = {
            name: torch.from_numpy(np.array([item[name] for item in items])) for name in ("label", "length", "index")
        }
        return {"ids": ids, "mask": mask, **rest}

    # Training ------------------------------------------------------------------------------------------------------

    def loss(self, model: nn.Module, batch: Any, noise: Noise) -> Loss:
        """Returns the cross entropy for classes, or the squared error of standardised numbers."""
        return self._loss(self._outputs(model, batch["ids"], batch["mask"]), batch["label"])

    def _loss(self, outputs: Tensor, labels: Tensor) -> Loss:
        if self.uncalibrated.names:
            right = (outputs.detach().argmax(-1) == labels).sum()
            return Loss(functional.cross_entropy(outputs, labels, reduction="sum"), len(labels), {"accuracy": right})
        targets = (labels.to(outputs) - self.uncalibrated.mean) / self.uncalibrated.std
        return Loss(functional.mse_loss(outputs, targets, reduction="sum"), len(labels))

    def _outputs(self, model: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
        """Returns [pages, classes] logits or [pages] numbers, in float32 or higher precision."""
        logits: Tensor = model(input_ids=ids, attention_mask=mask).logits
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return logits if self.uncalibrated.names else logits[:, 0]

    def evaluate(self, model: nn.Module, batch: Any, noise: Noise) -> Mapping[str, Any]:
        """Returns the loss, and all metrics with their baselines."""
        outputs = self._outputs(model, batch["ids"], batch["mask"])
        self.metrics["scores"].update(batch["index"], outputs, batch["label"], batch["length"])
        loss = self._loss(outputs, batch["label"])
        return {"loss": (loss.total, loss.count), "scores": self.metrics["scores"]}

    # After training ------------------------------------------------------------------------------------------------

    def calibration(self, model: nn.Module) -> Calibration:
        """Fits the calibration of a trained model on held-out pages."""
        file = self.folder / _HELD_OUT
        if not file.is_file():
            return self.uncalibrated
        with np.load(file, allow_pickle=False) as arrays:
            rows, labels = np.split(arrays["ids"], np.cumsum(arrays["tokens"])[:-1]), arrays["labels"]
        pad_id: Any = self._tokenizer.pad_token_id
        by_length = np.argsort([len(row) for row in rows], kind="stable")
        device = next(model.parameters()).device
        outputs_of_batches: list[NDArray[np.float64]] = []
        with torch.inference_mode():
            for start in range(0, len(rows), _BATCH):
                ids, mask = pad([rows[row] for row in by_length[start : start + _BATCH]], pad_id)
                outputs_of_batches.append(self._outputs(model, ids.to(device), mask.to(device)).double().cpu().numpy())
        outputs = np.concatenate(outputs_of_batches)[np.argsort(by_length)]
        return fit(outputs, labels, self.uncalibrated)

    def export(self, model: nn.Module, folder: Path) -> None:
        """Writes a folder for AutoModelForSequenceClassification, with class names and calibration."""
        if (folder / FILE).exists():
            raise UserError(f"{folder} already contains {FILE}; choose another folder")
        config, names = self.config, self.uncalibrated.names or ["score"]
        calibration = self.calibration(model)
        write_classifier(model, self._tokenizer, folder, config.max_length, names=names, base=config.model_name)
        calibration.write(folder)

    _data: dict[str, Scored | None]
