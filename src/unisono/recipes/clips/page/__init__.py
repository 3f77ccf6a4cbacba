"""What `unisono clips` writes next to the clips: an HTML page per video and clips.json."""
