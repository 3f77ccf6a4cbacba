"""Checks on this machine, with short training runs, that two processes train like one.

python validate_multigpu.py                                  the tiny model on 1 and 2 ranks, ddp and fsdp
python validate_multigpu.py --ranks 1,4 --strategies ddp
python validate_multigpu.py --model_path … --dataset_path … --precision bf16       your own model and data

Each run trains the same few steps; the script compares losses and weights and exits with 1 if runs differ. If there are
fewer GPUs than ranks, the ranks share them, or the CPU. All flags of `unisono verify` and train_flow_matching.py work.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from script_flags import translated

from unisono.cli.main import main as unisono
from unisono.errors import UnisonoError

TINY = ["--model_config=tiny", "--num_shapes=48", "--batch_size=4"]
# Not float64, because the transformer computes its norms in float32.
CHECK = ["--ranks=1,2", "--strategies=ddp,fsdp", "--steps=3", "--precision=float32"]


def check(arguments: Sequence[str]) -> int:
    """Runs the comparison; returns 0 if all runs are the same."""
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return unisono(["verify", "--help"])
    try:
        arguments = translated(arguments)
    except UnisonoError as error:
        print(f"validate_multigpu.py: {error}", file=sys.stderr)
        return error.exit_code
    own_model = any(argument.startswith(("--model_", "--model-", "--config")) for argument in arguments)
    return unisono(["verify", "wan-flow", *CHECK, *([] if own_model else TINY), *arguments])


if __name__ == "__main__":
    sys.exit(check(sys.argv[1:]))
