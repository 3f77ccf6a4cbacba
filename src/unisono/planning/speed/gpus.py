"""A catalogue of GPUs with memory, rates and links, for predicting runs on GPUs that this machine need not have.

Memory, bandwidths and links are taken from data sheets. `SUSTAINED` and `ATTENTION` are the fractions of the data
sheet's rate that long runs reach; they were measured on an H200 and are assumed for all other GPUs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from difflib import get_close_matches

from unisono.errors import ConfigError
from unisono.planning.peak_rates import peak_flops

SUSTAINED = 0.668
"""Fraction of the peak rate that matrix products reach at the GPU's power limit."""
ATTENTION = 0.54
"""Fraction of the peak rate that fused attention reaches, forward and backward together."""
BANDWIDTH = 0.85
"""Fraction of the memory bandwidth that elementwise kernels reach."""
LINK = 0.8
"""Fraction of the bandwidth of links that collectives and copies reach."""
_NVLINK_NETWORK = 50e9  # bytes/s per GPU: one 400 Gbit/s adapter each
_PCIE_NETWORK = 12.5e9  # bytes/s per machine: one 100 Gbit/s adapter


@dataclass(frozen=True)
class Gpu:
    """A GPU model, with the links of a typical machine. Bandwidths are in bytes/s and per direction."""

    name: str
    driver_name: str  # name by which planning/peak_rates.py looks up the GPU
    memory_gb: float
    memory_bandwidth: float
    link: float  # bandwidth between the GPUs of a machine, per GPU
    host_link: float  # bandwidth between host memory and a GPU
    has_nvlink: bool = False

    @property
    def series(self) -> str:
        """The name without the memory size."""
        return self.name.rpartition("-")[0]

    def rate(self, kind: str) -> float:
        """Returns the sustained rate of matrix products in FLOP/s. `kind` is fp8 (or else bf16), bf16, tf32 or fp32."""
        peak = peak_flops(self.driver_name, kind) or peak_flops(self.driver_name, "bf16" if kind == "fp8" else "fp32")
        assert peak is not None
        return SUSTAINED * peak

    @property
    def attention_rate(self) -> float:
        """The sustained rate of fused attention in 16 bit, in FLOP/s."""
        return ATTENTION / SUSTAINED * self.rate("bf16")

    @property
    def has_fp8(self) -> bool:
        """Whether the GPU has fp8 matrix units."""
        return peak_flops(self.driver_name, "fp8") is not None


_PCIE3, _PCIE4, _PCIE5 = 16e9, 32e9, 64e9


def _nvlink(name: str, driver_name: str, memory: float, bandwidth: float, link: float, host: float = _PCIE5) -> Gpu:
    return Gpu(name, driver_name, memory, bandwidth * 1e12, link * 1e9, host, has_nvlink=True)


def _pcie(name: str, driver_name: str, memory: float, bandwidth: float, link: float = _PCIE4) -> Gpu:
    return Gpu(name, driver_name, memory, bandwidth * 1e12, link, link)


