"""The moments of a long video that are worth cutting out: scored, found, cut."""
