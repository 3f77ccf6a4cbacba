"""Code that both Wan recipes share: the data, the encoders, the transformer, its weights and the objective."""
