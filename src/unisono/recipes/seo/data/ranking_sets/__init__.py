"""Ranking data sets: BEIR, MS MARCO, tables of texts, and descriptions of Debian's packages."""
