"""Predicts the time of a training step on GPUs that need not be there."""
