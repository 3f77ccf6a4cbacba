"""Writes one self-contained HTML page about a run, from the files in its folder only."""
