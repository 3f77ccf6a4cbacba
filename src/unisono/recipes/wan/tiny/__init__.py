"""The tiny Wan: small working models, a dataset drawn by code, and a classifier; needs no downloads."""
