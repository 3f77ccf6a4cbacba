"""Builds the recipe's model, and rejects one that cannot be trained."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from unisono.engine.recipe import Recipe
from unisono.errors import RecipeError
from unisono.formatting import format_bytes
from unisono.planning.host import whole_host_memory

_FACTORIES = {torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn, torch.full}
_LARGE = 2**30  # bytes; smaller tensors are not checked
_TOO_LARGE = ("can't allocate memory", "not enough memory", "Storage size calculation overflowed", "out of memory")


def build_model(recipe: Recipe) -> nn.Module:
    """Calls Recipe.model() and checks the result."""
    try:
        with _Allocations():
            model = recipe.model()
    except MemoryError as error:
        raise RecipeError(_does_not_fit(error)) from error
    except RuntimeError as error:
        if not any(text in str(error) for text in _TOO_LARGE):
            raise
        raise RecipeError(_does_not_fit(error)) from error
    if not isinstance(model, nn.Module):
        raise RecipeError(f"model() returned {type(model).__name__}; expected a torch.nn.Module")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise RecipeError("model() has no trainable parameters")
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor):
            raise RecipeError(
                f"model(): {name} has no shape yet (a lazy module); call the model once on an example in model(), or "
                "set its size"
            )
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.is_complex():
            raise RecipeError(
                f"model(): {name} is complex, which optimizers and all-reduce do not support; train its real and "
                "imaginary parts (a real weight with a last dimension of 2, and torch.view_as_complex)"
            )
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            raise RecipeError(
                f"model(): {name or 'the model'} is an embedding with sparse gradients, which cannot be summed across "
                "ranks; remove sparse=True"
            )
    return model


class _Allocations(TorchFunctionMode):
    """Rejects a tensor larger than the machine's memory: the system would kill the process that fills it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _FACTORIES:
            shape = _shape_of(func, args, kwargs)
            device = torch.device(kwargs.get("device") or torch.get_default_device())
            size = math.prod(shape) * (kwargs.get("dtype") or torch.get_default_dtype()).itemsize
            if device.type == "cpu" and size > _LARGE and size > (whole := whole_host_memory()):
                raise RecipeError(
                    f"model(): a tensor of {' x '.join(map(str, shape))} takes {format_bytes(size)}, and this machine "
                    f"has {format_bytes(whole)} of memory; make it smaller, or build the model on the meta device and "
                    "shard it (fsdp)"
                )
        return func(*args, **kwargs)


def _shape_of(func: Any, args: Any, kwargs: Any) -> list[int]:
    sizes = kwargs.get("size", args[0] if args else ())
    if isinstance(sizes, int) and func is not torch.full:
        sizes = [size for size in args if isinstance(size, int)]
    try:
        return [int(size) for size in sizes]
    except (TypeError, ValueError):  # torch raises a better error
        return []


def _does_not_fit(error: BaseException) -> str:
    return f"model() does not fit into memory: {' '.join(str(error).split()) or type(error).__name__}; make it smaller"
