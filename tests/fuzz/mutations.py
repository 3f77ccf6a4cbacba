"""Damages files: hypothesis draws what happens, and the functions here apply it.

A file is damaged as bytes (bits, lengths, sections), as text (words of its format), or as JSON, whether it is a JSON
file, a line of one, or the header of a safetensors file. A case is a pure function of what hypothesis draws, so it can
be repeated and made smaller.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from fuzz.reader import OUTSIDE

Operation = tuple[Any, ...]

_NUMBERS = (0, 1, 2, 127, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)
_WORDS = (
    *(b"", b"\0", b"\n", b"\r\n", b'"', b"'", b"{", b"}", b"[", b"]", b",", b":", b"<", b">", b"&", b"/", b"\\", b"%"),
    *(
        b"../",
        b"/etc/passwd",
        b"nan",
        b"inf",
        b"-1",
        b"1e309",
        b"9" * 400,
        b"null",
        b"true",
        b"\xff\xfe",
        b"\xef\xbb\xbf",
    ),
    *(b"\x1b[31m", b"\xed\xa0\x80", "İſ\u2028".encode(), b"[" * 3000, b'{"a":' * 500, b"a" * 70_000, b"\0" * 600),
    *(f"../{OUTSIDE}/secret{end}".encode() for end in ("", ".txt", ".json", ".mp4", ".safetensors", ".html", ".h5")),
)
_VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        2**31,
        2**63,
        2**64,
        10**400,
        -(10**30),
        0.5,
        -0.0,
        1e308,
        float("nan"),
        float("inf"),
    ),
    *("", "x", "0", "nan", "\0", "\ud800", "\x1b[31m", "a\nb", "x" * 5000, ".", "..", "/etc/passwd"),
    *(f"../{OUTSIDE}/secret.txt", f"../{OUTSIDE}/secret.safetensors", f"../{OUTSIDE}"),
    *([], [[]], [None], [0] * 3, {}, {"": {}}, {"x": [1, "a", None]}, ["x"] * 3, [-1, 2**62], [1e300, 2]),
)
_PLACE = st.integers(0, 2**20)  # where, as a fraction of the file
# An alphabet of its own, because hypothesis would build a table of all characters first, which takes seconds.
_LETTERS = "ab01 \n\r\t\0\"'\\/<>&;:,.-_{}[]%\x1b\x7f\x85éß\u0130\u2028\u202e\ud800\ufeff\U0001f600"
_LENGTH = st.one_of(st.integers(1, 8), st.integers(1, 4096))
_JSON = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(_LETTERS, max_size=8),
        st.sampled_from(_VALUES[16:30]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(_LETTERS, max_size=6), inner, max_size=4)
    ),
    max_leaves=8,
)


def operations(words: Sequence[bytes]) -> st.SearchStrategy[list[Operation]]:
    """What happens to one file, in order."""
    word = st.sampled_from([*words, *words, *_WORDS]) if words else st.sampled_from(_WORDS)
    of_bytes = st.one_of(
        st.tuples(st.just("flip"), _PLACE, st.integers(0, 7)),
        st.tuples(st.just("byte"), _PLACE, st.sampled_from((0, 1, 0x20, 0x7F, 0x80, 0xFF))),
        st.tuples(st.just("number"), _PLACE, st.sampled_from(_NUMBERS), st.sampled_from((2, 4, 8)), st.booleans()),
        st.tuples(st.just("remove"), _PLACE, _LENGTH),
        st.tuples(st.just("repeat"), _PLACE, _LENGTH, st.integers(1, 40)),
        st.tuples(st.just("move"), _PLACE, _PLACE, _LENGTH),
        st.tuples(st.just("insert"), _PLACE, word),
        st.tuples(st.just("overwrite"), _PLACE, word),
        st.tuples(st.just("cut"), _PLACE),
        st.tuples(st.just("line"), _PLACE, _PLACE),
    )
    of_json = st.one_of(
        st.tuples(st.just("value"), _PLACE, st.sampled_from(_VALUES)),
        st.tuples(st.just("value"), _PLACE, _JSON),
        st.tuples(st.just("value"), _PLACE, word.map(lambda text: text.decode("utf-8", "replace"))),
        st.tuples(st.just("delete"), _PLACE),
        st.tuples(st.just("rename"), _PLACE, st.sampled_from(("", "x", "__proto__", "../x", "step", "\ud800"))),
        st.tuples(st.just("copy"), _PLACE, _PLACE),
    )
    whole = st.one_of(
        st.tuples(st.just("all"), st.binary(max_size=64)),
        st.tuples(
            st.just("all"), st.text(_LETTERS, max_size=64).map(lambda text: text.encode("utf-8", "surrogatepass"))
        ),
        st.tuples(st.just("all"), _JSON.map(lambda value: json.dumps(value).encode())),
    )
    return st.one_of(
        st.lists(of_json, min_size=1, max_size=3),
        st.lists(of_bytes, min_size=1, max_size=4),
        st.lists(st.one_of(of_bytes, of_json), min_size=1, max_size=5),
        st.lists(whole, min_size=1, max_size=1),
    )


def apply(content: bytes, changes: Sequence[Operation]) -> bytes:
    """The damaged file."""
    for change in changes:
        content = _of_json(content, change) if change[0] in _JSON_CHANGES else _of_bytes(content, *change)
    return content


def _of_bytes(content: bytes, kind: str, *arguments: Any) -> bytes:
    if kind == "all":
        return bytes(arguments[0])
    at, *rest = arguments
    at = at * (len(content) + 1) >> 20 if at < 2**20 else len(content)
    if kind == "cut":
        return content[:at]
    if kind == "insert":
        return content[:at] + rest[0] + content[at:]
    if kind == "overwrite":
        return content[:at] + rest[0] + content[at + len(rest[0]) :]
    if kind == "number":
        value, size, is_little = rest
        data = (value % 2 ** (8 * size)).to_bytes(size, "little" if is_little else "big")
        return content[:at] + data + content[at + size :]
    if kind == "remove":
        return content[:at] + content[at + rest[0] :]
    if kind == "repeat":
        return content[:at] + content[at : at + rest[0]] * rest[1] + content[at:]
    if kind == "move":
        other, length = rest[0] * (len(content) + 1) >> 20, rest[1]
        return content[:at] + content[other : other + length] + content[at:]
    if kind == "line":
        lines = content.splitlines(keepends=True) or [b""]
        lines.insert(arguments[0] * len(lines) >> 20, lines[min(rest[0] * len(lines) >> 20, len(lines) - 1)])
        return b"".join(lines)
    if at >= len(content):
        return content
    value = content[at] ^ 1 << rest[0] if kind == "flip" else rest[0]
    return content[:at] + bytes([value]) + content[at + 1 :]


_JSON_CHANGES = ("value", "delete", "rename", "copy")


def _of_json(content: bytes, change: Operation) -> bytes:
    """Changes a JSON document in the file; the file as it is if there is none."""
    length = int.from_bytes(content[:8], "little")
    if content[8:9] == b"{" and length <= len(content) - 8:  # safetensors
        header = _changed_json(content[8 : 8 + length], change)
        return len(header).to_bytes(8, "little") + header + content[8 + length :]
    if content[:1] not in (b"{", b"["):
        return content
    whole = _changed_json(content, change)
    if whole is not content:
        return whole
    lines = content.split(b"\n")
    number = change[1] * len(lines) >> 20
    lines[min(number, len(lines) - 1)] = _changed_json(lines[min(number, len(lines) - 1)], change)
    return b"\n".join(lines)


def _changed_json(text: bytes, change: Operation) -> bytes:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return text
    places: list[tuple[Any, Any]] = []
    waiting = [document]
    while waiting and len(places) < 3000:
        each = waiting.pop()
        if isinstance(each, dict | list):
            inside = list(each.items() if isinstance(each, dict) else enumerate(each))
            places += [(each, key) for key, _ in inside]
            waiting += [value for _, value in inside]
    if not places:
        return json.dumps(change[2] if change[0] == "value" else None).encode()
    kind, at, *rest = change
    holder, key = places[min(at * len(places) >> 20, len(places) - 1)]
    if kind == "value":
        holder[key] = rest[0]
    elif kind == "delete":
        del holder[key]
    elif kind == "rename" and isinstance(holder, dict):
        holder[rest[0]] = holder.pop(key)
    elif kind == "copy":
        other, name = places[min(rest[0] * len(places) >> 20, len(places) - 1)]
        holder[key] = copy.deepcopy(other[name])
    return json.dumps(document).encode()
