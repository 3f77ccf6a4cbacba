"""Turns labelled videos into training samples: label files, features of each clip, datasets."""
