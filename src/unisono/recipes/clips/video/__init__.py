"""Decodes videos that may be damaged: frames and sound of any time range, and clips of a few seconds."""
