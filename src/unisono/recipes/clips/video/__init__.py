"""Decoding videos that may be damaged: frames and sound by time, and clips of a few seconds."""
