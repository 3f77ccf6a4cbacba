"""Wan's transformers, VAE and text encoder: in from wherever they are, out as diffusers loads them."""
