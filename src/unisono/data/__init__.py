"""Turns positions in the sample stream into micro-batches: sample order, loading, noise."""
