"""The process that copies a run to object storage: `python -m unisono.mirror.process`."""

from __future__ import annotations

import math
from pathlib import Path

from unisono.mirror.upload import Upload
from unisono.observe.side_process.child import SideProcess, begin
from unisono.storage.store import Store


def main() -> None:
    """Copies the run that the JSON on stdin describes, until the run has ended."""
    order, output = begin()
    # A large checkpoint may take arbitrarily long, so calls have no time limit. Each request has its own limit.
    process = SideProcess("mirror", output, math.inf, persists=True)
    process.run(Upload(Path(order["folder"]), Store(order["address"]), order["keep_last"]))


if __name__ == "__main__":
    main()
