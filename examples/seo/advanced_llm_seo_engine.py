"""Re-exports unisono's SEO classes under the name of the original module."""

from unisono.recipes.seo.front import AdvancedLLMSEOEngine, SEOConfig

__all__ = ["AdvancedLLMSEOEngine", "SEOConfig"]
