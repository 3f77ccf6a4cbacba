"""Compares the built-in scorer of clips with baselines and with a trained run.

    python benchmarks/clips_untrained.py untrained              # some minutes on two CPU cores
    python benchmarks/clips_untrained.py untrained --quick --output FOLDER    # smoke test; the numbers mean nothing

Two sets of videos: generated talks (`clips_talk.py`), whose highlights are two events at once, and the mirror set,
whose highlights differ from decoys only by the direction of a motion. A trained run can learn both. The built-in
scorer can find the first, because it measures such events, and by design not the second.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from pathlib import Path

import numpy as np
from clips import BASELINES, film, peak_of, say, train
from clips_talk import make as make_talks
from machine import depends_on
from parts import ROOT, Parts, Row, verdict

sys.path.insert(0, str(ROOT / "src"))
PARTS = Parts("clips", ["torch", "av", "numpy", "opencv-python-headless"])
MEASURES = ("mAP", "HIT@1", "kendall_tau", "spearman_rho")
LONG_S_PER_MINUTE = 1.01  # `clips.py long`: an hour of 1280 x 720 with a trained run


def built_in(videos: list[Path], truths: list[np.ndarray]) -> Row:
    """The built-in scorer's metrics, averaged over videos."""
    from unisono.recipes.clips.metrics.highlights import of_video
    from unisono.recipes.clips.untrained.scorer import score

    each = [of_video(truth, score(video).scores) for video, truth in zip(videos, truths, strict=True)]
    return {measure: float(np.nanmean([metrics[measure] for metrics in each])) for measure in MEASURES}


def untrained(options: argparse.Namespace, place: Path) -> Row:
    from unisono.recipes.clips.data.synthetic import make, plan

    result = PARTS.begin("untrained", options)
    result["command"] = result["command"].replace("clips.py", Path(__file__).name)
    numbers, num_clips = ((3, 2), 16) if options.quick else ((24, 8), 60)
    make_talks(place / "talks", numbers[0], seed=0, num_clips=num_clips)
    held_out = make_talks(place / "talks_eval", numbers[1], seed=1, num_clips=num_clips)
    say("generated the talks")
    few = "1" if options.quick else "30"
    words = ["--data_path", str(place / "talks"), "--eval_data_path", str(place / "talks_eval"), "--num_epochs", few]
    words += ["--nproc", "1", "--eval_every", "0"]
    result["talks"] = {"trained": train("talks", options, place, words)}
    videos = sorted((place / "talks_eval").glob("*.mp4"))
    trained = result.pop("talks")["trained"]
    result["talks"] = {"built_in": built_in(videos, [talk.scores for talk in held_out]), "trained": trained}

    number = 2 if options.quick else 8
    make(place / "mirror", number, split="eval")
    plans = [plan(0, "eval", each) for each in range(number)]
    result["mirror"] = {"built_in": built_in(sorted((place / "mirror").glob("*.mp4")), [each.scores for each in plans])}

    minutes, size = (0.2, (160, 90)) if options.quick else (20, (1280, 720))
    path = place / "long.mp4"
    film(path, 60 * minutes, size, seed=1)
    began = time.monotonic()
    command = [sys.executable, "-m", "unisono", "clips", str(path), "--output_dir", str(place / "out")]
    code, output, peak_mib = peak_of([*command, "--longest", "20"], place / "said.txt")
    scored = re.search(r"scored in ([\d.]+) s", output)
    assert not code and scored is not None, output
    result["long"] = {"minutes": minutes, "scored_s": float(scored[1]), "wall_s": time.monotonic() - began}
    result["long"]["peak_mib"] = peak_mib
    return result


def table(result: Row) -> list[str]:
    lines = ["# clips: the built-in scorer", "", *depends_on(result)]
    lines += [
        "- Talks: 24 generated videos of 2 minutes to train on and 8 held-out ones. A highlight is two events at once "
        "(laughter, applause or a raised voice, with motion, quick cuts or a new slide); each event also happens by "
        "itself. These are events that the built-in scorer measures, so the set says nothing about other videos.",
        "- Mirror set: the direction of a motion distinguishes highlights, which the built-in scorer does not "
        "measure. clips_learning.md has a trained run (mAP 1.000) and baselines (frame difference 0.613).",
        "",
        f"| | scorer | {' | '.join(MEASURES)} |",
        "|---" * (len(MEASURES) + 2) + "|",
    ]
    for name, label in (("talks", "talks"), ("mirror", "mirror set")):
        rows = result[name]
        for kind in rows:
            shown = "built-in" if kind == "built_in" else "trained run"
            if rows[kind].get("failed"):
                lines.append(f"| {label} | {shown} | FAILED |" + " |" * (len(MEASURES) - 1))
                continue
            lines.append(f"| {label} | {shown} | " + " | ".join(f"{rows[kind][key]:.3f}" for key in MEASURES) + " |")
        for kind in () if rows.get("trained", {"failed": "not run"})["failed"] else BASELINES:
            cells = " | ".join(f"{rows['trained'][f'{key}_{kind}']:.3f}" for key in MEASURES)
            lines.append(f"| {label} | baseline: {kind.replace('_', ' ')} | {cells} |")
    long = result["long"]
    per_minute = long["scored_s"] / long["minutes"]
    lines += [
        "",
        f"Speed: {long['minutes']:g} minutes of video scored in {long['scored_s']:.0f} s, {per_minute:.2f} s per "
        f"minute of video; peak memory of the whole command {long['peak_mib']:.0f} MiB.",
    ]
    if not result["quick"] and not result["talks"]["trained"].get("failed"):
        talks = result["talks"]
        best = max(talks["trained"][f"mAP_{kind}"] for kind in BASELINES)
        mine = talks["built_in"]["mAP"]
        lines += [
            "",
            f"Target on talks: mAP at least 0.1 above the best baseline ({mine:.3f}, {best:.3f}): "
            f"{verdict(mine >= best + 0.1)}.",
            f"Target: at most {LONG_S_PER_MINUTE} s per minute of video, as with a trained run: "
            f"{verdict(per_minute <= LONG_S_PER_MINUTE)}.",
        ]
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--patience_s", type=float, default=1800, help="time limit of each unisono run, in seconds")
    return PARTS.main(parser, {"untrained": (untrained, table)})


if __name__ == "__main__":
    sys.exit(main())
