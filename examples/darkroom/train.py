"""Trains Algorithm Distillation on the darkroom. Run it from this folder in any of these ways:

python train.py                                   one GPU, or the CPU; --gpus all uses every GPU
accelerate launch train.py                        with the settings of `accelerate config`
torchrun --nproc_per_node=2 train.py

Flags (--train_timesteps 4000) and --config FILE override the files below. --help lists all settings.
"""

import sys
from pathlib import Path

from unisono.cli.main import program

CONFIG = ["config/env/darkroom.yaml", "config/algorithm/explorer.yaml", "config/model/ad_dr_compressed.yaml"]

if __name__ == "__main__":
    files = [f"--config={Path(__file__).parent / file}" for file in CONFIG]
    arguments = sys.argv[1:]
    if not any(argument.startswith(("--gpus", "--nproc")) for argument in arguments):
        arguments = ["--gpus=1", *arguments]  # ignored under a launcher, which assigns a GPU to each process
    sys.argv[1:] = ["train", "darkroom", *files, *arguments]
    program()
