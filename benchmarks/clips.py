"""Measures whether clips learns a pattern that simple statistics miss, how fast it is, and its memory on long videos.

    python benchmarks/clips.py learning              # two CPU ranks: the mirror set, three seeds, and controls
    python benchmarks/clips.py harder                # the same with increasing noise, until learning fails
    python benchmarks/clips.py extraction            # 1 and 2 workers, 1 and 2 processes, interleaved
    python benchmarks/clips.py overhead              # step time next to a hand-written loop, interleaved; --device cuda
    python benchmarks/clips.py long                  # an hour of 1280 x 720: memory, and seconds per minute of video
    python benchmarks/clips.py learning --quick --output FOLDER    # smoke test; the numbers mean nothing

learning: every run is a plain `unisono train`, evaluated on held-out videos. In the mirror set a highlight and its
decoy are mirror images of each other; each control removes one cue that could reveal the difference.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from multiprocessing import Pipe, get_context
from pathlib import Path
from typing import Any

from gate import Rounds
from machine import depends_on
from overhead import Case, Variant, numbers_of
from parts import ROOT, Parts, Row, unisono, verdict

sys.path.insert(0, str(ROOT / "src"))
PARTS = Parts("clips", ["torch", "av", "numpy"])

MEASURES = ("mAP", "HIT@1", "kendall_tau", "spearman_rho", "MAP50", "MAP15")
BASELINES = ("random", "centre", "earliest", "frame_difference", "loudness")
BARS = {"mAP": 0.95, "above_random": 0.1, "above_motion": 0.1, "overhead": 1.01, "growth_mib": 64.0}
SEEDS = (0, 1, 2)


def say(*words: object) -> None:
    print(time.strftime("%H:%M:%S"), *words, flush=True)


# learning and harder -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MirrorSet:
    """A variant of the mirror set; the default is the set that `--data_path mirror` generates."""

    pattern: str = "motion"
    noise: float = 0.0
    num_videos: int = 120

    def words(self, place: Path, quick: bool) -> list[str]:
        """Returns the flags to train on this set; generates the set if it does not exist."""
        from unisono.recipes.clips.data.synthetic import make
        from unisono.recipes.clips.settings import MIRROR_PRESETS

        number = 8 if quick else self.num_videos
        few = ["--num_epochs", "1"] if quick else []
        if self == MirrorSet():
            return ["--data_path", "mirror", *(["--num_videos", str(number)] if quick else []), *few]
        folder = place / f"{self.pattern}_{self.noise:g}_{number}"
        for split, videos in (("train", number), ("eval", max(2, number // 4))):
            if not (folder / split).exists():
                make(folder / split, videos, split=split, pattern=self.pattern, noise=self.noise)
        settings = {"data_path": folder / "train", "eval_data_path": folder / "eval", **MIRROR_PRESETS}
        return [*(str(word) for name, value in settings.items() for word in (f"--{name}", value)), *few]


def train(name: str, options: argparse.Namespace, place: Path, words: list[str]) -> Row:
    """Runs `unisono train clips`; returns the metrics of its last evaluation."""
    folder, started = place / f"run {name}", time.monotonic()
    words = ["train", "clips", *words]
    further = ["--log_every", "5", "--cache_dir", str(place / "cache"), "--output_dir", str(folder)]
    failed = unisono([*words, *further], options.patience_s)
    command = shlex.join(["unisono", *words]).replace(f"{place}{os.sep}", "")
    row: Row = {"failed": failed, "command": command, "wall_s": time.monotonic() - started}
    if not failed:
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        last = [line for line in lines if "eval/mAP" in line][-1]
        row |= {name.removeprefix("eval/"): value for name, value in last.items() if name.startswith("eval/")}
        row |= {"steps": last["step"], "losses": {line["step"]: line["loss"] for line in lines if "loss" in line}}
        row["training_s"] = statistics.median(line["step_ms"] for line in lines if "step_ms" in line)
        row["training_s"] *= last["step"] / 1000
    say(name, failed or f"mAP {row['mAP']:.3f}, frame difference {row['mAP_frame_difference']:.3f}")
    return row


def learning(options: argparse.Namespace, place: Path) -> Row:
    result, plain = PARTS.begin("learning", options), MirrorSet()
    seeds = SEEDS[:1] if options.quick else SEEDS
    configurations: dict[str, tuple[MirrorSet, int, list[str]]] = {}
    for ranks in (1, 2):
        for seed in seeds:
            configurations[f"seed {seed}, {ranks} rank{'s'[: ranks - 1]}"] = (plain, ranks, ["--seed", str(seed)])
    for seed in seeds:
        configurations[f"seed {seed}, labels shuffled"] = (plain, 1, ["--seed", str(seed), "--shuffle_labels"])
    configurations["no pattern: highlights go either way"] = (MirrorSet("none"), 1, [])
    configurations["frames only"] = (plain, 1, ["--use", "frames"])
    configurations["sound only"] = (plain, 1, ["--use", "mel"])
    configurations["pattern in the sound"] = (MirrorSet("sound"), 1, [])
    configurations["pattern in the sound, frames only"] = (MirrorSet("sound"), 1, ["--use", "frames"])
    configurations["pattern in the sound, sound only"] = (MirrorSet("sound"), 1, ["--use", "mel"])
    result["rows"] = {name: {"failed": "not run"} for name in configurations}
    for name, (which, ranks, further) in configurations.items():
        words = [*which.words(place, options.quick), "--nproc", str(ranks), "--global_batch_size", "4", *further]
        result["rows"][name] = {"ranks": ranks, **train(name, options, place, words)}
        PARTS.write(result, options)
    return result


def apart(one: Row, two: Row) -> float:
    """The largest relative difference of the losses of two runs in their first 40 steps."""
    pairs = ((one["losses"][step], two["losses"][step]) for step in one["losses"] if int(step) <= 40)
    return max((abs(mine - other) / mine for mine, other in pairs), default=math.nan)


def learning_table(result: Row) -> list[str]:
    rows = result["rows"]
    lines = ["# clips: learning the mirror set", "", *depends_on(result)]
    lines += [
        "- 120 training videos of 60 s and 30 held-out ones; 8 epochs, a batch of 4 videos on any number of ranks; "
        "results of the last evaluation, not the best",
        "- *no pattern*: the same set, but highlights move in either direction, so only clips with and without motion "
        "can be told apart. *pattern in the sound*: rising tones are highlights, and the motion carries no "
        "information.",
        "- With shuffled labels, clips with motion get more extreme scores than clips without, for highlights and "
        "decoys alike. So the top clip of a video is a highlight more often than a random clip (0.2), while τ and ρ "
        "stay at 0.",
        "",
        f"| | ranks | {' | '.join(MEASURES)} | training | process |",
        "|---" * (len(MEASURES) + 4) + "|",
    ]
    for name, row in rows.items():
        if row["failed"]:
            lines.append(f"| {name} | FAILED: {row['failed'].replace('|', ' ')} |{' |' * (len(MEASURES) + 2)}")
            continue
        cells = [str(row["ranks"]), *(f"{row[measure]:.3f}" for measure in MEASURES)]
        lines.append(f"| {' | '.join([name, *cells])} | {row['training_s']:.0f} s | {row['wall_s']:.0f} s |")
    first = next(iter(rows.values()))
    if first["failed"]:
        return lines
    for kind in BASELINES:
        cells = [f"{first[f'{measure}_{kind}']:.3f}" for measure in MEASURES]
        lines.append(f"| baseline: {kind.replace('_', ' ')} | | {' | '.join(cells)} | | |")
    if result["quick"] or any(row["failed"] for row in rows.values()):
        return lines
    return [*lines, "", "Targets:", "", *learning_checks(result)]


def learning_checks(result: Row) -> Iterator[str]:
    rows = result["rows"]
    first = rows["seed 0, 1 rank"]
    trained = [row["mAP"] for name, row in rows.items() if re.fullmatch(r"seed \d, \d ranks?", name)]
    shuffled = [row["mAP"] for name, row in rows.items() if name.endswith("shuffled")]
    motion, chance = first["mAP_frame_difference"], first["mAP_random"]
    seeds = [name.split(",")[0] for name in rows if name.endswith("2 ranks")]
    furthest = max(apart(rows[f"{seed}, 1 rank"], rows[f"{seed}, 2 ranks"]) for seed in seeds)
    best = max(BASELINES, key=lambda kind: first[f"mAP_{kind}"])
    nothing, deaf = rows["no pattern: highlights go either way"], rows["sound only"]
    lame = rows["pattern in the sound, frames only"]
    checks = {
        f"mAP at least {BARS['mAP']} in {len(trained) // 2} seeds on 1 and 2 ranks (lowest {min(trained):.3f})": (
            min(trained) >= BARS["mAP"]
        ),
        "1 and 2 ranks train the same (largest relative difference of the losses of the first 40 steps: "
        f"{furthest:.0e})": furthest < 0.01,
        f"shuffled labels at chance level (highest {max(shuffled):.3f}, random {chance:.3f})": (
            max(shuffled) <= chance + BARS["above_random"]
        ),
        f"every baseline is far below (best: {best.replace('_', ' ')}, {first[f'mAP_{best}']:.3f})": (
            first[f"mAP_{best}"] <= 0.7
        ),
        f"no better than frame difference without a pattern ({nothing['mAP']:.3f}, "
        f"{nothing['mAP_frame_difference']:.3f})": (
            nothing["mAP"] <= nothing["mAP_frame_difference"] + BARS["above_motion"]
        ),
        f"the same without the modality that carries the pattern (sound only {deaf['mAP']:.3f}, frames only "
        f"{lame['mAP']:.3f})": (max(deaf["mAP"], lame["mAP"]) <= motion + BARS["above_motion"]),
    }
    return (f"- {what}: {verdict(ok)}" for what, ok in checks.items())


HARDER = (0.5, 1.0, 1.2, 1.4)


def harder(options: argparse.Namespace, place: Path) -> Row:
    result = PARTS.begin("harder", options)
    sets = {f"noise {noise}, 120 videos": MirrorSet(noise=noise) for noise in HARDER[: 1 if options.quick else None]}
    result["rows"] = {name: {"failed": "not run"} for name in sets}
    for name, which in sets.items():
        words = [*which.words(place, options.quick), "--nproc", "1"]
        facts = {"noise": which.noise, "videos": which.num_videos}
        result["rows"][name] = {**facts, **train(name, options, place, words)}
        PARTS.write(result, options)
    return result


def harder_table(result: Row) -> list[str]:
    lines = ["# clips: the mirror set with noise", "", *depends_on(result)]
    lines += [
        "- Noise is the standard deviation of each pixel's noise relative to the contrast of the dot: above 0.2, the "
        "noise stays the same and the dot gets fainter. 8 epochs, as without noise.",
        "",
        "| noise | videos | mAP | HIT@1 | last loss | frame difference, mAP | random, mAP | training |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in result["rows"].items():
        if row["failed"]:
            lines.append(f"| {name} | FAILED: {row['failed'].replace('|', ' ')} | | | | | | |")
            continue
        cells = [f"{row['noise']:g}", str(row["videos"]), *(f"{row[key]:.3f}" for key in ("mAP", "HIT@1"))]
        cells += [f"{row['losses'][max(row['losses'], key=int)]:.4f}"]
        cells += [f"{row[key]:.3f}" for key in ("mAP_frame_difference", "mAP_random")]
        lines.append(f"| {' | '.join(cells)} | {row['training_s']:.0f} s |")
    return lines


# extraction ----------------------------------------------------------------------------------------------------------


def film(path: Path, seconds: float, size: tuple[int, int], fps: int = 25, seed: int = 0) -> Any:
    """Writes a video with planted highlights of any length and size, two seconds at a time; returns its plan."""
    import av

    from unisono.recipes.clips.data.synthetic import frames_of, plan, sound_of

    shown, rate = plan(seed, "film", 0, max(4, round(seconds / 2))), 44_100
    with av.open(str(path), mode="w") as container:
        video = container.add_stream("libx264", rate=fps, options={"preset": "ultrafast", "crf": "26", "g": "125"})
        video.width, video.height, video.pix_fmt = *size, "yuv420p"
        audio = container.add_stream("aac", rate=rate, layout="mono")
        samples = 0
        for clip in range(len(shown.kinds)):
            here = {name: getattr(shown, name)[clip : clip + 1] for name in _OF_CLIPS}
            part = replace(shown, **here, noise_seed=(shown.noise_seed + clip) % 2**31)
            for picture in frames_of(part, 64, fps):
                frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
                container.mux(video.encode(frame.reformat(*size, "yuv420p")))
            frame = av.AudioFrame.from_ndarray(sound_of(part, sample_rate=rate)[None], format="fltp", layout="mono")
            frame.sample_rate, frame.pts, frame.time_base = rate, samples, Fraction(1, rate)
            samples += frame.samples
            container.mux(audio.encode(frame))
        container.mux(video.encode(None))
        container.mux(audio.encode(None))
    return shown


_OF_CLIPS = ("kinds", "turns", "phases", "centres", "loudness", "pitches", "sweeps")


@dataclass(frozen=True)
class Video:
    """A video to extract."""

    name: str
    video: Path
    features: None = None


def fill(folder: str, videos: list[str], part: int, parts: int, workers: int) -> float:
    """Runs one process's share of an extraction as `prepare` does; returns seconds."""
    import torch

    from unisono.engine.recipe import Work
    from unisono.recipes.clips.data.extract import Extraction
    from unisono.recipes.clips.data.features import ExtractSettings

    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // parts))  # as the launcher sets it
    sources = [Video(Path(each).name, Path(each)) for each in videos]
    began = time.perf_counter()
    if videos:
        Extraction(Path(folder), sources, ExtractSettings()).fill(Work(Path(folder), part, parts), workers)
    return time.perf_counter() - began


