"""Distributes a model across devices: one small file per strategy."""
