"""The recipe `wan-distill`: distils a Wan model into a smaller or faster model, from prompts alone."""
