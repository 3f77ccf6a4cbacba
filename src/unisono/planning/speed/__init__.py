"""Predicts the time of a training step on GPUs that this machine need not have."""
