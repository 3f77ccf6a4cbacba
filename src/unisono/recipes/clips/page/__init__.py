"""What `unisono clips` writes for people and programs: an HTML page per video, clips.json, remarks."""
