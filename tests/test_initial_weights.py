"""Initial weights from files: read by shards, kept in full precision if requested, saved only if trained."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from many_runs import Outcome, Run, largest_difference, many_runs

SETTINGS = {"global_batch_size": 8, "batch_size": 8, "max_steps": 6, "save_every": 3, "ema_decay": 0.9}
VARIANTS = {
    "one device": (1, {}),
    "2 ranks ddp": (2, {"strategy": "ddp", "batch_size": 2}),
    "1 rank fsdp": (1, {"strategy": "fsdp"}),
    "2 ranks fsdp": (2, {"strategy": "fsdp"}),
    "3 ranks fsdp": (3, {"strategy": "fsdp", "batch_size": 1}),
}
TIED = {"single": 1, "ddp": 2, "fsdp": 2}
FROZEN = {"embedding.weight", "blocks.0.up.weight", "blocks.0.up.bias"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    root: Path = tmp_path_factory.mktemp("elsewhere")
    run_list = [
        Run(name, name, world, SETTINGS | {"dtype": "float64"} | settings, recipe="SentencesFromElsewhere")
        for name, (world, settings) in VARIANTS.items()
    ]
    longer = SETTINGS | {"dtype": "float64", "max_steps": 9}
    run_list.append(Run("straight on", "straight on", 1, longer, recipe="SentencesFromElsewhere"))
    fsdp = longer | {"strategy": "fsdp"}
    run_list.append(Run("then 3 ranks", "2 ranks fsdp", 3, fsdp, recipe="SentencesFromElsewhere"))
    run_list.append(
        Run(
            "16 bit",
            "16 bit",
            2,
            SETTINGS | {"strategy": "fsdp", "mixed_precision": "bf16"},
            recipe="SentencesFromElsewhere",
        )
    )
    short = SETTINGS | {"dtype": "float64", "max_steps": 3}
    run_list.append(Run("tied here", "tied here", 1, short, recipe="TiedHere"))
    for name, world in TIED.items():
        run_list.append(
            Run(f"tied {name}", f"tied {name}", world, short | {"strategy": name}, recipe="TiedFromElsewhere")
        )
    return many_runs(run_list, root)


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "one device"])
def test_every_strategy_begins_with_the_same_weights_and_trains_alike(name: str, runs: dict[str, Outcome]) -> None:
    one, other = runs["one device"], runs[name]
    torch.testing.assert_close(other.losses()[:6], one.losses(), rtol=1e-10, atol=0)
    assert largest_difference(other.weights(6), one.weights(6)) < 1e-10
    assert largest_difference(other.weights(6, "ema."), one.weights(6, "ema.")) < 1e-10


def test_a_rank_reads_only_its_own_shards(runs: dict[str, Outcome]) -> None:
    whole = int((runs["one device"].record / "asked.0").read_text())
    for name, world in (("2 ranks fsdp", 2), ("3 ranks fsdp", 3)):
        parts = [int((runs[name].record / f"asked.{rank}").read_text()) for rank in range(world)]
        assert max(parts) < 0.75 * whole, (parts, whole)


def test_weights_that_are_not_trained_are_not_saved(runs: dict[str, Outcome]) -> None:
    for name in ("one device", "2 ranks fsdp"):
        saved = runs[name].weights(6).keys()
        assert not FROZEN & saved and "head.weight" in saved and "blocks.0.norm1.weight" in saved


def test_a_run_with_initial_weights_resumes_on_other_ranks(runs: dict[str, Outcome]) -> None:
    torch.testing.assert_close(runs["then 3 ranks"].losses(), runs["straight on"].losses(), rtol=1e-10, atol=0)
    assert largest_difference(runs["then 3 ranks"].weights(9), runs["straight on"].weights(9)) < 1e-10


def test_untrained_weights_are_stored_in_16_bit_and_the_others_still_train(runs: dict[str, Outcome]) -> None:
    torch.testing.assert_close(runs["16 bit"].losses(), runs["one device"].losses(), rtol=3e-2, atol=0)


@pytest.mark.parametrize("name", TIED)
def test_a_weight_that_two_modules_share_stays_shared(name: str, runs: dict[str, Outcome]) -> None:
    here, elsewhere = runs["tied here"], runs[f"tied {name}"]
    assert "head.weight" not in elsewhere.weights() and "embedding.weight" in elsewhere.weights()
    torch.testing.assert_close(elsewhere.losses(), here.losses(), rtol=1e-10, atol=0)
    assert largest_difference(elsewhere.weights(), here.weights()) < 1e-10


def test_an_export_has_all_weights(runs: dict[str, Outcome], tmp_path: Path) -> None:
    from recipes_for_tests import __file__ as recipes
    from unisono.engine.export import load_trained

    _, model, _ = load_trained(runs["one device"].folder, reference=f"{recipes}:SentencesFromElsewhere")
    assert not any(tensor.is_meta for tensor in model.state_dict().values())
    assert (
        largest_difference(
            {"head.weight": model.head.weight.detach()},
            {"head.weight": runs["one device"].weights(6, "ema.")["head.weight"].float()},
        )
        < 1e-6
    )
