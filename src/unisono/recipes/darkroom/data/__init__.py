"""Learning histories: their collection, their HDF5 files, and the contexts cut out of them."""
