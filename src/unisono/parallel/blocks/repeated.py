"""Finds the repeated blocks of a model, which are sharded, compiled and recomputed one by one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from unisono.parallel.blocks.compile_cache import use_compile_cache
from unisono.parallel.blocks.selective import own_selective_class, store_expensive_results

_COMPILATIONS = 64
_MIN_FRACTION = 0.1  # minimum fraction of the weights: includes encoder and decoder layers, but not a few small heads


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Returns the modules whose class is repeated in a list and holds a large fraction of the weights; may be empty."""
    families: dict[type, list[nn.Module]] = defaultdict(list)
    inside: set[nn.Module] = set()  # modules inside blocks: layers that a block repeats are not blocks themselves
    for container in model.modules():  # outer containers first
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
    large = [blocks for blocks in families.values() if _num_weights(blocks) > _MIN_FRACTION * _num_weights([model])]
    return list(dict.fromkeys(block for blocks in large for block in blocks))  # a layer may be used several times


def _num_weights(modules: Sequence[nn.Module]) -> int:
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


def recompute_activations(block: nn.Module, *, selective: bool = False) -> None:
    """Makes `block` store only its input and recompute its activations in backward (activation checkpointing).

    With `selective`, the block also stores what is expensive to recompute; see `selective.py`. Blocks with their own
    autograd functions may implement this themselves.
    """
    # Subclass the block's class: a wrapper module would rename the weights, and DataParallel's replicas would share a
    # patched instance.
    own = own_selective_class(block) if selective else None
    if isinstance(own, type):
        block.__class__ = own
    elif not _recomputes(block):
        block.__class__ = _recomputing(type(block), selective=selective)  # type: ignore[arg-type]  # is hashable


def has_autograd_functions(
    kind: type[nn.Module], selective: Callable[..., type[nn.Module] | str] | None = None
) -> None:
    """Declares that a class of blocks, or of layers in blocks, has autograd functions, which save tensors for backward.

    If such a block is compiled together with its recomputation, the compiler (up to torch 2.11) keeps the tensors that
    the functions save: nine tenths of a Wan block's activations. So such blocks are compiled first and recomputed from
    outside.

    `selective(block, products=False)` returns a class for such a block that recomputes by itself what is cheap, or says
    why there is none; with `products`, a class that also recomputes matrix products whose results are large.
    """
    kind._unisono_functions = True  # type: ignore[attr-defined]
    if selective is not None:
        kind._unisono_selective = staticmethod(selective)  # type: ignore[attr-defined]


def recomputing(plain: type[nn.Module], *, selective: bool = False, compute: Any = None) -> type[nn.Module]:
    """Returns a subclass that recomputes its activations; `compute` is the compiled forward function, if any."""
    return _recomputing(plain, compute, selective=selective)  # type: ignore[arg-type]  # is hashable


def _recomputes(block: nn.Module) -> bool:
    return hasattr(type(block), "_unisono_plain")


@cache  # one subclass per class of blocks, because torch.compile's guards check the class
def _recomputing(plain: type[nn.Module], compute: Any = None, *, selective: bool = False) -> type[nn.Module]:
    """Returns a subclass of `plain` that recomputes its activations; `compute` is by default plain.forward."""
    compute = compute or plain.forward
    options: dict[str, Any] = {"use_reentrant": False}
    if selective:
        options["context_fn"] = store_expensive_results

    def forward(self: nn.Module, *arguments: Any, **keywords: Any) -> Any:
        if not torch.is_grad_enabled():
            return compute(self, *arguments, **keywords)
        if not keywords:
            return checkpoint(compute, self, *arguments, **options)
        # Pass keywords as positional arguments: keywords could collide with checkpoint()'s own, and checkpoint()
        # searches only positional arguments for the devices whose random state it restores.
        names = tuple(keywords)

        def with_keywords(*values: Any) -> Any:
            first = len(values) - len(names)
            return compute(*values[:first], **dict(zip(names, values[first:], strict=True)))

        return checkpoint(with_keywords, self, *arguments, *keywords.values(), **options)

    attributes = {"forward": forward, "_unisono_plain": plain, "__module__": plain.__module__}
    return type(plain.__name__, (plain,), attributes)


@cache
def _compiled(plain: type[nn.Module], dynamic: bool | None) -> Any:
    return torch.compile(plain.forward, dynamic=dynamic)


def compile_blocks(model: nn.Module, blocks: Sequence[nn.Module], dynamic: bool | None = None) -> None:
    """Compiles each block in place (all blocks of a class share compilations), or the whole model if it has no blocks.

    `dynamic=False` compiles for each shape, even if other blocks of the class (of a teacher, say) had other shapes.
    """
    _set_up_compiler()
    for module in blocks or [model]:
        kind: Any = type(module)
        if _recomputes(module) and any(hasattr(type(part), "_unisono_functions") for part in module.modules()):
            plain = kind._unisono_plain
            module.__class__ = _recomputing(plain, _compiled(plain, dynamic))
        else:
            module.compile(dynamic=dynamic)  # in place: adds no `_orig_mod.` to parameter names


def compiled_forward(kind: type[nn.Module], dynamic: bool | None = None) -> Any:
    """Returns the compiled forward function of a class of blocks, for callers that wrap it in uncompiled code."""
    _set_up_compiler()
    return _compiled(kind, dynamic)  # type: ignore[arg-type]  # classes are hashable


def _set_up_compiler() -> None:
    disable_wrong_optimizations()
    use_compile_cache()
    # All blocks of a class share one limit on compilations. Batches of one and of several samples, training and
    # evaluation, and recomputed blocks count separately, and by default torch silently runs the ninth uncompiled.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _COMPILATIONS)


def disable_wrong_optimizations() -> None:
    """Disables compiler optimisations that give wrong gradients in supported versions of torch."""
    import torch._inductor.config as inductor

    # Since 2.10, sums over many tokens in the backward pass of modulated norms are silently wrong (pytorch#193061):
    # by a factor of 480 in a Wan block with 7,800 tokens.
    if hasattr(inductor.triton, "mix_order_reduction"):
        inductor.triton.mix_order_reduction = False
