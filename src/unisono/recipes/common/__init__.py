"""What several recipes need: reading what people have, keeping what is computed of it, saying how far that is."""
