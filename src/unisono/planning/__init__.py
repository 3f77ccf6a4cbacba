"""Estimates memory use, and chooses a strategy that fits."""
