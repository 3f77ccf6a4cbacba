"""The repeated blocks of a model: what is sharded, compiled and recomputed piece by piece."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

_COMPILATIONS = 64
_GOOD_PART = 0.1  # an encoder's and a decoder's layers both count, a few small heads do not


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The modules of the classes that are repeated in lists and hold a good part of the weights; may be empty."""
    families: dict[type, list[nn.Module]] = defaultdict(list)
    inside: set[nn.Module] = set()  # blocks: the layers that a block repeats itself are no blocks
    for container in model.modules():  # outer ones first
        if container in inside or not isinstance(container, nn.ModuleList | nn.Sequential):
            continue
        by_class: dict[type, list[nn.Module]] = defaultdict(list)
        for child in container:
            if any(True for _ in child.parameters()):
                by_class[type(child)].append(child)
        for kind, children in by_class.items():
            if len(children) > 1 and not isinstance(children[0], nn.ModuleList | nn.Sequential):
                families[kind].extend(children)
                inside.update(part for child in children for part in child.modules())
    large = [blocks for blocks in families.values() if _num_weights(blocks) > _GOOD_PART * _num_weights([model])]
    return list(dict.fromkeys(block for blocks in large for block in blocks))  # a layer may be used several times


def _num_weights(modules: Sequence[nn.Module]) -> int:
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


def recompute_activations(block: nn.Module) -> None:
    """Makes `block` keep only its input and compute its activations again in backward."""
    # A subclass of the block's own class rather than a wrapper module (which would rename the weights) or a patched
    # instance (which DataParallel's replicas would share).
    if not _recomputes(block):
        block.__class__ = _recomputing(type(block))  # type: ignore[arg-type]  # classes are hashable


def has_autograd_functions(kind: type[nn.Module]) -> None:
    """Notes of a class of blocks that it has autograd functions of its own, which save tensors for backward.

    A compiler that is given such a block together with its recomputing keeps what they save, up to torch 2.11: nine
    tenths of a Wan block's activations. They are compiled first, and recomputed from outside.
    """
    kind._unisono_functions = True  # type: ignore[attr-defined]


def _recomputes(block: nn.Module) -> bool:
    return hasattr(type(block), "_unisono_plain")


@cache  # one class for all blocks of a kind: torch.compile's guards look at the class
def _recomputing(plain: type[nn.Module], compute: Any = None) -> type[nn.Module]:
    """`compute`: plain.forward as it is, or compiled."""
    compute = compute or plain.forward

    def forward(self: nn.Module, *arguments: Any, **keywords: Any) -> Any:
        if not torch.is_grad_enabled():
            return compute(self, *arguments, **keywords)
        if not keywords:
            return checkpoint(compute, self, *arguments, use_reentrant=False)
        # Not by their names: some are checkpoint's own, and it looks for tensors' devices, whose random state it keeps,
        # only among what has none.
        names = tuple(keywords)

        def named(*given: Any) -> Any:
            first = len(given) - len(names)
            return compute(*given[:first], **dict(zip(names, given[first:], strict=True)))

        return checkpoint(named, self, *arguments, *keywords.values(), use_reentrant=False)

    parts = {"forward": forward, "_unisono_plain": plain, "__module__": plain.__module__}
    return type(plain.__name__, (plain,), parts)


@cache
def _compiled(plain: type[nn.Module], dynamic: bool | None) -> Any:
    return torch.compile(plain.forward, dynamic=dynamic)


def compile_blocks(model: nn.Module, blocks: Sequence[nn.Module], dynamic: bool | None = None) -> None:
    """Compiles each block in place (one compilation serves all of a kind), or the whole model if it has no blocks.

    `dynamic` False: each shape anew, also when others of the kind (a teacher, a student) have had other shapes.
    """
    leave_out_wrong_optimisations()
    # All blocks of a kind share one count of compilations. Batches of one and of more, training and evaluation,
    # recomputed blocks and others are one each, and by default the ninth would run uncompiled, without an error.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _COMPILATIONS)
    for module in blocks or [model]:
        kind: Any = type(module)
        if _recomputes(module) and hasattr(kind, "_unisono_functions"):
            plain = kind._unisono_plain
            module.__class__ = _recomputing(plain, _compiled(plain, dynamic))
        else:
            module.compile(dynamic=dynamic)  # in place: no `_orig_mod.` in the names


def leave_out_wrong_optimisations() -> None:
    """Switches off what is known to give wrong gradients in the versions of torch that we support."""
    import torch._inductor.config as inductor

    # Since 2.10, sums over many tokens in the backward pass of modulated norms come out as garbage, silently
    # (pytorch#193061): seen on a Wan block with 7,800 tokens, off by a factor of 480.
    if hasattr(inductor.triton, "mix_order_reduction"):
        inductor.triton.mix_order_reduction = False