WAYS = {"1 process, 1 worker": (1, 1), "1 process, 2 workers": (1, 2), "2 processes, 1 worker each": (2, 1)}


def extraction(options: argparse.Namespace, place: Path) -> Row:
    from unisono.recipes.clips.data.synthetic import make

    result = PARTS.begin("extraction", options)
    number, seconds = (2, 4) if options.quick else (8, 30)
    make(place / "mirror", 2 if options.quick else 40)
    (place / "films").mkdir()
    for seed in range(number):
        film(place / "films" / f"{seed}.mp4", seconds, (1280, 720), seed=seed)
    say("generated the videos")
    cases = {
        "1280 × 720, 25 frames per second": (sorted((place / "films").glob("*.mp4")), seconds),
        "mirror set: 32 × 32, 4 frames per second": (sorted((place / "mirror").glob("*.mp4")), 60),
    }
    with ExitStack() as stack:
        processes = [stack.enter_context(ProcessPoolExecutor(1, mp_context=get_context("spawn"))) for _ in range(2)]
        for process in processes:
            process.submit(fill, str(place), [], 0, 1, 1).result()  # the process has imported everything
        for case, (videos, length) in cases.items():
            took: dict[str, list[float]] = {name: [] for name in WAYS}
            for turn in range(-1, options.rounds or (1 if options.quick else 7)):  # the first turn is a warm-up
                names = list(WAYS)
                for name in names[turn % len(names) :] + names[: turn % len(names)]:
                    folder, (parts, workers) = place / "extracted", WAYS[name]
                    began = time.perf_counter()
                    running = [
                        process.submit(fill, str(folder), [str(each) for each in videos], part, parts, workers)
                        for part, process in enumerate(processes[:parts])
                    ]
                    for each in running:
                        each.result()
                    took[name] += [time.perf_counter() - began] if turn >= 0 else []
                    num_extracted = len(list(folder.glob("*/facts.json")))
                    assert num_extracted == len(videos), f"{num_extracted} of {len(videos)} were extracted"
                    shutil.rmtree(folder)
            result["rows"][case] = {"videos": len(videos), "seconds_each": length, "took_s": took}
            PARTS.write(result, options)
            say(case, {name: round(statistics.median(each), 2) for name, each in took.items()})
    return result


