"""A dataset of the Hugging Face Hub, or of the `datasets` library."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from torch.utils.data import Dataset

from unisono.datasets.arrow_rows import ArrowRows
from unisono.datasets.parquet_rows import ParquetRows
from unisono.datasets.tar_shards import TarShards
from unisono.errors import UserError

_BY_SUFFIX = {".parquet": ParquetRows, ".arrow": ArrowRows, ".tar": TarShards}


class HuggingFace(Dataset[Any]):
    """A split of a dataset of the Hugging Face Hub.

    By default, `datasets.load_dataset` downloads it and converts it to Arrow. With `streaming`, nothing is converted:
    unisono indexes the dataset's Parquet, Arrow or tar files where they are, and fetches only the parts that it needs.
    A dataset that `datasets` has loaded already can be passed instead of a name.
    """

    def __init__(
        self,
        path: Any,
        name: str | None = None,
        *,
        split: str = "train",
        streaming: bool = False,
        transform: Callable[[dict[str, Any]], Any] | None = None,
        index_dir: str | os.PathLike[str] | None = None,
        storage_options: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """`options` are passed to `datasets.load_dataset`, for instance `data_files` and `revision`."""
        self.transform = transform
        if not isinstance(path, str | os.PathLike):
            self._rows = _checked(path)
        elif streaming:
            files = _data_files(os.fspath(path), name, split, options)
            kind = _kind_of(files, os.fspath(path))
            self._rows = kind(files, index_dir=index_dir, storage_options=storage_options)
        else:
            self._rows = _checked(_call("load_dataset", os.fspath(path), name, split=split, **options))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        row = self._rows[index]
        return row if self.transform is None else self.transform(row)

    def __getattr__(self, name: str) -> Any:
        # Forward these attributes, which only indexed rows have.
        if name not in ("block_starts", "will_read", "about_to_read") or "_rows" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._rows, name)


def _checked(dataset: Any) -> Any:
    if isinstance(dataset, Mapping):
        raise UserError(f"the dataset has several splits ({', '.join(map(str, dataset))}); pass split=")
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise UserError(
            "a streaming dataset of Hugging Face has no random access; pass its name with streaming=True instead, so "
            "that unisono reads its files by an index"
        )
    return dataset


def _data_files(path: str, name: str | None, split: str, options: Mapping[str, Any]) -> list[str]:
    """Returns the files of a split, as paths and URLs."""
    builder = _call("load_dataset_builder", path, name, **options)
    files = builder.config.data_files or {}
    if split not in files:
        raise UserError(f"{path} has no split {split!r}; it has {', '.join(map(str, files)) or 'no data files'}")
    return [str(file) for file in files[split]]


def _kind_of(files: list[str], path: str) -> Any:
    suffixes = {os.path.splitext(file.partition("?")[0])[1] for file in files}
    if len(suffixes) == 1 and (kind := _BY_SUFFIX.get(next(iter(suffixes)))) is not None:
        return kind
    raise UserError(
        f"{path} consists of {', '.join(sorted(suffixes)) or 'unknown'} files, which have no random access; remove "
        "streaming, and datasets will convert them to Arrow"
    )


def _call(function: str, *arguments: Any, **options: Any) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise UserError("Hugging Face datasets need the package datasets; run: pip install 'unisono[data]'") from error
    try:
        return getattr(datasets, function)(*arguments, **options)
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{arguments[0]} cannot be loaded ({type(error).__name__}: {reason})") from error
