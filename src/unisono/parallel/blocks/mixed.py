"""Limits the memory of stored activations: blocks recompute only as much as is needed to stay below a common limit.

A block has four levels, from the fastest to the one that stores least: store everything, recompute what is cheap,
recompute large matrix products too (blocks with their own kernels only), or recompute everything. A trial pass before
step 1 measures what a block stores at each level. Except for rounding, the result of training does not depend on them.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from unisono.parallel.blocks.repeated import compiled_forward, recomputing
from unisono.parallel.blocks.selective import own_selective_class, why_not_selective

STORE, CHEAP, PRODUCTS, WHOLE = "none", "selective", "products", "whole"
DESCRIPTIONS = {STORE: "nothing", CHEAP: "what is cheap", PRODUCTS: "matrix products too", WHOLE: "everything"}
Sizes = Mapping[str, int]  # bytes that a block stores, by level

# Time that a level costs, as a fraction of a block's forward pass.
_COST = {STORE: 0.0, CHEAP: 0.05, PRODUCTS: 0.55, WHOLE: 1.05}
_COST_OF_TORCHS = _COST | {CHEAP: 0.55}  # torch's own selective level stores only every second matrix product


class MixedBlocks:
    """The repeated blocks of a model, which recompute everything until `choose` has chosen their levels."""

    def __init__(self, blocks: Sequence[nn.Module], *, compiles: bool) -> None:
        self._blocks = list(blocks)
        self._measured: dict[type, dict[str, int]] = {}
        self._kinds: list[type] = []
        for block in self._blocks:
            own, products = (
                _class_or_none(own_selective_class(block, products=products)) for products in (False, True)
            )
            by_torch = own is None and why_not_selective(block) is None
            kind: Any = type(block)
            made = _mixed(kind, own, products, by_torch, compiles)
            self._kinds.append(made)
            block.__class__ = made
            block._unisono_level = WHOLE  # type: ignore[assignment]
            block._unisono_probe = None  # type: ignore[assignment]

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """A context for a trial pass, which also measures what the first block of each class stores at each level."""
        firsts = {kind: block for block, kind in reversed(list(zip(self._blocks, self._kinds, strict=True)))}
        try:
            for kind, block in firsts.items():
                block._unisono_probe = _Probe(self._measured.setdefault(kind, {}))  # type: ignore[assignment]
            yield
        finally:
            for block in firsts.values():
                block._unisono_probe = None  # type: ignore[assignment]

    def measured(self) -> list[dict[str, int]]:
        """Returns the bytes that a block of each class stores here, by level; empty if the trial used no blocks."""
        return [self._measured.get(kind, {}) for kind in dict.fromkeys(self._kinds)]

    def choose(self, limit: int, measured: Sequence[Sequence[Sizes]]) -> tuple[Counter[str], int]:
        """Chooses levels from the measurements of all ranks; returns the number of blocks by level, and their bytes."""
        sizes = dict(zip(dict.fromkeys(self._kinds), map(_largest, zip(*measured, strict=True)), strict=True))
        choices = [(sizes[kind], _cost_of(kind)) for kind in self._kinds]
        levels = choose_levels(limit, choices)
        for block, level in zip(self._blocks, levels, strict=True):
            block._unisono_level = level  # type: ignore[assignment]
        stored = (of_block.get(level, 0) for (of_block, _), level in zip(choices, levels, strict=True))
        return Counter(levels), sum(stored)


def choose_levels(limit: int, blocks: Sequence[tuple[Sizes, Mapping[str, float]]]) -> list[str]:
    """Chooses the level of each block, so that together they store at most `limit` bytes at a low cost in speed.

    `blocks` contains the bytes and the cost of each level, by block. Until all blocks fit, makes the change of level
    that frees the most memory per cost. Early blocks come first, because backward frees their memory last.
    """
    levels = [STORE if sizes else WHOLE for sizes, _ in blocks]
    stored = sum(sizes[STORE] for sizes, _ in blocks if sizes)
    while stored > limit:
        best: tuple[float, int, str] | None = None
        for number, (sizes, cost) in enumerate(blocks):
            now = levels[number]
            for level, size in sizes.items():
                if cost[level] > cost[now] and size < sizes[now]:
                    gain = (sizes[now] - size) / (cost[level] - cost[now])
                    if best is None or gain > best[0]:
                        best = (gain, number, level)
        if best is None:
            break
        _, number, level = best
        stored -= blocks[number][0][levels[number]] - blocks[number][0][level]
        levels[number] = level
    return levels


class _Probe:
    """Measures what a block stores for backward at each level, with the inputs of a trial pass."""

    def __init__(self, sizes: dict[str, int]) -> None:
        self._sizes = sizes

    def measure(self, block: nn.Module, levels: Mapping[str, Any], arguments: Any, keywords: Any) -> None:
        device = next(block.parameters()).device
        for level, compute in levels.items():
            try:
                compute(block, *arguments, **keywords)  # compiles, and chooses kernels
                size = _stored_bytes(partial(compute, block, *arguments, **keywords), device)
            except torch.OutOfMemoryError:
                size = 2**62
            self._sizes[level] = max(size, self._sizes.get(level, 0))


def _stored_bytes(compute: Callable[[], Any], device: torch.device) -> int:
    """Returns the bytes that a forward pass leaves in memory: its result and what it stores for backward."""
    if device.type == "cuda":
        before: int = torch.cuda.memory_allocated(device)
        result = compute()
        stored = torch.cuda.memory_allocated(device) - before
        del result
        return stored
    with torch.compiler.set_stance("force_eager"), _Allocations() as allocations:  # not seen in compiled code
        result = compute()
        stored = sum(allocations.bytes_by_storage.values())
    del result
    return stored


class _Allocations(TorchDispatchMode):
    """Counts the memory that operations have allocated and not freed yet; torch itself counts it only on GPUs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes_by_storage: dict[int, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {
            tensor.untyped_storage()._cdata for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)
        }
        results = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(results):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in inputs and storage._cdata not in self.bytes_by_storage:
                    self.bytes_by_storage[storage._cdata] = storage.nbytes()
                    weakref.finalize(storage, self.bytes_by_storage.pop, storage._cdata, None)
        return results


