"""What was trained, opened for use: a run's folder, or the folder of any model of this kind.

ranker = open_ranker("runs/seo-…")         # or a folder of sentence-transformers, or "minilm"
ranker.scores(["web server"], [page, other_page])
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
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
_USUAL_LENGTH = 512  # where neither a model's folder nor its positions say one


class Ranker:
    """Says how well pages answer queries."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        config: Config,
        told: str,
        most: int | None = None,
    ) -> None:
        """`told`: which weights these are, in words; `most`: tokens of a pair, where its texts have no limits each."""
        self.model, self.config, self.told = model.eval(), config, told
        self._tokenizer: Any = tokenizer
        self._most = most

    def to(self, device: torch.device | str) -> Ranker:
        """Computes there from now on."""
        self.model.to(device)
        return self

    @property
    def embeds(self) -> bool:
        """Whether it reads queries and pages apart; otherwise there are scores only."""
        return isinstance(self.model, Encoder)

    def embed(self, texts: Sequence[str], kind: Kind = "page") -> Tensor:
        """[texts, width] vectors of length 1, on the CPU; their products are cosines."""
        if not isinstance(self.model, Encoder):
            raise UserError("a cross-encoder reads a query and a page together and has no embeddings; use scores")
        length = self.config.query_length if kind == "query" else self.config.max_length
        prompt = self.model.prompts[kind]
        rows = _rows(self._tokenizer, [f"{prompt}{text}" for text in texts], length)
        return _in_batches(rows, self._vectors) if rows else torch.zeros(0, 0)

    def scores(self, queries: Sequence[str], pages: Sequence[str]) -> Tensor:
        """[queries, pages] on the CPU: cosines, or a cross-encoder's numbers; the higher the better."""
        if not queries or not pages:
            return torch.zeros(len(queries), len(pages))
        if self.embeds:
            return self.embed(queries, "query") @ self.embed(pages, "page").T
        asked = _rows(self._tokenizer, queries, self.config.query_length, special_tokens=False)
        read = _rows(self._tokenizer, pages, self.config.max_length, special_tokens=False)
        # One query after the other: all pairs at once may be many.
        return torch.stack([self._judged(query, read) for query in asked])

    def _vectors(self, rows: Sequence[Row], numbers: Sequence[int]) -> Tensor:
        ids, mask = pad(rows, self._tokenizer.pad_token_id)
        found: Tensor = self.model(*_placed(self.model, ids, mask))
        return found

    def _judged(self, query: Row, pages: Sequence[Row]) -> Tensor:
        pairing = pairing_of(self._tokenizer)
        around = len(pairing.before) + len(pairing.between) + len(pairing.after)
        room = len(query) + self.config.max_length if self._most is None else self._most - around
        pairs = [pairing.joined(query, page[: max(1, room - len(query))]) for page in pages]

        def judge(rows: Sequence[Row], numbers: Sequence[int]) -> Tensor:
            types = [pairs[number][1] for number in numbers] if pairing.typed else None
            return judged(self.model, self._tokenizer, rows, types)[:, 0]

        return _in_batches([ids for ids, _ in pairs], judge)


class Scorer:
    """Gives a page a number, or a probability for each class."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        config: Config,
        told: str,
        calibration: Calibration | None,
    ) -> None:
        self.model, self.config, self.told = model.eval(), config, told
        self.calibration = calibration or Calibration()
        self.is_number = _head(model).problem_type == "regression" or _head(model).num_labels == 1
        self.names = [] if self.is_number else self.calibration.names or list(_head(model).id2label.values())
        """Of the classes; empty: a number."""
        self._tokenizer: Any = tokenizer

    def to(self, device: torch.device | str) -> Scorer:
        """Computes there from now on."""
        self.model.to(device)
        return self

    def scores(self, texts: Sequence[str]) -> Tensor:
        """[texts] numbers in the labels' own unit, or [texts, classes] probabilities; calibrated where the run was."""
        rows = _rows(self._tokenizer, texts, self.config.max_length)
        if not rows:
            return torch.zeros(0) if self.is_number else torch.zeros(0, len(self.names))
        outputs = _in_batches(rows, lambda some, _: judged(self.model, self._tokenizer, some)).double().numpy()
        found = self.calibration.values(outputs[:, 0]) if self.is_number else self.calibration.probabilities(outputs)
        return torch.from_numpy(found)


def open_ranker(
    place: str | Path, *, step: str | None = None, weights: str = "auto", words: str | None = None
) -> Ranker:
    """The ranker of a run, or of a model by name or folder; step, weights and words as in `unisono export`."""
    if (Path(place) / "run.json").is_file():
        recipe, model, told = _of_run(Path(place), "rank", step, weights, words)
        tokenizer = _tokenizer_of(recipe)
        return Ranker(model, tokenizer, recipe.config, told)
    config, tokenizer, cross = _of_folder(str(place))
    if not cross:
        return Ranker(load_encoder(config, tokenizer), tokenizer, config, f"as in {place}")
    if _num_labels(str(place)) != 1:
        raise UserError(f"{place} tells {_num_labels(str(place))} classes apart; expected a model that ranks")
    model = load_classifier(config, tokenizer, 1)
    return Ranker(model, tokenizer, config, f"as in {place}", config.max_length)


