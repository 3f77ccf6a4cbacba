"""The tasks that can be trained: ranking (bi-encoder, cross-encoder), scoring and snippet writing."""
