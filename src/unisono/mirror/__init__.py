"""The copy of a run in object storage: uploads each checkpoint, and restores a run from there."""
