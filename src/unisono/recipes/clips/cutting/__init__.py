"""From scores to video files: choose moments, choose exact cut points, copy or encode."""
