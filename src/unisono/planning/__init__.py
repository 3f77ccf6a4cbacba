"""Estimates memory, and chooses the strategy that fits."""
