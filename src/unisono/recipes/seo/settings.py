"""The recipe's settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from unisono.engine.recipe import Recipe

ALIASES = {"lr": "learning_rate", "epochs": "num_epochs", "model": "model_name", "max_seq_length": "max_length"}
"""Flag names common in other training scripts."""

_BI, _CROSS, _SCORE, _SNIPPET = "task rank with method bi", "task rank with method cross", "task score", "task snippet"
FOR = {
    **dict.fromkeys(("pooling", "scale", "both_ways", "padding"), (_BI,)),
    **dict.fromkeys(("rerank", "cross_loss"), (_CROSS,)),
    **dict.fromkeys(("method", "query_length", "length_groups", "num_negatives", "num_candidates"), (_BI, _CROSS)),
    "hard_candidates": (_BI, _CROSS),
    "label": (_SCORE,),
    **dict.fromkeys(("write", "target_length"), (_SNIPPET,)),
}
"""Maps settings that affect only some tasks to these tasks."""


@dataclass
class Config(Recipe.Config):
    """Language models that rank, score and write pages for search"""

    task: Literal["rank", "score", "snippet"] = "rank"
    """Task to learn. rank: finding the page that answers a query. score: predicting a number or a class for a page, from your labels. snippet: writing a page's title or description."""
    model_name: str = "minilm"
    """A transformers model: a folder, a hub id, `minilm` (all-MiniLM-L6-v2, installed with unisono[seo]), or `tiny` (a small untrained model with its own tokenizer, built from the data)."""
    data_path: str | None = None
    """Training data. rank: a BEIR folder, MS MARCO files, or .csv/.jsonl (query, positive, negative...). score: .csv/.jsonl (text, label). snippet: .csv/.jsonl (text, title), a folder of HTML pages, or a sitemap. `debian`: descriptions of Debian packages, downloaded with apt (rank, snippet)."""
    eval_data_path: str | None = None
    """Evaluation data, in the same format as data_path. Default: the test split of data_path, or num_eval samples held out from it."""
    num_eval: int | None = None
    """Number of queries (rank) or pages (score, snippet) of data_path to hold out for evaluation. Default: 0 if data_path has a test split; otherwise 5 %, at most 1,000 (for small data sets 20 %, at most 50)."""
    num_candidates: int | None = None
    """rank: number of pages to rank for each held-out query: the relevant pages, and other pages evenly spaced over the data. Default: num_eval if unisono holds out the queries, all pages if the data has a test split."""
    hard_candidates: bool = False
    """data_path debian: make the task harder. All candidates come from one section of Debian, and words that a query shares with its page are removed from the page."""
    cache_dir: str | None = None
    """Folder of the token cache, which several runs can share. Default: the run folder."""
    max_length: int = 256
    """Maximum number of tokens per page. Longer pages are truncated, and the run prints how many there are."""
    query_length: int = 64
    """Maximum number of tokens per query."""
    length_groups: int = 4
    """rank: number of groups of similar length into which a batch is divided to reduce padding."""
    padding: Literal["auto", "groups", "none"] = "auto"
    """bi: how to pad a batch. groups: pad each of length_groups groups to its longest text. none: pack all texts into one row without padding, which is faster on a GPU. auto: none for BERT and RoBERTa models in 16 bit on a GPU with flash attention, otherwise groups."""
    leave_out_bad: bool = False
    """Skip unusable rows and files and print a summary, instead of stopping at the first one."""

    method: Literal["bi", "cross"] = "bi"
    """rank: bi embeds query and page separately (fast, in-batch negatives); cross reads them together (slower, more accurate)."""
    pooling: Literal["auto", "mean", "cls", "last"] = "auto"
    """bi: how to pool token vectors into a text's embedding. auto: as defined in the model's folder, otherwise the last token for decoders and the mean for encoders."""
    scale: float = 20.0
    """bi: factor by which the loss multiplies cosine similarities (1 / temperature)."""
    num_negatives: int = 0
    """rank: number of hard negatives per query to use from the data. If a query has fewer, cross draws random pages instead; for cross, 0 means 4."""
    both_ways: bool = False
    """bi: use a symmetric loss, the average of query-to-page and page-to-query."""
    rerank: int = 50
    """cross: number of BM25 results per held-out query to rerank in an evaluation, at most 100."""
    cross_loss: Literal["listwise", "bce"] = "listwise"
    """cross: loss function. listwise compares a page with its negatives; bce classifies each pair independently."""

    label: Literal["auto", "class", "number"] = "auto"
    """score: whether labels are classes or numbers. auto: classes if they are words or a few distinct integers, otherwise numbers."""
    write: Literal["title", "description"] = "title"
    """snippet: which text to generate for a page."""
    target_length: int = 48
    """snippet: maximum number of tokens in a generated text."""

    lora_rank: int = 0
    """Rank of the LoRA to train. 0: train all weights instead of a LoRA."""
    lora_alpha: float | None = None
    """LoRA alpha; the LoRA's output is scaled by lora_alpha / lora_rank. Default: twice the rank."""
    lora_dropout: float = 0.0
    """Dropout probability in the LoRA layers."""
    lora_targets: str = ""
    """Comma-separated names of the layers that get a LoRA. Default: all linear layers in the transformer blocks."""

    @property
    def kind(self) -> str:
        """The task and, for rank, the method."""
        return f"task rank with method {self.method}" if self.task == "rank" else f"task {self.task}"
