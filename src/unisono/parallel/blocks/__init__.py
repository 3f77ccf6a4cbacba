"""Everything that happens block by block: recomputation, compilation, prefetching, and waiting in host memory."""
