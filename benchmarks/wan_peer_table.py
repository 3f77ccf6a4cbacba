"""The results of benchmarks/wan_peer.py as Markdown: the table, and the targets with what was measured."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from machine import depends_on
from wan_peer_loss import table as loss_table
from wan_peer_variants import MUSUBI, RECOMPUTE, UNISONO, VARIANTS, Variant

Row = dict[str, Any]
Rows = Mapping[str, Row]
COLUMNS = ["variant", "ms/step", "× musubi, checkpointing", "peak GiB", "with start", "host GiB", "pinned GiB"]
COLUMNS += ["trained", "mean loss", "seconds"]
NOTES = """
- Both programs: the same random weights in one file, the same latents ({latent}) and text embeddings, batch 1, LoRA of
  rank 32 and alpha 32 in float32 on all linear layers of the blocks, frozen weights and computation in bf16 unless the
  variant says otherwise, AdamW (1e-4), gradients clipped at 1, noise levels logit-normal with shift 3.
- Not equal, as each program's documentation recommends it: musubi-tuner runs without `torch.compile` unless the variant
  says so, with `--sdpa`, an unfused AdamW and TF32 allowed; unisono compiles, chooses its attention kernel by
  measurement, and keeps a moving average of the LoRA. av and cv2, which musubi-tuner needs only for videos, may be
  replaced by stubs.
- *ms/step*: median of {rounds} round(s) of the median step after the warm-up, with the range of the rounds. *Peak*:
  torch's peak in the timed steps; *with start*: including loading, compilation and the choice of kernels. *Host*: peak
  RSS of the process; *pinned*: torch's page-locked memory, which may be part of it. *torch: N GiB*: torch may not
  allocate more, as on a smaller card.
