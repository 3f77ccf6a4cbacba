"""Creates the optimizer that the settings name, and checks that an optimizer can train these weights correctly."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.errors import ConfigError, RecipeError
from unisono.optim import named
from unisono.optim.adamw import adamw_for
from unisono.optim.base import ShardAwareOptimizer
from unisono.optim.combined import CombinedOptimizer
from unisono.optim.prodigy import Prodigy
from unisono.optim.schedule_free import ScheduleFreeAdamW
from unisono.parallel.row_shards import RowShards
from unisono.settings import OptimSettings

NamedParameters = Sequence[tuple[str, nn.Parameter]]

_UNUSABLE = {
    "lbfgs": "evaluates the loss several times in a step, and a step computes its gradient once",
    "sparseadam": "needs sparse gradients, which cannot be summed across ranks; use adam",
}
# Their update uses whole matrices or norms of whole weights; on a shard it would be a different algorithm.
_WHOLE_WEIGHTS = ("muon", "adafactor", "lbfgs", "shampoo", "galore")
_UPDATES_TOGETHER = (Prodigy, ScheduleFreeAdamW)  # their updates combine all weights
_WHOLE_WEIGHTS_EXACTLY = ("soap", "lamb", "lars", "came")


def named_optimizer(name: str) -> type[Optimizer]:
    """Returns the class with this name, in `unisono.optim` or torch.optim, ignoring case."""
    classes = {
        key.lower(): value
        for key, value in vars(torch.optim).items()
        if inspect.isclass(value) and issubclass(value, Optimizer) and value is not Optimizer
    } | named.OPTIMIZERS
    if (reason := _UNUSABLE.get(name.lower())) is not None:
        raise ConfigError(f"optimizer {name} cannot be used: it {reason}")
    if name.lower() not in classes:
        usable = ", ".join(sorted(classes.keys() - _UNUSABLE.keys()))
        raise ConfigError(f"optimizer: expected one of {usable}; got {name!r}")
    return classes[name.lower()]


def from_settings(
    parameters: NamedParameters,
    settings: OptimSettings,
    *,
    shards: RowShards | None = None,
    not_for_muon: Collection[str] = (),
) -> Optimizer:
    """Creates the optimizer that the settings name. `not_for_muon`: names of matrices that Muon leaves to AdamW."""
    kind = named_optimizer(settings.optimizer)
    if settings.optimizer.lower() in named.OPTIMIZERS:
        return named.make(parameters, settings, shards or RowShards(), not_for_muon)
    accepted = inspect.signature(kind).parameters
    options: dict[str, Any] = {
        "lr": settings.learning_rate,
        "weight_decay": settings.weight_decay,
        "betas": (settings.beta1, settings.beta2),
        "momentum": settings.beta1,
        "eps": settings.epsilon,
        # The fused optimizer updates all weights in one kernel, and skips a non-finite step without a host sync.
        "fused": True,
    }
    if "fused" not in accepted:
        options["foreach"] = True
    if kind is torch.optim.AdamW:
        kind = adamw_for(parameters[0][1])
    return kind(list(parameters), **{name: value for name, value in options.items() if name in accepted})


def not_for_muon(model: nn.Module, blocks: Sequence[nn.Module]) -> list[str]:
    """Returns the names of matrices that Muon should not train: embeddings and, if there are blocks, all outside."""
    tables = {
        id(weight)
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        for weight in module.parameters()
    }
    inside = {id(weight) for block in blocks for weight in block.parameters()}
    return [
        name
        for name, weight in model.named_parameters()
        if id(weight) in tables or (blocks and id(weight) not in inside)
    ]


def needs_whole_weights(kind: type) -> bool:
    """Whether the update of an element depends on other elements of its weight; if so, shards cannot be updated."""
    if issubclass(kind, ShardAwareOptimizer):
        return False
    names = [each.__name__.lower() for each in kind.__mro__]
    return any(name in _WHOLE_WEIGHTS_EXACTLY or any(part in name for part in _WHOLE_WEIGHTS) for name in names)


def check_optimizer(optimizer: Any, parameters: NamedParameters, *, sharded: bool) -> list[str]:
    """Rejects an optimizer that cannot train these weights correctly; returns notes on possible problems."""
    if not isinstance(optimizer, Optimizer):
        raise RecipeError(f"optimizer() returned {type(optimizer).__name__}; expected a torch.optim.Optimizer")
    kind = type(optimizer)
    if (reason := _UNUSABLE.get(kind.__name__.lower())) is not None:
        raise RecipeError(f"optimizer() returned {kind.__name__}, which cannot be used: it {reason}")
    if sharded:
        for part in optimizer.parts if isinstance(optimizer, CombinedOptimizer) else [optimizer]:
            _check_on_shards(part)
    for group in optimizer.param_groups:
        if not isinstance(group.get("lr"), float | int | torch.Tensor):
            raise RecipeError(f"optimizer(): {kind.__name__} has a group without a learning rate; give it lr=")
    remarks = _check_coverage(optimizer, parameters)
    if sharded and not kind.__module__.startswith(("torch.optim", "unisono.")):
        remarks.append(
            f"optimizer {kind.__name__} runs on fsdp's shards, which is correct only if its update is elementwise"
        )
    return remarks


def check_updates_in_parts(optimizer: Optimizer) -> None:
    """Rejects an optimizer that cannot update a few weights at a time, which weights in host memory require."""
    for part in optimizer.parts if isinstance(optimizer, CombinedOptimizer) else [optimizer]:
        kind = type(part)
        skips = bool(getattr(part, "_step_supports_amp_scaling", False))  # so its state exists before step 1
        dampened = any(group.get("dampening") for group in part.param_groups)
        if not (skips and not dampened and kind.__module__.startswith(("torch.optim", "unisono."))) or issubclass(
            kind, _UPDATES_TOGETHER
        ):
            raise ConfigError(
                f"blocks_on_host updates trained weights a few at a time, which {kind.__name__} cannot; use optimizer "
                "adamw, adam, sgd, adamw8bit, adamw4bit, adafactor or muon"
            )


def _check_on_shards(optimizer: Optimizer) -> None:
    """Rejects an optimizer that would be a different algorithm on fsdp's shards."""
    name = type(optimizer).__name__
    if needs_whole_weights(type(optimizer)):
        raise ConfigError(
            f"optimizer {name} updates whole matrices and cannot run on fsdp's shards; use ddp, or --optimizer muon or "
            "adafactor, which can"
        )
    if isinstance(optimizer, ShardAwareOptimizer) and optimizer.shards.device is None:
        raise RecipeError(f"optimizer(): {name} needs to know fsdp's shards; pass it shards=self.shards")


def _check_coverage(optimizer: Optimizer, parameters: NamedParameters) -> list[str]:
    held = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
    left_out = [name for name, weight in parameters if id(weight) not in held]
    if len(left_out) == len(parameters):
        raise RecipeError(
            "optimizer() holds none of the model's trainable weights, so nothing would be trained; build it from "
            "the (name, parameter) pairs that are passed to optimizer()"
        )
    if foreign := len(held) - (len(parameters) - len(left_out)):
        raise RecipeError(
            f"optimizer() holds {foreign} weights that are not trainable weights of model(); put them into the model, "
            "and build the optimizer only from the (name, parameter) pairs that are passed to optimizer()"
        )
    if not left_out:
        return []
    return [
        f"the optimizer does not update {len(left_out)} of {len(parameters)} trainable weights, such as "
        f"{left_out[0]}: they keep their initial values (requires_grad_(False) would also save their gradients' memory)"
    ]
