"""unisono slurm RECIPE --nodes 2 --gpus-per-node 8: writes a run's batch script, submits it, shows its progress."""

from __future__ import annotations

import os
import re
import sys
import time
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path

from unisono.cli.train import split_words
from unisono.cluster.sbatch import BatchJob, script
from unisono.cluster.slurm import submit
from unisono.config.resolve import Resolved
from unisono.engine.batch import plan_batch
from unisono.engine.checks import check_settings
from unisono.engine.registry import load_recipe
from unisono.engine.run import configure
from unisono.errors import EXIT_DONE, ConfigError, UserError
from unisono.settings import Settings

_USAGE = """usage: unisono slurm RECIPE --nodes 2 --gpus-per-node 8 [options] [--submit [--follow]] [training flags]

Writes a batch script for SLURM: one srun task per GPU. The script starts all ranks again when one dies (up to
--max_restarts times), and puts the job back into the queue when the time limit is near or the job is preempted; the
run goes on from its checkpoint. Training flags are checked here and go into the script.

  --nodes N                machines (default 1)
  --gpus-per-node N        GPUs on each, also type:N
  --ntasks-per-node N      CPU ranks on each, where there are no GPUs
  --cpus-per-task N        cores for each rank
  --mem M                  memory on each machine, for instance 64G
  --time T                 time limit, for instance 24:00:00
  --partition P  --account A  --qos Q  --constraint C
  --job-name J             default: the recipe's name
  --module M               `module load M` before the start (repeatable)
  --env NAME=VALUE         variable for the job (repeatable)
  --signal-before 120      seconds before the time limit at which the run saves and stops; 0: never
  --no-requeue             stop for good at the time limit (exit code 75) instead of going on later
  --output-script FILE     default: <recipe>.sbatch
  --force                  write over an existing script
  --print                  print the script and do nothing else
  --submit                 submit it with sbatch
  --follow                 show the job's state and the run's progress until it ends (Ctrl-C leaves the job alone)
"""

_TEXTS = ("gpus_per_node", "time", "partition", "account", "qos", "constraint", "mem", "job_name")
_NUMBERS = ("nodes", "ntasks_per_node", "cpus_per_task", "signal_before")
_REPEATABLE = ("module", "env")
_VALUES = (*_TEXTS, *_NUMBERS, *_REPEATABLE, "output_script")
_SWITCHES = ("no_requeue", "force", "print", "submit", "follow")
_SRUN_DECIDES = {
    "gpus": "gpus_per_node",
    "nproc": "ntasks_per_node",
    "nnodes": "nodes",
    "node_rank": "nodes",
    "rdzv_endpoint": "nodes",
}


@dataclass
class _Options:
    """Our own options as text, and the words that belong to training."""

    values: dict[str, list[str]] = field(default_factory=dict)
    switches: set[str] = field(default_factory=set)
    training: list[str] = field(default_factory=list)

    def text(self, name: str) -> str | None:
        return self.values[name][-1] if name in self.values else None

    def number(self, name: str) -> int | None:
        text = self.text(name)
        if text is not None and not (text.isascii() and text.isdecimal()):
            raise ConfigError(f"--{name}: expected a whole number, got {text!r}")
        return None if text is None else int(text)


def main(words: list[str]) -> int:
    """Runs the command; with --follow the exit code is the job's."""
    options = _read(words)
    recipe, config, flags, wants_help, _ = split_words(options.training)
    if wants_help:
        print(_USAGE, end="")
        return EXIT_DONE
    if recipe is None:
        raise UserError(
            "slurm: which recipe? for instance: unisono slurm my_file.py:MyRecipe --nodes 2 --gpus-per-node 8"
        )
    if "follow" in options.switches and "submit" not in options.switches:
        raise ConfigError("--follow: there is no job yet; use --submit --follow")
    kind = load_recipe(recipe)
    resolved = configure(kind, file=config, flags=flags)
    _check(resolved)
    job = _job(options, resolved, recipe)
    batch = plan_batch(resolved.build(Settings).batch, resolved.explicit, devices=job.ranks)
    text = script(job)
    if "print" in options.switches:
        print(text, end="")
        return EXIT_DONE
    path = Path(options.text("output_script") or f"{_plain(recipe.rpartition(':')[2] or recipe)}.sbatch")
    _write(path, text, overwrite="force" in options.switches)
    _explain(job, path, batch.global_batch)
    if "submit" not in options.switches:
        print(f"Submit it with: sbatch {path}")
        return EXIT_DONE
    number = submit(path)
    print(
        f"Submitted as job {number}; its log is {job.job_name}-{number}.log. To stop it: scancel {number}", flush=True
    )
    if "follow" not in options.switches:
        return EXIT_DONE
    from unisono.cli.follow import follow

    return follow(number, Path(job.output_dir), resolved.values["max_steps"])