def _largest(of_ranks: Sequence[Sizes]) -> dict[str, int]:
    """Returns the measurements of the rank that stores most, level by level."""
    levels = dict.fromkeys(level for sizes in of_ranks for level in sizes)
    return {level: max(sizes.get(level, 0) for sizes in of_ranks) for level in levels}


def _class_or_none(form: Any) -> Any:
    return form if isinstance(form, type) else None


def _cost_of(kind: Any) -> Mapping[str, float]:
    return _COST_OF_TORCHS if kind._unisono_by_torch else _COST


@cache  # one class for all blocks of a kind, because torch.compile's guards check the class
def _mixed(plain: Any, cheap: Any, products: Any, by_torch: bool, compiles: bool) -> type[nn.Module]:
    """Returns a subclass of `plain` whose instances compute at the level in `_unisono_level`."""

    def compiled(kind: Any) -> Any:
        return compiled_forward(kind) if compiles else kind.forward

    levels = {STORE: compiled(plain)}
    if cheap is not None or by_torch:
        levels[CHEAP] = compiled(cheap or recomputing(plain, selective=True))
    if products is not None:
        levels[PRODUCTS] = compiled(products)
    if hasattr(plain, "_unisono_functions") and compiles:  # such blocks are compiled first
        whole: Any = recomputing(plain, compute=compiled_forward(plain))
        levels[WHOLE] = whole.forward
    else:
        levels[WHOLE] = compiled(recomputing(plain))

    def forward(self: Any, *arguments: Any, **keywords: Any) -> Any:
        if not torch.is_grad_enabled():
            return levels[STORE](self, *arguments, **keywords)
        if self._unisono_probe is not None:
            self._unisono_probe.measure(self, levels, arguments, keywords)
        return levels[self._unisono_level](self, *arguments, **keywords)

    attributes = {"forward": forward, "_unisono_by_torch": by_torch, "__module__": plain.__module__}
    return type(plain.__name__, (plain,), attributes)
