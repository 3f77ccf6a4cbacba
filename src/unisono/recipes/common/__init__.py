"""Code shared by several recipes: caches on disk, fingerprints, data folders, media files, base weights of a LoRA."""
