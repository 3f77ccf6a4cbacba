"""Side processes, which follow the folder of a run while it trains: trackers, and the copy in object storage."""
