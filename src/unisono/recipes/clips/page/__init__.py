"""Writes the HTML page and clips.json of each video, next to its clips."""
