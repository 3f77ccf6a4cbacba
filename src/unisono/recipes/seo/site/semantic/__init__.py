"""Compares the pages of a site by meaning: duplicates, strays, rivals for a query, links, topics and moved pages."""
