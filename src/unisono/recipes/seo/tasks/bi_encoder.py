"""The task `rank` with the method `bi`: the model embeds query and page separately.

The loss is contrastive: each query must pick its page from all pages of the global batch, on all ranks, and from the
hard negatives. A page is not used as a negative if it equals the positive, belongs to the same query, or is relevant.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import cached_property
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

from unisono.engine.recipe import Loss
from unisono.errors import ConfigError
from unisono.formatting import format_count
from unisono.recipes.seo.models.groups import Groups, grouped
from unisono.recipes.seo.models.packing import Packed, pack, read_packed
from unisono.recipes.seo.tasks.ranking import RankingTask

if TYPE_CHECKING:
    from pathlib import Path

    from unisono.data.noise import Noise
    from unisono.recipes.seo.data.store import Texts
    from unisono.recipes.seo.models.encoder import Encoder
    from unisono.recipes.seo.models.groups import Tokens
    from unisono.recipes.seo.tasks.matching import Matching

_NO_KEY = -1  # key of a missing negative
_NO_PAGE = -2  # page number of a missing negative; `relevant` is padded with -1
_BLOCK = 256  # number of held-out queries to embed at once


class BiEncoder(RankingTask):
    """Embeds queries and pages separately."""

    coupled = True
    packs = False
    """Whether texts are packed without padding."""
    uncounted: int | None = None
    """Id of the token that gets no position when texts are packed; see `Encoder.uncounted`."""

    def model(self) -> nn.Module:
        """Builds the encoder."""
        from unisono.recipes.seo.models.load import load_encoder

        return load_encoder(self.config, self.tokenizer)

    def get_ready(self, model: nn.Module, *, flash_attention: bool) -> None:
        """Decides whether to pack or pad texts, and prepares the model for packing."""
        encoder: Encoder = model  # type: ignore[assignment]
        padding = self.config.padding
        if padding == "groups" or (padding == "auto" and not flash_attention):
            return
        reason = read_packed(encoder.backbone)
        if reason and padding == "none":
            raise ConfigError(f"padding none: {reason}; use --padding groups")
        if reason:
            self.remarks.append(f"texts are padded in groups of similar length, not packed: {reason}")
        self.packs, self.uncounted = reason is None, encoder.uncounted

    @cached_property
    def num_negatives(self) -> int:
        """Number of hard negatives per query: num_negatives, or fewer if no query has that many."""
        return min(self.config.num_negatives, self._most_negatives)

    @cached_property
    def _most_negatives(self) -> int:
        return int(np.diff(self.matching("train").negative_starts).max(initial=0))

    def start_remark(self, global_batch: int) -> str | None:
        """Returns a message with the number of negatives per query."""
        hard, others = self.num_negatives, max(0, global_batch - 1)
        if not hard and not others:
            raise ConfigError(
                "batch_size 1: the negatives of a query are the pages of the other queries in its batch, so there are "
                "none; use a larger batch_size, or data with negatives and --num_negatives"
            )
        num_negatives = format_count(others * (1 + hard) + hard, "negative")
        remark = (
            f"each query is compared with its page and {num_negatives}: the pages of the "
            f"{format_count(others, 'other query')} in the global batch"
        )
        if hard:
            remark += f", and up to {hard} hard negatives of each query"
        elif self.config.num_negatives:
            remark += "; the data has no hard negatives"
        elif most := self._most_negatives:
            remark += (
                f"; the data also has up to {most} hard negatives per query: use --num_negatives {most} to add them"
            )
        return remark + ("; texts are packed without padding" if self.packs else "")

    def train_data(self) -> Dataset[Any]:
        """Returns pairs of a query and a relevant page."""
        return Pairs(self.texts("queries"), self.texts("pages"), self.matching("train"), self.num_negatives)

    def eval_data(self) -> Dataset[Any]:
        """Returns the pages to rank for the held-out queries."""
        return Candidates(self.texts("eval_pages"), self.matching("eval").candidates)

    def collate(self, items: list[Any]) -> Any:
        """Groups or packs the texts, and adds the keys that identify identical texts."""
        pad_id = int(self.tokenizer.pad_token_id)
        if isinstance(items[0], Candidate):
            groups = grouped([item.tokens for item in items], pad_id, 1)
            return {"pages": groups, "numbers": torch.tensor([item.number for item in items])}
        texts = [item.query for item in items] + [item.page for item in items]
        nothing = np.array([pad_id], dtype=np.int32)
        texts += [tokens if len(tokens) else nothing for item in items for tokens in item.negatives]
        laid_out = (
            pack(texts, pad_id, self.uncounted) if self.packs else grouped(texts, pad_id, self.config.length_groups)
        )
        batch: dict[str, Any] = {"texts": laid_out}
        batch["query_keys"] = torch.tensor([key_of(item.query) for item in items])
        batch["page_keys"] = torch.tensor([key_of(item.page) for item in items])
        if self.num_negatives:
            keys = [[key_of(tokens) if len(tokens) else _NO_KEY for tokens in item.negatives] for item in items]
            batch["negative_keys"] = torch.tensor(keys)
            batch["negative_numbers"] = torch.tensor([item.negative_numbers for item in items])
        batch["relevant"] = torch.tensor(np.stack([item.relevant for item in items]))
        batch["numbers"] = torch.tensor([item.number for item in items])
        return batch

    def embed(self, model: nn.Module, batch: Any, noise: Noise) -> Mapping[str, Tensor]:
        """Embeds the query, page and negatives of each sample."""
        texts: Groups | Packed = batch["texts"]
        vectors, samples = texts.through(model), len(batch["query_keys"])
        rows = {"query": vectors[:samples], "page": vectors[samples : 2 * samples]}
        names = ["query_keys", "page_keys", "relevant", "numbers"]
        if self.num_negatives:
            rows["negative"] = vectors[2 * samples :].view(samples, self.num_negatives, -1)
            names += ["negative_keys", "negative_numbers"]
        return rows | {name: batch[name] for name in names}

    def couple_rows(self, rows: Mapping[str, Tensor], start: int, stop: int) -> Loss:
        """Returns the contrastive loss, summed over the queries start to stop."""
        return contrastive(rows, self.config.scale, both_ways=self.config.both_ways, anchors=slice(start, stop))

    def before_evaluation(self, model: nn.Module) -> None:
        """Embeds the held-out queries. There are few of them, so every process embeds all of them."""
        queries, device = self.texts("eval_queries"), next(model.parameters()).device
        tokens = [queries[int(number)] for number in self.matching("eval").queries]
        pad_id, parts = int(self.tokenizer.pad_token_id), []
        order = np.argsort([len(each) for each in tokens], kind="stable")
        for start in range(0, len(order), _BLOCK):
            groups = grouped([tokens[place] for place in order[start : start + _BLOCK]], pad_id, 1)
            parts.append(groups.on(device).through(model))
        vectors = torch.cat(parts)
        self.query_vectors = torch.empty_like(vectors).index_copy_(0, torch.from_numpy(order).to(device), vectors)

    def evaluate(self, model: nn.Module, batch: Any, noise: Noise) -> Mapping[str, Any]:
        """Ranks the pages of a batch for all queries."""
        vectors = batch["pages"].through(model)
        with torch.autocast(vectors.device.type, enabled=False):  # 16-bit cosines would have many ties
            scores = self.query_vectors.to(vectors.dtype) @ vectors.T
        self.metrics["pages"].update(scores, batch["numbers"])
        return {"pages": self.metrics["pages"], **self.baseline_metrics(len(vectors))}

    def export(self, model: nn.Module, folder: Path) -> None:
        """Writes a folder for sentence-transformers and transformers."""
        from unisono.recipes.seo.export import write_sentence_transformer

        encoder: Encoder = model  # type: ignore[assignment]
        write_sentence_transformer(encoder, self.tokenizer, folder, self.config.max_length, base=self.config.model_name)


def contrastive(
    rows: Mapping[str, Tensor], scale: float, *, both_ways: bool = False, anchors: slice = slice(None)
) -> Loss:
    """Returns the cross entropy of each query's page among the pages and hard negatives of all queries.

    With both_ways it also compares each page with all queries. False negatives are masked. `anchors` selects the
    samples whose losses are summed, so the largest matrix has only one row per selected sample.
    """
    queries, pages, everyone = rows["query"], rows["page"], slice(None)
    right = torch.arange(len(queries), device=queries.device)[anchors]
    own = right[:, None] == torch.arange(len(queries), device=queries.device)
    scores = scale * queries[anchors] @ pages.T
    scores = scores.masked_fill(_same(rows, anchors, everyone) & ~own, -torch.inf)
    if "negative" in rows:
        negatives, keys = rows["negative"].flatten(0, 1), rows["negative_keys"].flatten()
        wrong = scale * queries[anchors] @ negatives.T
        excluded = (keys[None] == rows["page_keys"][anchors, None]) | (keys == _NO_KEY)[None]
        excluded |= _among(rows["relevant"][anchors], rows["negative_numbers"].flatten())
        scores = torch.cat([scores, wrong.masked_fill(excluded, -torch.inf)], dim=1)
    each = cross_entropy(scores, right, reduction="none")
    if both_ways:
        backwards = scale * pages[anchors] @ queries.T
        backwards = backwards.masked_fill(_same(rows, everyone, anchors).T & ~own, -torch.inf)
        each = (each + cross_entropy(backwards, right, reduction="none")) / 2
    first = (scores.argmax(1) == right).double().sum()
    return Loss(each.sum(), len(each), {"first_right": first})


def _same(rows: Mapping[str, Tensor], queries: slice, pages: slice) -> Tensor:
    """Returns a [queries, pages] mask of the pages that are relevant for each query."""
    page_keys, query_keys = rows["page_keys"], rows["query_keys"]
    same_page = page_keys[queries, None] == page_keys[None, pages]
    same_query = query_keys[queries, None] == query_keys[None, pages]
    return same_page | same_query | _among(rows["relevant"][queries], rows["numbers"][pages])


def _among(relevant: Tensor, numbers: Tensor) -> Tensor:
    """Returns a [queries, pages] mask of the page numbers that are in each query's list of relevant pages."""
    is_among = torch.zeros(len(relevant), len(numbers), dtype=torch.bool, device=relevant.device)
    for column in relevant.T:  # one column at a time, to save memory
        is_among |= column[:, None] == numbers[None]
    return is_among


