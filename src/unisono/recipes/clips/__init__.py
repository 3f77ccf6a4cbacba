"""Highlight detection in long videos: learns to score moments, chooses the best ones and cuts them out."""
