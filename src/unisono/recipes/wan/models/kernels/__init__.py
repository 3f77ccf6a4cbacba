"""A Wan transformer block in fewer and faster GPU operations: attention, fused norms and gates, Triton kernels."""
