"""Shows a run below the cell of a Jupyter notebook while it trains.

A thread of the notebook's process reads the run folder, as `unisono watch` does, so it makes no difference whether the
run trains in this process or in separate rank processes.
"""

from __future__ import annotations

import contextvars
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

from unisono.observe.training_line import SHOWN_ELSEWHERE
from unisono.observe.watch.live_run import LiveRun
from unisono.observe.watch.summary import as_html, as_text

_EVERY_S = 1.0


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return hasattr(shell, "kernel")


@contextmanager
def shown_in_notebook(folder: Path) -> Iterator[None]:
    """A context in which the run in `folder` is shown below the current cell; without a notebook it does nothing."""
    if not in_notebook():
        yield
        return
    view, before = _View(folder), os.environ.get(SHOWN_ELSEWHERE)
    os.environ[SHOWN_ELSEWHERE] = "1"  # no line per logged step, here and in the ranks
    try:
        with view:
            yield
    finally:
        if before is None:
            del os.environ[SHOWN_ELSEWHERE]


class _View:
    """The display of one run, which a thread updates."""

    def __init__(self, folder: Path) -> None:
        self._run, self._over = LiveRun(folder), Event()
        # The notebook uses the context to find the cell to which an output belongs.
        context = contextvars.copy_context()
        self._thread = Thread(target=lambda: context.run(self._update_regularly), name="notebook view", daemon=True)
        self._display: Any = None

    def __enter__(self) -> None:
        import IPython.display

        show: Any = IPython.display.display
        self._run.update()
        self._display = show(self._shown(), display_id=True)
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join(timeout=10)
        self._update(budget_s=10.0)

    def _update_regularly(self) -> None:
        while not self._over.wait(_EVERY_S):
            self._update(budget_s=0.2)

    def _update(self, budget_s: float) -> None:
        self._run.update(budget_s)
        if self._display is not None:
            self._display.update(self._shown())

    def _shown(self) -> _Shown:
        return _Shown(as_text(self._run), str(as_html(self._run)))


class _Shown:
    """An object that a notebook shows as HTML, and other programs as text."""

    def __init__(self, text: str, html: str) -> None:
        self._text, self._html = text, html

    def __repr__(self) -> str:
        return self._text

    def _repr_html_(self) -> str:
        return self._html
