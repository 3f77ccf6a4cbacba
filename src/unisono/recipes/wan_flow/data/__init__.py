"""The dataset of a run: a folder of images and videos, or the built-in shapes."""
