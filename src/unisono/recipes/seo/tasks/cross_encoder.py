"""The task `rank` with the method `cross`: the model reads query and page together and outputs one score.

This is slower and more accurate than comparing embeddings, so the model only reranks the results of BM25. In training,
each query comes with its page and several negatives: hard negatives if the data has them, otherwise random pages.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torch.utils.data import Dataset

from unisono.engine.recipe import Loss
from unisono.formatting import format_count
from unisono.recipes.seo.models.groups import Groups, Tokens, grouped
from unisono.recipes.seo.tasks.ranking import BM25_RESULTS, RankingTask

if TYPE_CHECKING:
    from unisono.data.noise import Noise
    from unisono.recipes.seo.data.store import Texts
    from unisono.recipes.seo.tasks.matching import Matching

_NEGATIVES = 4  # default number of negatives per query


class CrossEncoder(RankingTask):
    """Scores a query and a page together."""

    special_tokens = False

    @property
    def num_negatives(self) -> int:
        """Number of negatives per query."""
        return self.config.num_negatives or _NEGATIVES

    def start_remark(self, global_batch: int) -> str | None:
        """Returns a message with the number of negatives per query."""
        return f"each query is scored with its page and {format_count(self.num_negatives, 'negative')}"

    def model(self) -> nn.Module:
        """Builds a classifier of query-page pairs with one output."""
        from unisono.recipes.seo.models.load import load_cross_encoder

        return load_cross_encoder(self.config, self.tokenizer)

    def train_data(self) -> Dataset[Any]:
        """Returns queries with their page and negatives."""
        return Lists(self.texts("queries"), self.texts("pages"), self.matching("train"), self.num_negatives)

    def eval_data(self) -> Dataset[Any]:
        """Returns the BM25 results of the held-out queries."""
        best = np.load(self.folder / BM25_RESULTS, allow_pickle=False)
        return BM25Results(self.texts("eval_queries"), self.texts("eval_pages"), self.matching("eval"), best)

    def collate(self, items: list[Any]) -> Any:
        """Joins queries and pages into pairs, and groups the pairs by length."""
        pairing = pairing_of(self.tokenizer)
        pairs = [pairing.joined(item.query, page) for item in items for page in item.pages]
        groups = grouped(
            [pair[0] for pair in pairs],
            int(self.tokenizer.pad_token_id),
            self.config.length_groups,
            [pair[1] for pair in pairs] if pairing.typed else None,
        )
        numbers = torch.tensor([item.numbers for item in items])
        return {"pairs": groups, "numbers": numbers, "rows": torch.tensor([item.row for item in items])}

    def _scores(self, model: nn.Module, batch: Any) -> Tensor:
        """Returns [queries, pages] scores."""

        def score(ids: Tensor, mask: Tensor, types: Tensor | None = None) -> Tensor:
            further = {} if types is None else {"token_type_ids": types}
            scores: Tensor = model(input_ids=ids, attention_mask=mask, **further).logits[:, 0]
            return scores.to(torch.promote_types(scores.dtype, torch.float32))

        groups: Groups = batch["pairs"]
        return groups.through(score).view(batch["numbers"].shape)

    def loss(self, model: nn.Module, batch: Any, noise: Noise) -> Loss:
        """Returns the loss; the first page of each list is the relevant one, all others are negatives."""
        scores = self._scores(model, batch)
        first = (scores.argmax(1) == 0).double().sum()
        if self.config.cross_loss == "bce":
            target = torch.zeros_like(scores)
            target[:, 0] = 1
            each = binary_cross_entropy_with_logits(scores, target, reduction="none").mean(1)
        else:
            each = cross_entropy(
                scores, torch.zeros(len(scores), dtype=torch.long, device=scores.device), reduction="none"
            )
        return Loss(each.sum(), len(each), {"first_right": first})

    def evaluate(self, model: nn.Module, batch: Any, noise: Noise) -> Mapping[str, Any]:
        """Reranks the BM25 results."""
        scores = self._scores(model, batch).masked_fill(batch["numbers"] < 0, torch.nan)
        self.metrics["pages"].update(scores, batch["numbers"], batch["rows"])
        return {"pages": self.metrics["pages"], **self.baseline_metrics(len(scores))}

    def export(self, model: nn.Module, folder: Path) -> None:
        """Writes a folder for transformers and sentence-transformers' CrossEncoder."""
        from unisono.recipes.seo.export import write_cross_encoder

        pairing, config = pairing_of(self.tokenizer), self.config
        around = len(pairing.before) + len(pairing.between) + len(pairing.after)
        longest = config.max_length + config.query_length + around
        write_cross_encoder(model, self.tokenizer, folder, longest, base=config.model_name)


