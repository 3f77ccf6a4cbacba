"""Crawls one host: follows its links within limits, and obeys robots.txt."""