_GPUS = (
    _nvlink("B200-180GB", "B200", 180, 8.0, 900),
    _nvlink("H200-141GB", "H200", 141, 4.8, 450),
    _nvlink("H100-80GB", "H100 80GB HBM3", 80, 3.35, 450),
    _pcie("H100-PCIe-80GB", "H100 PCIe", 80, 2.0, _PCIE5),
    _nvlink("A100-80GB", "A100", 80, 2.0, 300, _PCIE4),
    _nvlink("A100-40GB", "A100", 40, 1.555, 300, _PCIE4),
    _nvlink("V100-32GB", "V100-SXM2-32GB", 32, 0.9, 150, _PCIE3),
    _nvlink("V100-16GB", "V100-SXM2-16GB", 16, 0.9, 150, _PCIE3),
    _pcie("L40S-48GB", "L40S", 48, 0.864),
    _pcie("L40-48GB", "L40", 48, 0.864),
    _pcie("A40-48GB", "A40", 48, 0.696),
    _pcie("L4-24GB", "L4", 24, 0.3),
    _pcie("A10-24GB", "A10", 24, 0.6),
    _pcie("T4-16GB", "T4", 16, 0.32, _PCIE3),
    _pcie("RTX6000Ada-48GB", "RTX 6000 Ada Generation", 48, 0.96),
    _pcie("RTXA6000-48GB", "RTX A6000", 48, 0.768),
    _pcie("RTX5090-32GB", "GeForce RTX 5090", 32, 1.792, _PCIE5),
    _pcie("RTX4090-24GB", "GeForce RTX 4090", 24, 1.008),
    _pcie("RTX3090-24GB", "GeForce RTX 3090", 24, 0.936),
)
NAMES = tuple(gpu.name for gpu in _GPUS)
_USABLE_GB = {"H200-141GB": 139.7, "H100-80GB": 79.1, "A100-80GB": 79.2, "A100-40GB": 39.4, "B200-180GB": 178.3}
"""Memory in GiB that the driver reports, where known. For other GPUs, the nominal size counts as GiB."""


@dataclass(frozen=True)
class Cluster:
    """Identical machines with identical GPUs."""

    gpu: Gpu
    gpus_per_node: int
    nodes: int = 1
    network: float = 0.0  # bytes/s between machines, per machine and direction

    @property
    def ranks(self) -> int:
        """The number of GPUs."""
        return self.gpus_per_node * self.nodes

    @property
    def memory_gb(self) -> float:
        """Memory of one GPU in GiB."""
        return _USABLE_GB.get(self.gpu.name, self.gpu.memory_gb)

    def __str__(self) -> str:
        machines = f" on each of {self.nodes} machines" if self.nodes > 1 else ""
        return f"{self.gpus_per_node} × {self.gpu.name}{machines}"


def parse_cluster(text: str, nodes: int = 1, network_gbit: float | None = None) -> Cluster:
    """Parses text such as `8xH100-80GB`; a name without a memory size means the card with the most memory."""
    match = re.fullmatch(r"(?:(\d+)\s*[x×*]\s*)?(.+)", text.strip(), re.IGNORECASE)
    count, name = (int(match[1] or 1), match[2]) if match else (1, text)
    if count < 1 or nodes < 1:
        raise ConfigError(f"gpus {text!r}, nodes {nodes}: expected at least one GPU and one machine")
    gpu = _find(name)
    network = _PCIE_NETWORK if not gpu.has_nvlink else count * _NVLINK_NETWORK
    if network_gbit is not None:
        if network_gbit <= 0:
            raise ConfigError(f"network_gbit {network_gbit:g}: expected a positive number")
        network = network_gbit * 1e9 / 8
    return Cluster(gpu, count, nodes, network)


def _find(name: str) -> Gpu:
    wanted = _plain(name)
    for gpu in _GPUS:  # larger cards come first
        if wanted in (_plain(gpu.name), _plain(gpu.name).removesuffix("gb"), _plain(gpu.series)):
            return gpu
    sized = re.fullmatch(r"(.+?)[-_ ](\d+(?:\.\d+)?)\s*gb", name.strip(), re.IGNORECASE)
    for gpu in _GPUS if sized else ():  # a known card with another memory size, such as H100-94GB
        if sized and _plain(sized[1]) == _plain(gpu.series):
            return replace(gpu, name=f"{gpu.series}-{sized[2]}GB", memory_gb=float(sized[2]))
    names = {_plain(known): known for known in (*NAMES, *(gpu.series for gpu in _GPUS))}
    near = get_close_matches(wanted, names, n=1, cutoff=0.5)
    hint = f"did you mean {names[near[0]]}?" if near else f"the catalogue has {', '.join(NAMES)}"
    raise ConfigError(f"unknown GPU {name!r}; {hint}")


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9.]", "", name.lower().removeprefix("nvidia").replace("geforce", ""))
