"""The recipe's settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from unisono.engine.recipe import Recipe

ALIASES = {"lr": "learning_rate", "epochs": "num_epochs", "model": "model_name", "max_seq_length": "max_length"}
"""Names used by other scripts."""

_BI, _CROSS, _SCORE, _SNIPPET = "task rank, method bi", "task rank, method cross", "task score", "task snippet"
FOR = {
    **dict.fromkeys(("pooling", "scale", "both_ways", "padding"), (_BI,)),
    **dict.fromkeys(("rerank", "cross_loss"), (_CROSS,)),
    **dict.fromkeys(("method", "query_length", "length_groups", "num_negatives", "num_candidates"), (_BI, _CROSS)),
    "hard_candidates": (_BI, _CROSS),
    "label": (_SCORE,),
    **dict.fromkeys(("write", "target_length"), (_SNIPPET,)),
}
"""Settings that only have an effect for these tasks."""


@dataclass
class Config(Recipe.Config):
    """Language models that rank, score and write pages for search"""

    task: Literal["rank", "score", "snippet"] = "rank"
    """rank: which page answers a query. score: a number or a class for a page, learned from your labels. snippet: a page's title or description."""
    model_name: str = "minilm"
    """A transformers model: a folder, a hub id, `minilm` (all-MiniLM-L6-v2, installed with unisono[seo]), or `tiny` (a small untrained model with its own tokenizer, built from the data)."""
    data_path: str | None = None
    """Training data. rank: a BEIR folder, MS MARCO files, or .csv/.jsonl (query, positive, negative...). score: .csv/.jsonl (text, label). snippet: .csv/.jsonl (text, title), a folder of HTML pages, or a sitemap. `debian`: descriptions of Debian's packages (rank, snippet)."""
    eval_data_path: str | None = None
    """Evaluation data, in the same format. Default: the test split of data_path, or a part of it (num_eval)."""
    num_eval: int | None = None
    """Number of queries (rank) or pages (score, snippet) of data_path to hold out for evaluation. Default: the test split of data_path if there is one; otherwise 5 %, at most 1,000 (of small data sets 20 %, at most 50)."""
    num_candidates: int | None = None
    """rank: number of pages that held-out queries are ranked against: their own, and others evenly spaced. Default: num_eval if unisono holds out the queries, all pages if the data has a test split."""
    hard_candidates: bool = False
    """debian: make the task harder. Candidates come from the same section, and words that a query shares with its page are removed from the page."""
    cache_dir: str | None = None
    """Folder for tokens that several runs share. Default: the run folder."""
    max_length: int = 256
    """Maximum number of tokens per page. Longer pages are truncated, and the run prints how many."""
    query_length: int = 64
    """Maximum number of tokens per query."""
    length_groups: int = 4
    """rank: number of groups of similar length into which a batch is divided to reduce padding."""
    padding: Literal["auto", "groups", "none"] = "auto"
    """bi: how a batch is padded. groups: in length_groups groups. none: all texts are packed into one row without padding, which is faster on a GPU. auto: none for BERT and RoBERTa models in 16 bit on a GPU with flash attention, otherwise groups."""
    leave_out_bad: bool = False
    """Leave out unusable rows and files and print which, instead of stopping at the first one."""

    method: Literal["bi", "cross"] = "bi"
    """rank: bi embeds query and page separately (fast, in-batch negatives); cross reads them together (slower, more accurate)."""
    pooling: Literal["auto", "mean", "cls", "last"] = "auto"
    """bi: how token vectors are pooled. auto: as the model's folder defines, otherwise the last token for decoders and the mean for encoders."""
    scale: float = 20.0
    """bi: factor of the cosine similarities in the loss (1 / temperature)."""
    num_negatives: int = 0
    """rank: number of hard negatives per query, if the data has them. cross draws other pages if it does not."""
    both_ways: bool = False
    """bi: average the loss with its mirror image, in which each page must find its query."""
    rerank: int = 50
    """cross: number of BM25 results per held-out query to rerank in an evaluation, at most 100."""
    cross_loss: Literal["listwise", "bce"] = "listwise"
    """cross: listwise compares a page with its negatives; bce classifies each pair on its own."""

    label: Literal["auto", "class", "number"] = "auto"
    """score: kind of the labels. auto: classes if they are words or few different integers."""
    write: Literal["title", "description"] = "title"
    """snippet: what to write."""
    target_length: int = 48
    """snippet: maximum number of tokens to write."""

    lora_rank: int = 0
    """Rank of a LoRA to train instead of all weights. 0: train all weights."""
    lora_alpha: float | None = None
    """Scale of the LoRA. Default: twice the rank."""
    lora_dropout: float = 0.0
    """Dropout in the LoRA."""
    lora_targets: str = ""
    """Names of the layers that get a LoRA, separated by commas. Default: all linear layers of the blocks."""

    @property
    def kind(self) -> str:
        """The task, and the method if there is a choice."""
        return f"task rank, method {self.method}" if self.task == "rank" else f"task {self.task}"
