"""Learning histories: collecting them, their HDF5 files, and the context windows cut from them."""
