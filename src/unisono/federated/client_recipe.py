"""Adapts a recipe to one client: it trains on the client's share of the data, and FedProx adds a term to the loss."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from unisono.engine.recipe import Loss, Recipe
from unisono.errors import UserError
from unisono.federated.split import indices_of, share_of


@dataclass(frozen=True)
class ClientShare:
    """The part of the data that a client trains on, and the strength of its FedProx term."""

    client: int
    clients: int
    split: str
    seed: int
    proximal_mu: float = 0.0
    global_weights: str | None = None
    """Path of a safetensors file with the global weights at the start of the round."""


def client_recipe(recipe_class: type[Recipe], share: ClientShare) -> type[Recipe]:
    """Returns the recipe of a client: a subclass that differs in dataset() and, with FedProx, in loss()."""

    class Client(recipe_class):  # type: ignore[misc, valid-type]
        def dataset(self, split: str) -> Any:
            from unisono.data.stream import is_stream

            whole = super().dataset(split)
            if is_stream(whole):
                raise UserError('dataset("train") is a stream, which cannot be divided between clients')
            if whole is None or share.split == "none" or share.clients == 1:
                return whole
            return share_of(whole, indices_of(whole, share.split, share.client, share.clients, share.seed))

        def loss(self, model: Any, batch: Any, noise: Any) -> Loss:
            loss: Loss = super().loss(model, batch, noise)
            if not share.proximal_mu or share.global_weights is None or not model.training:
                return loss
            distance = self._distance(model)
            return replace(loss, total=loss.total + share.proximal_mu / 2 * distance * loss.count)

        def _distance(self, model: Any) -> Any:
            """Returns the squared distance between the trained weights and the global weights."""
            if not hasattr(self, "_anchor"):
                from safetensors.torch import load_file

                assert share.global_weights is not None
                anchor = load_file(share.global_weights)
                device = next(model.parameters()).device
                self._anchor = {name: tensor.to(device) for name, tensor in anchor.items()}
            return sum(
                (weight - self._anchor[name]).pow(2).sum()
                for name, weight in model.named_parameters()
                if weight.requires_grad
            )

    Client.__name__, Client.__qualname__ = recipe_class.__name__, recipe_class.__qualname__
    Client.__module__, Client.__doc__ = recipe_class.__module__, recipe_class.__doc__
    return Client
