"""Opens trained models for inference: from a run folder, or from the folder of a transformers model.

ranker = open_ranker("runs/seo-…")         # or a folder of sentence-transformers, or "minilm"
ranker.scores(["web server"], [page, other_page])
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from unisono.engine.export import load_trained
from unisono.errors import UserError
from unisono.recipes.common.model_files import read_json
from unisono.recipes.seo.data.tokens import Tokenize
from unisono.recipes.seo.metrics.calibration import Calibration
from unisono.recipes.seo.models.encoder import Encoder, Row, pad
from unisono.recipes.seo.models.folders import Kind, locate, nothing_fetched, read_layout
from unisono.recipes.seo.models.load import load_classifier, load_encoder, load_tokenizer
from unisono.recipes.seo.settings import Config
from unisono.recipes.seo.tasks.cross_encoder import pairing_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TOKENS_AT_ONCE = 16_384
_DEFAULT_LENGTH = 512  # maximum length if neither the model's folder nor its position embeddings define one


class Ranker:
    """Scores how well pages answer queries."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        config: Config,
        description: str,
        max_pair_length: int | None = None,
    ) -> None:
        """`description` names the model in messages. `max_pair_length` limits query plus page for a cross-encoder."""
        self.model, self.config, self.description = model.eval(), config, description
        self._tokenizer: Any = tokenizer
        self._max_pair_length = max_pair_length

    def to(self, device: torch.device | str) -> Ranker:
        """Moves the model to a device."""
        self.model.to(device)
        return self

    @property
    def embeds(self) -> bool:
        """Whether the model embeds queries and pages separately; a cross-encoder does not."""
        return isinstance(self.model, Encoder)

    def embed(self, texts: Sequence[str], kind: Kind = "page") -> Tensor:
        """Returns the embeddings as [texts, width] unit vectors on the CPU."""
        if not isinstance(self.model, Encoder):
            raise UserError("a cross-encoder has no embeddings, because it reads query and page together; use scores")
        length = self.config.query_length if kind == "query" else self.config.max_length
        prompt = self.model.prompts[kind]
        rows = _rows(self._tokenizer, [f"{prompt}{text}" for text in texts], length)
        return _in_batches(rows, self._vectors) if rows else torch.zeros(0, 0)

    def scores(self, queries: Sequence[str], pages: Sequence[str]) -> Tensor:
        """Returns [queries, pages] scores on the CPU: cosines, or a cross-encoder's outputs; higher is better."""
        if not queries or not pages:
            return torch.zeros(len(queries), len(pages))
        if self.embeds:
            return self.embed(queries, "query") @ self.embed(pages, "page").T
        query_rows = _rows(self._tokenizer, queries, self.config.query_length, special_tokens=False)
        page_rows = _rows(self._tokenizer, pages, self.config.max_length, special_tokens=False)
        # Score one query at a time, because all pairs together may not fit into memory.
        return torch.stack([self._pair_scores(query, page_rows) for query in query_rows])

    def _vectors(self, rows: Sequence[Row], numbers: Sequence[int]) -> Tensor:
        ids, mask = pad(rows, self._tokenizer.pad_token_id)
        vectors: Tensor = self.model(*_on_device(self.model, ids, mask))
        return vectors

    def _pair_scores(self, query: Row, pages: Sequence[Row]) -> Tensor:
        pairing = pairing_of(self._tokenizer)
        num_special = len(pairing.before) + len(pairing.between) + len(pairing.after)
        limit = self._max_pair_length
        room = len(query) + self.config.max_length if limit is None else limit - num_special
        pairs = [pairing.joined(query, page[: max(1, room - len(query))]) for page in pages]

        def score(rows: Sequence[Row], numbers: Sequence[int]) -> Tensor:
            types = [pairs[number][1] for number in numbers] if pairing.typed else None
            return logits_of(self.model, self._tokenizer, rows, types)[:, 0]

        return _in_batches([ids for ids, _ in pairs], score)


