"""The recipe `wan-distill`: distils a Wan model into a smaller one, from prompts alone."""
