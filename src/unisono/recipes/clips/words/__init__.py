"""Speech in a video: transcripts (`reading.py`), sentences, clips cut at sentence ends, titles and captions."""
