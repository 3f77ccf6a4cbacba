"""Predicts the GPU memory of a training step without a GPU, and chooses settings for which it fits."""
