"""Frozen weights in 16, 8 or 4 bits: formats, matrix products, and the layers that use them."""
