"""Base class of both methods of the task `rank`: queries and pages, the held-out split, and the baselines."""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from unisono.engine.recipe import Work
from unisono.errors import ConfigError
from unisono.recipes.common.cache_files import write_cache_file
from unisono.recipes.common.fingerprint import of_tokenizer
from unisono.recipes.seo.data.ranking_sets.ids import hashes_of
from unisono.recipes.seo.data.ranking_sets.ranking import Ranking, read_ranking
from unisono.recipes.seo.data.store import Texts, fill_texts, open_texts
from unisono.recipes.seo.data.tokens import Tokenize, fingerprint_of
from unisono.recipes.seo.metrics.baselines import baselines
from unisono.recipes.seo.metrics.ranking import TopPages
from unisono.recipes.seo.tasks.matching import (
    Matching,
    few_held_out_remarks,
    hold_out,
    load,
    match,
    save,
    with_candidates,
    without,
)
from unisono.recipes.seo.tasks.task import Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEBIAN = "debian"
BM25_RESULTS = "found_by_words.npy"
_TOKEN_FOLDERS, _BASELINES_FILE = "places.json", "lines_beside.json"
_MEASURES = ("MRR@10", "NDCG@10", "Recall@10")  # metrics of the baselines


class RankingTask(Task):
    """Queries and pages to train on, and held-out queries to rank pages for."""

    headline = (
        "eval/MRR@10",
        *(f"eval/MRR@10_{name}" for name in ("bm25", "tfidf", "random")),
        "eval/NDCG@10",
        "eval/Recall@10",
    )
    special_tokens = True
    """Whether texts are tokenized with special tokens at the beginning and end."""

    # Before training -----------------------------------------------------------------------------------------------

    def prepare(self, work: Work) -> None:
        """Reads the data, holds out queries, tokenizes, and measures the baselines."""
        from unisono.recipes.seo.models.load import load_tokenizer, prompts_of

        config, remarks = self.config, list[str]()
        data = self._read(str(config.data_path), "train", remarks, work)
        other = self._other(data, remarks, work)
        sides = self._sides(data, other, remarks)  # on every process, so that all processes raise the same error
        self._check_wrong_pages(sides["train"], data)
        if len(work.share([0])):
            for side, matching in sides.items():
                save(self.folder, side, matching)
            # One process trains the tokenizer of a tiny model; the others load it.
            load_tokenizer(config.model_name, lambda: _texts_of(data), self.folder)
        if work.meet():
            return
        held_out, prompts = other or data, prompts_of(config.model_name)
        places = {
            "pages": self._fill(data, "pages", prompts["page"], work),
            "queries": self._fill(data, "queries", prompts["query"], work),
            "eval_pages": self._fill(held_out, "pages", prompts["page"], work),
            "eval_queries": self._fill(held_out, "queries", prompts["query"], work),
        }
        lines = self._measure_baselines(held_out, work)
        if work.meet():
            return
        if len(work.share([0])):
            # Store paths relative to this folder, because a run may be moved; paths in cache_dir are absolute.
            token_folders = {name: str(_seen_from(self.folder, place)) for name, place in places.items()}
            write_cache_file(self.folder / _TOKEN_FOLDERS, json.dumps(token_folders).encode())
            if lines is not None:
                content = {"of": self._baselines_key(held_out), "found": lines}
                write_cache_file(self.folder / _BASELINES_FILE, json.dumps(content, indent=1).encode())
        work.meet()
        self.remarks += remarks
        self._remark_on_truncation(places)

    def _other(self, data: Ranking, remarks: list[str], work: Work) -> Ranking | None:
        """Reads separate evaluation data; returns None if queries of data_path are held out instead."""
        if self.config.eval_data_path:
            try:
                return self._read(self.config.eval_data_path, "test", remarks, work)
            except ConfigError:
                train_split = self._read(self.config.eval_data_path, "train", remarks, work)
                if train_split.has_split("test"):  # the test split exists, so the error has another cause
                    raise
                return train_split
        if self.config.num_eval is None and data.has_split("test"):
            return self._read(str(self.config.data_path), "test", remarks, work)
        return None

    def _read(self, path: str, split: str, remarks: list[str], work: Work) -> Ranking:
        if path == DEBIAN:
            from unisono.recipes.seo.data.ranking_sets.debian import packages, read_debian

            if len(work.share([0])):  # one process downloads them
                packages(self.cache, work.message)
            work.meet()
            return read_debian(self.cache, hard=self.config.hard_candidates)
        if self.config.hard_candidates:
            raise ConfigError("hard_candidates only applies to data_path debian; remove it")
        return read_ranking(path, split, remark=remarks.append, leave_out_bad=self.config.leave_out_bad)

    def _sides(self, data: Ranking, other: Ranking | None, remarks: list[str]) -> dict[str, Matching]:
        """Returns the judgements of both splits, "train" and "eval"."""
        config, whole = self.config, match(data)
        query_hashes = hashes_of(text for _, text in data.queries())
        if other is not None:
            again = int(np.isin(hashes_of(text for _, text in other.queries()), query_hashes).sum())
            if again:
                remarks.append(
                    f"{again:,} of {other.num_queries:,} evaluation queries also occur in the training data, so the "
                    "metrics will be higher than for unseen queries"
                )
            return {"train": whole, "eval": with_candidates(match(other), config.num_candidates)}
        among = None
        if config.hard_candidates and data.sections is not None:
            sections = data.sections[whole.relevant[whole.starts[:-1]]]  # the section of each query's page
            section = np.bincount(sections).argmax()
            among = sections == section
            relevant = whole.relevant[np.repeat(among, np.diff(whole.starts))]
            candidates = np.union1d(np.flatnonzero(data.sections == section), relevant).astype(np.int32)
            whole = replace(whole, candidates=candidates)
        what = f"data_path {config.data_path}"
        train, held_out = hold_out(whole, config.num_eval, config.num_candidates, what, among)
        # Remove exact duplicates of held-out queries from training, because the model would memorise them.
        left = without(train, query_hashes, query_hashes[held_out.queries])
        if not len(left.queries):
            raise ConfigError(f"{what}: all other queries are exact duplicates of held-out ones; add more queries")
        if len(left.queries) < len(train.queries):
            num = len(train.queries) - len(left.queries)
            remarks.append(f"{num:,} queries are exact duplicates of held-out ones and are excluded from training")
        remarks += few_held_out_remarks(len(held_out.queries), "queries")
        return {"train": left, "eval": held_out}

    def _check_wrong_pages(self, train: Matching, data: Ranking) -> None:
        """Rejects data in which no page could serve as a negative."""
        has_negatives = data.num_pages > 1
        if self.coupled:  # the pages of other queries are the negatives
            named = bool(self.config.num_negatives and len(train.negatives))
            has_negatives = named or (len(train.queries) > 1 and len(np.unique(train.relevant)) > 1)
        if not has_negatives:
            raise ConfigError(
                f"data_path {self.config.data_path}: {len(train.queries):,} distinct queries and "
                f"{len(np.unique(train.relevant)):,} distinct pages remain for training, so there are no negatives; "
                "add more of both" + (", or hard negatives (--num_negatives)" if self.coupled else "")
            )

    def _fill(self, data: Ranking, what: str, prompt: str, work: Work) -> Path:
        limit = self.config.max_length if what == "pages" else self.config.query_length
        read: Callable[[], Iterable[tuple[int, str]]] = data.pages if what == "pages" else data.queries
        mark = (of_tokenizer(self.tokenizer), limit, prompt, what, self.special_tokens, self.config.hard_candidates)
        tokenize = Tokenize(self.tokenizer, limit, special_tokens=self.special_tokens)
        return fill_texts(
            self.cache / "tokens",
            lambda: (prompt + text for _, text in read()),
            tokenize,
            fingerprint_of(data.page_files if what == "pages" else data.query_files, *mark),
            work,
            what,
        )

    def _measure_baselines(self, held_out: Ranking, work: Work) -> dict[str, dict[str, float]] | None:
        """Measures random order, TF-IDF and BM25; returns None if the run has already stored these metrics."""
        if all(work.gather(self._stored_baselines.get("of") == self._baselines_key(held_out))):
            return None
        matching = load(self.folder, "eval")
        place = {number: at for at, number in enumerate(matching.candidates.tolist())}
        queries = _some(held_out.queries(), set(matching.queries.tolist()))
        judged = {
            query: {place[page]: grade for page, grade in grades.items() if page in place}
            for query, grades in matching.judged().items()
        }
        work.message(f"measuring the baselines: {len(judged):,} held-out queries, {len(place):,} pages")
        best: dict[str, Any] = {}
        metrics = baselines(list(queries), lambda: _some(held_out.pages(), place), judged, work, best)
        if best:
            self._keep_best(matching, best["bm25"].numpy(), work)
        return metrics

    @property
    def _stored_baselines(self) -> dict[str, Any]:
        file = self.folder / _BASELINES_FILE
        with suppress(OSError, ValueError):  # a damaged file counts as missing
            stored = json.loads(file.read_bytes())
            return stored if isinstance(stored, dict) else {}
        return {}

    def _baselines_key(self, held_out: Ranking) -> str:
        """Returns a digest of everything the baselines depend on, because a resumed run may evaluate on other data."""
        matching, digest = load(self.folder, "eval"), sha256()
        for numbers in (matching.queries, matching.starts, matching.relevant, matching.grades, matching.candidates):
            digest.update(np.ascontiguousarray(numbers).tobytes() + b"|")
        return fingerprint_of(held_out.files, digest.hexdigest(), self.config.rerank, self.config.hard_candidates)

    def _keep_best(self, matching: Matching, best: NDArray[np.int64], work: Work) -> None:
        """Stores the best pages by BM25 for each query, padded with -1."""
        numbers = np.where(best < 0, -1, matching.candidates[np.maximum(best, 0)])[:, : self.config.rerank]
        if len(work.share([0])):
            buffer = BytesIO()
            np.save(buffer, numbers.astype(np.int32), allow_pickle=False)
            write_cache_file(self.folder / BM25_RESULTS, buffer.getvalue())

    def _remark_on_truncation(self, places: Mapping[str, Path]) -> None:
        for what, limit in (("pages", "max_length"), ("queries", "query_length")):
            texts = open_texts(places[what])
            if texts.num_cut:
                self.remarks.append(
                    f"{texts.num_cut:,} of {len(texts):,} {what} are longer than {limit} "
                    f"{getattr(self.config, limit)} tokens and were truncated"
                )

    # After prepare() -----------------------------------------------------------------------------------------------

    @property
    def cache(self) -> Path:
        """The folder of the token cache."""
        return Path(self.config.cache_dir).expanduser() if self.config.cache_dir else self.folder

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer."""
        from unisono.recipes.seo.models.load import load_tokenizer

        return load_tokenizer(self.config.model_name, None, self.folder)

    def texts(self, which: str) -> Texts:
        """Opens the tokens of "pages", "queries", "eval_pages" or "eval_queries"."""
        return open_texts(self.folder / json.loads((self.folder / _TOKEN_FOLDERS).read_text())[which])

    def matching(self, side: str) -> Matching:
        """Loads the judgements of a split, "train" or "eval"."""
        return load(self.folder, side)

    @cached_property
    def _baselines(self) -> dict[str, float]:
        metrics: dict[str, dict[str, float]] = self._stored_baselines["found"]
        return {
            f"{name}_{line}": metrics[line][name] for name in _MEASURES for line in metrics if name in metrics[line]
        }

    def held_out_texts(self) -> tuple[list[str], list[str]]:
        """Reads the held-out queries and their candidate pages from the data again."""
        work, matching = Work(self.folder), self.matching("eval")
        data = self._read(str(self.config.data_path), "train", [], work)
        held_out = self._other(data, [], work) or data
        queries, pages = set(matching.queries.tolist()), set(matching.candidates.tolist())
        return list(_some(held_out.queries(), queries)), list(_some(held_out.pages(), pages))

    def baseline_metrics(self, count: int) -> dict[str, tuple[float, int]]:
        """Returns the baselines' metrics as (sum, count) pairs for an evaluation batch of `count` samples."""
        return {name: (value * count, count) for name, value in self._baselines.items()}

    def dataset(self, split: str) -> Dataset[Any] | None:
        """Returns the training data, or the data for ranking the held-out queries; None if none are held out."""
        if split == "train":
            return self.train_data()
        matching = self.matching("eval")
        if not len(matching.queries):
            return None
        self.metrics["pages"] = TopPages(matching.judged(), len(matching.queries))
        return self.eval_data()

    def train_data(self) -> Dataset[Any]:
        """Returns the training data."""
        raise NotImplementedError

    def eval_data(self) -> Dataset[Any]:
        """Returns the evaluation data."""
        raise NotImplementedError


def _texts_of(data: Ranking) -> Iterable[str]:
    for _, text in data.queries():
        yield text
    for _, text in data.pages():
        yield text


def _some(texts: Iterable[tuple[int, str]], numbers: Container[int]) -> Iterable[str]:
    return (text for number, text in texts if number in numbers)


def _seen_from(folder: Path, place: Path) -> Path:
    folder, place = folder.resolve(), place.resolve()
    return place.relative_to(folder) if place.is_relative_to(folder) else place
