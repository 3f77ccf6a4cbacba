"""What is said in a video: transcripts (`reading.py`), sentences, clips that end with them, titles and captions."""
