"""Sends what the run folder records to experiment trackers."""
