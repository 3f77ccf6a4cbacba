"""The analysis of a site: its pages, rules about them, keywords, and the report."""
