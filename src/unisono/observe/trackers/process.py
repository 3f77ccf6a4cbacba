"""The process of one tracker: `python -m unisono.observe.trackers.process`."""

from __future__ import annotations

from pathlib import Path

from unisono.observe.side_process.child import SideProcess, begin
from unisono.observe.trackers.follower import Follower, tracked_run
from unisono.observe.trackers.named import load_tracker


def main() -> None:
    """Runs the tracker that the input names."""
    order, output = begin()
    name: str = order["name"]
    run = tracked_run(Path(order["folder"]), project=order["project"], offline=order["offline"])
    tracker = load_tracker(name)
    process = SideProcess(f"track {order['label']}", output, order["hang_s"])
    tracker.say = process.say
    process.run(Follower(tracker, run, name))


if __name__ == "__main__":
    main()
