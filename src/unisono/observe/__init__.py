"""Shows and records the progress of a run: run folder, metrics, events, progress bar, trackers, report."""
