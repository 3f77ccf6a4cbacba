"""Runs on a Ray cluster: `unisono train … --on ray`, and `unisono.ray.train(…)` in a Ray job.

Ray places one actor per machine of the run (`placement.py`). Each actor runs unisono's launcher on its node
(`machine.py`, `machine_program.py`), which starts, watches and restarts the ranks there, as with `--nnodes`. The driver
(`driver.py`) runs the rendezvous, so the run continues whichever node is lost, asks Ray to place the actor of a lost
node again, forwards signals, and prints the machines' output (`output.py`). Scheduling is left to Ray.
"""

from __future__ import annotations

from unisono.ray.start import train

__all__ = ["train"]
