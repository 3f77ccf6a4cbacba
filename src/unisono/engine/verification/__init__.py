"""`unisono verify`: trains the same steps on different ranks and micro-batches and compares the results."""
