"""What every rank does right now: ranks write it into the run folder, and `unisono watch` shows it."""
