"""`--blocks_on_host` changes where frozen weights wait and nothing else: whole runs, and what is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import unisono
from command_line import TESTS
from command_line import unisono as unisono_command
from many_runs import Copy, Outcome, Run, identical, many_runs
from recipes_for_tests import PartlyFrozen, PartlyFrozenFromElsewhere
from unisono.engine.build import blocks_on_host, components
from unisono.engine.build.blocks_on_host import plan_blocks_on_host
from unisono.engine.export import load_trained
from unisono.errors import ConfigError, UnisonoError
from unisono.parallel.blocks.repeated import repeated_blocks
from unisono.parallel.blocks.swap import frozen_bytes
from unisono.parallel.strategy import Placement

BLOCKS = 6
COMMON: dict[str, Any] = {
    **{"num_blocks": BLOCKS, "num_samples": 12, "num_eval": 3, "global_batch_size": 6, "batch_size": 3},
    **{"dtype": "float64", "max_steps": 4, "save_every": 2, "eval_every": 2, "preview_every": 4, "guard_steps": 1},
}
RECOMPUTED = {"activation_checkpointing": True, "recompute_every": 2}
DDP = {"strategy": "ddp"}
# name -> ranks, settings, recipe; each run is bit-identical with and without --blocks_on_host
KINDS: dict[str, tuple[int, dict[str, Any], str]] = {
    "one rank": (1, {}, "PartlyFrozen"),
    "recomputed": (1, RECOMPUTED, "PartlyFrozen"),
    "two ranks": (2, DDP | {"batch_size": 2}, "PartlyFrozen"),
    "from elsewhere": (1, {"ema_decay": 0.9}, "PartlyFrozenFromElsewhere"),
    "two ranks, from elsewhere, recomputed": (2, DDP | RECOMPUTED, "PartlyFrozenFromElsewhere"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    root = tmp_path_factory.mktemp("on_host")
    planned = []
    for name, (world, settings, recipe) in KINDS.items():
        for num in (0, 3, BLOCKS):
            swapped = {"blocks_on_host": num} if num else {}
            planned.append(Run(f"{name} {num}", f"{name} {num}", world, COMMON | settings | swapped, recipe=recipe))
    for num in (0, 4):
        settings = COMMON | {"blocks_on_host": num}
        copy = Copy(f"one rank {BLOCKS}", 2)
        planned.append(Run(f"resumed {num}", f"resumed {num}", 1, settings, copy, recipe="PartlyFrozen"))
    auto = COMMON | {"strategy": "auto", "blocks_on_host": "auto", "batch_size": 2}
    planned.append(Run("auto", "auto", 2, auto, recipe="PartlyFrozen"))
    return many_runs(planned, root)


def assert_identical(run: Outcome, reference: Outcome) -> None:
    assert "error" not in run.main, run.main
    assert run.losses().tolist() == reference.losses().tolist() and len(run.losses()) == COMMON["max_steps"]
    assert identical(run.weights(), reference.weights())
    names = ("eval/loss", "eval/accuracy")
    assert [[line[name] for name in names] for line in run.evaluations()] == [
        [line[name] for name in names] for line in reference.evaluations()
    ]


@pytest.mark.parametrize("name", KINDS)
def test_a_run_with_blocks_on_the_host_equals_the_run_without_bit_for_bit(runs: dict[str, Outcome], name: str) -> None:
    reference = runs[f"{name} 0"]
    for num in (3, BLOCKS):
        assert_identical(runs[f"{name} {num}"], reference)
    if KINDS[name][2] == "PartlyFrozen":  # its checkpoints hold the frozen weights, and it draws previews
        assert "blocks.3.up.weight" in reference.weights()
        assert_same_preview(runs[f"{name} 3"], reference)


def assert_same_preview(run: Outcome, reference: Outcome) -> None:
    texts = [next((it.folder / "previews").rglob("*scores.txt")).read_text() for it in (run, reference)]
    assert texts[0] == texts[1] and torch.isfinite(torch.tensor(float(texts[0])))


@pytest.mark.parametrize("num", [0, 4])
def test_a_run_resumes_with_another_number_of_blocks_on_the_host(runs: dict[str, Outcome], num: int) -> None:
    assert_identical(runs[f"resumed {num}"], runs["one rank 0"])


def test_exported_weights_equal_those_of_a_run_without_blocks_on_the_host(runs: dict[str, Outcome]) -> None:
    for name in ("one rank", "from elsewhere"):
        states = []
        for num in (0, BLOCKS):
            recipe = f"{TESTS / 'recipes_for_tests.py'}:{KINDS[name][2]}"
            torch.manual_seed(0)  # the files that the weights came from
            states.append(load_trained(runs[f"{name} {num}"].folder, reference=recipe)[1].state_dict())
        assert identical(*states)


def test_auto_on_the_cpu_keeps_all_blocks_there_and_chooses_ddp(runs: dict[str, Outcome]) -> None:
    assert_identical(runs["auto"], runs["two ranks 0"])


def refusal(tmp_path: Path, recipe: Any = PartlyFrozen, **settings: Any) -> str:
    with pytest.raises(UnisonoError) as error:
        unisono.train(recipe, **{**COMMON, "output_dir": str(tmp_path / "run"), "gpus": "0", **settings})
    assert isinstance(error.value, ConfigError) and "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()
    return str(error.value)


def test_impossible_combinations_are_rejected_in_one_line(tmp_path: Path) -> None:
    assert "has 6 blocks with frozen weights; use at most 6" in refusal(tmp_path, blocks_on_host=7)
    assert "has no repeated blocks" in refusal(tmp_path, blocks_on_host=1, num_blocks=1)
    assert "not with fsdp; use fsdp_cpu_offload" in refusal(tmp_path, blocks_on_host=2, strategy="fsdp")
    assert "not with dp" in refusal(tmp_path, blocks_on_host="auto", strategy="dp")
    assert "at least 0" in refusal(tmp_path, blocks_on_host=-1)
    assert "blocks_on_host" in refusal(tmp_path, blocks_on_host="many")


def test_too_little_host_memory_is_refused_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks_on_host, "free_host_memory", lambda: 10_000)

    def load(*_: Any) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("recipes_for_tests.FromElsewhere.rows", load)
    text = refusal(tmp_path, PartlyFrozenFromElsewhere, blocks_on_host=6)
    assert "blocks_on_host 6 needs 45.0 KiB of host memory, and 9.8 KiB are free" in text


def test_auto_chooses_the_number_that_the_fullest_device_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(values: list[Any], mine: Any) -> None:
        values[:] = [mine, mine + 2] if isinstance(mine, int) else [mine, mine]

    recipe = PartlyFrozen(PartlyFrozen.Config(num_blocks=BLOCKS))
    model = recipe.model()
    blocks = repeated_blocks(model)
    size = frozen_bytes(model, blocks)[0]
    monkeypatch.setattr(blocks_on_host, "demand_of", lambda *_: SimpleNamespace(total=BLOCKS * size))
    monkeypatch.setattr(blocks_on_host, "_usable_memory", lambda _: (BLOCKS - 1) * size)
    monkeypatch.setattr(blocks_on_host.dist, "all_gather_object", gather)
    settings: Any = SimpleNamespace(parallel=SimpleNamespace(blocks_on_host="auto"))
    gpu = torch.device("cuda", 0)
    alone = plan_blocks_on_host(model, blocks, settings, Placement(gpu, 0, 1, [gpu], None))
    together = plan_blocks_on_host(model, blocks, settings, Placement(gpu, 0, 2, [gpu], None))
    assert (len(alone.blocks), len(together.blocks)) == (3, 5)


def test_compiled_blocks_on_the_host_are_recomputed_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[bool] = []
    monkeypatch.setattr(components, "recompute_activations", lambda _, selective: chosen.append(selective))
    model = PartlyFrozen(PartlyFrozen.Config(num_blocks=BLOCKS)).model()
    blocks, cpu = repeated_blocks(model), torch.device("cpu")
    swap: Any = SimpleNamespace(attach=lambda *_, **__: None)
    for compiles in (False, True):
        precision = SimpleNamespace(activation_checkpointing="selective", recompute_every=3, compile=compiles)
        settings: Any = SimpleNamespace(precision=precision)
        remarks = components._transform_blocks(model, blocks, swap, settings, Placement(cpu, 0, 1, [cpu], None))
        assert any("recomputed as a whole" in remark for remark in remarks) == compiles
    assert chosen == [True, True, False, False]


def test_the_banner_shows_how_much_memory_is_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for num, expected in ((2, "saves no memory: 2 of them"), (5, "are stored in host memory, which saves")):
        settings = {**COMMON, "output_dir": str(tmp_path / str(num)), "gpus": "0", "max_steps": 1}
        unisono.train(PartlyFrozen, **settings, blocks_on_host=num)
        assert f"blocks_on_host {num} of 6 blocks" in (text := capsys.readouterr().err) and expected in text


def test_the_error_of_a_run_that_does_not_fit_says_how_many_blocks_on_the_host_would_help(tmp_path: Path) -> None:
    for num in (0, 4):
        with pytest.raises(UnisonoError, match=r"blocks_on_host 6 \(frees [\d.]+ KiB\)"):
            unisono.train(
                PartlyFrozen,
                **COMMON,
                output_dir=str(tmp_path / str(num)),
                gpus="0",
                blocks_on_host=num,
                inject="oom@rank0:step1:x9",
                max_restarts=0,
            )


@pytest.mark.slow
def test_verify_finds_the_same_run(tmp_path: Path) -> None:
    recipe = f"{TESTS / 'recipes_for_tests.py'}:PartlyFrozen"
    words = ["verify", recipe, "--ranks", "1,2,3", "--blocks_on_host", "4", "--num_blocks", "6", "--steps", "3"]
    ended = unisono_command(*words, cwd=tmp_path)
    assert ended.code == 0 and "same" in ended.out, ended
