"""Wan's transformers, VAE and text encoder: loads them from all published formats, and saves LoRAs."""
