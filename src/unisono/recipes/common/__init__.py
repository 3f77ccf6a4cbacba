"""Code that several recipes share: on-disk caches, fingerprints, data folders, media files, LoRA base weights."""
