"""Bars of named entries on the report page."""

from __future__ import annotations

from unisono.observe.report.charts import bar_chart
from unisono.observe.report.series import Curves


def test_entries_without_a_name_or_a_number_draw_no_bars() -> None:
    curves = Curves()
    curves.add(1, [float("nan"), 0.5])
    assert 'value="0.5"' in bar_chart("right", curves, ["cat", "dog"])
    assert bar_chart("right", curves, ["cat"]) == "", "the only entry that has a name is not finite"
