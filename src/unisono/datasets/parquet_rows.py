"""A dataset of Parquet files, with random access to their rows."""

from __future__ import annotations

from typing import Any

from unisono.datasets.row_groups import RangeFile, RowGroups
from unisono.datasets.sources import Source


class ParquetRows(RowGroups):
    """The rows of Parquet files, as dicts of values by column; only `columns` are read."""

    suffix, kind = ".parquet", "parquet-1"

    def _opened(self, source: Source) -> Any:
        import pyarrow
        from pyarrow import parquet

        return parquet.ParquetFile(pyarrow.PythonFile(RangeFile(self._reader, source), mode="r"))

    def _sizes(self, opened: Any) -> list[tuple[int, int]]:
        metadata = opened.metadata
        return [(metadata.row_group(number).num_rows, number) for number in range(metadata.num_row_groups)]

    def _read(self, opened: Any, place: int) -> Any:
        return opened.read_row_group(place, columns=self.columns, use_threads=False)