def _read(words: list[str]) -> _Options:
    """Our own options win over training flags of the same name; those can still stand in --config."""
    options, waiting = _Options(), list(words)
    while waiting:
        word = waiting.pop(0)
        flag, has_value, value = word.partition("=")
        name = flag.removeprefix("--").replace("-", "_") if flag.startswith("--") else ""
        if name in _SWITCHES:
            if has_value:
                raise ConfigError(f"{flag} takes no value")
            options.switches.add(name)
        elif name in _VALUES:
            if not has_value and (not waiting or waiting[0].startswith("--")):
                raise ConfigError(f"{flag}: expected a value")
            if name in options.values and name not in _REPEATABLE:
                raise ConfigError(f"{flag} is given twice")
            options.values.setdefault(name, []).append(value if has_value else waiting.pop(0))
        else:
            options.training.append(word)
            near = get_close_matches(name, [*_VALUES, *_SWITCHES], n=1, cutoff=0.85)
            if near and name not in _SRUN_DECIDES and not _is_setting(name):
                raise ConfigError(f"unknown flag {flag}; did you mean --{near[0].replace('_', '-')}?")
    return options


def _is_setting(name: str) -> bool:
    from unisono.config.fields import fields_by_name

    return name in fields_by_name((Settings,))


def _check(resolved: Resolved) -> None:
    settings = resolved.build(Settings)
    for name, instead in _SRUN_DECIDES.items():
        if resolved.explicit(name):
            raise ConfigError(f"{name}: under SLURM srun starts the ranks; use --{instead.replace('_', '-')} instead")
    check_settings(settings)
    if settings.run.resume == "never":
        raise ConfigError("resume: never would refuse to go on after a requeue; leave it out and use a new output_dir")


def _job(options: _Options, resolved: Resolved, recipe: str) -> BatchJob:
    numbers = {name: number for name in _NUMBERS if (number := options.number(name)) is not None}
    texts = {name: options.text(name) for name in _TEXTS}
    job_name = texts.pop("job_name") or _plain(recipe.rpartition(":")[2] or recipe).lower()
    # Fixed when the script is written: a requeued job goes on in it, and so does the same script submitted again.
    output = resolved.values["output_dir"] or f"runs/{job_name}-{time.strftime('%Y%m%d-%H%M%S')}"
    given = () if resolved.explicit("output_dir") else (f"--output_dir={output}",)
    job = BatchJob(
        job_name=job_name,
        folder=os.getcwd(),
        output_dir=output,
        python=sys.executable,
        train=(*options.training, *given),
        modules=options.values.get("module", ()),
        environ=dict(_variable(text) for text in options.values.get("env", ())),
        requeue="no_requeue" not in options.switches,
        max_restarts=resolved.values["max_restarts"],
        **numbers,  # type: ignore[arg-type]
        **texts,  # type: ignore[arg-type]
    )
    strategy = resolved.values["strategy"]
    if strategy in ("single", "dp") and job.ranks > 1:
        raise ConfigError(
            f"strategy {strategy} is for one process, and this job has {job.ranks}; use ddp, fsdp or auto"
        )
    return job


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"env: expected NAME=VALUE, got {text!r}")
    return name, value


def _plain(name: str) -> str:
    """The name with nothing in it that a file or a job cannot be called."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name).lstrip("-.") or "run"


def _write(path: Path, text: str, *, overwrite: bool) -> None:
    try:
        with path.open("w" if overwrite else "x") as file:
            file.write(text)
    except FileExistsError:
        raise UserError(f"{path} is there already; give --force to write over it, or another --output-script") from None
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}); give another --output-script") from None


def _explain(job: BatchJob, path: Path, global_batch: int) -> None:
    on = f"{job.tasks_per_node} {'GPU' if job.gpus else 'CPU rank'}{'s' * (job.tasks_per_node > 1)}"
    size = f"{job.nodes} node{'s' * (job.nodes > 1)} with {on} each, {job.ranks} rank{'s' * (job.ranks > 1)}"
    print(f"{path}: {size}, {global_batch} samples a step")
    print(f"  run folder     {job.output_dir} (must be on a file system that all nodes share)")
    if job.signal_before:
        then = "goes back into the queue and on from there" if job.requeue else "ends with exit code 75"
        print(f"  time limit     {job.signal_before} s before it the run saves a checkpoint, stops, and {then}")
    print(f"  a rank dies    all ranks start again from the last checkpoint, up to {job.max_restarts} times")
    if job.environ or job.modules:
        print(f"  environment    {', '.join([*(f'module {m}' for m in job.modules), *job.environ])}")