class Pairing(NamedTuple):
    """The special tokens around and between two texts."""

    before: list[int]
    between: list[int]
    after: list[int]
    typed: bool  # whether the tokenizer returns token types

    def joined(self, first: Tokens, second: Tokens) -> tuple[Tokens, Tokens]:
        """Returns the tokens of both texts in one row, and the token types: 0 for the first text, 1 for the second."""
        left = np.concatenate([self.before, first, self.between]).astype(np.int32)
        right = np.concatenate([second, self.after]).astype(np.int32)
        return np.concatenate([left, right]), np.repeat([0, 1], [len(left), len(right)])


def pairing_of(tokenizer: Any) -> Pairing:
    """Returns the special tokens with which a tokenizer joins two texts, derived from an example."""
    plain = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("query", "page")]
    both = tokenizer("query", "page")
    ids = list(both["input_ids"])
    start = _find(ids, plain[0], 0)
    second = _find(ids, plain[1], start + len(plain[0]))
    typed = any(both.get("token_type_ids", []))
    return Pairing(ids[:start], ids[start + len(plain[0]) : second], ids[second + len(plain[1]) :], typed)


def _find(ids: list[int], part: list[int], start: int) -> int:
    for place in range(start, len(ids) - len(part) + 1):
        if ids[place : place + len(part)] == part:
            return place
    raise ValueError("the tokenizer changes the tokens of a text when it joins two texts")


class Listed(NamedTuple):
    """A query and the pages to score for it; in training, the relevant page is first."""

    query: Tokens
    pages: Sequence[Tokens]
    numbers: list[int]
    row: int  # number of the query


class Lists(Dataset[Listed]):
    """Sample i: the i-th pair of a query and a relevant page, and negatives."""

    def __init__(self, queries: Texts, pages: Texts, matching: Matching, num_negatives: int) -> None:
        self.queries, self.pages, self.matching, self.num_negatives = queries, pages, matching, num_negatives

    def __len__(self) -> int:
        return len(self.matching.relevant)

    def __getitem__(self, index: int) -> Listed:
        matching = self.matching
        query = int(np.searchsorted(matching.starts, index, side="right")) - 1
        wrong = matching.negatives_of(query).tolist()
        # The engine seeds `random` by the sample's position in the stream.
        chosen = random.sample(wrong, min(len(wrong), self.num_negatives))
        right = {int(page) for page in matching.relevant_for(query)}
        while len(chosen) < self.num_negatives:
            other = random.randrange(len(self.pages))
            if other not in right or len(right) == len(self.pages):
                chosen.append(other)
        numbers = [int(matching.relevant[index]), *chosen]
        tokens = [self.pages[number] for number in numbers]
        return Listed(self.queries[int(matching.queries[query])], tokens, numbers, query)


class BM25Results(Dataset[Listed]):
    """Item i: the i-th held-out query and its best pages by BM25."""

    def __init__(self, queries: Texts, pages: Texts, matching: Matching, best: Any) -> None:
        self.queries, self.pages, self.matching, self.best = queries, pages, matching, best

    def __len__(self) -> int:
        return len(self.best)

    def __getitem__(self, index: int) -> Listed:
        numbers = self.best[index].tolist()
        tokens = [self.pages[max(0, number)] for number in numbers]  # -1 if BM25 returned fewer pages
        return Listed(self.queries[int(self.matching.queries[index])], tokens, numbers, index)