class Scorer:
    """Predicts a number for a page, or a probability for each class."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        config: Config,
        description: str,
        calibration: Calibration | None,
    ) -> None:
        self.model, self.config, self.description = model.eval(), config, description
        self.calibration = calibration or Calibration()
        self.is_number = _head(model).problem_type == "regression" or _head(model).num_labels == 1
        self.names = [] if self.is_number else self.calibration.names or list(_head(model).id2label.values())
        """Names of the classes; empty if the model predicts a number."""
        self._tokenizer: Any = tokenizer

    def to(self, device: torch.device | str) -> Scorer:
        """Moves the model to a device."""
        self.model.to(device)
        return self

    def scores(self, texts: Sequence[str]) -> Tensor:
        """Returns [texts] numbers in the labels' unit, or [texts, classes] probabilities; calibrated if possible."""
        rows = _rows(self._tokenizer, texts, self.config.max_length)
        if not rows:
            return torch.zeros(0) if self.is_number else torch.zeros(0, len(self.names))
        outputs = _in_batches(rows, lambda some, _: logits_of(self.model, self._tokenizer, some)).double().numpy()
        calibration = self.calibration
        values = calibration.values(outputs[:, 0]) if self.is_number else calibration.probabilities(outputs)
        return torch.from_numpy(values)


def open_ranker(
    place: str | Path, *, step: str | None = None, weights: str = "auto", reference: str | None = None
) -> Ranker:
    """Opens a run or a model as a ranker; step, weights and reference work as in `unisono export`."""
    if (Path(place) / "run.json").is_file():
        recipe, model, description = _of_run(Path(place), "rank", step, weights, reference)
        tokenizer = _tokenizer_of(recipe)
        return Ranker(model, tokenizer, recipe.config, description)
    config, tokenizer, has_head = _of_folder(str(place))
    if not has_head:
        return Ranker(load_encoder(config, tokenizer), tokenizer, config, f"as in {place}")
    if _num_labels(str(place)) != 1:
        raise UserError(f"{place} is a classifier with {_num_labels(str(place))} classes; expected a ranking model")
    model = load_classifier(config, tokenizer, 1)
    return Ranker(model, tokenizer, config, f"as in {place}", config.max_length)


class SiteEncoder:
    """Embeds queries and pages to compare a site's pages."""

    def __init__(self, ranker: Ranker, name: str) -> None:
        self.name, self._ranker = name, ranker

    def to(self, device: torch.device | str) -> SiteEncoder:
        """Moves the model to a device."""
        self._ranker.to(device)
        return self

    def embed(self, texts: Sequence[str], kind: Kind = "page") -> NDArray[np.float32]:
        """Returns unit vectors [texts, width]."""
        return self._ranker.embed(texts, kind).numpy().astype(np.float32)


def open_encoder(place: str | Path) -> SiteEncoder | None:
    """Opens a run of the task `rank`, or a model, as an encoder; returns None for a model without embeddings."""
    with nothing_fetched():
        ranker = open_ranker(place)
    return SiteEncoder(ranker, f"{place} ({ranker.description})") if ranker.embeds else None


def open_scorer(
    place: str | Path, *, step: str | None = None, weights: str = "auto", reference: str | None = None
) -> Scorer:
    """Opens a run of the task `score`, or the folder of a classifier, as a scorer."""
    if (Path(place) / "run.json").is_file():
        recipe, model, description = _of_run(Path(place), "score", step, weights, reference)
        tokenizer = _tokenizer_of(recipe)
        return Scorer(model, tokenizer, recipe.config, description, recipe.task.calibration(model))
    config, tokenizer, has_head = _of_folder(str(place))
    if not has_head:
        raise UserError(f"{place} is neither a run of the task score nor a model with a classification head")
    number = _num_labels(str(place))
    model = load_classifier(config, tokenizer, number, regression=number == 1)
    return Scorer(model, tokenizer, config, f"as in {place}", Calibration.read(locate(str(place))))


