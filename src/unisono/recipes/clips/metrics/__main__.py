"""Evaluates files: `python -m unisono.recipes.clips.metrics --predictions P.jsonl --ground_truth G.jsonl`."""

from unisono.errors import run_as_program
from unisono.recipes.clips.metrics.qvhighlights import main

if __name__ == "__main__":
    run_as_program(main)
