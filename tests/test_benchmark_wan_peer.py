"""The benchmark next to musubi-tuner: its flags exist, rounds add up, and targets are judged by what was measured."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from command_line import environment
from unisono.cli.train import configure, load_recipe, parse_command

ROOT = Path(__file__).parent.parent
MUSUBI, COMPILED = "14b musubi, checkpointing", "14b musubi, compiled"


@pytest.fixture(scope="module")
def peer() -> Iterator[Any]:
    """The benchmark's modules."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import wan_peer as main
        import wan_peer_files as files
        import wan_peer_loss as loss
        import wan_peer_runs as runs
        import wan_peer_table as table
        import wan_peer_variants as variants

        yield type(
            "Modules",
            (),
            {"main": main, "files": files, "loss": loss, "runs": runs, "table": table, "variants": variants},
        )
    finally:
        sys.path.pop(0)


def measured(ms: float, peak: float = 20.0, **more: Any) -> dict[str, Any]:
    steps = {"step_ms": [ms] * 3, "losses": [1.0], "trained": 9, "seconds": 5.0}
    return {"failed": "", "peak_gib": peak, "host_gib": 3.0, **steps, **more}


def row(ms: float, peak: float = 20.0, **more: Any) -> dict[str, Any]:
    return {"failed": "", "rounds": [measured(ms, peak, **more)]}


def test_every_variant_has_a_unique_name_and_the_programs_alternate(peer: Any) -> None:
    names = [variant.name for variant in peer.variants.VARIANTS]
    assert len(names) == len(set(names))
    assert {MUSUBI, COMPILED, "14b unisono, checkpointing", "1.3b musubi, no checkpointing"} < set(names)
    programs = [variant.program for variant in peer.variants.VARIANTS[:8]]
    assert programs == ["musubi", "unisono"] * 4


def test_unisono_accepts_the_flags_of_every_variant(peer: Any, tmp_path: Path) -> None:
    place = peer.runs.Workplace(tmp_path, tmp_path, None, tiny=False)
    seen = set()
    for variant in peer.variants.VARIANTS:
        if variant.program == "unisono":
            command = parse_command(place._words(variant)[1:])
            settings = configure(load_recipe(command.recipe), file=[], flags=command.flags).values
            seen.add((settings["base_precision"], settings["blocks_on_host"]))
    assert {("auto", 0), ("fp8", 24), ("nf4", 30), ("int8", 0)} <= seen


def test_the_rehearsal_has_fewer_blocks_to_swap(peer: Any, tmp_path: Path) -> None:
    place = peer.runs.Workplace(tmp_path, tmp_path, None, tiny=True)
    [variant] = [each for each in peer.variants.VARIANTS if "24 blocks on host" in each.name]
    words = place._words(variant)
    assert words[words.index("--blocks_on_host") + 1] == "2" and "24" not in words


def test_rounds_accumulate_and_a_failure_never_replaces_a_measurement(peer: Any) -> None:
    add, needs = peer.main.add_round, peer.main.needs_round
    one: dict[str, Any] = {"failed": "", "rounds": []}
    assert needs(one, 1)
    add(one, {"failed": "took more than 9 s", "seconds": 9.0})
    assert one["failed"] == "took more than 9 s" and needs(one, 1)
    add(one, measured(100.0))
    assert (one["failed"], len(one["rounds"])) == ("", 1)
    assert not needs(one, 1) and needs(one, 2)
    add(one, {"failed": "took more than 9 s", "seconds": 9.0})
    assert (one["failed"], len(one["rounds"])) == ("", 1)
    add(one, measured(120.0))
    assert peer.table.ms(one) == 110.0 and not needs(one, 2)
    small: dict[str, Any] = {"failed": "", "rounds": []}
    add(small, {"failed": "out of memory", "peak_gib": 10.9})
    assert not needs(small, 1)  # it would run out of memory again


def test_targets_are_met_missed_or_not_measured(peer: Any) -> None:
    rows = {
        MUSUBI: row(2100.0),
        COMPILED: row(1100.0, peak=90.0),
        "14b unisono, no checkpointing": row(700.0, peak=91.0),  # faster, with more memory: does not count
        "14b unisono, every 2nd block recomputed": row(1000.0, peak=60.0),
        "14b unisono, checkpointing": row(1200.0, peak=35.0, host_gib=6.0),
        "14b unisono, fp8, checkpointing, 24 GB card": row(1100.0, peak=21.0),
        "14b unisono, nf4, checkpointing, 16 GB card": row(2600.0, peak=14.0),
        "14b unisono, fp8, checkpointing, 24 blocks on host": {"failed": "out of memory", "rounds": [{"failed": "x"}]},
    }
    card24, card16, card12, unlimited, recomputing, host = peer.table.targets(rows)
    assert "24 GB card" in card24 and "1100 ms" in card24 and card24.endswith(": met.")
    assert "2600 ms" in card16 and card16.endswith("**missed**.")
    assert card12.endswith("no variant ran.")
    assert "1.10 × (14b unisono, every 2nd block recomputed" in unlimited and "missed" in unlimited
    assert "2.10 × (14b unisono, every 2nd" in recomputing and recomputing.endswith(": met.")
    assert "at most 6.0 GiB" in host and "missed" in host
    assert "musubi has not run" in list(peer.table.targets({}))[3]


