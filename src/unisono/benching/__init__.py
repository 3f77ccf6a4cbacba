"""Measures the speed of a recipe on several numbers of ranks, next to a hand-written PyTorch loop (`unisono bench`)."""
