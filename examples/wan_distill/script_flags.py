"""Translates the command line of the original script into settings of unisono.

Most of the script's flags are flags or aliases of unisono (`unisono train wan-distill --help`). This module handles the
other flags: each has the effect that its name suggests, or a note explains its effect.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from unisono.cli import script_arguments
from unisono.cli.script_arguments import ArgumentReader, flag_name
from unisono.cluster.environment import World, detect
from unisono.config import Resolved
from unisono.devices import choose, visible_gpus
from unisono.errors import ConfigError
from unisono.formatting import format_count
from unisono.recipes.wan_distill.checks import check_config
from unisono.recipes.wan_distill.recipe import WanDistill

HERE = Path(__file__).resolve().parent
OUTPUT = "./outputs"
NUM_EPOCHS = 10
NUM_WORKERS = 0
TINY_STUDENT = "tiny_student.json"
FOR_REAL_TEACHERS = ("config/student_config.json", "config/student_config_small.json")
STATIC_PROMPTS = "data/static_prompts.txt"

_SWITCHES = {
    "multi_gpu": "All GPUs from one process: --strategy dp --gpus all.",
    "distributed": "Not needed: unisono reads ranks from torchrun, SLURM, MPI or accelerate.",
    "teacher_on_cpu": "The old name of --teacher_device_strategy cpu.",
    "save_samples": "Write images of teacher and student side by side to output_dir/previews.",
}
_WITH_VALUE = {
    "local_rank": "Not needed, like --distributed.",
    "sample_interval": "Epochs between sample images (1 with --save_samples alone); --preview_every counts steps.",
    "sample_dir": "Not used: sample images are in output_dir/previews.",
}
_PLACEMENTS = {
    "auto": "on each GPU if it fits, else moved to the GPU block by block (original script: spread over two or more)",
    "cpu": "weights in host memory, each block computed on the GPU (original script: on the CPU)",
    "gpu0": "each GPU has its own copy of the teacher (original script: only the first GPU, the others failed)",
}


@dataclass
class ScriptFlags:
    """Values of the flags of the original script that unisono does not have."""

    multi_gpu: bool = False
    distributed: bool = False
    teacher_on_cpu: bool = False
    save_samples: bool = False
    sample_dir: str | None = None
    sample_interval: str | None = None


def help_text() -> str:
    """Returns the text that precedes the help of `unisono train wan-distill`."""
    flags = {f"--{name}": text for name, text in _SWITCHES.items()}
    flags |= {f"--{name} {name.rpartition('_')[2].upper()}": text for name, text in _WITH_VALUE.items()}
    return f"""usage: python train_distillation.py --teacher_path MODEL --data_path FILE [--student_config FILE] [flags]
       torchrun --nproc_per_node=N train_distillation.py ...

Runs `unisono train wan-distill` with the defaults --output_dir {OUTPUT}, {NUM_EPOCHS} epochs and --num_workers
{NUM_WORKERS}. It accepts the flags of the original script below, and all settings of the recipe after them.

Flags of the original script:
""" + "".join(f"  {flag}\n      {text}\n" for flag, text in flags.items())


def resolve(arguments: Sequence[str]) -> Resolved:
    """Resolves arguments of `unisono train wan-distill` to all settings."""
    return script_arguments.resolve_settings(WanDistill, arguments)


def completed(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the command line for `unisono train wan-distill`, with defaults, and notes for the user."""
    arguments, script = translated(argv)
    resolved, world, names = resolve(arguments), detect(), set(map(flag_name, argv))
    gpus = 0 if resolved.values["gpus"] == "0" else len(visible_gpus())
    if resolved.values["output_dir"] is None:
        arguments.append(f"--output_dir={OUTPUT}")
    more, remarks = _devices(script, resolved, world, gpus)
    arguments += more
    for part in (_tiny(resolved), _teacher(script, resolved, gpus), _length(resolved, names)):
        arguments += part[0]
        remarks += part[1]
    more, default_remarks = _defaults(resolved, names, gpus)
    arguments += more
    remarks += default_remarks
    resolved = resolve(arguments)
    check_config(resolved.build(WanDistill.Config))
    more, sample_remarks = _samples(script, resolved, world)
    return arguments + more, remarks + sample_remarks


def translated(argv: Sequence[str]) -> tuple[list[str], ScriptFlags]:
    """Separates unisono's arguments from the flags that only the original script has."""
    arguments: list[str] = []
    script = ScriptFlags()
    reader = ArgumentReader(argv)
    for argument in reader:
        name = flag_name(argument)
        if name in _SWITCHES:
            if "=" in argument:
                raise ConfigError(f"--{name} takes no value")
            setattr(script, name, True)
        elif name == "local_rank":  # the launcher also sets it in the environment
            reader.value(argument)
        elif name in _WITH_VALUE:
            setattr(script, name, reader.value(argument))
        elif name == "sample_prompts":
            arguments.append(f"--{name}={_joined(reader.values(argument))}")
        elif name == "mixed_precision":  # a switch in the original script
            arguments.append(f"--{name}={(reader.values(argument, most=1) or ['bf16'])[0]}")
        elif not name and (argument == "python" or argument.endswith(".py")):
            raise ConfigError(f"unexpected {argument!r}: torchrun starts python by itself; use {torchrun(2)}")
        else:
            arguments.append(argument)
            if name:
                arguments += reader.values(argument) if "=" not in argument else []
    return arguments, script


