"""AdvancedLLMSEOEngine: trains a score of texts from your labels, and analyses texts with it.

Under torchrun every process makes the engine and calls the same methods; only `analyze_seo_score`, `batch_analyze` and
`optimize_content` may be called by one process alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils.data import DataLoader

from unisono.errors import ConfigError
from unisono.recipes.seo.front.analysis import Analysis, Answer, described, need_text
from unisono.recipes.seo.front.config import SEOConfig
from unisono.recipes.seo.front.data import SEODataset
from unisono.recipes.seo.front.devices import precision
from unisono.recipes.seo.front.loaders import DataLoaderConfig, DataLoaderManager, Loaders, OfRank
from unisono.recipes.seo.front.metrics import of_classes, of_numbers, of_order
from unisono.recipes.seo.front.teaching import Teaching


class AdvancedLLMSEOEngine(Teaching):
    """Trains, evaluates and analyses; see SEOConfig for what it can be told."""

    def __init__(self, config: SEOConfig | None = None) -> None:
        super().__init__(config)
        self._analysis = Analysis(self._learner, precision(self.config, self._devices))

    # --- data

    async def initialize_models(self) -> None:
        """Loads the tokenizer now instead of when it is needed; the model follows when its labels are known."""
        if self.config.model_name != "tiny":
            self._learner.need_tokenizer()

    def _manager(self, **fields: Any) -> DataLoaderManager:
        config = self.config
        told = {
            "batch_size": config.batch_size,
            "num_workers": config.dataloader_num_workers,
            "pin_memory": config.dataloader_pin_memory,
            "persistent_workers": config.dataloader_persistent_workers,
            "random_state": config.seed,
        }
        return DataLoaderManager(DataLoaderConfig(**{**told, **fields}), self._learner.tokenizer, config.max_length)

    def create_training_dataset(
        self,
        texts: Sequence[str],
        labels: Sequence[Any] | None = None,
        name: str = "training",
        metadata: Mapping[str, Sequence[Any]] | None = None,
    ) -> SEODataset:
        """A data set of texts with their labels; empty texts are refused."""
        SEODataset(texts, labels, metadata=metadata)  # before anything is made of them
        self._learner.need_tokenizer(texts)
        return self._manager().create_dataset(name, texts, labels, metadata)

    def create_training_dataloaders(
        self, texts: Sequence[str], labels: Sequence[Any], name: str = "training", val_split: float = 0.2
    ) -> Loaders:
        """Loaders of texts to train on and to validate with; of each class alike."""
        data = self.create_training_dataset(texts, labels, name)
        return self._manager().create_train_val_split(name, data, val_split)

    create_dataloaders = create_training_dataloaders
    create_stratified_dataloaders = create_training_dataloaders

    def create_training_dataloaders_with_test(
        self, texts: Sequence[str], labels: Sequence[Any], name: str = "training", **ratios: float
    ) -> tuple[DataLoader[Any], ...]:
        """Three loaders: train, validation, test (train_ratio=0.7, val_ratio=0.15, test_ratio=0.15)."""
        data = self.create_training_dataset(texts, labels, name)
        return self._manager(**ratios).create_train_val_test_split(name, data)

    def create_cross_validation_dataloaders(
        self,
        texts: Sequence[str],
        labels: Sequence[Any],
        name: str = "training",
        metadata: Mapping[str, Sequence[Any]] | None = None,
        **fields: Any,
    ) -> list[Loaders]:
        """(train, validation) of each fold; fields are DataLoaderConfig's: cv_folds=5, cv_strategy, group_by …"""
        data = self.create_training_dataset(texts, labels, name, metadata)
        return self._manager(**fields).create_cross_validation_folds(name, data)

    def create_distributed_dataloaders(
        self, texts: Sequence[str], labels: Sequence[Any], name: str = "training", val_split: float = 0.2
    ) -> Loaders:
        """The same as create_training_dataloaders; read by hand, each process sees its own texts."""
        data = self.create_training_dataset(texts, labels, name)
        manager, world = self._manager(), self._devices.world
        train, val = manager.split(data, [1 - val_split, val_split])

        def own(num: int, shuffle: bool) -> OfRank:
            return OfRank(num, world.rank, world.size, shuffle=shuffle, seed=self.config.seed)

        return (
            manager.create_dataloader(name, train, sampler=own(len(train), True)),
            manager.create_dataloader(name, val, sampler=own(len(val), False)),
        )

    def train_cross_validation(
        self,
        texts: Sequence[Any],
        labels: Sequence[Any] | None = None,
        num_folds: int = 5,
        max_epochs: int | None = None,
        metadata: Mapping[str, Sequence[Any]] | None = None,
        **fields: Any,
    ) -> dict[str, Any]:
        """Trains a model of its own on each fold and evaluates it on the rest: every figure, its mean and its spread.

        `texts` may also be what create_cross_validation_dataloaders gave. This engine itself learns nothing from it.
        """
        if labels is not None:
            told = {"cv_folds": num_folds, **fields}
            data = SEODataset(texts, labels, metadata=metadata)
            folds = self._manager(**told).create_cross_validation_folds("folds", data)
        elif texts and all(isinstance(each, tuple) and len(each) == 2 for each in texts):
            folds = list(texts)
        else:
            raise ConfigError("labels: none were given; expected texts and labels, or (train, validation) loaders")
        return self._over_folds(folds, max_epochs)

    # --- figures

    def evaluate_seo_classification(
        self, y_true: Sequence[Any], y_pred: Sequence[Any], task_type: str = "seo_optimization"
    ) -> dict[str, Any]:
        """Accuracy, precision, recall, F1 and kappa of classes, beside the most frequent class."""
        return {**of_classes(list(y_true), list(y_pred)), "task_type": task_type}

    def evaluate_seo_regression(
        self, y_true: Sequence[float], y_pred: Sequence[float], task_type: str = "seo_score"
    ) -> dict[str, Any]:
        """Errors, R² and Spearman of numbers, beside the mean."""
        return {**of_numbers(y_true, y_pred), "task_type": task_type}

    def evaluate_seo_ranking(
        self, y_true: Sequence[float], y_pred: Sequence[float], task_type: str = "content_ranking"
    ) -> dict[str, Any]:
        """NDCG of one list of pages, beside any order; for queries and pages see `unisono train seo`."""
        return {**of_order(y_true, y_pred), "task_type": task_type}

    def evaluate_seo_content_quality(
        self,
        texts: Sequence[str],
        html_contents: Sequence[str | bytes] | None = None,
        keywords: Sequence[str] | None = None,
    ) -> dict[str, Any]:
        """The checks of each text, or of its page where the HTML is given: plain rules, none of them learned."""
        from unisono.recipes.seo.data.pages import parse_page
        from unisono.recipes.seo.site.page_rules import check_page
        from unisono.recipes.seo.site.text_rules import check_text

        if html_contents is not None and len(html_contents) != len(texts):
            raise ConfigError(f"html_contents: {len(html_contents)} of them for {len(texts)} texts; give one for each")
        words = self._keywords(keywords)
        found = [
            check_text(text, words)
            if html_contents is None
            else check_page(parse_page(html_contents[place], f"text {place}"), words)
            for place, text in enumerate(texts)
        ]
        measured = [check for checks in found for check in checks if check.passed is not None]
        return {
            "checks": [[described(check) for check in checks] for checks in found],
            "num_failed": [sum(check.failed for check in checks) for checks in found],
            "share_passed": sum(bool(check.passed) for check in measured) / len(measured) if measured else None,
            "learned": False,
        }

    # --- texts

    def _keywords(self, keywords: Sequence[str] | str | None) -> list[str]:
        words = self.config.seo_keywords if keywords is None else keywords
        words = [words] if isinstance(words, str) else list(words)
        if not all(isinstance(word, str) and word.strip() for word in words):
            raise ConfigError(f"keywords: expected words, got {words!r}")
        return words

    def analyze_seo_score(self, text: str, keywords: Sequence[str] | str | None = None) -> dict[str, Any]:
        """The learned score of a text, and, under `checks`, what plain rules say of it.

        `seo_score` is None before training on real labels, and `reason` says so.
        """
        return self._analysis.of([text], self._keywords(keywords))[0]

    def batch_analyze(self, texts: Sequence[str], keywords: Sequence[str] | str | None = None) -> list[dict[str, Any]]:
        """The same for several texts, computed together."""
        if isinstance(texts, str):
            raise ConfigError("texts: expected a list of them; analyze_seo_score takes one")
        return self._analysis.of(list(texts), self._keywords(keywords))

    def optimize_content(self, content: str, target_keywords: Sequence[str] | str | None = None) -> Answer:
        """Changes that do not lower a text's score: its own sentences in another order, fewer repeated, shorter ones.

        Nothing is invented and no keyword is added; `changes` says of each change what became of the score, and
        `titles` are candidates from the text's own words.
        """
        words = self._keywords(target_keywords)
        if not words:
            raise ConfigError("target_keywords: none were given; say what the text should be found for")
        need_text(content, "content", "optimize")
        return self._analysis.improved(content, words)
