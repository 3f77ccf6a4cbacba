"""From positions in the sample stream to micro-batches: sample order, loading, noise."""
