"""The names that scripts import from here: they are unisono's."""

from unisono.recipes.seo.front import (
    AdvancedLLMSEOEngine,
    DataLoaderConfig,
    DataLoaderManager,
    EarlyStopping,
    SEOConfig,
    SEODataset,
)

__all__ = [
    "AdvancedLLMSEOEngine",
    "DataLoaderConfig",
    "DataLoaderManager",
    "EarlyStopping",
    "SEOConfig",
    "SEODataset",
]
