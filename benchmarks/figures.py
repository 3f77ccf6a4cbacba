"""Writes the figures in the documentation from benchmarks/results/*.json, so that no number is typed by hand.

python benchmarks/figures.py
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from wan_fits import COLUMNS, FREE_GIB, cell, fits

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"


def overhead_rows(device: str) -> list[str]:
    result = json.loads((RESULTS / f"overhead_{device}.json").read_text())
    machine = ", ".join(result["machine"]["gpus"]) or f"{result['machine']['cores']} CPU cores"
    rows = []
    for case in result["cases"]:
        if "variants" not in case:
            continue
        variants = case["variants"]
        hand = variants["hand"]
        shown = []
        for name in ("unisono", "accelerate", "fabric", "hand again"):
            row = variants.get(name, {})
            fastest = row.get("fastest_ms", 0) / hand["fastest_ms"]
            shown.append(f"{row['ratio']:.3f} ({fastest:.3f})" if "ratio" in row else "–")
        memory = f"{variants['unisono']['peak_mib'] / hand['peak_mib']:.3f}"
        rows.append(f"| {machine}, {case['case']} | {hand['step_ms']:.0f} ms | {' | '.join(shown)} | {memory} |")
    return rows


def costs() -> str:
    """The overhead of unisono over a hand-written loop."""
    lines = [
        "Step time relative to a hand-written loop, interleaved in one run: the median ratio, and in brackets",
        "the ratio of the fastest rounds. *By hand again* is the same loop a second time; its distance from 1 shows "
        "the noise.",
        "",
        "| | by hand | unisono | Accelerate | Fabric | by hand again | peak memory, unisono / by hand |",
        "|---|---|---|---|---|---|---|",
        *overhead_rows("cuda"),
        *overhead_rows("cpu"),
        "",
        "On one H200 every strategy trains, resumes bit-identically and passes `verify` in bf16 and fp16",
        "(losses only): [cuda.md](../benchmarks/results/cuda.md).",
        "",
    ]
    return "\n".join(lines)


def survived(results: Path = RESULTS) -> str:
    """The results about faults, one line per benchmark; skips benchmarks without results."""
    lines = []
    for name, in_words in MEASURED.items():
        file = results / f"{name}.json"
        if file.exists():
            lines.append(f"- {in_words(json.loads(file.read_text()))} ([{name}.md](../benchmarks/results/{name}.md)).")
    return "\n".join([*lines, ""]) if lines else ""


def faults(result: dict[str, Any]) -> str:
    rows = result["rows"]
    total, lost = _faults(rows), sum(not row["ok"] for row in rows)
    exact = [row for row in rows if row["tolerance"] == 0]
    rounded = [row for row in rows if row["tolerance"] > 0]
    recoveries = [seconds for row in rows for seconds in row["recoveries"]]
    text = f"**{total} injected faults, {'no run' if not lost else f'{lost} of {len(rows)} rows'} lost.** "
    text += f"After {_faults(exact)} of them weights, optimizer state, average and losses must equal those of an "
    text += f"undisturbed run bit for bit: {_difference(exact)}. After {_faults(rounded)} (out of memory, another "
    text += f"number of ranks) they must agree up to rounding: {_difference(rounded)}"
    if recoveries:
        text += f". Median time from the kill of a rank to the next step: {statistics.median(recoveries):.1f} s"
    return text


def _faults(rows: list[dict[str, Any]]) -> int:
    return sum(row["faults"] for row in rows)


def _difference(rows: list[dict[str, Any]]) -> str:
    largest = max((row["difference"] for row in rows), default=0.0)
    return f"largest difference {largest:.0e}" if largest else "no difference"


def memory(result: dict[str, Any]) -> str:
    cases = [row for row in result["cases"] if "difference" in row]
    good = sum(row["ok"] for row in result["cases"])
    in_place = sum(row["in_place"] for row in cases)
    restarts = sum(row["restarts"] for row in cases)
    worst = max((row["difference"] for row in cases if row["precision"] == "no"), default=0.0)
    text = f"**Real out-of-memory** on {', '.join(result['machine']['gpus'])}: {good} of {len(result['cases'])} cases "
    text += f"recovered as designed. Recoveries in place: {in_place}; by a restart: {restarts}. "
    failed = [row["case"] for row in result["cases"] if not row["ok"]]
    text += f"Failed case: {'; '.join(failed)}. " if failed else ""
    text += f"Losses are within {worst:.0e} (relative, float32) of those of a run that used the smaller micro-batch "
    return text + "from the start"


def save_stall(result: dict[str, Any]) -> str:
    medians = result["medians"]
    where = ", ".join(result["machine"]["gpus"]) or "the CPU"
    text = (
        f"**A checkpoint** of {result['parameters'] / 1e9:.2g} billion parameters ({result['bytes'] / 1e9:.0f} GB) on "
    )
    text += f"{where} stalls training for {medians['stall_s']:.2f} s, {100 * result['stall_share']:.1f} % of the "
    return text + f"{medians['synchronous_s']:.1f} s that a synchronous save takes"


def guard(result: dict[str, Any]) -> str:
    gpus = result["machine"]["gpus"] if result["settings"]["device"] == "cuda" else []
    where = ", ".join(gpus) or f"{result['machine']['cores']} CPU cores"
    shown = []
    for case in result["cases"]:
        ratios = {name: row["ratio"] for name, row in case.get("variants", {}).items() if "ratio" in row}
        if {"unisono", "never guarded", "always guarded"} <= ratios.keys():
            text = f"{case['case']}: {ratios['unisono']:.3f} with the default guard, {ratios['never guarded']:.3f} "
            shown.append(text + f"without it, {ratios['always guarded']:.3f} when every step is guarded")
    begin = f"**The out-of-memory guard**, step time relative to hand-written DDP on {where}"
    return f"{begin}: {'; '.join(shown)}"


def nccl(result: dict[str, Any]) -> str:
    ran = [row for row in result["rows"] if "not_run" not in row]
    failed = [row["name"] for row in ran if not row["ok"]]
    exact = [row["difference"] for row in ran if row["ok"] and row["tolerance"] <= 1e-10]
    text = f"**Ranks that share one GPU over NCCL** on {', '.join(result['machine']['gpus'])}: "
    text += f"{len(ran) - len(failed)} of {len(ran)} rows agree with one rank. "
    text += f"Largest difference in float64: {max(exact, default=0.0):.0e}"
    return text + (f". Failed: {', '.join(failed)}" if failed else "")


MEASURED: dict[str, Callable[[dict[str, Any]], str]] = {
    "faults": faults,
    "nccl": nccl,
    "memory": memory,
    "save_stall": save_stall,
    "guard_cpu": guard,
    "guard_cuda": guard,
}


def darkroom() -> str:
    """The results of the recipe, one line per part; skips parts without results."""
    lines = []
    for name, in_words in DARKROOM.items():
        file = RESULTS / f"darkroom_{name}.json"
        if file.exists() and (text := in_words(json.loads(file.read_text()))):
            lines.append(f"- {text} ([darkroom_{name}.md](../benchmarks/results/darkroom_{name}.md)).")
    return "\n".join(["", "## Figures", "", *lines, "", ""]) if lines else ""


def darkroom_learning(result: dict[str, Any]) -> str:
    seeds = [result["rows"][name] for name in result["seeds"] if not result["rows"][name]["failed"]]
    if not seeds:
        return ""
    shares, worst = [row["unseen_of_optimum"] for row in seeds], min(row["worst_of_optimum"] for row in seeds)
    slowest = max(row["learned"]["unseen"]["training_s"] for row in seeds)
    text = f"**Learning**, full configuration on {', '.join(result['machine']['gpus'])}, {len(seeds)} seeds: "
    text += "unseen goals at "
    text += f"{', '.join(f'{share:.1%}' for share in shares)} of the optimum, no goal below {worst:.0%} of its own; "
    text += f"90 % after at most {slowest:.1f} s of training"
    others = {name: row for name, row in result["rows"].items() if name not in result["seeds"] and not row["failed"]}
    if others:
        text += ". Other configurations: " + ", ".join(
            f"{name} {row['unseen_of_optimum']:.0%}" for name, row in others.items()
        )
    return text


def darkroom_speed(result: dict[str, Any]) -> str:
    rows = {name: row["step_ms"] for name, row in result["rows"].items() if row.get("step_ms")}
    if "reference model" not in rows or len(rows) < 2:
        return ""
    reference_ms = rows["reference model"]
    text = f"**Step time** on {', '.join(result['machine']['gpus'])}: "
    text += ", ".join(f"{name} {ms:.2f} ms ({reference_ms / ms:.2f} ×)" for name, ms in rows.items())
    missing = [name for name in result["rows"] if name not in rows]
    return text + (f"; not measured: {', '.join(missing)}" if missing else "")


def darkroom_end_to_end(result: dict[str, Any]) -> str:
    row = result["rows"]["end to end"]
    if row["failed"]:
        return ""
    text = f"**A whole run of 50,000 steps** on {', '.join(result['machine']['gpus'])}: {row['wall_s']:.0f} s with "
    return text + f"collection, compilation, evaluations and checkpoints; {row['step_ms']:.2f} ms per step"


def darkroom_demo(result: dict[str, Any]) -> str:
    seeds = [row for row in result["rows"].values() if not row["failed"]]
    if not seeds:
        return ""
    shares, slowest = [row["unseen_of_optimum"] for row in seeds], max(row["wall_s"] for row in seeds)
    training = max(row["training_s"] for row in seeds)
    text = f"**The demo** on {result['machine']['cores']} CPU cores, {len(seeds)} seeds: unseen goals at "
    text += f"{', '.join(f'{share:.1%}' for share in shares)} of the optimum; at most {slowest:.0f} s, of which "
    return text + f"{training:.0f} s are training"


def darkroom_choices(result: dict[str, Any]) -> str:
    rows = {name: row["unseen_of_optimum"] for name, row in result["rows"].items() if not row["failed"]}
    if not rows:
        return ""
    text = f"**Evidence for the defaults**: the demo on {result['machine']['cores']} CPU cores with one setting "
    text += "changed; fraction of the optimum on unseen goals after the same number of steps: "
    return text + "; ".join(f"{name} {share:.0%}" for name, share in rows.items())


DARKROOM: dict[str, Callable[[dict[str, Any]], str]] = {
    "learning": darkroom_learning,
    "speed": darkroom_speed,
    "end_to_end": darkroom_end_to_end,
    "demo": darkroom_demo,
    "choices": darkroom_choices,
}


def wan_step() -> str:
    """The step time of wan-flow and of the usual loop, for each shape."""
    file = RESULTS / "wan_step.json"
    if not file.exists():
        return ""
    result = json.loads(file.read_text())
    lines = [
        f"**Step time**, 1.3B, full fine-tune in bf16 on {', '.join(result['machine']['gpus'])} (machine, versions, "
        "targets, command: [wan_step.md](../benchmarks/results/wan_step.md)):",
        "",
        "| shape | batch | loop | ms per step | × usual | MFU | peak GiB |",
        "|---|---|---|---|---|---|---|",
    ]
    for shape, rows in result["rows"].items():
        for loop, row in sorted(rows.items(), key=lambda item: not item[0].startswith("usual")):
            if row["failed"]:
                continue
            times = f"{row['times_usual']:.2f}" if row["times_usual"] else "not measured"
            mfu = f"{row['mfu']:.3f}" if row["mfu"] else ""
            cells = [shape, str(result["shapes"][shape]["batch"]), loop, f"{row['ms']:.1f}", times, mfu]
            lines.append(f"| {' | '.join([*cells, format(row['mem_gib'], '.1f')])} |")
    return "\n".join([*lines, "", ""])


def wan_memory() -> str:
    """Memory of a step for each model and shape."""
    file = RESULTS / "wan_memory.json"
    if not file.exists():
        return ""
    result = json.loads(file.read_text())
    lines = [
        f"**All shapes**: GiB per GPU ({', '.join(result['machine']['gpus'])}) by the number of recomputed blocks, "
        "without EMA (`--ema_decay 0`) and with one micro-batch per step. Numbers are extrapolated from two runs with "
        "fewer blocks; those in *italics* are predicted, because they exceed the GPU's "
        f"{result['gpu_gib']:.1f} GiB or were not run. `fsdp` is for 8 GPUs "
        "(details: [wan_memory.md](../benchmarks/results/wan_memory.md)):",
        "",
        f"| model | shape | {' | '.join(COLUMNS)} |",
        "|---" * (len(COLUMNS) + 2) + "|",
    ]
    for row in result["rows"]:
        cells = [cell(row, name, result["gpu_gib"]) for name in COLUMNS]
        lines.append(f"| {' | '.join([row['model'], row['shape'], *cells])} |")
    caption = "Flags, and predicted GiB per GPU, with EMA, one sample at a time on each GPU, any number of "
    caption += f"micro-batches per step, and {FREE_GIB:.0f} GiB left for CUDA, NCCL and fragmentation:"
    return "\n".join(["### What fits on 80 GB", "", caption, "", *fits(result["rows"]), "", *lines, "", ""])


def tables_of(name: str, what: str) -> Callable[[], str]:
    """Returns a function that writes the tables of a result unchanged, and its targets."""

    def written() -> str:
        result, page = RESULTS / f"{name}.json", RESULTS / f"{name}.md"
        if not page.exists():
            return ""
        machine = json.loads(result.read_text())["machine"]
        where = ", ".join(machine["gpus"]) or f"{machine['cores']} CPU cores"
        lines = page.read_text().splitlines()
        first = next(number for number, line in enumerate(lines) if line.startswith("| "))
        caption = f"{what} on {where} (versions, command: [{name}.md](../benchmarks/results/{name}.md)):"
        return "\n".join([caption, "", *lines[first:], "", ""])

    return written


def watch() -> str:
    """The overhead of the status that ranks write."""
    file = RESULTS / "watch.json"
    if not file.exists():
        return ""
    result = json.loads(file.read_text())
    row, watched = (result["rows"][name] for name in ("written", "written and watched"))
    low, high = row["cpu_quartiles"]
    met = "met" if result["met"] else "missed"
    sentences = [
        f"Each write of the status takes {result['write_cpu_ms']:.2f} ms of CPU time. With one write per second, this "
        f"is {result['cpu_fraction']:.2%} of a rank's time (target {result['target']:.1%}: {met}).",
        f"On {result['machine']['cores']} cores with a load of {result['machine']['load_average']:.0f}, a step used "
        f"{row['cpu_ms']:.0f} ms of CPU time and took {row['step_ms']:.0f} ms, so there was one write every "
        f"{1e3 / row['step_ms']:.1f} steps. Writing the status changed the CPU time per step by "
        f"{row['cpu_ratio'] - 1:+.1%} (quartiles {low - 1:+.1%} to {high - 1:+.1%}), and by "
        f"{watched['cpu_ratio'] - 1:+.1%} while `watch` read it ([watch.md](../benchmarks/results/watch.md)).",
    ]
    return " ".join(sentences) + "\n"


def tune() -> str:
    if not (RESULTS / "tune.json").exists():
        return ""
    result = json.loads((RESULTS / "tune.json").read_text())
    pairs, names = zip(result["whole"], result["killed"], strict=True), ("state", "params", "value", "evaluations")
    same = sum(all(one[name] == other[name] for name in names) for one, other in pairs)
    states = [trial["state"] for trial in result["killed"]]
    best = "the same" if result["best_whole"] == result["best_killed"] else "another one"
    text = f"A study of {result['trials']} trials of TwoMoons, with all its processes killed {len(result['kills'])} "
    text += f"times, ended with {len(states)} finished trials: {states.count('complete')} complete and "
    text += f"{states.count('pruned')} pruned. {same} of {len(states)} trials equal those of the study without kills, "
    return text + f"bit for bit, and the best trial is {best} ([results](../benchmarks/results/tune.md)).\n"


def trackers() -> str:
    """What trackers cost a step."""
    result = json.loads((RESULTS / "trackers.json").read_text())
    limit, shown = result["limit"], []
    for name, what in (("wall", "the time of a step"), ("processor", "the processor time of the training process")):
        ratio, low, high = (result[f"{name}_ratio{which}"] for which in ("", "_low", "_high"))
        verdict = "met" if ratio <= 1 + limit else "missed"
        shown.append(
            f"{what} is {ratio:.4f} times that without trackers (quartiles {low:.4f} to {high:.4f}; target at most "
            f"{1 + limit:.3f}: {verdict})"
        )
    share = result["tensorboard_share"]
    return (
        f"Measured on {result['machine']['cores']} CPU cores with a load average of "
        f"{result['machine']['load_average']:.0f} from other programs, with steps of {result['step_ms']:.0f} ms that "
        f"are all logged, and W&B and MLflow offline: {shown[0]}, and {shown[1]}. TensorBoard, which runs in the "
        f"training process, takes {result['tensorboard_us']:.0f} µs per logged step, {share:.1%} of such a step "
        f"([trackers.md](../benchmarks/results/trackers.md)).\n"
    )


PAGES: dict[Path, dict[str, Callable[[], str]]] = {
    HERE.parent / "docs" / "benchmarks.md": {"figures": costs, "faults": survived},
    HERE.parent / "docs" / "darkroom.md": {"darkroom": darkroom},
    HERE.parent / "docs" / "watch.md": {"watch": watch},
    HERE.parent / "docs" / "tracking.md": {"trackers": trackers},
    HERE.parent / "docs" / "scaling.md": {"scaling": tables_of("scaling", "Costs per rank")},
    HERE.parent / "docs" / "wan.md": {
        "wan_learning": tables_of("wan_learning", "Results with `--nproc 2`, 64 samples per step,"),
        "wan_image_to_video": tables_of("wan_image_to_video", "Results with `--nproc 2`, 64 samples per step,"),
        "wan_step": wan_step,
        "wan_memory": wan_memory,
    },
    HERE.parent / "docs" / "tune.md": {"tune": tune},
    HERE.parent / "docs" / "data.md": {"datasets": tables_of("datasets", "Tar shards")},
    HERE.parent / "docs" / "bench.md": {"bench": tables_of("bench", "TwoMoons with a hidden width of 1024,")},
    HERE.parent / "docs" / "plan.md": {
        "plan": tables_of("plan", "Predictions for one H200, and collectives of CPU ranks, made")
    },
    HERE.parent / "docs" / "small_cards.md": {"small_cards": tables_of("small_cards", "Wan models by card,")},
    HERE.parent / "docs" / "wan_distill.md": {
        "wan_distill_learning": tables_of("wan_distill_learning", "Students of the tiny teacher"),
        "wan_distill_speed": tables_of("wan_distill_speed", "Speed"),
        "wan_dmd2_tiny": tables_of("wan_dmd2_tiny", "Few-step students of the tiny teacher"),
    },
    HERE.parent / "docs" / "clips.md": {
        "clips_learning": tables_of("clips_learning", "Results on the mirror set"),
        "clips_harder": tables_of("clips_harder", "The mirror set with noise"),
        "clips_untrained": tables_of("clips_untrained", "The built-in scorer, baselines and a trained run"),
        "clips_long": tables_of("clips_long", "Long videos of 1280 × 720"),
        "clips_extraction": tables_of("clips_extraction", "Feature extraction"),
        "clips_overhead": tables_of("clips_overhead", "Step time compared with a hand-written loop,"),
    },
    HERE.parent / "docs" / "seo.md": {
        "seo_learning_cuda": tables_of("seo_learning_cuda", "MRR@10 of 1,000 held-out queries among 1,000 pages"),
        "seo_learning_cpu": tables_of("seo_learning_cpu", "MRR@10 of 1,000 held-out queries among 1,000 pages"),
        "seo_site": tables_of(
            "seo_site", "Recall / precision for planted faults of a generated site, MiniLM not fine-tuned"
        ),
        "seo_speed_cuda": tables_of("seo_speed_cuda", "Training speed compared with sentence-transformers' trainer"),
        "seo_speed_cpu": tables_of("seo_speed_cpu", "Training speed compared with sentence-transformers' trainer"),
    },
}


def with_figures(page: Path) -> str:
    """The text of a page with current figures."""
    text = page.read_text()
    for name, written in PAGES[page].items():
        start, end = f"<!-- {name}: written by benchmarks/figures.py -->\n", f"<!-- end of {name} -->"
        before, rest = text.split(start)
        text = before + start + written() + end + rest.split(end)[1]
    return text


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(with_figures(page))
