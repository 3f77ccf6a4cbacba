"""`unisono plan`: predicts memory and time of a run under each strategy, for GPUs that this machine need not have."""
