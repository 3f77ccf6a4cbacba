"""Iterates over the members of a tar file without extracting anything.

Python's tarfile reads extension headers of any size into memory and follows links. This reader trusts nothing: every
header must have a valid checksum, extension headers are small, and a member must lie within the file. It returns
regular files only; links, devices, folders and sparse files are skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

BLOCK = 512
_ZEROS = bytes(BLOCK)
_LARGEST_EXTENSION = 2**20  # maximum size in bytes of an extension header (long names, pax records)
_MOST_EXTENSIONS = 16  # maximum number of extension headers per member
_WITHOUT_DATA = b"123456"  # types of members without data: links, devices, folders, FIFOs
_MAGIC = {b"\x1f\x8b": "gzip", b"BZ": "bzip2", b"\xfd7": "xz", b"\x28\xb5": "zstd"}


class TarError(ValueError):
    """Raised if a file is not a complete tar file; the message says why."""


@dataclass(frozen=True, slots=True)
class Member:
    """A regular file in a tar file."""

    name: str
    header: int  # offset of the member's first header
    data: int  # offset of the member's content
    size: int

    @property
    def end(self) -> int:
        """The offset of the next header."""
        return self.data + _padded(self.size)


def members(read: Callable[[int, int], bytes], size: int, *, whole: bool = True) -> Iterator[Member]:
    """Yields the regular files of a tar file of `size` bytes; `read(start, count)` returns bytes of it.

    `whole=False` reads a section of a tar file, which has no end-of-archive marker.
    """
    offset = 0
    while whole or offset < size:
        first, name, pax = offset, "", dict[str, str]()
        for _ in range(_MOST_EXTENSIONS + 1):
            block = read(offset, BLOCK)
            if offset == 0 and block[:2] in _MAGIC:
                raise TarError(
                    f"it is compressed with {_MAGIC[block[:2]]}; decompress it, as random access needs a plain file"
                )
            if len(block) < BLOCK:
                raise TarError(f"it is truncated: at byte {offset}, expected a member or the end marker")
            if block == _ZEROS:
                return
            kind, length = _parse(block, offset)
            data = offset + BLOCK
            if kind not in b"xgLK":
                break
            payload = _extension(read, data, length)
            if kind == b"x":
                pax = _pax_records(payload, offset)
            elif kind == b"L":
                name = _text(payload)
            offset = data + _padded(length)
        else:
            raise TarError(f"at byte {offset}: more than {_MOST_EXTENSIONS} extension headers in front of a member")
        if kind == b"S":
            is_extended = block[482]
            while is_extended:
                more = read(data, BLOCK)
                if len(more) < BLOCK:
                    raise TarError("it is truncated")
                is_extended, data = more[504], data + BLOCK
        name = pax.get("path") or name or _name(block)
        if "size" in pax:
            length = _decimal(pax["size"], offset)
        if kind in _WITHOUT_DATA:
            length = 0
        if data + length > size:
            raise TarError(
                f"it is truncated, or its headers are wrong: {name[:80]!r} would end at byte {data + length}"
            )
        is_sparse = any(key.startswith("GNU.sparse") for key in pax)
        if kind in b"07\0" and not is_sparse and not name.endswith("/"):
            yield Member(name, first, data, length)
        offset = data + _padded(length)


def _parse(block: bytes, offset: int) -> tuple[bytes, int]:
    """Returns the type and the size in a header."""
    sums = sum(block) - sum(block[148:156]) + 8 * 32
    try:
        is_valid = int(block[148:156].rstrip(b"\0 ").lstrip(b" ") or b"x", 8) == sums
    except ValueError:
        is_valid = False
    if not is_valid:
        if offset == 0 and block[:2] in _MAGIC:
            kind = _MAGIC[block[:2]]
            raise TarError(f"it is compressed with {kind}; decompress it, as random access needs a plain file")
        raise TarError(f"at byte {offset} there is no tar header")
    field = block[124:136]
    if field[0] & 0x80:  # a size of more than 8 GiB, as a binary number
        if field[0] != 0x80:
            raise TarError(f"at byte {offset} a member has a negative size")
        return block[156:157], int.from_bytes(field[1:], "big")
    try:
        return block[156:157], int(field.rstrip(b"\0 ").lstrip(b" ") or b"0", 8)
    except ValueError:
        raise TarError(f"at byte {offset} a member has no valid size") from None


def _extension(read: Callable[[int, int], bytes], start: int, length: int) -> bytes:
    if length > _LARGEST_EXTENSION:
        raise TarError(f"at byte {start} an extension header has {length} bytes; at most {_LARGEST_EXTENSION} are read")
    payload = read(start, length)
    if len(payload) < length:
        raise TarError("it is truncated")
    return payload


def _pax_records(payload: bytes, offset: int) -> dict[str, str]:
    """Parses records of the form "length key=value", in which the length counts the whole record."""
    records: dict[str, str] = {}
    at = 0
    while at < len(payload) and payload[at] != 0:
        digits, _, _ = payload[at : at + 8].partition(b" ")
        length = int(digits) if digits.isdigit() else 0
        record = payload[at : at + length]
        if length < len(digits) + 2 or len(record) < length or record[-1:] != b"\n":
            raise TarError(f"at byte {offset} there is a damaged pax header")
        key, _, value = record[len(digits) + 1 : -1].partition(b"=")
        records[_text(key)] = _text(value)
        at += length
    return records


def _name(block: bytes) -> str:
    name = _text(block[:100])
    prefix = _text(block[345:500]) if block[257:263] == b"ustar\0" else ""
    return f"{prefix}/{name}" if prefix else name


def _text(data: bytes) -> str:
    return data.partition(b"\0")[0].decode("utf-8", "surrogateescape")


def _decimal(text: str, offset: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise TarError(f"at byte {offset} a member has no valid size")
    return int(text)


def _padded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK
