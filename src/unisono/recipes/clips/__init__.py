"""Highlights of long videos: learn to score them, choose the best moments, cut them out."""
