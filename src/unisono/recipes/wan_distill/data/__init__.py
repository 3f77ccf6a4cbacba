"""Prompts, the teacher's roll-outs on disk, and the datasets made from them."""
