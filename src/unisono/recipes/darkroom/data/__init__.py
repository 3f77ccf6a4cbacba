"""Collects learning histories, stores them in HDF5 files, and cuts contexts out of them."""