def torchrun(processes: int) -> str:
    """Returns the command that starts this many processes."""
    return f"torchrun --nproc_per_node={processes} train_distillation.py ..."


def _joined(prompts: list[str]) -> str:
    if not prompts:
        raise ConfigError("--sample_prompts needs one or more prompts, each in quotes")
    if len(prompts) > 1 and (odd := [prompt for prompt in prompts if "|" in prompt or prompt.endswith(".txt")]):
        raise ConfigError(
            f"--sample_prompts: {odd[0]!r} cannot be one of several prompts; pass prompts without |, or one .txt file"
        )
    return "|".join(prompts)


def _devices(script: ScriptFlags, resolved: Resolved, world: World, gpus: int) -> tuple[list[str], list[str]]:
    remarks: list[str] = []
    if world.launcher in ("torchrun", "accelerate") and 0 < gpus < world.local_size:
        raise ConfigError(
            f"{world.launcher} started {world.local_size} processes, but this machine has {format_count(gpus, 'GPU')}; "
            f"use {torchrun(gpus)}, or let processes share a GPU with `unisono train wan-distill --gpus {gpus} "
            f"--nproc {world.local_size}`"
        )
    if world.launcher != "plain":
        for flag, is_set in {"--distributed": script.distributed, "--multi_gpu": script.multi_gpu}.items():
            remarks += [f"{flag} is not needed: {world.launcher} sets the ranks"] if is_set else []
        if world.size > 1:
            remarks.append(f"[Rank 0] Distributed training initialized: {world.size} processes by {world.launcher}")
        return [], remarks
    if script.distributed:
        remarks.append(f"--distributed needs other processes: start them with {torchrun(4)}, or use --gpus all")
    if script.multi_gpu and resolved.explicit("strategy") and resolved.values["strategy"] != "dp":
        raise ConfigError(
            f"--multi_gpu means --strategy dp, which contradicts --strategy {resolved.values['strategy']}; use one"
        )
    chosen = resolved.explicit("gpus") or resolved.explicit("nproc")
    if script.multi_gpu and gpus > 1:
        number = len(choose(resolved.values["gpus"], visible_gpus()).gpus) if resolved.explicit("gpus") else gpus
        remarks.append(
            f"Model wrapped with DataParallel on {number} GPUs (--strategy dp); {torchrun(number)} is faster"
        )
        return ["--strategy=dp"] + ([] if chosen else ["--gpus=all"]), remarks
    if script.multi_gpu:
        remarks.append(f"--multi_gpu has no effect: this machine has {'one GPU' if gpus else 'no GPU'}")
    return [] if chosen else ["--gpus=1"], remarks


def _tiny(resolved: Resolved) -> tuple[list[str], list[str]]:
    """Adapts student and prompts to the tiny teacher, which was trained only on the built-in shapes."""
    if str(resolved.values["teacher_path"]).lower() != "tiny":
        return [], []
    arguments: list[str] = []
    remarks: list[str] = []
    if _is_ours(resolved.values["student_config"], FOR_REAL_TEACHERS):
        small = Path(resolved.values["student_config"]).with_name(TINY_STUDENT)
        arguments.append(f"--student_config={small}")
        remarks.append(f"{resolved.values['student_config']} is for a real teacher: using {small} for the tiny one")
    if _is_ours(resolved.values["data_path"], (STATIC_PROMPTS,)):
        arguments.append("--data_path=shapes")
        remarks.append("the tiny teacher generates only coloured shapes: using --data_path shapes, its own prompts")
    return arguments, remarks


def _is_ours(path: str | None, names: Sequence[str]) -> bool:
    return path is not None and Path(path).resolve() in [HERE / name for name in names]


def _teacher(script: ScriptFlags, resolved: Resolved, gpus: int) -> tuple[list[str], list[str]]:
    strategy, chosen = resolved.values["teacher_device_strategy"], resolved.explicit("teacher_device_strategy")
    remarks: list[str] = []
    arguments: list[str] = []
    if script.teacher_on_cpu:
        if chosen and strategy != "cpu":
            raise ConfigError(
                f"--teacher_on_cpu and --teacher_device_strategy {strategy} contradict each other; use one"
            )
        remarks.append("--teacher_on_cpu is an old name of --teacher_device_strategy cpu")
        arguments, strategy, chosen = ["--teacher_device_strategy=cpu"], "cpu", True
    if strategy == "balanced" and not resolved.values["online"]:
        remarks.append(
            "--teacher_device_strategy balanced needs --online; using auto: during the roll-out each GPU has its own "
            "copy of the teacher, or moves it block by block if it does not fit"
        )
        return ["--teacher_device_strategy=auto"], remarks
    if chosen and strategy in _PLACEMENTS:
        placement = _PLACEMENTS[strategy] if gpus else "without a GPU the teacher runs on the CPU"
        remarks.append(f"--teacher_device_strategy {strategy}: {placement}")
    return arguments, remarks


