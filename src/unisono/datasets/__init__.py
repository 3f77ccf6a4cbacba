"""Map-style datasets for large data: tar shards, Parquet and Arrow files, folders of files, Hugging Face datasets.

Each dataset builds an index on disk once, and then reads single samples by number. The sample order, a pure function of
seed and position, therefore works as for any other dataset, and a run resumes at the exact sample.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["ArrowRows", "Files", "HuggingFace", "ParquetRows", "TarShards"]

if TYPE_CHECKING:
    from unisono.datasets.arrow_rows import ArrowRows
    from unisono.datasets.files import Files
    from unisono.datasets.hugging_face import HuggingFace
    from unisono.datasets.parquet_rows import ParquetRows
    from unisono.datasets.tar_shards import TarShards

_MODULES = {
    "ArrowRows": "arrow_rows",
    "Files": "files",
    "HuggingFace": "hugging_face",
    "ParquetRows": "parquet_rows",
    "TarShards": "tar_shards",
}


def __getattr__(name: str) -> Any:
    # Imported on first use, because torch and pyarrow take seconds.
    if name not in _MODULES:
        raise AttributeError(f"module 'unisono.datasets' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"unisono.datasets.{_MODULES[name]}"), name)
