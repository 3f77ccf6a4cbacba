"""The commands of `unisono`, one module each. A command parses arguments, calls the engine and prints results."""
