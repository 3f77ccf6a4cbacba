"""Ranking data sets in the formats people have: BEIR, MS MARCO, tables of texts, Debian's package descriptions."""
