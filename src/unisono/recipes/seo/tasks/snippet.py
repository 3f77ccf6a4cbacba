"""The task `snippet`: writes a title or a description for a page.

An encoder-decoder encodes the page and generates the text; a decoder continues a prompt of the page and a cue. The loss
is the negative log likelihood of the target tokens. Evaluations decode greedily; the baseline is the page's first
sentence.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

from unisono.engine.recipe import Loss, Work
from unisono.errors import ConfigError
from unisono.recipes.common.cache_files import write_cache_file
from unisono.recipes.common.fingerprint import combined, of_tokenizer
from unisono.recipes.seo.data.store import Texts, fill_texts, open_texts
from unisono.recipes.seo.data.tokens import Tokenize
from unisono.recipes.seo.metrics.rouge import MAX_CHARACTERS, copied_numbers, cut, lead_of, rouge_l
from unisono.recipes.seo.models.encoder import Row, pad
from unisono.recipes.seo.models.generate import UNSEEN, cue_for, first_token, logits_of, write
from unisono.recipes.seo.models.load import load_tokenizer, load_writer, reads_first
from unisono.recipes.seo.tasks.matching import default_num_eval, few_held_out_remarks
from unisono.recipes.seo.tasks.task import Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from unisono.data.noise import Noise

# Number of held-out pages to generate text for in an evaluation; each token takes a forward pass.
_NUM_WRITTEN = 64
_NUM_SHOWN = 8
_HOW = "snippet.json"  # file in the exported folder that describes how to prompt the model
_DEBIAN = "debian"


class Snippet(Task):
    """Writes a title or a description."""

    headline = ("eval/loss", "eval/rouge_l", "eval/rouge_l_lead", "eval/fits", "eval/fits_lead", "eval/numbers_copied")

    # Before training -----------------------------------------------------------------------------------------------

    def prepare(self, work: Work) -> None:
        """Reads and tokenizes pages and targets."""
        self._reads_first = reads_first(self.config.model_name)  # fails early if the model cannot generate text
        pairs, num_train = self._read(work)
        for _ in work.share([0]):
            self._load_tokenizer(lambda: (text for pair in pairs for text in pair))
        if work.meet():
            return
        places = {}
        for number, (what, tokens, limit) in enumerate(
            (("pages", Tokenize, self.config.max_length), ("targets", _Targets, self.config.target_length))
        ):
            texts = [pair[number] for pair in pairs]
            name = combined(of_tokenizer(self.tokenizer), what, limit, _digest(texts))
            places[what] = fill_texts(
                self._cache / what, _giving(texts), tokens(self.tokenizer, limit), name, work, what
            )
            if work.meet():  # all ranks must stop together, or one would wait for the others
                return
        self._pages, self._targets = open_texts(places["pages"]), open_texts(places["targets"])
        self._num_train = num_train
        self._held_out = pairs[num_train:]
        for what, texts_, most in (
            ("page", self._pages, f"max_length {self.config.max_length}"),
            (self.config.write, self._targets, f"target_length {self.config.target_length}"),
        ):
            if texts_.num_cut:
                longer = f"{texts_.num_cut:,} of {len(texts_):,} {what}s are longer than {most} tokens"
                self.remarks.append(f"{longer} and were truncated")

    def _read(self, work: Work) -> tuple[list[tuple[str, str]], int]:
        """Returns all pairs, training pairs first, and the number of training pairs."""
        from unisono.recipes.seo.data.snippets import read_snippets

        config = self.config

        def read(path: str) -> list[tuple[str, str]]:
            if path == _DEBIAN:
                return self._debian(work)
            return read_snippets(path, config.write, remark=self.remarks.append, leave_out_bad=config.leave_out_bad)

        if config.data_path is None:
            raise ConfigError(
                "data_path: expected a folder of HTML pages, or a .csv or .jsonl file with the columns text and title"
            )
        pairs = read(config.data_path)
        if not pairs:
            raise ConfigError(f"data_path {config.data_path} has no page with a {config.write}")
        if config.eval_data_path:
            others, train_pages = read(config.eval_data_path), {page for page, _ in pairs}
            if again := sum(page in train_pages for page, _ in others):
                self.remarks.append(f"{again:,} of {len(others):,} evaluation pages also occur in the training data")
            return [*pairs, *others], len(pairs)
        number = config.num_eval if config.num_eval is not None else default_num_eval(len(pairs))
        first: dict[str, int] = {}
        same = [first.setdefault(page, len(first)) for page, _ in pairs]  # identical pages are in the same part
        if number >= len(first):
            raise ConfigError(
                f"num_eval {number}: data_path {config.data_path} has {len(first)} distinct pages; some must remain "
                "for training"
            )
        self.remarks += few_held_out_remarks(number, "pages")
        held_out = {(2 * place + 1) * len(first) // (2 * number) for place in range(number)}
        train = [pair for pair, page in zip(pairs, same, strict=True) if page not in held_out]
        return [*train, *(pair for pair, page in zip(pairs, same, strict=True) if page in held_out)], len(train)

    def _debian(self, work: Work) -> list[tuple[str, str]]:
        """Returns the long and the short description of each Debian package."""
        from unisono.recipes.seo.data.ranking_sets.debian import packages

        if self.config.write != "title":
            raise ConfigError("data_path debian has no descriptions to learn, only titles; use --write title")
        for _ in work.share([0]):  # one process downloads them
            packages(self._cache, work.message)
        work.meet()
        return [(package.body, package.synopsis) for package in packages(self._cache)]

    @property
    def _cache(self) -> Path:
        return Path(self.config.cache_dir).expanduser() if self.config.cache_dir else self.folder

    def _load_tokenizer(self, data: Callable[[], Any] | None = None) -> PreTrainedTokenizerBase:
        return load_tokenizer(self.config.model_name, data, self.folder, writes=True)

    @cached_property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self._load_tokenizer()

    @cached_property
    def _reads_first(self) -> bool:
        return reads_first(self.config.model_name)

    @cached_property
    def _cue(self) -> Row:
        return np.array(self.tokenizer(cue_for(self.config.write), add_special_tokens=False)["input_ids"], np.int64)

    # Model and data ------------------------------------------------------------------------------------------------

    def model(self) -> nn.Module:
        """Builds the encoder-decoder or decoder that generates the text."""
        return load_writer(self.config, self.tokenizer)

    def dataset(self, split: str) -> Any:
        """Returns the pages of a split with their target texts; None if no pages are held out."""
        numbers = range(self._num_train) if split == "train" else range(self._num_train, len(self._pages))
        return Snippets(self._pages, self._targets, numbers) if len(numbers) else None

    def collate(self, items: list[Any]) -> Any:
        """Returns token ids, mask and labels; tokens that do not count in the loss have the label UNSEEN."""
        pad_id = int(self.tokenizer.pad_token_id)
        targets = [item["target"] for item in items]
        index = torch.tensor([item["index"] for item in items])
        if self._reads_first:
            ids, mask = pad([item["page"] for item in items], pad_id)
            return {"ids": ids, "mask": mask, "labels": pad(targets, UNSEEN)[0], "index": index}
        prompts = [self._prompt(item["page"]) for item in items]
        rows = [np.concatenate([prompt, target]) for prompt, target in zip(prompts, targets, strict=True)]
        ids, mask = pad(rows, pad_id)
        labels = torch.full_like(ids, UNSEEN)
        for number, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
            labels[number, len(prompt) : len(row)] = ids[number, len(prompt) : len(row)]
        # The logits of all page tokens would take much memory, and only logits after the shortest prompt are needed.
        keep = torch.arange(min(map(len, prompts)) - 1, max(map(len, rows)) - 1)
        return {"ids": ids, "mask": mask, "labels": labels[:, keep + 1], "keep": keep, "index": index}

    def _prompt(self, page: Row) -> Row:
        """Returns the prompt of a decoder: the page without the end token that some tokenizers add, then the cue."""
        ends = len(page) > 1 and page[-1] == self.tokenizer.eos_token_id
        room = max(1, self.config.max_length - len(self._cue))
        return np.concatenate([(page[:-1] if ends else page)[:room], self._cue])

    # Training ------------------------------------------------------------------------------------------------------

    def loss(self, model: nn.Module, batch: Any, noise: Noise) -> Loss:
        """Returns the negative log likelihood, summed over the target tokens."""
        labels = batch["labels"]
        logits = logits_of(model, batch, first_token(model, self.tokenizer) if self._reads_first else None)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        total = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=UNSEEN, reduction="sum")
        return Loss(total, (labels != UNSEEN).sum())

    def before_evaluation(self, model: nn.Module) -> None:
        """Generates texts for the first held-out pages on all ranks, because a sharded model needs every rank."""
        self._written = self._write(model, _NUM_WRITTEN)

    def evaluate(self, model: nn.Module, batch: Any, noise: Noise) -> Mapping[str, Any]:
        """Returns the loss and, for pages with a generated text, the metrics of that text and of the baseline."""
        loss = self.loss(model, batch, noise)
        totals: dict[str, list[float]] = {}
        for index in batch["index"].tolist():
            if index < len(self._written):
                page, true = self._held_out[index]
                for name, values in text_metrics(self._written[index], page, true, self.config.write).items():
                    sums = totals.setdefault(name, [0.0, 0.0])
                    sums[:] = [sums[0] + values[0], sums[1] + values[1]]
        return {"loss": (loss.total, loss.count), **{name: tuple(sums) for name, sums in totals.items() if sums[1]}}

    def preview(self, model: nn.Module, step: int) -> Mapping[str, Any] | None:
        """Returns, for some held-out pages, the first sentence, the true text and the generated text."""
        if not self._held_out:
            return None
        parts = [
            f"page:     {cut(lead_of(page), 200)}\ntrue:     {true}\nwritten:  {written}\n"
            for written, (page, true) in zip(self._write(model, _NUM_SHOWN), self._held_out, strict=False)
        ]
        return {f"{self.config.write}s.txt": "\n".join(parts)}

    def _write(self, model: nn.Module, most: int) -> list[str]:
        numbers = range(self._num_train, min(self._num_train + most, len(self._pages)))
        rows = [self._pages[number] for number in numbers]
        prompts = rows if self._reads_first else [self._prompt(row) for row in rows]
        return write(model, self.tokenizer, prompts, self.config.target_length)

    def export(self, model: nn.Module, folder: Path) -> None:
        """Writes a folder for AutoModelForSeq2SeqLM or AutoModelForCausalLM."""
        from unisono.recipes.seo.export import write_writer

        config = self.config
        write_writer(model, self.tokenizer, folder, config.max_length, base=config.model_name)
        cue = "" if self._reads_first else cue_for(config.write)
        usage = {"write": config.write, "put_after_the_page": cue, "max_new_tokens": config.target_length}
        write_cache_file(folder / _HOW, json.dumps(usage, indent=2).encode())

    _pages: Texts
    _targets: Texts
    _num_train: int
    _held_out: list[tuple[str, str]]
    _written: list[str]


class Snippets(Dataset[dict[str, Any]]):
    """Sample i: the tokens of page i, the tokens of its target, and i."""

    _STEP = 64  # in tokens; with few distinct shapes, each shape fills its micro-batches

    def __init__(self, pages: Texts, targets: Texts, numbers: range) -> None:
        self.pages, self.targets, self.numbers = pages, targets, numbers
        self._lengths = pages.lengths[numbers.start : numbers.stop]

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> dict[str, Any]:
        number = self.numbers[index]
        return {"page": self.pages[number], "target": self.targets[number], "index": index}

    def shape(self, index: int) -> int:
        """Returns a page's length, rounded up, so that micro-batches hold pages of similar length."""
        return -(-int(self._lengths[index]) // self._STEP) * self._STEP


def text_metrics(written: str, page: str, true: str, kind: str) -> dict[str, tuple[float, float]]:
    """Returns the metrics of one page as (sum, count), for the generated text and for the page's first sentence."""
    lead, most = lead_of(page), MAX_CHARACTERS[kind]
    metrics: dict[str, tuple[float, float]] = {"rouge_l_lead_cut": (rouge_l(cut(lead, most), true), 1)}
    for suffix, text in (("", written), ("_lead", lead)):
        metrics[f"rouge_l{suffix}"] = rouge_l(text, true), 1
        metrics[f"fits{suffix}"] = float(0 < len(text) <= most), 1
        metrics[f"numbers_copied{suffix}"] = copied_numbers(text, page)
    return metrics


class _Targets(Tokenize):
    """Tokenizes target texts and adds the end token."""

    def __init__(self, tokenizer: Any, limit: int) -> None:
        super().__init__(tokenizer, limit)
        self._end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id

    def __call__(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the tokens of each text."""
        rows = self._tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)
        most = self._limit - 1
        self.num_cut += sum(len(row) > most for row in rows["input_ids"])
        return [[*row[:most], self._end] for row in rows["input_ids"]]


def _giving(texts: list[str]) -> Callable[[], list[str]]:
    return lambda: texts


def _digest(texts: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        content = text.encode("utf-8", "surrogatepass")
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()
