"""Turns positions in the sample stream into micro-batches: determines the sample order, loads samples, draws noise."""
