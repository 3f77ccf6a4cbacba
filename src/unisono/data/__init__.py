"""Which samples, in which order, with which noise."""
