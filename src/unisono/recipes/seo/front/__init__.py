"""The engine under the names people know: SEOConfig, AdvancedLLMSEOEngine.

    from unisono.recipes.seo.front import AdvancedLLMSEOEngine, SEOConfig

    engine = AdvancedLLMSEOEngine(SEOConfig(use_multi_gpu=True, num_gpus=2, batch_size=16))
    train, val = engine.create_training_dataloaders(texts, labels)
    engine.train_with_early_stopping(train, val)
    engine.analyze_seo_score("a page", ["a keyword"])

Everything is trained by unisono's engine: the same run on the CPU, on one GPU, and on many.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unisono.recipes.seo.front.config import SEOConfig
    from unisono.recipes.seo.front.data import SEODataset
    from unisono.recipes.seo.front.engine import AdvancedLLMSEOEngine
    from unisono.recipes.seo.front.loaders import DataLoaderConfig, DataLoaderManager
    from unisono.recipes.seo.front.stopping import EarlyStopping

_HOME = {
    "SEOConfig": "config",
    "AdvancedLLMSEOEngine": "engine",
    "DataLoaderConfig": "loaders",
    "DataLoaderManager": "loaders",
    "SEODataset": "data",
    "EarlyStopping": "stopping",
}

__all__ = [
    "AdvancedLLMSEOEngine",
    "DataLoaderConfig",
    "DataLoaderManager",
    "EarlyStopping",
    "SEOConfig",
    "SEODataset",
]


def __getattr__(name: str) -> Any:
    # On first use: a config can be written and read without waiting for torch.
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
