"""Collects the histories of source learners for all goals in one HDF5 file, in the layout of other implementations.

python collect.py                                                datasets/history_darkroom_explorer_alg-seed42.hdf5
python collect.py --config config/algorithm/ppo_darkroom.yaml    datasets/history_darkroom_PPO_alg-seed42.hdf5
python train.py --traj_dir datasets                              trains on the collected histories

If a collection was stopped, the same command resumes it. The flags are those of train.py.
"""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import torch

from unisono.cli.train import parse_command
from unisono.engine.recipe import Work
from unisono.engine.start.run import configure
from unisono.errors import UnisonoError, UserError
from unisono.recipes.darkroom.data.histories import read_histories, write_histories
from unisono.recipes.darkroom.data.history_file import HistoryFile
from unisono.recipes.darkroom.recipe import Darkroom

CONFIG = ["config/env/darkroom.yaml", "config/algorithm/explorer.yaml"]


def collect(words: list[str]) -> Path:
    """Collects histories as configured and returns the path of the file."""
    command = parse_command(["darkroom", *words])
    files = [*(Path(__file__).parent / file for file in CONFIG), *command.files]
    config = configure(Darkroom, file=files, flags=command.flags).build(Darkroom.Config)
    name = f"history_{config.env}_{'PPO' if config.source == 'ppo' else config.source}_alg-seed{config.alg_seed}"
    folder = Path(config.traj_dir or "datasets")
    file, blocks = folder / f"{name}.hdf5", folder / f".{name}"
    if file.exists():
        raise UserError(f"{file} already exists and is not overwritten; move that file, or use another --alg_seed")
    recipe = Darkroom(replace(config, traj_dir=str(blocks)))
    tasks = sorted(recipe.split.all)
    steps = config.total_source_timesteps // config.n_stream
    print(f"{len(tasks)} goals x {config.n_stream} learners ({config.source}) x {steps:,} steps", flush=True)
    recipe.prepare(Work(blocks, device="cuda" if torch.cuda.is_available() else "cpu", shows_progress=True))
    parts = sorted(blocks.rglob("*.hdf5"))
    histories = read_histories(parts, recipe.room, tasks, config.n_stream, steps)
    with HistoryFile(parts[0]) as part:
        origin = part.origin()
    settings = json.loads(origin.settings) if origin else None
    write_histories(file, histories, recipe.room, source=config.source, seed=config.alg_seed, settings=settings)
    shutil.rmtree(blocks)
    return file


if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv):
        print(__doc__)
        sys.exit()
    try:
        print(collect(sys.argv[1:]))
    except UnisonoError as error:
        print(f"collect.py: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("collect.py: stopped; run the same command to continue", file=sys.stderr)
        sys.exit(130)
