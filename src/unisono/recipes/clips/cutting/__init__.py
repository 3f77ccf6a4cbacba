"""From scores to video files: choose moments, move their ends to cut points, copy or encode them."""