def test_a_later_call_without_musubi_keeps_its_rows(peer: Any, tmp_path: Path) -> None:
    file = tmp_path / "so_far.json"
    first = peer.main.SoFar(file, True, "0.3.4")
    first.parts["musubi"][MUSUBI] = row(1.0)
    first.parts["unisono"]["14b unisono, checkpointing"] = row(2.0)
    first.write()
    later = peer.main.SoFar(file, True, "")
    assert later.musubi == "0.3.4" and later.parts["musubi"] == first.parts["musubi"]
    assert later.parts["unisono"] == first.parts["unisono"]
    other = peer.main.SoFar(file, True, "0.3.5")
    assert not other.parts["musubi"] and other.parts["unisono"] == first.parts["unisono"]
    stored = json.loads(file.read_text())
    stored["unisono"]["of"][0] = "other code"
    file.write_text(json.dumps(stored))
    changed = peer.main.SoFar(file, True, "0.3.4")
    assert not changed.parts["unisono"] and changed.parts["musubi"]


def test_the_loss_table_compares_formats_with_the_bf16_base(peer: Any) -> None:
    def losses(*values: float) -> dict[str, Any]:
        return {"failed": "", "losses": list(values), "eval_losses": list(values)}

    rows = {"bf16": losses(2.0, 1.0), "nf4": losses(2.1, 1.2), "bf16, seed 1": losses(2.5, 1.5)}
    text = "\n".join(peer.loss.table(rows | {"fp8": {"failed": "exit code 3"}}, 2))
    assert "| `nf4` | 1.2000 | 0.15000 | 0.15000 |" in text
    assert "- fp8: FAILED: exit code 3" in text
    assert "mean distance of two training curves 0.50000" in text and "within 0.5000 of each other" in text


def test_the_weights_have_wans_names_and_shapes(peer: Any, tmp_path: Path) -> None:
    from safetensors import safe_open

    sizes = {name: 0 for name in peer.variants.MODELS}
    for name, model in peer.variants.MODELS.items():
        for _, shape, _ in peer.files.weights_of(model):
            size = 1
            for length in shape:
                size *= length
            sizes[name] += size
    assert sizes == {"14b": 14_288_491_584, "1.3b": 1_418_996_800}  # Wan 2.1's own numbers
    file = tmp_path / "weights.safetensors"
    peer.files.write_weights(file, peer.variants.TINY_MODELS["1.3b"])
    with safe_open(file, "pt") as weights:
        assert set(weights.keys()) == {name for name, _, _ in peer.files.weights_of(peer.variants.TINY_MODELS["1.3b"])}
        assert weights.get_tensor("blocks.1.norm3.weight").eq(1).all()
        assert 0.5 < weights.get_tensor("blocks.0.ffn.0.weight").float().std() * 128**0.5 < 0.9


def test_invalid_arguments_are_rejected_in_one_line(tmp_path: Path) -> None:
    calls = {
        "need": ["--tiny"],
        "give a checkout of it": ["--musubi", str(tmp_path), "--tiny", "--output", str(tmp_path)],
        "no variant is named like": ["--only", "no such", "--output", str(tmp_path)],
        "there is no GPU here": ["--output", str(tmp_path)],
    }
    for why, flags in calls.items():
        done = _benchmark(*flags)
        assert done.returncode != 0 and why in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_a_rehearsal_measures_unisono_and_lists_what_did_not_run(tmp_path: Path) -> None:
    flags = ["--tiny", "--only", "30 blocks on host;1.3b musubi", "--output", str(tmp_path / "results")]
    done = _benchmark(*flags, "--work", str(tmp_path / "work"))
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "results" / "wan_peer_rehearsal.json").read_text())
    [(name, one)] = result["rows"].items()
    [run] = one["rounds"]
    assert name == "14b unisono, nf4, checkpointing, 30 blocks on host" and not one["failed"]
    assert len(run["step_ms"]) == 2 and run["host_gib"] > 0.1 and run["trained"] > 0 and run["losses"]
    assert result["not_run"] == ["1.3b musubi, checkpointing", "1.3b musubi, no checkpointing"]
    assert "the numbers mean nothing" in (tmp_path / "results" / "wan_peer_rehearsal.md").read_text()
    assert (tmp_path / "results" / "wan_peer_rehearsal_so_far.json").exists()


def _benchmark(*flags: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "benchmarks/wan_peer.py", *flags]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, env=environment())
