"""Predicts the memory of a run, and chooses settings with which it fits (`--fit`)."""
