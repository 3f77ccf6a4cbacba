"""The recipes that come with unisono, each a folder that reads from top to bottom."""
