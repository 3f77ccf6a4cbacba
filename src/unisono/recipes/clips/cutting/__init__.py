"""Turns scores into clips: chooses moments, moves their ends to cut points, and copies or re-encodes them."""
