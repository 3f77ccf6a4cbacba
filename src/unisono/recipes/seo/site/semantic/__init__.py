"""Compares a site's pages by meaning: duplicates, off-topic pages, rivals for a query, links, topics, moved pages."""
