"""Optimizers that torch lacks or cannot run on sharded weights. Their results do not depend on the sharding."""
