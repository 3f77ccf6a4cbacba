"""The recipe `wan-distill`: a small Wan from a big one, from prompts alone."""
