"""The recipe `wan-flow`: flow-matching training of Wan 2.1 and 2.2."""
