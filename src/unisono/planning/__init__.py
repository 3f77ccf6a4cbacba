"""Estimates memory, and chooses the strategy by it."""
