"""`unisono plan`: predicts memory and time of a run under each strategy, for GPUs that need not be there."""
