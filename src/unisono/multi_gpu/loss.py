"""From a loss function that gives a mean to the sum and the count that the engine needs.

A mean over a micro-batch times its number of samples is a sum: added up over micro-batches and processes and divided
by all their samples, it is the mean over the whole batch again. Where a mean is over something else (tokens that are
not padding, samples weighted by class), the count must be of that: for torch's own losses it is worked out here, and
a function of the user's may return (mean, count).
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from unisono.engine.recipe import Loss
from unisono.errors import RecipeError

LossFunction = Callable[[Any, Any], Any]

_TARGETS = ("labels", "label", "targets", "target", "y")


def loss_of(model: nn.Module, batch: Any, loss_fn: LossFunction | None) -> Loss:
    """The loss of a batch, (inputs…, target) or a dict with `labels`; without a loss_fn one that fits the target."""
    inputs, named, target = _taken_apart(batch, keep_target=loss_fn is None)
    if loss_fn is not None and target is None:
        raise RecipeError(
            f"loss_fn needs a target, and the batch has {', '.join(named) or 'nothing'}; call one of them labels, "
            "target or y"
        )
    _check_call(model, inputs, named)
    output = model(*inputs, **named)
    if loss_fn is None and (own := _own_loss(output)) is not None:
        return summed(own, len_of(batch))
    if target is None:
        raise RecipeError("loss_fn: the model gives no loss and the batch has no target; return (inputs, target)")
    return _computed(loss_fn or _fitting(target), output, target, len_of(batch))


def _check_call(model: nn.Module, inputs: Sequence[Any], named: Mapping[str, Any]) -> None:
    """Whether forward() takes what the batch has, by name; what it does with that is not judged."""
    if not named:
        return
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):  # a compiled function has none
        return
    try:
        signature.bind(*inputs, **named)
    except TypeError as error:
        raise RecipeError(
            f"the batch is a mapping with {', '.join(named)}, and {type(model).__name__}.forward{signature} cannot be "
            f"called with these names ({error}); rename the entries, call the target {_TARGETS[0]}, target or y, or "
            "return (inputs, target)"
        ) from None


def _taken_apart(batch: Any, *, keep_target: bool) -> tuple[Sequence[Any], dict[str, Any], Any]:
    """Inputs by position and by name, and the target; a model that computes its loss itself gets that by name too."""
    if isinstance(batch, Mapping):
        named = {str(name): value for name, value in batch.items()}
        found = next((name for name in _TARGETS if name in named), None)
        target = None if found is None else named[found]
        if found is not None and not keep_target:
            del named[found]
        return (), named, target
    if isinstance(batch, tuple | list) and len(batch) > 1:
        return batch[:-1], {}, batch[-1]
    [only] = batch if isinstance(batch, tuple | list) else [batch]
    return [only], {}, only  # to be reconstructed


def _own_loss(output: Any) -> Tensor | None:
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return loss if isinstance(loss, Tensor) else None


def _fitting(target: Any) -> LossFunction:
    """Classes are whole numbers; what is measured is not."""
    if isinstance(target, Tensor) and not target.is_floating_point():
        return nn.CrossEntropyLoss()
    return functional.mse_loss


def _computed(loss_fn: LossFunction, output: Any, target: Any, num: int) -> Loss:
    if isinstance(output, Mapping | tuple | list) and not isinstance(loss_fn, nn.Module):
        return summed(loss_fn(output, target), num)
    logits = getattr(output, "logits", output)
    if isinstance(loss_fn, nn.Module):
        loss_fn = loss_fn.to(logits.device if isinstance(logits, Tensor) else "cpu")  # its class weights
    by_class = isinstance(loss_fn, nn.CrossEntropyLoss | nn.NLLLoss) and loss_fn.reduction == "mean"
    if by_class and isinstance(target, Tensor) and not target.is_floating_point():
        return _by_class(loss_fn, logits, target)  # type: ignore[arg-type]
    found = loss_fn(logits, target)
    if getattr(loss_fn, "reduction", None) == "sum" and isinstance(found, Tensor):
        return Loss(found, num)
    return summed(found, num)


def _by_class(loss_fn: nn.CrossEntropyLoss | nn.NLLLoss, output: Tensor, target: Tensor) -> Loss:
    """Its mean is over the targets that are not ignored, each with the weight of its class."""
    whole = copy.copy(loss_fn)
    whole.reduction = "sum"
    counted = target[target != loss_fn.ignore_index]
    weight = loss_fn.weight
    return Loss(whole(output, target), counted.numel() if weight is None else weight[counted].sum())


def summed(found: Any, num: int) -> Loss:
    """What a loss function returned, as a sum and a count; `num` samples are in the batch."""
    if isinstance(found, Loss):
        return found
    if isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], Tensor):
        mean, count = found
        return Loss(mean * count, count)
    if not isinstance(found, Tensor):
        raise RecipeError(
            f"loss_fn returned {type(found).__name__}; return a mean (a tensor), (mean, count), or unisono.Loss"
        )
    if found.dim() == 0:
        return Loss(found * num, num)
    return Loss(found.sum(), found.numel())


def len_of(batch: Any) -> int:
    """The number of samples in a batch: the length of the first tensor in it."""
    if isinstance(batch, Tensor):
        return len(batch) if batch.dim() else 1
    inside = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, tuple | list) else ()
    for value in inside:
        if num := len_of(value):
            return num
    return 0


def check_loss(loss_fn: Any) -> None:
    """Refuses what cannot be a loss function, before anything is trained."""
    if loss_fn is None or isinstance(loss_fn, nn.Module) or callable(loss_fn):
        if isinstance(loss_fn, nn.Module) and any(weight.requires_grad for weight in loss_fn.parameters()):
            raise RecipeError("loss_fn has weights to train; make it a part of the model, which is what is trained")
        if isinstance(loss_fn, type):
            raise RecipeError(f"loss_fn is the class {loss_fn.__name__}; give an object of it: {loss_fn.__name__}()")
        return
    raise RecipeError(f"loss_fn: expected a function of (outputs, targets), got {type(loss_fn).__name__}")


def same_weights_everywhere(model: nn.Module) -> None:
    """The first process's weights for all: each may have drawn its own."""
    import torch.distributed as dist

    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.data, src=0)
