"""From labelled videos to training samples: label files, features of each clip, datasets."""
