"""AdamW that stores its two moments in 8 or 4 bits, which takes a quarter or an eighth of AdamW's memory.

A moment is stored in blocks of neighbouring elements of a row. Each block has a scale, which is the largest magnitude
in the block, and each element has a code, which is the index of the nearest value in a fixed table. Blocks never cross
a row, and shards consist of whole rows, so the result does not depend on the number of ranks. (torchao's optimizers
form blocks within each shard, so their results change with the number of ranks.) The moments of small weights and of
one-dimensional weights stay in 32 bits, as in the publications (Dettmers et al., 8-bit Optimizers via Block-wise
Quantization, 2022; Li et al., Memory Efficient Optimizers with 4-bit States, 2023).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from unisono.optim.base import ShardAwareOptimizer, step_counter
from unisono.parallel.row_shards import RowShards

_SMALLEST = 4096  # minimum number of elements of a weight whose moments are compressed
_BLOCK = {8: 256, 4: 128}  # number of elements per scale, as in the publications


@cache
def code_book(bits: int, *, signed: bool) -> Tensor:
    """Returns the values of the codes in ascending order, from -1 (or 0, if not `signed`) to 1.

    The values cover several decades, so that small and large moments both have a small relative error. Each decade has
    half as many values as the next larger one. The 4-bit second moment has evenly spaced values without 0, because
    updates divide by it.
    """
    if bits == 4 and not signed:
        return torch.arange(1, 17, dtype=torch.float64) / 16
    decades = bits - 1
    values = [0.0, 1.0]
    for decade in range(decades):
        count = 2**decade if signed else 2 ** (decade + 1)
        largest = 10.0 ** (decade - decades + 1)
        middles = [largest * (0.1 + 0.9 * (number + 0.5) / count) for number in range(count)]
        values += [*middles, *(-value for value in middles)] if signed else middles
    return torch.tensor(sorted(values), dtype=torch.float64)


@cache
def _tables(bits: int, signed: bool, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns the values of codes, and the borders between them."""
    values = code_book(bits, signed=signed)
    return values.to(device, dtype), ((values[1:] + values[:-1]) / 2).to(device, dtype)


