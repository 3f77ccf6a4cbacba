"""Everything that happens block by block: recomputation, compilation, prefetching, and storage in host memory."""
