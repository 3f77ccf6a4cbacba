"""Builds the parts of a run: the model on its devices, the strategy, the optimizer and the datasets."""
