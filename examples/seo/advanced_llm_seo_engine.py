"""Re-exports unisono's SEO classes under the name of the original module."""

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
