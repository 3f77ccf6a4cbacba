"""Shared by all HTML pages that unisono writes: one base template, one style sheet, one chart module."""
