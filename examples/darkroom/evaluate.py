"""Evaluates the best weights of a run on goals that it has never seen.

python evaluate.py runs/darkroom-20260101-120000 [--episodes 500] [--repeats 4] [--greedy]
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import torch

from unisono.data.noise import Noise
from unisono.engine.export import load_trained
from unisono.errors import UnisonoError, UserError
from unisono.recipes.darkroom.recipe import GROUPS, Darkroom


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("--episodes", type=int, default=100, help="number of in-context episodes")
    parser.add_argument("--repeats", type=int, default=4, help="number of times to play each goal")
    parser.add_argument("--greedy", action="store_true", help="take the most likely action instead of sampling")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampled actions")
    options = parser.parse_args()
    trained, model, weights_used = load_trained(options.run, step="best")
    if not isinstance(trained, Darkroom):
        raise UserError(f"{options.run} is a run of {type(trained).__name__}, not of darkroom; pass another folder")
    config = replace(
        trained.config, eval_episodes=options.episodes, eval_repeats=options.repeats, greedy=options.greedy
    )
    recipe = Darkroom(config)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tasks, groups = (torch.tensor(column, device=device) for column in zip(*recipe.dataset("eval"), strict=True))
    noise = Noise(options.seed, torch.arange(len(tasks), device=device))
    metrics = {
        name: total / count
        for name, (total, count) in recipe.evaluate(model.to(device), (tasks, groups), noise).items()
    }
    print(f"{weights_used}: {options.episodes} episodes, each goal {options.repeats} times")
    print(f"{'goals':12} {'episode 1':>10} {'last 10':>8} {'of optimum':>11} {'solved':>7}")
    for group in (group for group in GROUPS if f"{group}_return" in metrics):  # eval_train_tasks may be 0
        first = metrics[f"{group}_return_by_episode"][0]
        last, share, solved = (metrics[f"{group}_{name}"] for name in ("return", "of_optimum", "solved"))
        print(f"{group:12} {first:10.2f} {last:8.2f} {share:11.1%} {solved:7.0%}")
    by_goal = zip(recipe.split.unseen, metrics["unseen_of_optimum_by_task"].tolist(), strict=True)
    print("unseen goals: " + "  ".join(f"{_name(recipe, goal)} {share:.0%}" for goal, share in by_goal))


def _name(recipe: Darkroom, task: int) -> str:
    """Returns the position of a task's goal, or the task's number in environments without a single goal."""
    size = recipe.room.size
    return f"({task // size},{task % size})" if recipe.config.env == "darkroom" else f"#{task}"


if __name__ == "__main__":
    try:
        main()
    except UnisonoError as error:
        print(f"evaluate.py: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
