"""`make fuzz`: damages valid files of every reader of foreign bytes for a while, and reports what must not happen.

`FUZZ_SECONDS` is the time per reader, `FUZZ_SEED` the first seed; words on the command line select readers by name.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from fuzz.campaign import Result, fuzz
from fuzz.table import READERS


def main() -> int:
    """Fuzzes the readers; returns 1 if there is a defect."""
    known = [reader.name for reader in READERS]
    names = [name for name in known if not sys.argv[1:] or any(word in name for word in sys.argv[1:])]
    if not names:
        print(f"no reader has such a name; there are {', '.join(known)}", file=sys.stderr)
        return 2
    seconds, seed = float(os.environ.get("FUZZ_SECONDS", "6")), int(os.environ.get("FUZZ_SEED", "0"))
    folder = Path(os.environ.get("FUZZ_DIR", "runs/fuzz")).absolute()
    print(f"{len(names)} readers, {seconds:g} s each; defects are kept in {folder / 'defects'}", flush=True)

    def report(result: Result) -> None:
        rejected = f"{result.num_rejected:,} of {result.num_cases:,} cases rejected"
        print(f"  {result.reader:24} {rejected:>32}  {result.seconds:5.1f} s", flush=True)
        for defect in result.defects:
            print("    " + defect.replace("\n", "\n    "), flush=True)

    results = fuzz(names, folder, seconds=seconds, seed=seed, report=report)
    defects = sum(len(result.defects) for result in results.values())
    cases = sum(result.num_cases for result in results.values())
    print(f"{cases:,} cases of {len(names)} readers: {defects or 'no'} defect{'' if defects == 1 else 's'}")
    return int(defects > 0)


if __name__ == "__main__":
    sys.exit(main())
