"""Wan's transformers, VAE and text encoder, loaded from every published format and written for diffusers."""
