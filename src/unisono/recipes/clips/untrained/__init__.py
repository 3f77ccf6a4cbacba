"""Scores videos without a trained run, from measurements of their sound and pictures.

`parts.py` lists the measurements and their weights; `sound.py`, `picture.py` and `faces.py` measure; `combine.py` turns
measurements into scores; `scorer.py` applies all of this to a video.
"""
