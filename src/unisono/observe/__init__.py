"""Shows and records the progress of a run: writes the run folder, draws the progress bar, and makes the report."""
