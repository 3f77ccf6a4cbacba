"""Writes one self-contained HTML page about a run. It reads only the files in the run folder."""
