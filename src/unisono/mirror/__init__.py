"""Copies a run to object storage: uploads each checkpoint, and restores a run from there."""
