"""Language models that rank, score and write pages for search."""
