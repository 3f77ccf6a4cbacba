"""The training loop, the optimizer step and the interface of a recipe."""
