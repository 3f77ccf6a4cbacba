"""Peak rates of GPUs, which correspond to a model FLOPs utilization (MFU) of 100 %.

The numbers are the data sheets' rates of dense matrix products, in TFLOP/s. At its power limit, a GPU sustains less:
an H200 sustained 661 of its 989 TFLOP/s in bf16. `--peak_tflops` sets another peak rate.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class PeakRates:
    """Rates of dense matrix products in TFLOP/s, by data type; None if the GPU does not support the type."""

    bf16: float | None  # fp16 is equally fast
    tf32: float | None
    fp32: float
    fp8: float | None = None


_RATES = {
    r"B200": PeakRates(2250, 1125, 75, 4500),
    r"H200|H100 80GB HBM3|H100 SXM5.*|GH200.*": PeakRates(989, 494, 67, 1979),
    r"H200 NVL|H100 NVL": PeakRates(835, 417, 60, 1671),
    r"H100 PCIe": PeakRates(756, 378, 51, 1513),
    r"A100([- ].*)?": PeakRates(312, 156, 19.5),
    r"A40": PeakRates(149.7, 74.8, 37.4),
    r"A10": PeakRates(125, 62.5, 31.2),
    r"L40S": PeakRates(362, 183, 91.6, 733),
    r"L40": PeakRates(181, 90.5, 90.5, 362),
    r"L4": PeakRates(121, 60, 30.3, 242),
    r"RTX 6000 Ada Generation": PeakRates(364, 182, 91.1, 729),
    r"RTX A6000": PeakRates(154.8, 77.4, 38.7),
    r"GeForce RTX 5090": PeakRates(209.5, 104.8, 104.8, 419),
    r"GeForce RTX 4090": PeakRates(165.2, 82.6, 82.6, 330.3),
    r"GeForce RTX 3090": PeakRates(71, 35.6, 35.6),
    r"V100-SXM2.*": PeakRates(125, None, 15.7),
    r"V100-PCIE.*": PeakRates(112, None, 14),
    r"T4": PeakRates(65, None, 8.1),
}
"""Maps patterns of the GPU name that the driver reports, without the manufacturer, to rates."""


def peak_flops(gpu: str, precision: str) -> float | None:
    """Returns the peak rate of a GPU in FLOP/s for bf16, fp16, fp8, tf32 or fp32; None if it is unknown.

    The name must match an entry of the table exactly, because similar names (a laptop's GPU, a MIG slice) have other
    rates.
    """
    name = re.sub(r"^(NVIDIA |Tesla )+", "", gpu.strip())
    for pattern, rates in _RATES.items():
        if re.fullmatch(pattern, name) and "MIG" not in name:
            rate = getattr(rates, "bf16" if precision == "fp16" else precision, None)
            return None if rate is None else rate * 1e12
    return None
