"""Trains Wan 2.1 or 2.2 by flow matching. Run it from this folder, in any of these ways:

python train_flow_matching.py --batch_size 1 --num_epochs 100       one GPU, or the CPU; --gpus all takes every GPU
./train_multigpu.sh 2 --batch_size 2 --num_epochs 50                two GPUs, or two CPU processes
torchrun --nproc_per_node=2 train_flow_matching.py --batch_size 2
sbatch train_flow_matching.slurm

It is `unisono train wan-flow`, and takes the flags of the script that people know. Where no model is named it takes
models/wan2.2_ti2v_5B_fp16.safetensors, and where that is not there either a tiny one, which learns built-in shapes.
--help lists all settings. `from train_flow_matching import FlowMatchingTrainer` is for loops of your own.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from known_script import KNOWN, completed, settings_of

from unisono.cli import main as unisono
from unisono.cluster.join import cleanup_distributed, is_main_process, setup_distributed
from unisono.errors import UnisonoError
from unisono.recipes.wan_flow.recipe import WanFlow

__all__ = ["cleanup_distributed", "is_main_process", "parse_args", "setup_distributed"]


def parse_args(words: Sequence[str] | None = None) -> argparse.Namespace:
    """All settings by name, also by the names that people know; a mistake is one line and exit code 2."""
    words = sys.argv[1:] if words is None else words
    if {"-h", "--help"} & set(words):
        _introduce()
        sys.exit(unisono.main(["train", "wan-flow", "--help"]))
    try:
        values = settings_of(completed(words)[0]).values
    except UnisonoError as error:
        _refuse(error)
    known = {name: values[ours] for name, ours in WanFlow.aliases.items()}
    return argparse.Namespace(**values, **known, local_rank=int(os.environ.get("LOCAL_RANK", -1)))


def __getattr__(name: str) -> Any:
    # Imported when it is asked for: who only starts processes does not wait for torch.
    if name == "FlowMatchingTrainer":
        from flow_matching_trainer import FlowMatchingTrainer

        return FlowMatchingTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _introduce() -> None:
    print(__doc__)
    print("Flags of that script, besides those below:")
    for flag, what in KNOWN.items():
        print(f"  {flag:24}{what}")
    print()


def _refuse(error: UnisonoError) -> NoReturn:
    print(f"train_flow_matching.py: {error}", file=sys.stderr)
    sys.exit(error.exit_code)


def main() -> NoReturn:
    """Trains as the command line says, and ends the process with the exit code."""
    words = sys.argv[1:]
    if {"-h", "--help"} & set(words):
        _introduce()
    else:
        try:
            words, remarks = completed(words)
            if remarks and is_main_process():
                print(f"train_flow_matching.py: {'; '.join(remarks)}", file=sys.stderr)
        except UnisonoError as error:
            _refuse(error)
    sys.argv[1:] = ["train", "wan-flow", *words]
    unisono.program()


if __name__ == "__main__":
    main()
