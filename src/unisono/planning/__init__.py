"""What fits, and what follows from it."""
