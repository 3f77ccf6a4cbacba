"""Optimizers that torch lacks or cannot run on shards. Their results do not depend on how weights are sharded."""
