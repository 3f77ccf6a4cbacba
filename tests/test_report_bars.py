"""Bars of named entries on the report page."""

from __future__ import annotations

from unisono.observe.report.bars import draw_bars
from unisono.observe.report.series import Curves


def test_entries_without_a_name_or_a_number_draw_no_bars() -> None:
    curves = Curves()
    curves.add(1, [float("nan"), 0.5])
    assert 'value="0.5"' in draw_bars("right", curves, ["cat", "dog"])
    assert draw_bars("right", curves, ["cat"]) == "", "the only entry that has a name is not finite"
