"""A dataset of Arrow files, in the IPC file format (Feather 2) or in the stream format of Hugging Face datasets."""

from __future__ import annotations

from typing import Any

from unisono.datasets.row_groups import RangeFile, RowGroups
from unisono.datasets.sources import Source
from unisono.errors import UserError

_MAGIC = b"ARROW1"


class ArrowRows(RowGroups):
    """The rows of Arrow files, as dicts of values by column."""

    suffix, kind = ".arrow", "arrow-1"

    def _opened(self, source: Source) -> Any:
        import pyarrow

        file = pyarrow.PythonFile(RangeFile(self._reader, source), mode="r")
        if self._reader.read(source, 0, len(_MAGIC)) == _MAGIC:
            return _FileFormat(file)
        return _StreamFormat(file, source)

    def _sizes(self, opened: Any) -> list[tuple[int, int]]:
        sizes: list[tuple[int, int]] = opened.sizes()
        return sizes

    def _read(self, opened: Any, place: int) -> Any:
        import pyarrow

        table = pyarrow.Table.from_batches([opened.batch(place)])
        return table if self.columns is None else table.select(self.columns)


class _FileFormat:
    """The IPC file format, whose footer lists the batches. A batch is located by its number."""

    def __init__(self, file: Any) -> None:
        from pyarrow import ipc

        self._reader = ipc.open_file(file)

    def sizes(self) -> list[tuple[int, int]]:
        return [(self.batch(number).num_rows, number) for number in range(self._reader.num_record_batches)]

    def batch(self, place: int) -> Any:
        return self._reader.get_batch(place)


class _StreamFormat:
    """The IPC stream format, a sequence of messages. A batch is located by the offset of its message."""

    def __init__(self, file: Any, source: Source) -> None:
        from pyarrow import ipc

        self._file, self._source = file, source
        self._schema = ipc.read_schema(ipc.read_message(file))

    def sizes(self) -> list[tuple[int, int]]:
        from pyarrow import ipc

        sizes = list[tuple[int, int]]()
        while (place := self._file.tell()) < self._source.size:
            try:
                message = ipc.read_message(self._file)
            except EOFError:  # the end-of-stream marker
                return sizes
            if message.type != "record batch":
                raise UserError(
                    f"{self._source.name} has a {message.type}, which prevents random access; write it in Arrow's "
                    "file format"
                )
            sizes.append((ipc.read_record_batch(message, self._schema).num_rows, place))
        raise UserError(f"{self._source.name} cannot be used: it is truncated (it has no end-of-stream marker)")

    def batch(self, place: int) -> Any:
        from pyarrow import ipc

        self._file.seek(place)
        return ipc.read_record_batch(ipc.read_message(self._file), self._schema)
