"""Disables dropout in a model, for runs that are compared: dropout masks depend on the number of ranks.

Dropout layers are recognised by their class. Other modules (attention, recurrent layers, stochastic depth) store the
probability in an attribute. An attribute counts only if it has one of the usual names and its value is a valid
probability, so `droplet_size`, `pressure_drop` and `drop_threshold` do not change.
"""

from __future__ import annotations

import re

from torch import nn

_MEASURE = r"(?:_?(?:p|prob|probs|probability|rate|ratio))"
_PART = r"(?:attn|attention|proj|resid|residual|embd|embed|path|ffn|mlp|hidden|head|pos|patch|token|block|input|output)"
_NAME = re.compile(
    rf"_*(?:(?:\w+_)?p_?)?(?:\w+_)?(?:dropout|drop_?path|drop_?connect|layer_?drop){_MEASURE}?"
    rf"|_*{_PART}_drop{_MEASURE}?"
    rf"|_*drop{_MEASURE}"
    r"|_*(?:\w+_)?drop_?(?:p|prob|probs|probability)"  # cond_drop_prob
    r"|_*(?:\w+_)?p_?drop",  # attn_pdrop
)


def disable_dropout(model: nn.Module) -> None:
    """Sets the probability of every dropout in the model to 0."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if is_dropout(name, value):
                setattr(module, name, 0.0)


def is_dropout(name: str, value: object) -> bool:
    """Whether a module's attribute is the probability of a dropout."""
    return isinstance(value, float) and 0 < value < 1 and _NAME.fullmatch(name.lower()) is not None
