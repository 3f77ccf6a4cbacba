"""Processes beside a run that follow its folder: trackers, and the copy in object storage."""
