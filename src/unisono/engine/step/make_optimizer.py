"""Makes the torch optimizer by its name in the settings, and checks it, or one that a recipe made."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.errors import ConfigError, RecipeError
from unisono.settings import OptimSettings

NamedParameters = Sequence[tuple[str, nn.Parameter]]

_UNUSABLE = {
    "lbfgs": "evaluates the loss several times in a step, and a step computes its gradient once",
    "sparseadam": "needs sparse gradients, which cannot be summed over ranks; use adam",
}
# Their update uses whole matrices or norms of whole weights; on a shard it would be a different algorithm.
_WHOLE_WEIGHTS = ("muon", "adafactor", "lbfgs", "shampoo", "galore")
_WHOLE_WEIGHTS_EXACTLY = ("soap", "lamb", "lars", "came")


def named_optimizer(name: str) -> type[Optimizer]:
    """The class in torch.optim with this name, ignoring case."""
    classes = {
        key.lower(): value
        for key, value in vars(torch.optim).items()
        if inspect.isclass(value) and issubclass(value, Optimizer) and value is not Optimizer
    }
    if (reason := _UNUSABLE.get(name.lower())) is not None:
        raise ConfigError(f"optimizer {name} cannot be used: it {reason}")
    if name.lower() not in classes:
        usable = ", ".join(sorted(classes.keys() - _UNUSABLE.keys()))
        raise ConfigError(f"optimizer: torch.optim has no {name!r}; it has {usable}")
    return classes[name.lower()]


def from_settings(
    parameters: NamedParameters, settings: OptimSettings, tables: Collection[nn.Parameter] = ()
) -> Optimizer:
    """Makes the optimizer in the settings. `tables`: embedding weights, for which Muon's update is not suited."""
    kind = named_optimizer(settings.optimizer)
    if kind.__name__ == "Muon":
        return _muon(kind, parameters, settings, tables)
    accepted = inspect.signature(kind).parameters
    options: dict[str, Any] = {
        "lr": settings.learning_rate,
        "weight_decay": settings.weight_decay,
        "betas": (settings.beta1, settings.beta2),
        "momentum": settings.beta1,
        "eps": settings.epsilon,
        # One kernel for all weights, which also skips a non-finite step on the device without a host sync.
        "fused": True,
    }
    if kind.__name__ == "Adafactor":
        del options["eps"]  # a pair with a different meaning
    if "fused" not in accepted:
        options["foreach"] = True
    return kind(list(parameters), **{name: value for name, value in options.items() if name in accepted})


def _muon(
    kind: Any, parameters: NamedParameters, settings: OptimSettings, tables: Collection[nn.Parameter]
) -> Optimizer:
    """Muon for matrices, AdamW for everything else, as its authors use it."""
    table_ids = {id(table) for table in tables}
    matrices = [pair for pair in parameters if pair[1].dim() == 2 and id(pair[1]) not in table_ids]
    others = [pair for pair in parameters if pair[1].dim() != 2 or id(pair[1]) in table_ids]
    rates: dict[str, Any] = {"lr": settings.learning_rate, "weight_decay": settings.weight_decay}
    parts: list[Optimizer] = []
    if matrices:
        # Scales updates to the size of AdamW's, so that one learning rate works for both.
        parts.append(kind(matrices, **rates, momentum=settings.beta1, adjust_lr_fn="match_rms_adamw"))
    if others:
        betas = (settings.beta1, settings.beta2)
        parts.append(torch.optim.AdamW(others, **rates, betas=betas, eps=settings.epsilon, foreach=True))
    return CombinedOptimizer(parts)


class CombinedOptimizer(Optimizer):
    """Several optimizers, each for its own weights, combined into one with one list of groups and one state."""

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.parts = list(parts)
        for part in parts:
            part.state = self.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Steps all optimizers."""
        for part in self.parts:
            part.step()


def tables_of(model: nn.Module) -> list[nn.Parameter]:
    """The weights of all embeddings in the model."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    return [weight for module in model.modules() if isinstance(module, kinds) for weight in module.parameters()]


def needs_whole_weights(kind: type) -> bool:
    """Whether the update of an element depends on other elements of its weight, so that shards cannot be updated."""
    names = [each.__name__.lower() for each in kind.__mro__]
    return any(name in _WHOLE_WEIGHTS_EXACTLY or any(part in name for part in _WHOLE_WEIGHTS) for name in names)


def refuse_on_shards(kind: type) -> None:
    """Refuses an optimizer that would be a different algorithm on fsdp's shards."""
    if needs_whole_weights(kind):
        raise ConfigError(f"optimizer {kind.__name__} updates whole matrices and cannot run on fsdp's shards; use ddp")


def check_optimizer(optimizer: Any, parameters: NamedParameters, *, sharded: bool) -> list[str]:
    """Refuses an optimizer that cannot train these weights correctly; returns notes on possible problems."""
    if not isinstance(optimizer, Optimizer):
        raise RecipeError(f"optimizer() returned {type(optimizer).__name__}; expected a torch.optim.Optimizer")
    kind = type(optimizer)
    if (reason := _UNUSABLE.get(kind.__name__.lower())) is not None:
        raise RecipeError(f"optimizer() returned {kind.__name__}, which cannot be used: it {reason}")
    parts = [type(part) for part in optimizer.parts] if isinstance(optimizer, CombinedOptimizer) else [kind]
    if sharded:
        for part in parts:
            refuse_on_shards(part)
    for group in optimizer.param_groups:
        if not isinstance(group.get("lr"), float | int | torch.Tensor):
            raise RecipeError(f"optimizer(): {kind.__name__} has a group without a learning rate; give it lr=")
    remarks = _check_coverage(optimizer, parameters)
    if sharded and not kind.__module__.startswith(("torch.optim", "unisono.")):
        remarks.append(
            f"optimizer {kind.__name__} gets fsdp's shards: its update of an element must not depend on other elements"
        )
    return remarks


def _check_coverage(optimizer: Optimizer, parameters: NamedParameters) -> list[str]:
    held = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
    left_out = [name for name, weight in parameters if id(weight) not in held]
    if len(left_out) == len(parameters):
        raise RecipeError(
            "optimizer() holds none of the model's trainable weights, so nothing would be trained; make it from its "
            "argument, the (name, parameter) pairs"
        )
    if foreign := len(held) - (len(parameters) - len(left_out)):
        raise RecipeError(
            f"optimizer() holds {foreign} weights that are not trainable weights of model(); put them into the model, "
            "and make the optimizer from its argument"
        )
    if not left_out:
        return []
    return [
        f"the optimizer leaves out {len(left_out)} of {len(parameters)} trainable weights, {left_out[0]} for instance: "
        "they keep their initial values (requires_grad_(False) would also save the memory of their gradients)"
    ]
