"""Shows what every rank is doing: ranks write their status to the run folder, and `unisono watch` displays it."""
