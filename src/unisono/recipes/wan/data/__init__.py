"""Reads a folder of images, videos and captions, and turns it into latents and text embeddings."""
