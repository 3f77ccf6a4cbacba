"""Enters a run folder: locks it, reads the settings stored in it, chooses the checkpoint to resume from."""
