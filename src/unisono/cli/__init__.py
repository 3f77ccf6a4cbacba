"""The commands of `unisono`, one file each: they parse arguments, call the engine and print results."""
