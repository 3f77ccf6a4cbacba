"""Reads, writes and deletes files in object storage through fsspec, and checks the addresses of such files."""
