"""What a run shows and writes down: run folder, metrics, events, progress."""
