"""Converts the result of a loss function that returns a mean to the sum and the count that the engine needs.

The sum is the mean over a micro-batch times its number of samples. The engine adds the sums of all micro-batches and
processes and divides the total by the number of all samples, which gives the mean over the whole batch. A mean over
tokens without padding, or a mean that weights samples by class, needs another count. This module computes that count
for torch's own losses; a user's function may return (mean, count).
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
    """Returns the loss of a batch, which is (inputs…, target) or a dict with a target such as `labels`.

    Without loss_fn, the model's own loss is used if it returns one; otherwise the target's type determines the loss.
    """
    inputs, named, target = _split(batch, keep_target=loss_fn is None)
    if loss_fn is not None and target is None:
        raise RecipeError(
            f"loss_fn needs a target, but the batch has only {', '.join(named) or 'nothing'}; name the target labels, "
            "target or y"
        )
    _check_call(model, inputs, named)
    output = model(*inputs, **named)
    if loss_fn is None and (model_loss := _loss_in(output)) is not None:
        return to_sum(model_loss, len_of(batch))
    if target is None:
        raise RecipeError("loss_fn: the model returns no loss and the batch has no target; return (inputs, target)")
    return _compute(loss_fn or _default_loss(target), output, target, len_of(batch))


def _check_call(model: nn.Module, inputs: Sequence[Any], named: Mapping[str, Any]) -> None:
    """Raises RecipeError if forward() does not accept the names in the batch."""
    if not named:
        return
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):  # a compiled function has no signature
        return
    try:
        signature.bind(*inputs, **named)
    except TypeError as error:
        raise RecipeError(
            f"the batch is a mapping with {', '.join(named)}, but {type(model).__name__}.forward{signature} does not "
            f"accept these names ({error}); rename the entries, name the target {_TARGETS[0]}, target or y, or return "
            "(inputs, target)"
        ) from None


def _split(batch: Any, *, keep_target: bool) -> tuple[Sequence[Any], dict[str, Any], Any]:
    """Splits a batch into positional inputs, named inputs and target.

    With `keep_target`, a named target stays among the inputs, for a model that computes its own loss.
    """
    if isinstance(batch, Mapping):
        named = {str(name): value for name, value in batch.items()}
        target_name = next((name for name in _TARGETS if name in named), None)
        if target_name is None:
            return (), named, None
        target = named[target_name] if keep_target else named.pop(target_name)
        return (), named, target
    if isinstance(batch, tuple | list) and len(batch) > 1:
        return batch[:-1], {}, batch[-1]
    [only] = batch if isinstance(batch, tuple | list) else [batch]
    return [only], {}, only  # the input is also the target, for a model that reconstructs its input


def _loss_in(output: Any) -> Tensor | None:
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return loss if isinstance(loss, Tensor) else None


def _default_loss(target: Any) -> LossFunction:
    """Returns cross-entropy for integer targets (classes), and mean squared error for floating-point targets."""
    if isinstance(target, Tensor) and not target.is_floating_point():
        return nn.CrossEntropyLoss()
    return functional.mse_loss


def _compute(loss_fn: LossFunction, output: Any, target: Any, num: int) -> Loss:
    if isinstance(output, Mapping | tuple | list) and not isinstance(loss_fn, nn.Module):
        return to_sum(loss_fn(output, target), num)
    logits = getattr(output, "logits", output)
    if isinstance(loss_fn, nn.Module):
        loss_fn = loss_fn.to(logits.device if isinstance(logits, Tensor) else "cpu")  # it may have class weights
    by_class = isinstance(loss_fn, nn.CrossEntropyLoss | nn.NLLLoss) and loss_fn.reduction == "mean"
    if by_class and isinstance(target, Tensor) and not target.is_floating_point():
        return _by_class(loss_fn, logits, target)  # type: ignore[arg-type]
    result = loss_fn(logits, target)
    if getattr(loss_fn, "reduction", None) == "sum" and isinstance(result, Tensor):
        return Loss(result, num)
    return to_sum(result, num)


def _by_class(loss_fn: nn.CrossEntropyLoss | nn.NLLLoss, output: Tensor, target: Tensor) -> Loss:
    """Computes the sum and count of a loss whose mean ignores some targets and weights the rest by class."""
    sum_fn = copy.copy(loss_fn)
    sum_fn.reduction = "sum"
    counted = target[target != loss_fn.ignore_index]
    weight = loss_fn.weight
    return Loss(sum_fn(output, target), counted.numel() if weight is None else weight[counted].sum())


def to_sum(result: Any, num: int) -> Loss:
    """Converts the result of a loss function for a batch of `num` samples to a sum and a count."""
    if isinstance(result, Loss):
        return result
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], Tensor):
        mean, count = result
        return Loss(mean * count, count)
    if not isinstance(result, Tensor):
        raise RecipeError(
            f"loss_fn returned {type(result).__name__}; return a mean (a tensor), (mean, count), or unisono.Loss"
        )
    if result.dim() == 0:
        return Loss(result * num, num)
    return Loss(result.sum(), result.numel())


def len_of(batch: Any) -> int:
    """Returns the number of samples in a batch, which is the length of the first tensor in it."""
    if isinstance(batch, Tensor):
        return len(batch) if batch.dim() else 1
    values = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, tuple | list) else ()
    for value in values:
        if num := len_of(value):
            return num
    return 0


def check_loss(loss_fn: Any) -> None:
    """Raises RecipeError if an object cannot be a loss function. Called before training starts."""
    if isinstance(loss_fn, type):
        raise RecipeError(f"loss_fn is the class {loss_fn.__name__}; pass an instance: {loss_fn.__name__}()")
    if isinstance(loss_fn, nn.Module) and any(weight.requires_grad for weight in loss_fn.parameters()):
        raise RecipeError("loss_fn has trainable weights; make it part of the model, because only that is trained")
    if loss_fn is not None and not callable(loss_fn):
        raise RecipeError(f"loss_fn: expected a function of (outputs, targets), got {type(loss_fn).__name__}")


def broadcast_weights(model: nn.Module) -> None:
    """Copies the weights of rank 0 to all other ranks, which may have initialised them differently."""
    import torch.distributed as dist

    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.data, src=0)
