"""Scores videos without a trained run, from measurements of their sound and pictures.

`parts.py` names what is measured and how much it counts, `sound.py`, `picture.py` and `faces.py` measure it,
`combine.py` turns measurements into scores, and `scorer.py` does all of this for a video.
"""
