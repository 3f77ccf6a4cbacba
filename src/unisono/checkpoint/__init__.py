"""Saving, finding, loading and exporting checkpoints."""
