"""Computes a Wan transformer block in fewer and faster GPU operations: attention, fused norms and gates, Triton."""
