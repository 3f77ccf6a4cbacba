"""Optimizers that torch does not have or cannot run on shards. Their results do not depend on the sharding."""
