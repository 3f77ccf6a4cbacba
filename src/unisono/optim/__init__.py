"""Optimizers that torch lacks, or that torch's cannot run on shards. None depends on where shards begin and end."""
