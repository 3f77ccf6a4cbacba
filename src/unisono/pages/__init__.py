"""The base template, the style sheet and the chart module, which all HTML pages of unisono share."""
