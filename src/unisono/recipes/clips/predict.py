"""What a run says of its held-out videos, in QVHighlights' form, for that benchmark's evaluation (`metrics.py`).

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
from unisono.errors import EXIT_DONE, ConfigError, end_as_program
from unisono.recipes.clips.cutting.moments import pick
from unisono.recipes.clips.metrics.qvhighlights import SCORES, WINDOWS
from unisono.recipes.clips.metrics.retrieval import MOST_WINDOWS
from unisono.recipes.clips.model import Scorer
from unisono.recipes.clips.recipe import Clips
from unisono.recipes.clips.scoring import logits_of
from unisono.recipes.common.whole_files import write_whole


@torch.no_grad()
def predictions(run: Path, step: str | None = None) -> Iterator[dict[str, Any]]:
    """What QVHighlights evaluates, for each query about a held-out video.

    `qid`; `pred_saliency_scores`, one for each clip of 2 s; `pred_relevant_windows`, the best moments of that curve.
    """
    recipe, model, _ = load_trained(run, step=step)
    if not isinstance(recipe, Clips) or not isinstance(model, Scorer) or recipe.config.clip_seconds != 2:
        raise ConfigError(f"{run} is no run of clips with --clip_seconds 2, as QVHighlights has them")
    recipe.prepare(Work(run / "prepared"))  # what the run has extracted is there already
    videos = recipe.dataset("eval")
    if videos is None or any(video.source.qid is None for video in recipe.held_out):
        raise ConfigError(f"{run} holds out no queries with a qid; train with --eval_data_path val.jsonl")
    for video, item in zip(recipe.held_out, videos, strict=True):
        logits = logits_of(model, {kind: item[kind][None] for kind in model.encoders}, recipe.config.window)[0]
        scores = torch.sigmoid(logits.float()).tolist()
        moments = pick(scores, 2.0, number=MOST_WINDOWS, shortest=2.0, longest=150.0, gap=0.0)
        windows = [[moment.start, moment.end, moment.score] for moment in moments]
        yield {"qid": video.source.qid, SCORES: scores, WINDOWS: windows}


def main(words: Sequence[str] | None = None) -> int:
    """Writes the predictions to a new file."""
    parser = argparse.ArgumentParser(prog="python -m unisono.recipes.clips.predict", description=main.__doc__)
    parser.add_argument("--run", type=Path, required=True, help="the run's folder")
    parser.add_argument("--output", type=Path, required=True, help="jsonl to write")
    parser.add_argument("--step", help="a step number of the run, newest (default) or best")
    options = parser.parse_args(words)
    if options.output.exists():
        raise ConfigError(f"{options.output} exists, and was left alone; choose another name")
    lines = [json.dumps(line) for line in predictions(options.run, options.step)]
    write_whole(options.output, "".join(f"{line}\n" for line in lines).encode())
    return EXIT_DONE


if __name__ == "__main__":
    end_as_program(main)
