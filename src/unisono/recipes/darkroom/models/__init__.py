"""The transformer, and its rollouts in the environments."""
