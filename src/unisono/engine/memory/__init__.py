"""The micro-batch size that fits into memory, and advice if not even one sample fits."""