def key_of(tokens: Tokens) -> int:
    """Returns a 63-bit hash of a text's tokens."""
    digest = blake2b(np.ascontiguousarray(tokens, dtype=np.int32).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class Pair:
    """A query, its page, its hard negatives (padded with empty texts), and the numbers of its relevant pages."""

    __slots__ = ("negative_numbers", "negatives", "number", "page", "query", "relevant")

    def __init__(
        self,
        query: Tokens,
        page: Tokens,
        number: int,
        negatives: Sequence[Tokens],
        negative_numbers: Sequence[int],
        relevant: Tokens,
    ) -> None:
        self.query, self.page, self.number, self.relevant = query, page, number, relevant
        self.negatives, self.negative_numbers = negatives, negative_numbers


class Pairs(Dataset[Pair]):
    """Sample i is the i-th pair of a query and a relevant page."""

    _MAX_RELEVANT = 32  # maximum number of relevant pages per query that are excluded as negatives

    def __init__(self, queries: Texts, pages: Texts, matching: Matching, num_negatives: int) -> None:
        self.queries, self.pages, self.matching, self.num_negatives = queries, pages, matching, num_negatives
        most = int(np.diff(matching.starts).max(initial=1))
        self.num_relevant = min(most, self._MAX_RELEVANT)

    def __len__(self) -> int:
        return len(self.matching.relevant)

    def __getitem__(self, index: int) -> Pair:
        matching = self.matching
        query = int(np.searchsorted(matching.starts, index, side="right")) - 1
        number = int(matching.relevant[index])
        pages = matching.relevant_for(query)[: self.num_relevant]
        relevant = np.full(self.num_relevant, -1, dtype=np.int64)
        relevant[: len(pages)] = pages
        wrong = matching.negatives_of(query).tolist()
        chosen = random.sample(wrong, min(len(wrong), self.num_negatives))  # seeded by the position of the sample
        num_missing = self.num_negatives - len(chosen)
        negatives = [self.pages[page] for page in chosen] + [np.zeros(0, dtype=np.int32)] * num_missing
        numbers = [*chosen, *[_NO_PAGE] * num_missing]
        return Pair(
            self.queries[int(matching.queries[query])], self.pages[number], number, negatives, numbers, relevant
        )


class Candidate:
    """A page with its number."""

    __slots__ = ("number", "tokens")

    def __init__(self, number: int, tokens: Tokens) -> None:
        self.number, self.tokens = number, tokens


class Candidates(Dataset[Candidate]):
    """Pages to rank, batched by similar length."""

    _STEP = 32  # tokens

    def __init__(self, pages: Texts, numbers: Any) -> None:
        self.pages, self.numbers = pages, numbers
        self.lengths = pages.lengths[numbers]

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Candidate:
        number = int(self.numbers[index])
        return Candidate(number, self.pages[number])

    def shape(self, index: int) -> int:
        """Returns a page's length, rounded up."""
        return -(-int(self.lengths[index]) // self._STEP) * self._STEP
