"""What several recipes need: caches on disk, fingerprints, data folders, media files, base weights of a LoRA."""
