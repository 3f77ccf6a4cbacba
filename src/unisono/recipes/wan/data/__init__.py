"""From a folder of pictures, films and captions to latents and rows of text."""
