"""Trains Algorithm Distillation on the darkroom. Run it from this folder, in any of these ways:

python train.py                                   one GPU, or the CPU; --gpus all takes every GPU
accelerate launch train.py                        as `accelerate config` was told
torchrun --nproc_per_node=2 train.py

Flags win over the files below (--train_timesteps 4000), and so does --config FILE. --help lists all settings.
"""

import sys
from pathlib import Path

from unisono.cli.main import program

CONFIG = ["config/env/darkroom.yaml", "config/algorithm/explorer.yaml", "config/model/ad_dr_compressed.yaml"]

if __name__ == "__main__":
    files = [f"--config={Path(__file__).parent / file}" for file in CONFIG]
    words = sys.argv[1:]
    if not any(word.startswith(("--gpus", "--nproc")) for word in words):
        words = ["--gpus=1", *words]  # under a launcher it has no meaning: there each process has its GPU already
    sys.argv[1:] = ["train", "darkroom", *files, *words]
    program()
