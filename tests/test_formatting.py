"""Numbers, sizes and exceptions as text."""

from __future__ import annotations

import pytest

from unisono.errors import ConfigError
from unisono.formatting import describe_exception, format_bytes, format_clock, format_count, format_duration


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 bytes"), (1023, "1023 bytes"), (1536, "1.5 KiB"), (2**31, "2.0 GiB")]
)
def test_sizes_are_shown_in_binary_units(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


def test_a_count_agrees_with_its_noun() -> None:
    shown = [format_count(count, thing) for count, thing in ((1, "rank"), (2, "rank"), (1200, "query"), (3, "batch"))]
    assert shown == ["1 rank", "2 ranks", "1,200 queries", "3 batches"]
    assert format_count(2, "day") == "2 days"


def test_short_durations_have_fractions_where_they_matter() -> None:
    assert [format_duration(seconds, precise=True) for seconds in (0.25, 9, 12, 190)] == [
        "0.25 s",
        "9 s",
        "12s",
        "3m10s",
    ]
    assert format_clock(2 * 86400 + 3 * 3600 + 4 * 60 + 5) == "2 d 3:04:05"


def test_any_exception_can_be_formatted_as_one_line() -> None:
    class Broken(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert describe_exception(ValueError("one\n  two")) == "ValueError: one two"
    assert describe_exception(ConfigError("batch_size 3: use 4")) == "batch_size 3: use 4"
    assert describe_exception(KeyError(), bare=(KeyError,)) == "KeyError: "
    assert "cannot be shown" in describe_exception(Broken())
    assert len(describe_exception(ValueError("x" * 10**6))) < 3000