def logits_of(model: nn.Module, tokenizer: Any, rows: Sequence[Row], types: Sequence[Row] | None = None) -> Tensor:
    """Returns [texts, labels] logits of a classifier or cross-encoder; `types` are the token types of pairs."""
    ids, mask = pad(rows, tokenizer.pad_token_id)
    inputs = {"input_ids": ids, "attention_mask": mask}
    if types is not None:
        inputs["token_type_ids"] = pad(types, 0)[0]
    moved = dict(zip(inputs, _on_device(model, *inputs.values()), strict=True))
    logits: Tensor = model(**moved).logits.float()
    return logits


def _of_run(run: Path, task: str, step: str | None, weights: str, reference: str | None) -> tuple[Any, nn.Module, str]:
    with nothing_fetched():  # opening a run must not trigger a download
        recipe, model, description = load_trained(run, step=step, weights=weights, reference=reference)
    config = recipe.config
    if getattr(config, "task", None) != task:
        actual = f"the task {config.task}" if hasattr(config, "task") else f"the recipe {type(recipe).__name__}"
        raise UserError(f"{run} is a run of {actual}; expected a run of the recipe seo with task {task}")
    return recipe, model, description


def _tokenizer_of(recipe: Any) -> PreTrainedTokenizerBase:
    with nothing_fetched():
        return load_tokenizer(recipe.config.model_name, None, recipe.prepared)


def _of_folder(name: str) -> tuple[Config, PreTrainedTokenizerBase, bool]:
    """Returns the config for loading a model, its tokenizer, and whether it has a classification head."""
    folder = locate(name)
    layout = read_layout(folder, name, any_pooling=True)
    config = read_json(layout.transformer / "config.json", dict) if (folder / "config.json").is_file() else {}
    has_head = any("ForSequenceClassification" in str(kind) for kind in config.get("architectures") or ())
    tokenizer = load_tokenizer(name, None, folder)
    length = min(layout.max_length or _DEFAULT_LENGTH, tokenizer.model_max_length)
    if (positions := config.get("max_position_embeddings")) and isinstance(positions, int):
        length = min(length, positions)
    length = max(8, length // 8 * 8)
    return Config(model_name=name, max_length=length, query_length=length), tokenizer, has_head


def _num_labels(name: str) -> int:
    """Returns the number of classes; transformers does not write the default of two to config.json."""
    labels = read_json(locate(name) / "config.json", dict).get("id2label")
    return len(labels) if isinstance(labels, dict) else 2


def _rows(tokenizer: Any, texts: Sequence[str], length: int, *, special_tokens: bool = True) -> list[Row]:
    tokenize = Tokenize(tokenizer, length, special_tokens=special_tokens)
    return [np.array(row) for row in tokenize(texts)] if len(texts) else []


@torch.no_grad()
def _in_batches(rows: Sequence[Row], compute: Callable[[Sequence[Row], Sequence[int]], Tensor]) -> Tensor:
    """Returns the results of `compute` in the order of the rows; rows of similar length are computed together."""
    longest_first = sorted(range(len(rows)), key=lambda number: -len(rows[number]))
    results: Tensor | None = None
    for numbers in _batches(longest_first, rows):
        some = compute([rows[number] for number in numbers], numbers).float().cpu()
        if results is None:
            results = some.new_empty(len(rows), *some.shape[1:])
        results[numbers] = some
    assert results is not None
    return results


def _batches(numbers: Sequence[int], rows: Sequence[Row]) -> Iterator[list[int]]:
    start = 0
    while start < len(numbers):
        stop = start + max(1, _TOKENS_AT_ONCE // max(1, len(rows[numbers[start]])))
        yield list(numbers[start:stop])
        start = stop


def _on_device(model: nn.Module, *tensors: Tensor) -> list[Tensor]:
    device = next(model.parameters()).device
    return [tensor.to(device) for tensor in tensors]


def _head(model: Any) -> Any:
    return model.config
