"""Builds what trains: the model on its devices, its strategy, optimizer and datasets."""
