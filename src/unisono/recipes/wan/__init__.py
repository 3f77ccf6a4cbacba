"""Code that both Wan recipes share: data, text and video encoders, the transformer, its weights and the objective."""
