"""Distributes a model over devices: one small file per strategy."""
