"""Starts a run: finds the recipe, launches ranks, and builds the run on each of them phase by phase."""