@cache
def _cells(bits: int, signed: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns the lowest code for each value of a float32's upper 16 bits, and the upper border of each code."""
    _, borders = _tables(bits, signed, torch.float32, torch.device("cpu"))
    upper = torch.arange(2**16, dtype=torch.int32)
    # As an integer, the bit pattern of a negative float grows with the magnitude of the float.
    lowest = (upper << 16 | torch.where(upper >= 2**15, 2**16 - 1, 0)).to(torch.int32)
    codes = torch.bucketize(lowest.view(torch.float32), borders)
    return codes.to(device), torch.cat([borders, torch.tensor([torch.inf])]).to(device)


def nearest_codes(values: Tensor, bits: int, signed: bool) -> Tensor:
    """Returns the code of the nearest value in the code book for each of `values`, which range from -1 to 1."""
    if values.dtype != torch.float32:
        return torch.bucketize(values, _tables(bits, signed, values.dtype, values.device)[1])
    # This is 20 times as fast as a binary search on a CPU. At most one border lies between numbers with the same upper
    # 16 bits, because neighbouring values of the code book are further apart.
    codes, borders = _cells(bits, signed, values.device)
    lowest = codes.take((values.view(torch.int32) >> 16).bitwise_and_(2**16 - 1).long())
    return lowest + (values > borders.take(lowest))


@dataclass(frozen=True)
class BlockCodes:
    """The format of a stored moment: the number of bits per code, and whether the values are signed."""

    bits: int
    signed: bool

    def encode(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the codes and scales of a matrix. Both have one row for each row of the matrix."""
        blocks = self._blocks(values)
        scales = blocks.abs().amax(dim=-1)
        unit = blocks / scales.clamp(min=torch.finfo(values.dtype).tiny).unsqueeze(-1)
        codes = nearest_codes(unit, self.bits, self.signed).to(torch.uint8).flatten(1)[:, : values.shape[1]]
        return self._pack(codes), scales

    def decode(self, codes: Tensor, scales: Tensor, num_columns: int) -> Tensor:
        """Returns the matrix that codes and scales represent."""
        values, _ = _tables(self.bits, self.signed, scales.dtype, scales.device)
        unit = values.take(self._unpack(codes)[:, :num_columns].long())
        return (self._blocks(unit) * scales.unsqueeze(-1)).flatten(1)[:, :num_columns]

    def _blocks(self, matrix: Tensor) -> Tensor:
        """Reshapes the matrix to (rows, blocks, elements). The last block of a row is padded with zeros."""
        size = min(_BLOCK[self.bits], matrix.shape[1])
        filled = pad(matrix, (0, -matrix.shape[1] % size))
        return filled.view(len(matrix), filled.shape[1] // size, size)  # does not use -1, as a rank may have no rows

    def _pack(self, codes: Tensor) -> Tensor:
        if self.bits == 8:
            return codes
        even = pad(codes, (0, codes.shape[1] % 2))
        return even[:, ::2] | even[:, 1::2] << 4

    def _unpack(self, packed: Tensor) -> Tensor:
        if self.bits == 8:
            return packed
        return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1)


class LowBitAdamW(ShardAwareOptimizer):
    """AdamW whose moments are stored in 8 or 4 bits."""

    row_slots: ClassVar[frozenset[str]] = frozenset(
        f"{moment}_{part}" for moment in ("exp_avg", "exp_avg_sq") for part in ("codes", "scales")
    )

    def __init__(
        self,
        parameters: Iterable[Any],
        bits: int,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        shards: RowShards | None = None,
    ) -> None:
        defaults = {"bits": bits, "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(parameters, defaults, shards or RowShards())
        self._moments = {"exp_avg": BlockCodes(bits, signed=True), "exp_avg_sq": BlockCodes(bits, signed=False)}

    def _is_compressed(self, weight: nn.Parameter) -> bool:
        shape = self.shards.whole_shape(weight)
        return len(shape) > 1 and shape.numel() >= _SMALLEST

    def _new_state(self, weight: nn.Parameter, group: dict[str, Any]) -> dict[str, Any]:
        state: dict[str, Any] = {"step": step_counter(weight)}
        for name, storage in self._moments.items():
            zeros = torch.zeros_like(weight, memory_format=torch.contiguous_format)
            if self._is_compressed(weight):
                state[f"{name}_codes"], state[f"{name}_scales"] = storage.encode(_as_matrix(zeros))
            else:
                state[name] = zeros
        return state

    def _step_group(self, group: dict[str, Any], weights: list[nn.Parameter]) -> None:
        (beta1, beta2), rate, eps, decay = group["betas"], group["lr"], group["eps"], group["weight_decay"]
        for weight in weights:
            state, gradient = self.state[weight], self._gradient(weight)
            step = self._count_step(state).to(gradient.dtype)
            first = torch.lerp(self._read(weight, "exp_avg"), gradient, 1 - beta1)
            second = torch.lerp(self._read(weight, "exp_avg_sq"), gradient.square(), 1 - beta2)
            denominator = (second / (1 - beta2**step)).sqrt_().add_(eps)
            update = first / denominator / (1 - beta1**step)
            self._store(weight, weight * (1 - rate * decay) - rate * update)
            self._write(weight, "exp_avg", first)
            self._write(weight, "exp_avg_sq", second)

    def _read(self, weight: nn.Parameter, name: str) -> Tensor:
        state = self.state[weight]
        if name in state:
            return state[name]  # type: ignore[no-any-return]
        codes, scales = state[f"{name}_codes"], state[f"{name}_scales"]
        return self._moments[name].decode(codes, scales, _num_columns(weight)).view(weight.shape)

    def _write(self, weight: nn.Parameter, name: str, moment: Tensor) -> None:
        state = self.state[weight]
        if name in state:
            self._store(state[name], moment)
            return
        codes, scales = self._moments[name].encode(_as_matrix(moment))
        self._store(state[f"{name}_codes"], codes)
        self._store(state[f"{name}_scales"], scales)


def _as_matrix(tensor: Tensor) -> Tensor:
    return tensor.reshape(tensor.shape[0], _num_columns(tensor))


def _num_columns(weight: Tensor) -> int:
    return weight.shape[1:].numel()
