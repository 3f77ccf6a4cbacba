"""Optimizers that torch does not have or cannot run on sharded weights. Their results do not depend on the sharding."""
