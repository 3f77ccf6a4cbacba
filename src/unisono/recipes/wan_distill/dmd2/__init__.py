"""The objective dmd2: distribution matching, for a student that samples in a few steps without guidance."""
