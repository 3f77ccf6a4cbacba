"""The Python API: `SEOConfig` and `AdvancedLLMSEOEngine`.

    from unisono.recipes.seo.front import AdvancedLLMSEOEngine, SEOConfig

    engine = AdvancedLLMSEOEngine(SEOConfig(use_multi_gpu=True, num_gpus=2, batch_size=16))
    train, val = engine.create_training_dataloaders(texts, labels)
    engine.train_with_early_stopping(train, val)
    engine.analyze_seo_score("a page", ["a keyword"])

unisono's engine runs the training, so a run is the same on the CPU, on one GPU and on many GPUs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from unisono.recipes.seo.front.config import SEOConfig

if TYPE_CHECKING:
    from unisono.recipes.seo.front.engine import AdvancedLLMSEOEngine

__all__ = ["AdvancedLLMSEOEngine", "SEOConfig"]


def __getattr__(name: str) -> Any:
    # Import on first use, so that a config can be written and read without importing torch.
    if name != "AdvancedLLMSEOEngine":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from unisono.recipes.seo.front.engine import AdvancedLLMSEOEngine

    return AdvancedLLMSEOEngine
