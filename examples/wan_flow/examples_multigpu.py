"""Lists commands that start a training run, and runs one of them.

python examples_multigpu.py                       the list
python examples_multigpu.py --run 3               runs number 3
python examples_multigpu.py --run 3 --max_steps 20         with more flags
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
EXAMPLES = [
    ("one GPU, or the CPU", "python train_flow_matching.py --batch_size 1 --num_epochs 100"),
    ("two GPUs: effective batch 2 x 2 = 4", "./train_multigpu.sh 2 --batch_size 2 --num_epochs 50"),
    ("all GPUs", "./train_multigpu.sh --batch_size 2"),
    ("torchrun", "torchrun --nproc_per_node=2 train_flow_matching.py --batch_size 2"),
    ("the predecessor of torchrun", "python -m torch.distributed.launch --nproc_per_node=2 train_flow_matching.py"),
    ("two processes on the CPU", "python train_flow_matching.py --nproc 2 --batch_size 2"),
    ("the same effective batch on any number of GPUs", "./train_multigpu.sh --global_batch_size 8"),
    (
        "less memory: sharding and activation checkpointing",
        "./train_multigpu.sh 2 --strategy fsdp --gradient_checkpointing",
    ),
    ("a LoRA of rank 8", "python train_flow_matching.py --lora_rank 8 --learning_rate 1e-4"),
    ("the tiny model from its config file", "unisono train wan-flow --config tiny.yaml"),
    ("check that 2 processes train like 1", "python validate_multigpu.py"),
]
PROGRAMS = {
    "python": [sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run"],
    "unisono": [sys.executable, "-m", "unisono"],
}


def main() -> int:
    """Prints the list, or runs one of its commands and returns its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--run", type=int, metavar="N", help="run number N of the list; flags after it are passed on")
    options, more = parser.parse_known_args()
    if options.run is None:
        if more:
            parser.error(f"{more[0]} is a training flag: use --run N {more[0]}")
        for number, (what, command) in enumerate(EXAMPLES, 1):
            print(f"{number:2}. {what}\n      {command}")
        print("Under SLURM: sbatch train_flow_matching.slurm. More: MULTI_GPU_TRAINING.md")
        return 0
    if not 1 <= options.run <= len(EXAMPLES):
        parser.error(f"--run: expected 1 to {len(EXAMPLES)}, got {options.run}")
    program, *words = shlex.split(EXAMPLES[options.run - 1][1])
    print(shlex.join([program, *words, *more]), flush=True)
    return subprocess.call([*PROGRAMS.get(program, [program]), *words, *more], cwd=HERE)


if __name__ == "__main__":
    sys.exit(main())
