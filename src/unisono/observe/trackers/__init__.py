"""Sends the records of the run folder to experiment trackers."""
