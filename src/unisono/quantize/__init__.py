"""Frozen weights in 16, 8 or 4 bits, matrix products in fp8, int8 or 2:4 sparsity, and the layers that use them."""