def open_scorer(
    place: str | Path, *, step: str | None = None, weights: str = "auto", words: str | None = None
) -> Scorer:
    """The scorer of a run of the task `score`, or of a folder of a classifier."""
    if (Path(place) / "run.json").is_file():
        recipe, model, told = _of_run(Path(place), "score", step, weights, words)
        tokenizer = _tokenizer_of(recipe)
        return Scorer(model, tokenizer, recipe.config, told, recipe.task.calibration(model))
    config, tokenizer, classifies = _of_folder(str(place))
    if not classifies:
        raise UserError(f"{place} is neither a run of the task score nor a model that was trained to score")
    number = _num_labels(str(place))
    model = load_classifier(config, tokenizer, number, regression=number == 1)
    return Scorer(model, tokenizer, config, f"as in {place}", Calibration.read(locate(str(place))))


def judged(model: nn.Module, tokenizer: Any, rows: Sequence[Row], types: Sequence[Row] | None = None) -> Tensor:
    """[texts, labels] of a classifier or cross-encoder, for the tokens of texts (of pairs: and their types)."""
    ids, mask = pad(rows, tokenizer.pad_token_id)
    given = {"input_ids": ids, "attention_mask": mask}
    if types is not None:
        given["token_type_ids"] = pad(types, 0)[0]
    placed = dict(zip(given, _placed(model, *given.values()), strict=True))
    found: Tensor = model(**placed).logits.float()
    return found


def _of_run(run: Path, task: str, step: str | None, weights: str, words: str | None) -> tuple[Any, nn.Module, str]:
    with nothing_fetched():  # what a run's file names is not a wish of the user's
        recipe, model, told = load_trained(run, step=step, weights=weights, reference=words)
    config = recipe.config
    if getattr(config, "task", None) != task:
        made = f"the task {config.task}" if hasattr(config, "task") else f"the recipe {type(recipe).__name__}"
        raise UserError(f"{run} is a run of {made}; expected one of the recipe seo and its task {task}")
    return recipe, model, told


def _tokenizer_of(recipe: Any) -> PreTrainedTokenizerBase:
    with nothing_fetched():
        return load_tokenizer(recipe.config.model_name, None, recipe.prepared)


def _of_folder(name: str) -> tuple[Config, PreTrainedTokenizerBase, bool]:
    """Settings to load a model with, its tokenizer, and whether it has a head that gives numbers."""
    folder = locate(name)
    layout = read_layout(folder, name, any_pooling=True)
    told = read_json(layout.transformer / "config.json", dict) if (folder / "config.json").is_file() else {}
    heads = any("ForSequenceClassification" in str(kind) for kind in told.get("architectures") or ())
    tokenizer = load_tokenizer(name, None, folder)
    most = min(layout.max_length or _USUAL_LENGTH, tokenizer.model_max_length)
    if (positions := told.get("max_position_embeddings")) and isinstance(positions, int):
        most = min(most, positions)
    most = max(8, most // 8 * 8)
    return Config(model_name=name, max_length=most, query_length=most), tokenizer, heads


def _num_labels(name: str) -> int:
    """Transformers writes two only by leaving them out."""
    labels = read_json(locate(name) / "config.json", dict).get("id2label")
    return len(labels) if isinstance(labels, dict) else 2


def _rows(tokenizer: Any, texts: Sequence[str], length: int, *, special_tokens: bool = True) -> list[Row]:
    tokenize = Tokenize(tokenizer, length, special_tokens=special_tokens)
    return [np.array(row) for row in tokenize(texts)] if len(texts) else []


@torch.no_grad()
def _in_batches(rows: Sequence[Row], compute: Callable[[Sequence[Row], Sequence[int]], Tensor]) -> Tensor:
    """What `compute` gives for each row, in their order; rows of one length are computed together."""
    longest_first = sorted(range(len(rows)), key=lambda number: -len(rows[number]))
    found: Tensor | None = None
    for numbers in _cut(longest_first, rows):
        some = compute([rows[number] for number in numbers], numbers).float().cpu()
        if found is None:
            found = some.new_empty(len(rows), *some.shape[1:])
        found[numbers] = some
    assert found is not None
    return found


def _cut(numbers: Sequence[int], rows: Sequence[Row]) -> Iterator[list[int]]:
    start = 0
    while start < len(numbers):
        stop = start + max(1, _TOKENS_AT_ONCE // max(1, len(rows[numbers[start]])))
        yield list(numbers[start:stop])
        start = stop


def _placed(model: nn.Module, *tensors: Tensor) -> list[Tensor]:
    device = next(model.parameters()).device
    return [tensor.to(device) for tensor in tensors]


def _head(model: Any) -> Any:
    return model.config
