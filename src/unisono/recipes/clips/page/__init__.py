"""Writes the HTML page and the clips.json of each video next to its clips."""
