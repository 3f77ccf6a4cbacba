"""Reads lines of text files, gzipped or not: UTF-8, or UTF-16 and UTF-32 with a byte order mark.

Other encodings are rejected, because after a wrong guess the model would be trained on garbage.
"""

from __future__ import annotations

import codecs
import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, cast

from unisono.errors import ConfigError
from unisono.recipes.common.tree import one_line

MAX_LINE = 2**26
"""Maximum number of characters per line, so that a file without line breaks cannot fill the memory."""

_BYTE_ORDER_MARKS = {  # longest first: the mark of UTF-32 begins with the mark of UTF-16
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
_NUM_BYTES = 4096


def lines_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yields line numbers from 1 and lines with their line breaks; raises ConfigError if the file is not text."""
    number = 0
    try:
        with ExitStack() as stack:
            file = _open(path, stack)
            encoding = _encoding(file.read(_NUM_BYTES), path)
            file.seek(0)
            text = stack.enter_context(io.TextIOWrapper(file, encoding, newline="\n"))
            while line := text.readline(MAX_LINE):
                number += 1
                if len(line) == MAX_LINE:
                    raise ConfigError(f"{path}, line {number}: longer than {MAX_LINE // 2**20} Mi characters")
                yield number, line
    except (EOFError, gzip.BadGzipFile, zlib.error):
        message = f"{path}: damaged or truncated after line {number}; download it again"
        raise ConfigError(one_line(message)) from None
    except UnicodeDecodeError as error:
        message = f"{path}: not valid {error.encoding} after line {number}; save it as UTF-8 (`iconv -t utf-8`)"
        raise ConfigError(one_line(message)) from None
    except OSError as error:
        raise ConfigError(one_line(f"{path} cannot be read ({error.strerror or error})")) from None


def read_start(path: Path, size: int) -> bytes:
    """Returns the first bytes of a file, decompressed; raises ConfigError if the file cannot be read."""
    try:
        with ExitStack() as stack:
            return _open(path, stack).read(size)
    except (EOFError, gzip.BadGzipFile, zlib.error):
        raise ConfigError(one_line(f"{path}: damaged; download it again")) from None
    except OSError as error:
        raise ConfigError(one_line(f"{path} cannot be read ({error.strerror or error})")) from None


def plain_suffix(path: Path) -> str:
    """Returns the suffix without .gz: .csv for both x.csv and x.csv.gz."""
    name = path.name.lower().removesuffix(".gz")
    return name[name.rindex(".") :] if "." in name else ""


def _open(path: Path, stack: ExitStack) -> BinaryIO:
    if not path.is_file():  # reading a pipe could block forever
        raise ConfigError(one_line(f"{path}: no such file"))
    file = stack.enter_context(path.open("rb"))
    is_gzip = file.read(2) == b"\x1f\x8b"  # whatever the file name is
    file.seek(0)
    return cast(BinaryIO, stack.enter_context(gzip.GzipFile(fileobj=file))) if is_gzip else file


def _encoding(start: bytes, path: Path) -> str:
    encoding = next((encoding for mark, encoding in _BYTE_ORDER_MARKS.items() if start.startswith(mark)), None)
    if encoding is None and b"\0" in start:
        raise ConfigError(one_line(f"{path}: not a text file; expected lines of UTF-8 text"))
    return encoding or "utf-8"
