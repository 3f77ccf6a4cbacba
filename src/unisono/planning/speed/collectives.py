"""Predicts the time of collectives by the alpha-beta model: a latency per message, and a time per byte.

NCCL and gloo move large tensors in rings. In a ring of n ranks, an all-gather or a reduce-scatter of S bytes sends
S · (n - 1) / n bytes through each link in n - 1 messages, and an all-reduce twice that.
"""

from __future__ import annotations

from dataclasses import dataclass

from unisono.planning.speed.gpus import LINK, Cluster

_LATENCY = 6e-6  # seconds per message within a machine
_NETWORK_LATENCY = 20e-6  # seconds per message between machines


@dataclass(frozen=True)
class Ring:
    """A group of ranks that communicate in a ring."""

    ranks: int
    bandwidth: float  # bytes/s through the slowest link
    latency: float = _LATENCY

    def gather(self, num_bytes: float) -> float:
        """Returns the seconds of an all-gather or a reduce-scatter; `num_bytes` is the size of the whole tensor."""
        if self.ranks == 1:
            return 0.0
        return (self.ranks - 1) * (self.latency + num_bytes / self.ranks / self.bandwidth)

    def all_reduce(self, num_bytes: float) -> float:
        """Returns the seconds of an all-reduce of a tensor."""
        return 2 * self.gather(num_bytes)

    def all_to_all(self, num_bytes: float) -> float:
        """Returns the seconds of an all-to-all, in which each rank exchanges `num_bytes` with all other ranks."""
        return self.gather(num_bytes) if self.ranks > 1 else 0.0


def ring_of_all(cluster: Cluster) -> Ring:
    """Returns the ring of all ranks, which passes through every machine once per network adapter."""
    link = LINK * cluster.gpu.link
    if cluster.nodes == 1:
        return Ring(cluster.ranks, link)
    return Ring(cluster.ranks, min(link, LINK * cluster.network), _NETWORK_LATENCY)


def ring_within(cluster: Cluster, ranks: int) -> Ring:
    """Returns the ring of `ranks` consecutive ranks, which is within a machine if they fit into one."""
    if ranks <= cluster.gpus_per_node:
        return Ring(ranks, LINK * cluster.gpu.link)
    return Ring(ranks, min(LINK * cluster.gpu.link, LINK * cluster.network), _NETWORK_LATENCY)


def ring_between(cluster: Cluster, shard_size: int) -> Ring:
    """Returns the ring of one rank per group of `shard_size` ranks; a machine's rings share its network adapters."""
    copies = cluster.ranks // shard_size
    if cluster.nodes == 1:
        return Ring(copies, LINK * cluster.gpu.link)
    sharing = min(shard_size, cluster.gpus_per_node)
    return Ring(copies, min(LINK * cluster.gpu.link, LINK * cluster.network / sharing), _NETWORK_LATENCY)
