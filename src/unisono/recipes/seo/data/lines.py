"""The lines of text files, gzipped or not, in UTF-8 and other encodings.

A byte order mark selects UTF-8, UTF-16 or UTF-32; without one a file is UTF-8. A file that is not UTF-8 but looks like
Windows-1252 (single non-ASCII bytes between letters, where other encodings have runs of them) is read as such, with a
remark. Everything else is rejected, because a wrong guess would train on garbage.
"""

from __future__ import annotations

import codecs
import gzip
import io
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, cast

from unisono.errors import ConfigError
from unisono.recipes.common.tree import one_line

LONGEST_LINE = 2**26
"""Characters: a file without ends of lines must not fill the memory."""

_MARKS = {  # the longer ones first: that of UTF-32 begins like that of UTF-16
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
_LOOKED_AT = 4096
_LONGEST_RUN = 2  # of letters with accents that Western words have side by side
_RUN = re.compile(r"[\udc80-\udcff]+")
_NOT_IN_1252 = re.compile("[\udc81\udc8d\udc8f\udc90\udc9d]")

Remark = Callable[[str], None]


def lines_of(path: Path, remark: Remark = lambda text: None) -> Iterator[tuple[int, str]]:
    """The lines with their numbers, from 1, with their ends; ConfigError where they cannot be read as text."""
    number = 0
    try:
        with ExitStack() as stack:
            file = _opened(path, stack)
            start = file.read(_LOOKED_AT)
            encoding = _encoding(start, path)
            file.seek(0)
            # What is not UTF-8 comes as lone surrogates: quicker than decoding line by line.
            errors = "surrogateescape" if encoding.startswith("utf-8") else "strict"
            text = stack.enter_context(io.TextIOWrapper(file, encoding, errors, newline="\n"))
            western, only_ascii = False, True
            while line := text.readline(LONGEST_LINE):
                number += 1
                if len(line) == LONGEST_LINE:
                    raise ConfigError(f"{path}, line {number}: longer than {LONGEST_LINE // 2**20} Mi characters")
                if not line.isascii():
                    if not western and _RUN.search(line):
                        _check_western(line, only_ascii, f"{path}, line {number}")
                        western = True
                        remark(f"{path} is not UTF-8 (line {number}): it is read as Windows-1252")
                    if western:
                        line = line.encode("utf-8", "surrogateescape").decode("cp1252", "replace")
                    only_ascii = False
                yield number, line
    except (EOFError, gzip.BadGzipFile, zlib.error):
        raise ConfigError(one_line(f"{path}: damaged or cut short after line {number}; get it again")) from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            one_line(f"{path}: not proper {error.encoding} after line {number}; save it as UTF-8")
        ) from None
    except OSError as error:
        raise ConfigError(one_line(f"{path} cannot be read ({error.strerror or error})")) from None


def read_start(path: Path, size: int) -> bytes:
    """The first bytes of what a file holds; ConfigError where it cannot be read."""
    try:
        with ExitStack() as stack:
            return _opened(path, stack).read(size)
    except (EOFError, gzip.BadGzipFile, zlib.error):
        raise ConfigError(one_line(f"{path}: damaged; get it again")) from None
    except OSError as error:
        raise ConfigError(one_line(f"{path} cannot be read ({error.strerror or error})")) from None


def plain_suffix(path: Path) -> str:
    """.csv of x.csv and of x.csv.gz."""
    name = path.name.lower().removesuffix(".gz")
    return name[name.rindex(".") :] if "." in name else ""


def _opened(path: Path, stack: ExitStack) -> BinaryIO:
    if not path.is_file():  # a pipe would be waited for, for ever
        raise ConfigError(one_line(f"{path}: there is no such file"))
    file = stack.enter_context(path.open("rb"))
    compressed = file.read(2) == b"\x1f\x8b"  # whatever it is called
    file.seek(0)
    return cast(BinaryIO, stack.enter_context(gzip.GzipFile(fileobj=file))) if compressed else file


def _encoding(start: bytes, path: Path) -> str:
    marked = next((encoding for mark, encoding in _MARKS.items() if start.startswith(mark)), None)
    if marked:
        return marked
    zeros = start.count(b"\0")
    if not zeros:
        return "utf-8"
    if zeros >= len(start) // 3:  # of UTF-16 without a mark every second byte is zero, where letters are Latin
        for encoding, high in (("utf-16-le", start[1::2]), ("utf-16-be", start[::2])):
            if high.count(b"\0") > 0.9 * zeros:
                return encoding
    raise ConfigError(one_line(f"{path}: not a text file; expected lines of UTF-8 text"))


def _check_western(line: str, only_ascii: bool, where: str) -> None:
    """Refuses a line that is not UTF-8, unless it looks like Windows-1252, as all before it may have been."""
    runs = _RUN.findall(line)
    only_ascii = only_ascii and _RUN.sub("", line).isascii()
    if not only_ascii or max(map(len, runs)) > _LONGEST_RUN or _NOT_IN_1252.search(line):
        raise ConfigError(
            one_line(f"{where}: not UTF-8, and not known as anything else; save the file as UTF-8 (`iconv -t utf-8`)")
        )
