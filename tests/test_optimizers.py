"""Every optimizer in the settings trains or is refused in one line; a recipe's own learning rate is applied."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

import unisono
from many_runs import Run, identical, largest_difference, many_runs
from recipes_for_tests import Sentences
from unisono.checkpoint.load import load_whole
from unisono.engine.step.make_optimizer import from_settings, named_optimizer, needs_whole_weights, not_for_muon
from unisono.engine.step.optimizer_wrapper import OptimizerWrapper
from unisono.errors import ConfigError, RecipeError, UserError
from unisono.optim.named import OPTIMIZERS
from unisono.settings import OptimSettings

UNUSABLE = {"lbfgs", "sparseadam"}
NAMES = {
    name.lower()
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
} | OPTIMIZERS.keys()


def weights(folder: Path, step: int, prefix: str = "model.") -> dict[str, torch.Tensor]:
    return load_whole(folder / "checkpoints" / f"step_{step:08d}", prefix)


@pytest.mark.parametrize("name", sorted(NAMES - UNUSABLE))
def test_every_optimizer_that_is_offered_trains_and_resumes(name: str, tmp_path: Path) -> None:
    common = {"optimizer": name, "gpus": "0", "batch_size": 4, "save_every": 2, "learning_rate": 1e-2}
    straight = unisono.train(Sentences, **common, max_steps=4, output_dir=str(tmp_path / "straight"))
    for steps in (2, 4):
        parts = unisono.train(Sentences, **common, max_steps=steps, output_dir=str(tmp_path / "parts"))
    assert identical(weights(straight.folder, 4), weights(parts.folder, 4))
    assert not identical(weights(straight.folder, 2), weights(straight.folder, 4))


@pytest.mark.parametrize("name", sorted(UNUSABLE))
def test_an_optimizer_that_cannot_work_is_refused_and_not_offered(name: str) -> None:
    with pytest.raises(ConfigError, match=f"optimizer {name} cannot be used: it (evaluates|needs)"):
        named_optimizer(name)
    with pytest.raises(ConfigError) as caught:
        named_optimizer("madam")
    assert name not in str(caught.value) and "adamw" in str(caught.value)


def test_muon_takes_matrices_and_adamw_the_rest() -> None:
    model = nn.ModuleDict({"table": nn.Embedding(5, 4), "layer": nn.Linear(4, 4), "norm": nn.LayerNorm(4)})
    optimizer = from_settings(
        list(model.named_parameters()), OptimSettings(optimizer="muon"), not_for_muon=not_for_muon(model, [])
    )
    muon, adamw = optimizer.param_groups
    assert muon["param_names"] == ["layer.weight"]
    assert sorted(adamw["param_names"]) == ["layer.bias", "norm.bias", "norm.weight", "table.weight"]
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    state = optimizer.state
    assert "momentum_buffer" in state[model["layer"].weight] and "exp_avg" in state[model["norm"].weight]


def test_some_optimizers_need_unsharded_weights() -> None:
    class Distributed_Shampoo(torch.optim.Optimizer): ...

    class MyMuon(torch.optim.Muon): ...

    assert all(needs_whole_weights(kind) for kind in (torch.optim.Adafactor, MyMuon, Distributed_Shampoo))
    assert not any(needs_whole_weights(kind) for kind in (torch.optim.AdamW, torch.optim.SGD, torch.optim.NAdam))


class Own(Sentences):
    """A recipe with its own optimizer."""

    make: ClassVar[Any] = None

    def optimizer(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> Any:
        return type(self).make(list(parameters))


class OwnMuon(Sentences):
    """A recipe that uses Muon for its matrices."""

    def optimizer(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> Any:
        return torch.optim.Muon([pair for pair in parameters if pair[1].dim() == 2])


def train_own(make: Any, tmp_path: Path, **settings: Any) -> unisono.Result:
    Own.make = staticmethod(make)
    settings = {"batch_size": 4, "max_steps": 2, "gpus": "0"} | settings
    return unisono.train(Own, **settings, output_dir=str(tmp_path / "run"))


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda given: torch.optim.SGD([nn.Parameter(torch.ones(2))]), "holds none of the model's trainable weights"),
        (
            lambda given: torch.optim.SGD([weight for _, weight in given] + [nn.Parameter(torch.ones(2))]),
            "holds 1 weights that are not trainable weights",
        ),
        (lambda given: torch.optim.LBFGS([weight for _, weight in given]), "LBFGS, which cannot be used"),
        (lambda given: "adam", "returned str; expected a torch.optim.Optimizer"),
    ],
    ids=["foreign", "too much", "lbfgs", "text"],
)
def test_an_optimizer_that_does_not_train_the_model_is_refused(make: Any, told: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=told):
        train_own(make, tmp_path)
    assert not (tmp_path / "run").exists()


def test_weights_missing_from_the_optimizer_are_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = train_own(lambda given: torch.optim.SGD(given[1:], lr=0.1), tmp_path, save_every=1)
    assert "the optimizer does not update 1 of " in (stderr := capsys.readouterr().err) and "embedding.weight" in stderr
    before, after = weights(done.folder, 1), weights(done.folder, 2)
    assert {name for name in before if torch.equal(before[name], after[name])} == {"embedding.weight"}


def test_an_optimizer_in_the_settings_that_has_no_effect_is_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train_own(lambda pairs: torch.optim.SGD(pairs, lr=0.1), tmp_path, optimizer="adamw8bit")
    assert "optimizer adamw8bit has no effect: the recipe's optimizer() returned SGD" in capsys.readouterr().err


def test_the_state_of_another_optimizer_class_is_refused(tmp_path: Path) -> None:
    train_own(lambda pairs: torch.optim.AdamW(pairs, lr=0.1), tmp_path)
    with pytest.raises(UserError, match="state of the optimizer AdamW, but this run uses RMSprop; use AdamW again"):
        train_own(lambda pairs: torch.optim.RMSprop(pairs, lr=0.1), tmp_path, max_steps=3)
    assert train_own(lambda pairs: torch.optim.AdamW(pairs, lr=0.1), tmp_path, max_steps=3).step == 3


def test_an_optimizer_for_unsharded_weights_is_rejected_on_shards_and_trains_the_same_on_any_ranks(
    tmp_path: Path,
) -> None:
    common = {"global_batch_size": 4, "max_steps": 3, "dtype": "float64"}
    own = f"{Path(__file__)}:OwnMuon"
    fsdp, ddp = {"strategy": "fsdp"}, {"strategy": "ddp", "batch_size": 2}
    runs = many_runs(
        [
            Run("own on shards", "own", 2, common | fsdp, recipe=own),
            Run("on 2 ranks", "two", 2, common | ddp | {"optimizer": "adafactor"}),
            Run("on 1", "one", 1, common | {"optimizer": "adafactor", "batch_size": 4}),
        ],
        tmp_path,
    )
    for ended in runs["own on shards"].by_rank:
        assert ended["exit_code"] == 2 and "Muon updates whole matrices" in ended["error"]
    assert largest_difference(runs["on 2 ranks"].weights(), runs["on 1"].weights()) < 1e-10


class OwnRate(Sentences):
    """A recipe that sets its learning rate itself."""

    defaults: ClassVar[dict[str, Any]] = {**Sentences.defaults, "optimizer": "sgd", "beta1": 0.0, "weight_decay": 0.0}
    rates: ClassVar[list[Any]] = []

    def learning_rate(self, step: int) -> Any:
        return self.rates[step]

    def optimizer(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> Any:
        first, *others = parameters
        return torch.optim.SGD([{"params": [first], "lr": 0.2}, {"params": others, "lr": 0.1}])


def test_a_recipes_own_learning_rate_is_applied(tmp_path: Path) -> None:
    def run(name: str, *rates: Any) -> tuple[Path, list[dict[str, torch.Tensor]]]:
        OwnRate.rates = [*rates]
        folder = tmp_path / name
        steps = {"max_steps": len(rates), "save_every": 1, "keep_last": 0}
        unisono.train(OwnRate, batch_size=4, gpus="0", grad_clip=0.0, **steps, output_dir=str(folder))
        return folder, [weights(folder, step) for step in range(1, len(rates) + 1)]

    torch.manual_seed(0)
    start = {name: weight.detach() for name, weight in OwnRate(OwnRate.Config()).model().named_parameters()}
    [still] = run("still", 0.0)[1]
    assert identical(start, still), "a rate of 0 moves nothing"
    [once], [twice], [apart] = (run(*each)[1] for each in (("once", 0.2), ("twice", 0.4), ("apart", [0.4, 0.1])))
    for name, weight in start.items():
        torch.testing.assert_close(twice[name] - weight, 2 * (once[name] - weight), rtol=1e-3, atol=1e-6)
        factor = 2 if name == "embedding.weight" else 1
        torch.testing.assert_close(apart[name] - weight, factor * (once[name] - weight), rtol=1e-3, atol=1e-6)


def test_a_recipes_own_learning_rate_is_not_rounded_twice() -> None:
    weight, numbers = nn.Parameter(torch.zeros(1)), torch.rand(100, 2, dtype=torch.float64).tolist()
    for peak, rate in numbers:
        optimizer = OptimizerWrapper(
            [("w", weight)], OptimSettings(learning_rate=peak, optimizer="sgd"), lambda _: None, 1.0
        )
        assert optimizer.set_own_learning_rate(rate) == rate
    assert optimizer.set_own_learning_rate(np.float32(0.5)) == 0.5, "a number of numpy's is a number"


@pytest.mark.parametrize("rate", [-1.0, float("nan"), "fast", [0.1], [0.1, 0.2, 0.3]])
def test_an_invalid_learning_rate_is_rejected(rate: Any, tmp_path: Path) -> None:
    OwnRate.rates = [rate]
    with pytest.raises(RecipeError, match=r"learning_rate\(\) returned"):
        unisono.train(OwnRate, batch_size=4, gpus="0", max_steps=1, output_dir=str(tmp_path / "run"))
