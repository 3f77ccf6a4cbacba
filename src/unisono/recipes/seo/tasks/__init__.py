"""What can be trained: ranking (bi-encoder, cross-encoder), scoring and snippet writing, one file per task."""
