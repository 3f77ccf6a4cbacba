"""Saves, finds and loads checkpoints: tensors and JSON to a committed folder and back, on any number of ranks."""
