"""The transformer, and rollouts of it in the environments."""