""".strip()


def medians(row: Row) -> list[float]:
    """The median step time of each round."""
    return [statistics.median(each["step_ms"]) for each in row["rounds"]]


def ms(row: Row) -> float:
    """The step time of a variant."""
    return statistics.median(medians(row))


def largest(row: Row, key: str) -> float | None:
    """The largest value of all rounds."""
    values = [each[key] for each in row["rounds"] if each.get(key) is not None]
    return max(values) if values else None


def page(result: Row) -> str:
    """The whole result."""
    rows: Rows = result["rows"]
    kind = "# wan-flow LoRA next to musubi-tuner"
    lines = [kind + (": a rehearsal with tiny models" if result["tiny"] else ""), "", *depends_on(result)]
    lines.append(f"- musubi-tuner: {result['musubi'] or 'not given'}")
    if result["tiny"]:
        lines.append("- **Tiny models: the numbers mean nothing.**")
    rounds = max((len(row["rounds"]) for row in rows.values()), default=0)
    latent = " × ".join(map(str, result["latent"]))
    lines += [NOTES.format(latent=latent, rounds=rounds), ""]
    lines += [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    lines += [_line(variant, rows) for variant in VARIANTS if variant.name in rows]
    if result["not_run"]:
        lines += ["", f"Not run: {'; '.join(result['not_run'])}."]
    if result["loss"]:
        lines += ["", "## Loss on a quantised base", "", *loss_table(result["loss"], result["loss_steps"])]
    if not result["tiny"]:
        lines += ["", "## Targets", "", *targets(rows)]
    return "\n".join([*lines, ""])


def _line(variant: Variant, rows: Rows) -> str:
    row = rows[variant.name]
    name = variant.name + (f" (torch: {variant.cap_gib:g} GiB)" if variant.cap_gib else "")
    memory = [_number(largest(row, key)) for key in ("peak_gib", "peak_with_start_gib", "host_gib", "pinned_gib")]
    if row["failed"]:
        cells = [name, f"FAILED: {row['failed']}".replace("|", " "), "", *memory, "", "", ""]
        return f"| {' | '.join(cells)} |"
    base = rows.get(f"{variant.model} {MUSUBI}, checkpointing", {"failed": "not run"})
    times = "" if base["failed"] else f"{ms(base) / ms(row):.2f}"
    each = medians(row)
    time = f"**{ms(row):.0f}**" + (f" ({min(each):.0f} – {max(each):.0f})" if len(each) > 1 else "")
    losses = [loss for one in row["rounds"] for loss in one["losses"]]
    mean = f"{statistics.mean(losses):.3f}" if losses else ""
    last = row["rounds"][-1]
    cells = [name, time, times, *memory, f"{last['trained']:,}", mean, f"{last['seconds']:.0f}"]
    return f"| {' | '.join(cells)} |"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def targets(rows: Rows) -> Iterator[str]:
    """Each target with the best variant that counts for it."""
    for card, cap, most_ms in ((24, 22.0, 1200), (16, 14.5, 2500), (12, 10.5, 4500)):
        fits = _ours(rows, lambda variant, cap=cap: variant.cap_gib == cap)
        text = f"14B on a {card} GB card: at most {cap:g} GiB and {most_ms} ms"
        if fits:
            yield _verdict(text, f"{ms(rows[fits[0]]):.0f} ms ({fits[0]})", ms(rows[fits[0]]) <= most_ms)
        else:
            yield f"- {text}: no variant ran."
    yield _faster(
        rows,
        "14B without a memory limit: 1.35 × musubi compiled, in no more memory",
        [name for name in ("14b musubi, compiled",) if _ran(rows, name)],
        1.35,
        lambda variant, peak: variant.cap_gib is None and (largest(rows[variant.name], "peak_gib") or 0) <= peak,
    )
    theirs = [variant for variant in VARIANTS if variant.program == MUSUBI and variant.model == "14b"]
    yield _faster(
        rows,
        "14B with recomputing: 1.9 × the fastest checkpointed form of musubi",
        [
            variant.name
            for variant in theirs
            if "--gradient_checkpointing" in variant.flags and _ran(rows, variant.name)
        ],
        1.9,
        lambda variant, _: RECOMPUTE in variant.flags,
    )
    yield from _host_memory(rows)


def _faster(rows: Rows, text: str, theirs: list[str], least: float, counts: Callable[[Variant, float], bool]) -> str:
    if not theirs:
        return f"- {text}: musubi has not run."
    reference = min(theirs, key=lambda name: ms(rows[name]))
    peak = largest(rows[reference], "peak_gib") or 0.0
    ours = _ours(rows, lambda variant: variant.model == "14b" and counts(variant, peak))
    if not ours:
        return f"- {text}: no variant of unisono counts."
    times = ms(rows[reference]) / ms(rows[ours[0]])
    seen = f"{times:.2f} × ({ours[0]}, {_number(largest(rows[ours[0]], 'peak_gib'))} GiB; {reference}, {peak:.1f} GiB)"
    exact = [name for name in ours if "--base_precision" not in _named(name).flags]
    if exact and exact[0] != ours[0]:
        seen += f"; with a bf16 base {ms(rows[reference]) / ms(rows[exact[0]]):.2f} × ({exact[0]})"
    return _verdict(text, seen, times >= least)


def _host_memory(rows: Rows) -> Iterator[str]:
    loads = _ours(rows, lambda variant: variant.model == "14b" and "--blocks_on_host" not in variant.flags)
    if loads:
        most = max(largest(rows[name], "host_gib") or 0.0 for name in loads)
        yield _verdict("14B starts with at most 4 GiB of host memory", f"at most {most:.1f} GiB", most <= 4)


def _ours(rows: Rows, counts: Callable[[Variant], bool]) -> list[str]:
    """unisono's variants that ran and count, the fastest first."""
    names = [each.name for each in VARIANTS if each.program == UNISONO and _ran(rows, each.name) and counts(each)]
    return sorted(names, key=lambda name: ms(rows[name]))


def _ran(rows: Rows, name: str) -> bool:
    return name in rows and not rows[name]["failed"]


def _named(name: str) -> Variant:
    return next(variant for variant in VARIANTS if variant.name == name)


def _verdict(text: str, seen: str, is_met: bool) -> str:
    return f"- {text}: measured {seen}: {'met' if is_met else '**missed**'}."
