"""A study of 20 trials that is killed twice, beside the same study without kills.

    PYTHONPATH=src python benchmarks/tune.py [--trials 20] [--kill_in 6,13]

Each kill sends SIGKILL to the study and to the trial that it is running, as soon as that trial has a checkpoint. Then
the same command runs again. The page compares every trial's values, outcome and evaluations with the study that was
not killed. Trials run one at a time, because the values of later trials depend on the order in which others finish.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

from machine import depends_on, machine, versions, without_folders

from unisono.tuning.study import Study, read_trials

HERE = Path(__file__).resolve().parent
RECIPE = f"{HERE.parent / 'examples/own_model/recipe.py'}:TwoMoons"
SEARCH = ("learning_rate=log:1e-5..1e-1", "hidden=8..128:8", "optimizer=adamw|sgd", "weight_decay=0..0.3")
SETTINGS = ("--gpus", "0", "--num_points", "1024", "--eval_every", "40", "--num_epochs", "20")
MARK = "UNISONO_BENCHMARK_STUDY"


def start(folder: Path, trials: int, mark: str) -> subprocess.Popen[bytes]:
    """Starts the study, or continues it."""
    words = [sys.executable, "-m", "unisono", "tune", RECIPE, *SETTINGS, "--trials", str(trials)]
    words += [word for space in SEARCH for word in ("--search", space)]
    words += ["--output_dir", str(folder)]
    environ = {**os.environ, MARK: mark, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(words, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def kill_everything(mark: str) -> int:
    """Sends SIGKILL to all processes of a study; returns how many there were."""
    wanted, killed = f"{MARK}={mark}".encode(), 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (process / "environ").read_bytes().split(b"\0"):
                os.kill(int(process.name), signal.SIGKILL)
                killed += 1
        except OSError:
            continue
    return killed


def run(folder: Path, trials: int, kills: list[int]) -> list[int]:
    """Runs a study to its end; kills it in each trial of `kills`. Returns the number of processes killed each time."""
    killed = []
    for trial in kills:
        mark = uuid.uuid4().hex
        study = start(folder, trials, mark)
        checkpoints = folder / "trials" / f"{trial:04d}" / "checkpoints"
        while not list(checkpoints.glob("step_*/manifest.json")):
            if study.poll() is not None:
                raise RuntimeError(f"the study ended with {study.returncode} before trial {trial} had a checkpoint")
            time.sleep(0.01)
        killed.append(kill_everything(mark))
        study.wait()
    code = start(folder, trials, uuid.uuid4().hex).wait()
    if code:
        raise RuntimeError(f"the study ended with {code}")
    return killed


def summary(study: Study) -> list[dict[str, Any]]:
    """Every trial of a study."""
    return [
        {
            "trial": trial.number,
            "state": trial.state,
            "params": dict(trial.params),
            "value": trial.value,
            "step": trial.step,
            "evaluations": [list(pair) for pair in trial.evaluations],
            "starts": len(json.loads((trial.folder / "run.json").read_text())["starts"]),
        }
        for trial in study.trials
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--kill_in", default="6,13", help="trials in which the study is killed")
    parser.add_argument("--quick", action="store_true", help="smoke test: 3 trials, killed in the first and the second")
    parser.add_argument("--output", type=Path, default=HERE / "results")
    options = parser.parse_args()
    trials = 3 if options.quick else options.trials
    kills = [0, 1] if options.quick else [int(part) for part in options.kill_in.split(",")]
    with tempfile.TemporaryDirectory() as place:
        began = time.perf_counter()
        run(Path(place, "whole"), trials, [])
        whole_s = time.perf_counter() - began
        killed = run(Path(place, "killed"), trials, kills)
        whole, after = read_trials(Path(place, "whole")), read_trials(Path(place, "killed"))
        result: dict[str, Any] = {
            "machine": machine(),
            "versions": versions(["torch", "unisono", "optuna"]),
            "date": time.strftime("%Y-%m-%d"),
            "command": " ".join(["python", "benchmarks/tune.py", *without_folders(sys.argv[1:])]),
            "search": list(SEARCH),
            "settings": list(SETTINGS),
            "trials": trials,
            "kills": [{"trial": trial, "processes": count} for trial, count in zip(kills, killed, strict=True)],
            "whole_s": whole_s,
            "whole": summary(whole),
            "killed": summary(after),
            "best_whole": None if whole.best is None else whole.best.number,
            "best_killed": None if after.best is None else after.best.number,
        }
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "tune.json").write_text(json.dumps(result, indent=1) + "\n")
    (options.output / "tune.md").write_text(page(result))
    print(page(result))


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether a trial of one study equals that of the other, bit for bit."""
    return all(one[name] == other[name] for name in ("state", "params", "value", "evaluations"))


def page(result: dict[str, Any]) -> str:
    """The results as Markdown."""
    pairs = list(zip(result["whole"], result["killed"], strict=True))
    num_same = sum(same(one, other) for one, other in pairs)
    states = [trial["state"] for trial in result["killed"]]
    kills = " and ".join(f"trial {kill['trial']} ({kill['processes']} processes)" for kill in result["kills"])
    lines = [
        "# A study that is killed twice",
        "",
        *depends_on(result),
        f"- Search: {', '.join(result['search'])}; {' '.join(result['settings'])}",
        "",
        f"SIGKILL of all processes in {kills}, as soon as that trial had a checkpoint; then the same command again.",
        "",
        f"- finished trials: {len(states)} (target {result['trials']}): {states.count('complete')} complete, "
        f"{states.count('pruned')} pruned, {states.count('failed')} failed",
        f"- trials that are equal to those of the study without kills, bit for bit: {num_same} of {len(pairs)}",
        f"- best trial: {result['best_killed']}, without kills {result['best_whole']}",
        "",
        "| trial | outcome | starts | eval/loss | last step | same as without kills |",
        "|---:|---|---:|---:|---:|---|",
    ]
    for one, other in pairs:
        value = "" if other["value"] is None else f"{other['value']:.5f}"
        verdict = "yes" if same(one, other) else "NO"
        row = (other["trial"], other["state"], other["starts"], value, other["step"], verdict)
        lines.append(f"| {' | '.join(map(str, row))} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
