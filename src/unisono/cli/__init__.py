"""The commands of `unisono`, one file each: parses arguments, calls the engine, prints, and sets the exit code."""
