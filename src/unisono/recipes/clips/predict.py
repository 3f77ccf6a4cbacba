"""Writes a run's predictions for its held-out videos in the format of QVHighlights, for `metrics/` to evaluate.

python -m unisono.recipes.clips.predict --run RUN --output P.jsonl
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from unisono.engine.export import load_trained
from unisono.engine.recipe import Work
from unisono.errors import EXIT_DONE, ConfigError, run_as_program
from unisono.recipes.clips.cutting.moments import pick
from unisono.recipes.clips.metrics.qvhighlights import SCORES, WINDOWS
from unisono.recipes.clips.metrics.retrieval import MOST_WINDOWS
from unisono.recipes.clips.model import Scorer
from unisono.recipes.clips.recipe import Clips
from unisono.recipes.clips.scoring import logits_of
from unisono.recipes.common.cache_files import write_cache_file


@torch.no_grad()
def predictions(run: Path, step: str | None = None) -> Iterator[dict[str, Any]]:
    """Yields one line per query about a held-out video.

    A line has the `qid`, `pred_saliency_scores` (one per clip of 2 s) and `pred_relevant_windows` (the best moments).
    """
    recipe, model, _ = load_trained(run, step=step)
    if not isinstance(recipe, Clips) or not isinstance(model, Scorer) or recipe.config.clip_seconds != 2:
        raise ConfigError(f"{run} is not a run of clips with --clip_seconds 2, which QVHighlights requires")
    recipe.prepare(Work(run / "prepared"))  # finds the features that the run has extracted
    videos = recipe.dataset("eval")
    if videos is None or any(video.source.qid is None for video in recipe.held_out):
        raise ConfigError(f"{run} has no held-out queries with a qid; train with --eval_data_path val.jsonl")
    for video, item in zip(recipe.held_out, videos, strict=True):
        logits = logits_of(model, {kind: item[kind][None] for kind in model.encoders}, recipe.config.window)[0]
        scores = torch.sigmoid(logits.float()).tolist()
        moments = pick(scores, 2.0, number=MOST_WINDOWS, shortest=2.0, longest=150.0, gap=0.0)
        windows = [[moment.start, moment.end, moment.score] for moment in moments]
        yield {"qid": video.source.qid, SCORES: scores, WINDOWS: windows}


def main(words: Sequence[str] | None = None) -> int:
    """Writes the predictions of a run for its held-out videos to a new file."""
    parser = argparse.ArgumentParser(prog="python -m unisono.recipes.clips.predict", description=main.__doc__)
    parser.add_argument("--run", type=Path, required=True, help="folder of the trained run")
    parser.add_argument("--output", type=Path, required=True, help=".jsonl file to write")
    parser.add_argument("--step", help="checkpoint of the run: a step number, newest or best (default: newest)")
    options = parser.parse_args(words)
    if options.output.exists():
        raise ConfigError(f"{options.output} already exists and is not overwritten; choose another name")
    lines = [json.dumps(line) for line in predictions(options.run, options.step)]
    write_cache_file(options.output, "".join(f"{line}\n" for line in lines).encode())
    return EXIT_DONE


if __name__ == "__main__":
    run_as_program(main)
