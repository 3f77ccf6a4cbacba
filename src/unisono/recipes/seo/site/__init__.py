"""Analyses a site: reads its pages, checks them with rules, matches keywords, and writes the report."""
