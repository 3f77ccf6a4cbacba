"""Metrics of highlight detection and moment retrieval; `python -m unisono.recipes.clips.metrics` evaluates files."""
