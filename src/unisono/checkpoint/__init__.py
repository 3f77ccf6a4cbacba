"""Saves, finds and loads checkpoints: folders of tensors and JSON that any number of ranks can write and read."""
