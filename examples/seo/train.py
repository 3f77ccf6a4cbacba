"""Trains a language model for search. Run it from this folder, in any of these ways:

python train.py                                   one GPU, or the CPU; --gpus all uses every GPU
accelerate launch train.py                        with the settings of `accelerate config`
torchrun --nproc_per_node=2 train.py

Without flags it learns the labels of pages.csv (score.yaml). Flags and --config FILE override that file: --task rank
--data_path FOLDER trains a ranking model. --help lists all settings.
"""

import sys
from pathlib import Path

from unisono.cli.main import program

HERE = Path(__file__).parent

if __name__ == "__main__":
    words = sys.argv[1:]
    named = [word.partition("=")[0].replace("-", "_") for word in words if word.startswith("--")]
    told = " ".join(words).replace("=", " ").split()
    score = "--task" not in told or told[told.index("--task") :][1:2] == ["score"]
    if "__config" not in named and score:
        words = [f"--config={HERE / 'score.yaml'}", *words]
        if "__data_path" not in named:
            words.append(f"--data_path={HERE / 'pages.csv'}")
    if not {"__gpus", "__nproc"} & set(named):
        words = ["--gpus=1", *words]  # not under a launcher, where each process already has its GPU
    sys.argv[1:] = ["train", "seo", *words]
    program()