def extraction_table(result: Row) -> list[str]:
    lines = ["# clips: speed of feature extraction", "", *depends_on(result)]
    lines += [
        "- The configurations are interleaved in rotating order; medians. Each ratio compares neighbouring "
        "measurements. One worker may use all cores for decoding; two processes share the cores. Times include "
        "waiting for the disk.",
        "",
        "| videos | configuration | videos per s | seconds of video per s | relative to the first |",
        "|---|---|---|---|---|",
    ]
    for case, row in result["rows"].items():
        first = row["took_s"][next(iter(WAYS))]
        for name, took in row["took_s"].items():
            each = row["videos"] / statistics.median(took)
            times = statistics.median(one / other for one, other in zip(first, took, strict=True))
            videos = f"{row['videos']} of {row['seconds_each']} s, {case}"
            lines.append(f"| {videos} | {name} | {each:.2f} | {each * row['seconds_each']:.0f} | {times:.2f} |")
    return lines


# overhead ------------------------------------------------------------------------------------------------------------


class Loop(Variant):
    """A loop of clips_loops.py, in a separate process."""

    def start(self, case: Case, job: dict[str, Any]) -> None:
        """Starts the process, which waits before its first step."""
        self.folder.mkdir()
        ours, theirs = Pipe()
        job_json = json.dumps({**job, "folder": str(self.folder)})
        with (self.folder / "0.log").open("wb") as log:
            process = subprocess.Popen(
                [
                    sys.executable,
                    str(ROOT / "benchmarks" / "clips_loops.py"),
                    self.name,
                    str(theirs.fileno()),
                    job_json,
                ],
                env=self._environment(case, 0, job["threads"]) | job["heap"] | {"PYTHONPATH": str(ROOT / "src")},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        theirs.close()
        self.processes.append(process)
        self.pipes.append(ours)


def overhead(options: argparse.Namespace, place: Path) -> Row:
    from unisono.engine.recipe import Work
    from unisono.recipes.clips.recipe import Clips
    from unisono.recipes.clips.settings import Config

    result, cuda = (
        PARTS.begin("overhead", options, "_cuda" if options.device == "cuda" else ""),
        options.device == "cuda",
    )
    starts = 1 if options.quick else STARTS
    rounds = Rounds(options.rounds or (2 if options.quick else 12), 12, 2)
    config = {"data_path": "mirror", "cache_dir": str(place / "cache"), "num_videos": 8 if options.quick else 128}
    recipe = Clips(Config(**config))
    recipe.prepare(Work(place / "prepared"))
    recipe.dataset("train")
    weights = sum(weight.numel() for weight in recipe.model().parameters())
    job = {"device": options.device, "told": config, "batch": 32 if cuda else 4, "workers": 2, "threads": 1}
    job["rounds"] = asdict(rounds)
    result["settings"] = {**{name: job[name] for name in ("batch", "workers", "threads", "device")}, "weights": weights}
    result["settings"] |= {**asdict(rounds), "starts": 0}
    say("extracted the videos")
    for heap, variables in list(HEAPS.items())[: 1 if cuda else None]:  # the heap does not matter for GPU memory
        totals: list[Loop] = []
        for start in range(starts):
            variants = in_turns({**job, "heap": variables}, rounds, place / f"{heap} {start}")
            for total, variant in zip(totals, variants, strict=False):
                total.rounds_ms += variant.rounds_ms
                total.rounds_busy_ms += variant.rounds_busy_ms
            totals = totals or variants
            result["settings"]["starts"] = start + 1
            rows = {f"{each.name}, {heap}": numbers_of(each, totals[0]) for each in totals}
            result["rows"] |= {name: {**row, "starts": start + 1} for name, row in rows.items()}
            PARTS.write(result, options)
    return result


STARTS = 4
HEAPS: dict[str, dict[str, str]] = {
    "default heap": {},
    "retained heap": {"MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TRIM_THRESHOLD_": str(2**40)},
}


def in_turns(job: dict[str, Any], rounds: Rounds, place: Path) -> list[Loop]:
    """Starts the loops and interleaves their rounds until they end."""
    place.mkdir()
    variants = [Loop(name, place / name.replace(" ", "-")) for name in ("hand", "unisono", "hand again")]
    try:
        for variant in variants:
            variant.start(Case(1, False), job)
        for variant in variants:
            variant.report(note=False)
        for number in range(1 + rounds.rounds):
            turn = number % len(variants)
            for variant in variants[turn:] + variants[:turn]:
                variant.go()
                variant.report(note=number > 0)
            if number:
                say(f"round {number}", {each.name: round(each.rounds_ms[-1], 2) for each in variants})
        for variant in variants:
            variant.finish()
    finally:
        for variant in variants:
            variant.end()
    return variants


def overhead_table(result: Row) -> list[str]:
    rows, job = result["rows"], result["settings"]
    lines = ["# clips: step time compared with a hand-written loop", "", *depends_on(result)]
    lines += [
        f"- The recipe's model ({job['weights']:,} weights) and its windows of 30 clips, batches of {job['batch']}, "
        f"{job['workers']} loader workers, {'bf16' if job['device'] == 'cuda' else 'float32, one thread'}",
        f"- Each program is started {job['starts']} times and runs {job['rounds']} rounds of {job['steps']} steps, "
        f"interleaved with the others; the first {job['dropped']} steps of a round are not timed. Ratios are medians "
        "over all rounds, with quartiles; *hand again* is the same program a second time and shows the noise. CPU "
        "time is what other programs on the machine disturb least.",
        "- *default heap*: in the hand-written loop, the C library returns memory to the system and requests it "
        "again, up to 20,000 pages per step, varying between processes; unisono retains it. *retained heap*: all "
        f"three retain it ({', '.join(HEAPS['retained heap'])}), which compares the loops and not their heaps.",
        "- Weights differ because the gradient of the attention keys' bias is pure rounding error, which Adam scales "
        "up like any other gradient: 1e-7 after the first step, 1e-5 after the second, and more from there on.",
        "",
        "| | ms per step | ratio to hand | quartiles | CPU time | fastest rounds | weights differ by |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        hand = rows[f"hand, {name.split(', ')[1]}"]
        low, high = row["ratio_quartiles"]
        lines.append(
            f"| {name} | {row['step_ms']:.2f} | {row['ratio']:.4f} | {low:.4f} – {high:.4f} | {row['busy_ratio']:.4f} "
            f"| {row['fastest_ms'] / hand['fastest_ms']:.4f} | {row['weights_max_difference']:.1e} |"
        )
    if not result["quick"]:
        lines += ["", f"Target: at most {BARS['overhead']}.", ""]
        for heap in HEAPS:
            if f"unisono, {heap}" in rows:
                ratio, again = rows[f"unisono, {heap}"]["ratio"], rows[f"hand again, {heap}"]["ratio"]
                lines.append(f"- {heap}: {ratio:.3f} ({verdict(ratio <= BARS['overhead'])}); hand again {again:.3f}")
    return lines


# long ----------------------------------------------------------------------------------------------------------------


def long(options: argparse.Namespace, place: Path) -> Row:
    from unisono.recipes.clips.metrics.highlights import of_video

    result, minutes = PARTS.begin("long", options), (0.2, 0.4) if options.quick else (5, 20, 60)
    size = (160, 90) if options.quick else (1280, 720)
    result |= {
        "size": size,
        "rows": {f"{length:g} minutes": {"failed": "not run"} for length in minutes},
    }
    words = [*MirrorSet().words(place, options.quick), "--nproc", "1", "--output_dir", str(place / "run")]
    failed = unisono(["train", "clips", *words], options.patience_s)
    if failed:
        raise SystemExit(f"training failed: {failed}")
    say("trained the model")
    for length in minutes:
        name, began = f"{length:g} minutes", time.monotonic()
        path = place / f"{length:g}.mp4"
        shown = film(path, 60 * length, size, seed=1)
        made_s, mb = time.monotonic() - began, path.stat().st_size / 1e6
        words = ["clips", str(path), "--run", str(place / "run"), "--output_dir", str(place / "out"), "--longest", "20"]
        began = time.monotonic()
        code, output, peak_mib = peak_of([sys.executable, "-m", "unisono", *words], place / "said.txt")
        wall_s = time.monotonic() - began
        row: Row = {"failed": output[-300:] if code else "", "wall_s": wall_s, "made_s": made_s, "mb": mb}
        if not code:
            record = json.loads((place / "out" / path.stem / "clips.json").read_text())
            row |= of_video(shown.scores, record["scores"]) | {"num_clips": len(record["scores"])}
            scored = re.search(r"scored in ([\d.]+) s", output)
            assert scored is not None, output
            row |= {"peak_mib": peak_mib, "scored_s": float(scored[1]), "minutes": length, "cuts": len(record["clips"])}
        result["rows"][name] = row
        path.unlink()
        PARTS.write(result, options)
        say(name, row)
    return result


def peak_of(command: list[str], log: Path) -> tuple[int, str, float]:
    """Runs a command; returns its exit code, its output and its peak memory (RSS)."""
    with log.open("wb") as out:
        environ = os.environ | {"PYTHONPATH": str(ROOT / "src")}
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environ)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, log.read_text(errors="replace"), usage.ru_maxrss / 1024


def long_table(result: Row) -> list[str]:
    width, height = result["size"]
    lines = ["# clips: long videos", "", *depends_on(result)]
    lines += [
        f"- Videos of {width} × {height} at 25 frames per second, with sound, generated with planted highlights; "
        "`unisono clips VIDEO --run RUN --longest 20` with a model trained on the mirror set. Memory is the "
        "peak RSS of the whole command: scoring, cutting five clips, the page.",
        "",
        "| video | file | clips | peak memory | scoring, s per minute of video | whole command | mAP | HIT@1 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    good = {name: row for name, row in result["rows"].items() if not row["failed"]}
    for name, row in result["rows"].items():
        if name not in good:
            lines.append(f"| {name} | FAILED: {row['failed'].replace('|', ' ')} | | | | | | |")
            continue
        lines.append(
            f"| {name} | {row['mb']:.0f} MB | {row['num_clips']} | {row['peak_mib']:.0f} MiB "
            f"| {row['scored_s'] / row['minutes']:.2f} | {row['wall_s']:.0f} s "
            f"| {row['mAP']:.3f} | {row['HIT@1']:.0f} |"
        )
    if not result["quick"] and len(good) == len(result["rows"]) > 1:
        first, *_, last = good.values()
        grew = last["peak_mib"] - first["peak_mib"]
        bounded = verdict(grew <= BARS["growth_mib"])
        lines += ["", f"Target: bounded memory (it grew by {grew:.0f} MiB over {list(good)[-1]}): {bounded}."]
    return lines


# all -----------------------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="overhead: device to train on")
    parser.add_argument("--rounds", type=int, help="extraction, overhead: rounds per configuration (default 7, 12)")
    parser.add_argument("--patience_s", type=float, default=1800, help="time limit of each unisono run, in seconds")
    parts = {
        "learning": (learning, learning_table),
        "harder": (harder, harder_table),
        "extraction": (extraction, extraction_table),
        "overhead": (overhead, overhead_table),
        "long": (long, long_table),
    }
    return PARTS.main(parser, parts)


if __name__ == "__main__":
    sys.exit(main())
