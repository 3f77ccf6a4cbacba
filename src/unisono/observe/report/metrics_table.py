"""The metrics of a run as a table with a row per step, for Python and notebooks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from unisono.errors import UserError
from unisono.formatting import format_number, shorten
from unisono.observe.folder import METRICS
from unisono.observe.json_lines import JsonLines

_MOST_SHOWN = 10  # rows and columns that a notebook shows
_FIRST = ("step", "epoch", "loss", "lr", "grad_norm", "samples_per_s")


class MetricsTable:
    """Logged steps and evaluations of a run: a row per step, a column per metric.

    `table["loss"]` is a column, with None where a step has no value; `table[0]` and `table[-1]` are rows.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self.rows: list[dict[str, Any]] = [dict(row) for row in rows]
        """A dict per step, which contains only the metrics of that step."""
        self.columns: list[str] = list(dict.fromkeys(name for row in self.rows for name in row))
        """The names of all metrics, `step` first."""

    @classmethod
    def read(cls, folder: Path) -> MetricsTable:
        """Reads metrics.jsonl of a run folder; the evaluation of a step is in the same row as its training metrics."""
        by_step: dict[int, dict[str, Any]] = {}
        for record in JsonLines(folder / METRICS):
            step = record.get("step")
            if type(step) is int:
                row = by_step.setdefault(step, {"step": step})
                row.update({name: _value(value) for name, value in record.items()})
        return cls([by_step[step] for step in sorted(by_step)])

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)

    def __getitem__(self, key: str | int) -> Any:
        if isinstance(key, int):
            return self.rows[key]
        if key not in self.columns:
            raise KeyError(f"{key!r} is not a metric of this run; it has {', '.join(self.columns)}")
        return [row.get(key) for row in self.rows]

    def points(self, name: str) -> tuple[list[int], list[float]]:
        """Returns the steps at which this metric has a number, and the numbers."""
        column = zip(self["step"], self[name], strict=True)
        known = [(step, value) for step, value in column if type(value) in (int, float)]
        return [step for step, _ in known], [value for _, value in known]

    def to_pandas(self) -> Any:
        """Returns a pandas DataFrame, with NaN where a step has no value."""
        try:
            import pandas
        except ImportError:
            raise UserError("to_pandas() needs pandas; run pip install pandas") from None
        return pandas.DataFrame(self.rows, columns=self.columns)

    def __repr__(self) -> str:
        last = ", ".join(
            f"{name} {_shown(self.rows[-1][name])}" for name in self._main(_FIRST) if name in self.rows[-1]
        )
        return f"<metrics of {len(self)} steps, {len(self.columns)} columns{f'; last: {last}' if self.rows else ''}>"

    def _main(self, first: Sequence[str]) -> list[str]:
        scalar = [name for name in self.columns if not any(isinstance(row.get(name), list) for row in self.rows[-1:])]
        evaluated = [name for name in scalar if name.startswith("eval/")]
        return list(dict.fromkeys([*(name for name in first if name in scalar), *evaluated, *scalar]))[:_MOST_SHOWN]

    def _repr_html_(self) -> str:
        columns, half = self._main(_FIRST), _MOST_SHOWN // 2
        rows: list[dict[str, Any] | None] = [*self.rows]
        if len(rows) > _MOST_SHOWN:
            rows = [*rows[:half], None, *rows[-half:]]
        heads = "".join(f"<th>{escape(shorten(name, 60))}</th>" for name in columns)
        cells = [
            "".join(f"<td>{escape('…' if row is None else _shown(row.get(name)))}</td>" for name in columns)
            for row in rows
        ]
        body = "".join(f"<tr>{each}</tr>" for each in cells)
        note = f"<p>{len(self):,} steps, {len(self.columns)} columns</p>"
        return f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>{note}"


def _value(value: Any) -> Any:
    """Converts "nan", "inf" and "-inf" back to numbers."""
    if isinstance(value, list):
        return [_value(item) for item in value]
    return float(value) if value in ("nan", "inf", "-inf") else value


def _shown(value: Any) -> str:
    if value is None:
        return ""
    return format_number(value) if type(value) in (int, float) else shorten(str(value), 40)
