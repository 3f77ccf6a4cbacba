"""The loss of unisono's LoRA on a base in fp8, int8 and nf4, next to the bf16 base and to other seeds."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from statistics import mean
from typing import Any

from wan_peer_files import write_loss_data
from wan_peer_runs import Row, Workplace, last_line, metrics, unisono_words
from wan_peer_variants import UNISONO

MODEL = "1.3b"
BASE = "bf16"
FORMATS = ("fp8", "int8", "nf4")
SEEDS = (1, 2, 3)
EVALUATIONS = 10
NUM_HELD_OUT = 8
RUNS: dict[str, tuple[str, int]] = {name: (name, 0) for name in (BASE, *FORMATS)}
RUNS |= {f"{BASE}, seed {seed}": (BASE, seed) for seed in SEEDS}
EXPECTED_S = 75.0


def measure(
    place: Workplace, steps: int, at_once: int, so_far: dict[str, Row], patience_s: float, write: Callable[[], None]
) -> None:
    """Adds the missing runs to `so_far`, several at once: they compare losses, not times."""
    missing = [name for name in RUNS if so_far.get(name, {"failed": "not run"})["failed"]]
    if not missing:
        return
    data = place.data("loss")
    shutil.rmtree(data, ignore_errors=True)
    write_loss_data(data)

    def one(name: str) -> None:
        so_far[name] = _run(place, name, steps, patience_s)
        row = so_far[name]
        outcome = f"FAILED: {row['failed']}" if row["failed"] else f"held-out loss {row['eval_losses'][-1]:.4f}"
        print(f"loss, {name}: {outcome}, {row['seconds']} s", flush=True)

    one(missing[0])  # compiles for the others
    write()
    with ThreadPoolExecutor(at_once) as pool:
        for _ in pool.map(one, missing[1:]):
            write()


def _run(place: Workplace, name: str, steps: int, patience_s: float) -> Row:
    precision, seed = RUNS[name]
    file_name = "loss-" + name.replace(", ", "-").replace(" ", "-")
    folder, log = place.work / file_name, place.work / "logs" / f"{file_name}.log"
    shutil.rmtree(folder, ignore_errors=True)
    words = unisono_words(place.weights_file(MODEL), place.data("loss"), folder, steps)
    words += ["--base_precision", precision, "--seed", str(seed), "--batch_size", "4", "--learning_rate", "5e-4"]
    words += ["--num_eval", str(NUM_HELD_OUT), "--eval_every", str(max(1, steps // EVALUATIONS)), "--eval_first"]
    words += ["--eval_batch_size", "8", "--ema_decay", "0", "--num_workers", "0"]
    words += ["--no_compile", "--gpus", "0"] if place.tiny else []
    code, seconds = place.run([sys.executable, "-m", "unisono", *words], UNISONO, log, patience_s)
    lines = metrics(folder)
    shutil.rmtree(folder, ignore_errors=True)
    failed = "" if code == 0 else f"exit code {code}: {last_line(log.read_text(errors='replace'))}"
    return {
        "failed": failed,
        "losses": [line["loss"] for line in lines if "step_ms" in line],
        "eval_losses": [line["eval/loss"] for line in lines if "eval/loss" in line],
        "seconds": round(seconds, 1),
    }


def distance(one: list[float], two: list[float]) -> float:
    """The mean absolute difference of two curves."""
    return mean(abs(a - b) for a, b in zip(one, two, strict=True))


def table(rows: Mapping[str, Row], steps: int) -> list[str]:
    """The comparison as Markdown, with what the runs that did not fail allow."""
    good = {name: row for name, row in rows.items() if not row["failed"]}
    lines = [f"- {name}: FAILED: {row['failed']}" for name, row in rows.items() if row["failed"]]
    if BASE not in good:
        return [*lines, "", f"The run with the {BASE} base is missing."]
    base = good[BASE]
    lines += [f"- {steps} steps of {MODEL}, batches of 4; held-out loss before training {base['eval_losses'][0]:.4f}"]
    seeds = [good[name] for name in RUNS if name in good and name not in FORMATS]
    if len(seeds) > 1:
        pairs = list(combinations(seeds, 2))
        final = [row["eval_losses"][-1] for row in seeds]
        training, held_out = (mean(distance(a[key], b[key]) for a, b in pairs) for key in ("losses", "eval_losses"))
        lines.append(
            f"- {len(seeds)} seeds on the {BASE} base (other LoRA, order and noise): mean distance of two training "
            f"curves {training:.5f}, of two held-out curves {held_out:.5f}; final held-out losses within "
            f"{max(final) - min(final):.4f} of each other"
        )
    lines += ["", "| base | final held-out loss | training distance | held-out distance |", "|---|---|---|---|"]
    for name in (BASE, *FORMATS):
        if name in good:
            row: Any = good[name]
            distances = [f"{distance(row[key], base[key]):.5f}" for key in ("losses", "eval_losses")]
            cells = [f"`{name}`", f"{row['eval_losses'][-1]:.4f}", *(distances if name != BASE else ["", ""])]
            lines.append(f"| {' | '.join(cells)} |")
    return lines
