"""Implements `unisono bench`: measures a recipe's speed at several rank counts, against a hand-written PyTorch loop."""
