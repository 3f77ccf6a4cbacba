"""Everything a run shows and records: run folder, metrics, events, progress, trackers, report."""
