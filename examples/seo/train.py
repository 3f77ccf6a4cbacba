"""Trains a language model for search. Start it from this folder in any of these ways:

python train.py                                   one GPU, or the CPU without one; --gpus all uses every GPU
accelerate launch train.py                        with the settings of `accelerate config`
torchrun --nproc_per_node=2 train.py

Without flags, it trains on the labels in pages.csv with the settings in score.yaml. Flags override score.yaml, and
--config FILE replaces it. --task rank --data_path FOLDER trains a ranking model. --help lists all settings.
"""

import sys
from pathlib import Path

from unisono.cli.main import program

HERE = Path(__file__).parent

if __name__ == "__main__":
    arguments = sys.argv[1:]
    flags = [argument.partition("=")[0].replace("-", "_") for argument in arguments if argument.startswith("--")]
    values = " ".join(arguments).replace("=", " ").split()
    is_score = "--task" not in values or values[values.index("--task") :][1:2] == ["score"]
    if "__config" not in flags and is_score:
        arguments = [f"--config={HERE / 'score.yaml'}", *arguments]
        if "__data_path" not in flags:
            arguments.append(f"--data_path={HERE / 'pages.csv'}")
    if not {"__gpus", "__nproc"} & set(flags):
        arguments = ["--gpus=1", *arguments]  # ignored under a launcher, which assigns a GPU to each process
    sys.argv[1:] = ["train", "seo", *arguments]
    program()
