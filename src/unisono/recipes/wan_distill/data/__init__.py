"""Prompts, the teacher's roll-outs on disk, and datasets of them."""
