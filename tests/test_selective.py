"""Selective activation checkpointing: stores what is expensive to recompute, and nothing else changes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import unisono
from many_runs import slow_unless
from recipes_for_tests import Reader, Sentences
from unisono.config.help import flag_text
from unisono.config.resolve import resolve
from unisono.errors import ConfigError
from unisono.parallel.blocks.repeated import compile_blocks, has_autograd_functions, recompute_activations
from unisono.settings import Settings

MODES = ["none", "selective", "whole"]
PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


class Watch(TorchDispatchMode):
    """Counts matrix products, and the bytes of results that are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.products, self.bytes = 0, 0
        self._alive: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        self.products += func in PRODUCTS
        for each in tree_leaves(results):
            if isinstance(each, Tensor) and (storage := each.untyped_storage())._cdata not in self._alive:
                self._alive.add(storage._cdata)
                self.bytes += storage.nbytes()
                weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())
        return results

    def _freed(self, storage: int, size: int) -> None:
        self._alive.discard(storage)
        self.bytes -= size


def reader(mode: str, dropout: float = 0.0) -> Reader:
    torch.manual_seed(0)
    model = Reader(16, 3, dropout).double()
    for block in model.blocks if mode != "none" else ():
        recompute_activations(block, selective=mode == "selective")
    return model


def loss_of(model: nn.Module) -> Tensor:
    torch.manual_seed(1)  # for dropout
    tokens = torch.arange(40).view(4, 10) % 13
    result = model(tokens, tokens >= 0, torch.ones(4, 3).double(), torch.zeros(4, 16).double())
    return result.square().sum()


def gradients(model: nn.Module) -> list[Tensor]:
    loss_of(model).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def test_selective_recomputing_saves_memory_and_recomputes_fewer_matrix_products() -> None:
    stored, products = {}, {}
    for mode in MODES:
        with Watch() as watch:
            loss = loss_of(reader(mode))
            stored[mode] = watch.bytes
            loss.backward()
        products[mode] = watch.products
    assert stored["none"] > 1.5 * stored["selective"] > 2 * stored["whole"]
    # Of a block's four products, the last one is never needed again; the first and the third are stored.
    blocks = 3
    assert products["whole"] - products["none"] == 3 * blocks
    assert products["selective"] - products["none"] == blocks


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("mode", MODES[1:])
def test_selective_recomputing_does_not_change_gradients_at_all(mode: str, dropout: float) -> None:
    expected, actual = gradients(reader("none", dropout)), gradients(reader(mode, dropout))
    assert len(actual) == len(expected) and all(map(torch.equal, actual, expected))


@pytest.mark.parametrize("backend", slow_unless(["aot_eager", "inductor"], ["aot_eager"]))
def test_compiled_blocks_store_selectively_too(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend=backend))
    model = reader("selective")
    compile_blocks(model, list(model.blocks))
    for ours, expected in zip(gradients(model), gradients(reader("none")), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)


# Settings


@pytest.mark.parametrize(
    ("flags", "value"),
    [
        ([], False),
        (["--activation_checkpointing"], True),
        (["--activation_checkpointing", "--deterministic"], True),
        (["--activation_checkpointing", "selective"], "selective"),
        (["--activation-checkpointing=selective"], "selective"),
        (["--activation_checkpointing", "false"], False),
        (["--no_activation_checkpointing"], False),
        (["--gradient_checkpointing", "yes"], True),
        (["--gradient_checkpointing", "selective"], "selective"),
    ],
)
def test_activation_checkpointing_is_a_switch_with_one_more_value(flags: list[str], value: object) -> None:
    aliases = {"gradient_checkpointing": "activation_checkpointing"}
    resolved = resolve((Settings,), flags=flags, aliases=aliases)
    assert resolved.build(Settings).precision.activation_checkpointing == value
    assert type(resolved.values["activation_checkpointing"]) is type(value)
    assert flag_text(resolved.fields["activation_checkpointing"]) == "--[no_]activation_checkpointing [selective]"


@pytest.mark.parametrize(
    ("text", "value"), [("yes", True), ("off", False), ("true", True), ("selective", "selective"), ("'true'", True)]
)
def test_a_config_file_can_request_selective_recomputing(text: str, value: object, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(f"activation_checkpointing: {text}\n")
    resolved = resolve((Settings,), file=tmp_path / "run.yaml")
    assert resolved.build(Settings).precision.activation_checkpointing is value


def test_an_unknown_value_is_rejected_by_name() -> None:
    with pytest.raises(ConfigError, match=r"expected true or false or selective.*did you mean selective\?"):
        resolve((Settings,), flags=["--activation_checkpointing", "selectiv"])


# Blocks that cannot


class OwnKernels(nn.Module):
    """Says that it has its own autograd functions, as Wan's fast blocks do."""

    def __init__(self, width: int = 10) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor, allowed: Tensor) -> Tensor:
        return x + self.layer(x)


has_autograd_functions(OwnKernels)


class InPlace(nn.Module):
    """Changes the result of a product in place."""

    def __init__(self, width: int = 10) -> None:
        super().__init__()
        self.layer, self.activation = nn.Linear(width, width), nn.ReLU(inplace=True)

    def forward(self, x: Tensor, allowed: Tensor) -> Tensor:
        return x + self.activation(self.layer(x))


def of_blocks(kind: type[nn.Module]) -> Callable[[Any], nn.Module]:
    def model(self: Any) -> nn.Module:
        reader = Reader(10, 0, 0.0)
        reader.blocks = nn.ModuleList(kind() for _ in range(3))
        return reader

    return model


class WithOwnKernels(Sentences):
    model = of_blocks(OwnKernels)


class WithInPlaceLayers(Sentences):
    model = of_blocks(InPlace)


@pytest.mark.parametrize(
    ("recipe", "why"),
    [(WithOwnKernels, "has its own kernels"), (WithInPlaceLayers, "has in-place layers"), (Sentences, None)],
)
def test_unsupported_blocks_are_fully_recomputed_with_a_remark(
    recipe: type[Sentences], why: str | None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = {"gpus": "0", "batch_size": 4, "max_steps": 2}
    losses = []
    for mode in (False, "selective"):
        done = unisono.train(recipe, **settings, activation_checkpointing=mode, output_dir=str(tmp_path / str(mode)))
        losses.append(done.last["loss"])
    assert losses[0] == losses[1]
    printed = " ".join(capfd.readouterr().err.split())
    assert ("recomputing such blocks as a whole" in printed) == (why is not None)
    assert why is None or why in printed