def _length(resolved: Resolved, names: set[str]) -> tuple[list[str], list[str]]:
    remarks: list[str] = []
    if "num_steps" in names:
        remarks.append(
            "--num_steps counts optimizer steps of the whole run, on any number of GPUs (original script: of each "
            "process)"
        )
    limits = [name for name in ("max_steps", "num_epochs") if resolved.values[name] is not None]
    if not limits:
        remarks.append(f"no --num_steps and no --num_epochs: {NUM_EPOCHS} epochs (original script: at most 500 steps)")
    if "num_epochs" in names or not limits:
        remarks.append(
            "an epoch is a pass over everything that the teacher generated, at all noise levels: --rollouts × --pairs "
            "per prompt (original script: over the prompts)"
        )
    return [] if limits else [f"--num_epochs={NUM_EPOCHS}"], remarks


def _defaults(resolved: Resolved, names: set[str], gpus: int) -> tuple[list[str], list[str]]:
    """Returns defaults, and notes about those that differ from the original script's; the tiny teacher has its own."""
    remarks: list[str] = []
    if "mixed_precision" in names:
        kind = {"no": "32 bit"}.get(resolved.values["mixed_precision"], resolved.values["mixed_precision"])
        remarks.append(f"--mixed_precision takes effect: the student computes in {kind} (original script: ignored)")
    if str(resolved.values["teacher_path"]).lower() == "tiny":
        return [], remarks
    arguments = [] if resolved.explicit("num_workers") else [f"--num_workers={NUM_WORKERS}"]
    theirs = {"learning_rate": "1e-5", "mixed_precision": "no"}
    ours = {name: f"{resolved.values[name]:g}" if name == "learning_rate" else resolved.values[name] for name in theirs}
    if gpus:
        theirs, ours = {**theirs, "teacher_dtype": "float32"}, {**ours, "teacher_dtype": "bfloat16"}
    differ = [name for name in theirs if not resolved.explicit(name)]
    if differ:
        flags = ", ".join(f"--{'lr' if name == 'learning_rate' else name} {ours[name]}" for name in differ)
        remarks.append(f"defaults: {flags} (original script: {', '.join(theirs[name] for name in differ)})")
    return arguments, remarks


def _samples(script: ScriptFlags, resolved: Resolved, world: World) -> tuple[list[str], list[str]]:
    """Converts the interval of sample images from epochs to steps."""
    if not (script.save_samples or script.sample_interval or script.sample_dir):
        return [], []
    folder = f"{resolved.values['output_dir']}/previews"
    remarks = [f"samples are in {folder}: the teacher's on the left, the student's on the right"]
    if script.sample_dir:
        remarks[0] = f"--sample_dir {script.sample_dir} is not used: {remarks[0]}"
    if not (script.save_samples or script.sample_interval):
        return [], remarks
    interval = script.sample_interval or "1"
    if not (interval.isascii() and interval.isdecimal() and int(interval) > 0):
        raise ConfigError(f"--sample_interval: expected a number of epochs of at least 1, got {interval!r}")
    if resolved.explicit("preview_every"):
        if script.sample_interval:
            raise ConfigError("--sample_interval (epochs) and --preview_every (steps) contradict each other; use one")
        return [], remarks
    samples, batch = num_samples(resolved), _global_batch(resolved, world)
    steps = max(1, -(-samples * int(interval) // batch))
    remarks.append(
        f"--sample_interval {interval}: every {steps:,} steps (--preview_every), since an epoch has {samples:,} "
        f"samples and a step {batch}"
    )
    return [f"--preview_every={steps}"], remarks


def num_samples(resolved: Resolved) -> int:
    """Returns the number of samples per epoch, which is prompts × roll-outs × noise levels."""
    from unisono.recipes.wan_distill.data.prompts import prompts_of  # imports torch

    values = resolved.values
    prompts = prompts_of(values["data_path"], values["eval_data_path"], values["num_eval"]).train
    return len(prompts) * int(values["rollouts"]) * max([1] if values["online"] else _levels(resolved))


def _levels(resolved: Resolved) -> Iterator[int]:
    values = resolved.values
    yield values["pairs"] if values["velocity_weight"] else 1
    for weight, number in (("trajectory_weight", "trajectory_points"), ("few_step_weight", "few_steps")):
        yield min(values[number], values["teacher_steps"]) if values[weight] else 1


def _global_batch(resolved: Resolved, world: World) -> int:
    values = resolved.values
    if values["global_batch_size"]:
        return int(values["global_batch_size"])
    if world.launcher != "plain":
        processes = world.size
    elif resolved.explicit("nproc"):
        processes = values["nproc"]
    else:
        processes = max(1, choose(values["gpus"], visible_gpus()).requested)
    return int(values["batch_size"] * processes * (values["gradient_accumulation_steps"] or 1))
