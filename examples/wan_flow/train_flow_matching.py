"""Trains Wan 2.1 or 2.2 by flow matching. Run it from this folder, in any of these ways:

python train_flow_matching.py --batch_size 1 --num_epochs 100       one GPU, or the CPU; --gpus all uses every GPU
./train_multigpu.sh 2 --batch_size 2 --num_epochs 50                two GPUs, or two CPU processes
torchrun --nproc_per_node=2 train_flow_matching.py --batch_size 2
sbatch train_flow_matching.slurm

It runs `unisono train wan-flow` and accepts the flags of the original script. The default model is
models/wan2.2_ti2v_5B_fp16.safetensors if that file exists, otherwise a tiny model that learns built-in shapes. --help
lists all settings. For your own loop: `from train_flow_matching import FlowMatchingTrainer`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from script_flags import FLAGS, completed, resolve

from unisono.cli import main as unisono
from unisono.cluster.own_loop import cleanup_distributed, is_main_process, setup_distributed
from unisono.errors import UnisonoError
from unisono.recipes.wan_flow.recipe import WanFlow

__all__ = ["cleanup_distributed", "is_main_process", "parse_args", "setup_distributed"]


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns all settings by name, including the original names; a mistake exits with one line and code 2."""
    argv = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & set(argv):
        _introduce()
        sys.exit(unisono.main(["train", "wan-flow", "--help"]))
    try:
        values = resolve(completed(argv)[0]).values
    except UnisonoError as error:
        _refuse(error)
    original_names = {name: values[ours] for name, ours in WanFlow.aliases.items()}
    return argparse.Namespace(**values, **original_names, local_rank=int(os.environ.get("LOCAL_RANK", -1)))


def __getattr__(name: str) -> Any:
    # Imported on demand, because a process that only starts others does not need torch.
    if name == "FlowMatchingTrainer":
        from flow_matching_trainer import FlowMatchingTrainer

        return FlowMatchingTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _introduce() -> None:
    print(__doc__)
    print("Flags of the original script, in addition to those below:")
    for flag, text in FLAGS.items():
        print(f"  {flag:24}{text}")
    print()


def _refuse(error: UnisonoError) -> NoReturn:
    print(f"train_flow_matching.py: {error}", file=sys.stderr)
    sys.exit(error.exit_code)


def main() -> NoReturn:
    """Trains with the options on the command line, and exits with the exit code of the run."""
    argv = sys.argv[1:]
    if {"-h", "--help"} & set(argv):
        _introduce()
    else:
        try:
            argv, remarks = completed(argv)
            if remarks and is_main_process():
                print(f"train_flow_matching.py: {'; '.join(remarks)}", file=sys.stderr)
        except UnisonoError as error:
            _refuse(error)
    sys.argv[1:] = ["train", "wan-flow", *argv]
    unisono.program()


if __name__ == "__main__":
    main()
