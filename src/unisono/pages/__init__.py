"""The page kit: one skeleton, one style sheet and one chart module for every HTML page that unisono writes."""
