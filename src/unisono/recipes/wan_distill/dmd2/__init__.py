"""The objective dmd2: trains, by distribution matching, a student that samples in a few steps without guidance."""
