"""The loop, the optimizer step and the contract with a recipe."""
