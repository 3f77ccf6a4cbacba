"""The base template, style sheet and chart module that all HTML pages of unisono share."""
