"""Checks on this machine that training on two processes is training on one: really, by training.

python validate_multigpu.py                                  the tiny model on 1 and 2 ranks, ddp and fsdp: minutes
python validate_multigpu.py --ranks 1,4 --strategies ddp
python validate_multigpu.py --model_path … --dataset_path … --precision bf16       your own model and data

Each run takes the same few steps; losses and weights are compared. On a machine with fewer GPUs than ranks they share
them, or the CPU. Exit code 1 when runs differ. It takes all flags of `unisono verify` and of train_flow_matching.py.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from known_script import in_our_words

from unisono.cli.main import main as unisono
from unisono.errors import UnisonoError

TINY = ["--model_config=tiny", "--num_shapes=48", "--batch_size=4"]
# Not in float64: the transformer itself computes its norms in float32.
CHECK = ["--ranks=1,2", "--strategies=ddp,fsdp", "--steps=3", "--precision=float32"]


def check(words: Sequence[str]) -> int:
    """Runs the comparison and gives the exit code: 0 when all runs are the same."""
    if {"-h", "--help"} & set(words):
        print(__doc__)
        return unisono(["verify", "--help"])
    try:
        words = in_our_words(words)
    except UnisonoError as error:
        print(f"validate_multigpu.py: {error}", file=sys.stderr)
        return error.exit_code
    own_model = any(word.startswith(("--model_", "--model-", "--config")) for word in words)
    return unisono(["verify", "wan-flow", *CHECK, *([] if own_model else TINY), *words])


if __name__ == "__main__":
    sys.exit(check(sys.argv[1:]))
