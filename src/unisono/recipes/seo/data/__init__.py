"""Reads queries, pages, judgements and labels in common formats, and caches their tokens."""
