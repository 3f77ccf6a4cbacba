"""Wan's transformers, VAE and text encoder: loading from every published format, and writing for diffusers."""
