"""Translates the command line of the original script into settings of unisono.

Most of its flags are flags or aliases of unisono (`unisono train wan-distill --help`). This module handles the others:
each does what its name says, or a note explains what it does instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from unisono.cli import known_words
from unisono.cli.known_words import KnownWords, flag_name
from unisono.cluster.environment import World, detect
from unisono.config import Resolved
from unisono.devices import choose, visible_gpus
from unisono.errors import ConfigError
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
_PLACES = {
    "auto": "on each GPU if it fits, else moved to the GPU block by block (original script: spread over two or more)",
    "cpu": "weights in host memory, each block computed on the GPU (original script: on the CPU)",
    "gpu0": "each GPU has its own copy of the teacher (original script: only the first GPU, the others failed)",
}


@dataclass
class Known:
    """Values of the flags that unisono does not have."""

    multi_gpu: bool = False
    distributed: bool = False
    teacher_on_cpu: bool = False
    save_samples: bool = False
    sample_dir: str | None = None
    sample_interval: str | None = None


def help_text() -> str:
    """The text before the help of `unisono train wan-distill`."""
    flags = {f"--{name}": said for name, said in _SWITCHES.items()}
    flags |= {f"--{name} {name.rpartition('_')[2].upper()}": said for name, said in _WITH_VALUE.items()}
    return f"""usage: python train_distillation.py --teacher_path MODEL --data_path FILE [--student_config FILE] [flags]
       torchrun --nproc_per_node=N train_distillation.py ...

Runs `unisono train wan-distill` with the defaults --output_dir {OUTPUT}, {NUM_EPOCHS} epochs and --num_workers
{NUM_WORKERS}. It accepts the flags of the original script below, and all settings of the recipe after them.

Flags of the original script:
""" + "".join(f"  {flag}\n      {said}\n" for flag, said in flags.items())


def settings_of(words: Sequence[str]) -> Resolved:
    """Resolves a command line with unisono's own flags."""
    return known_words.settings_of(WanDistill, words)


def completed(given: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the command line for `unisono train wan-distill`, with defaults, and notes for the user."""
    words, known = in_our_words(given)
    told, world, names = settings_of(words), detect(), set(map(flag_name, given))
    gpus = 0 if told.values["gpus"] == "0" else len(visible_gpus())
    if told.values["output_dir"] is None:
        words.append(f"--output_dir={OUTPUT}")
    more, remarks = _devices(known, told, world, gpus)
    for part in (_tiny(told), _teacher(known, told, gpus), _length(told, names), _defaults(told, names, gpus)):
        more += part[0]
        remarks += part[1]
    words += more
    told = settings_of(words)
    check_config(told.build(WanDistill.Config))
    more, also = _samples(known, told, world)
    return words + more, remarks + also


def in_our_words(words: Sequence[str]) -> tuple[list[str], Known]:
    """Separates the flags that unisono does not have from the command line; returns both."""
    ours: list[str] = []
    known = Known()
    reader = KnownWords(words)
    for word in reader:
        name = flag_name(word)
        if name in _SWITCHES:
            if "=" in word:
                raise ConfigError(f"--{name} takes no value")
            setattr(known, name, True)
        elif name == "local_rank":  # the launcher also sets it in the environment
            reader.value(word)
        elif name in _WITH_VALUE:
            setattr(known, name, reader.value(word))
        elif name == "sample_prompts":
            ours.append(f"--{name}={_joined(reader.values(word))}")
        elif name == "mixed_precision":  # a switch in the original script
            ours.append(f"--{name}={(reader.values(word, most=1) or ['bf16'])[0]}")
        elif not name and (word == "python" or word.endswith(".py")):
            raise ConfigError(f"unexpected {word!r}: torchrun starts python by itself; {torchrun(2)}")
        else:
            ours.append(word)
            if name:
                ours += reader.values(word) if "=" not in word else []
    return ours, known


def torchrun(processes: int) -> str:
    """The command that starts this many processes."""
    return f"torchrun --nproc_per_node={processes} train_distillation.py ..."


def _joined(prompts: list[str]) -> str:
    if not prompts:
        raise ConfigError("--sample_prompts needs one or more prompts, each in quotes")
    if len(prompts) > 1 and (odd := [prompt for prompt in prompts if "|" in prompt or prompt.endswith(".txt")]):
        raise ConfigError(f"--sample_prompts: {odd[0]!r} among others; give prompts, or one text file of them")
    return "|".join(prompts)


def _devices(known: Known, told: Resolved, world: World, gpus: int) -> tuple[list[str], list[str]]:
    remarks: list[str] = []
    if world.launcher in ("torchrun", "accelerate") and 0 < gpus < world.local_size:
        raise ConfigError(
            f"local_rank {world.local_size - 1}, and there are only {gpus} GPUs here; {torchrun(gpus)} (processes can "
            f"share a GPU: unisono train wan-distill --gpus {gpus} --nproc {world.local_size})"
        )
    if world.launcher != "plain":
        for flag, given in {"--distributed": known.distributed, "--multi_gpu": known.multi_gpu}.items():
            remarks += [f"{flag} is not needed: {world.launcher} sets the ranks"] if given else []
        if world.size > 1:
            remarks.append(f"[Rank 0] Distributed training initialized: {world.size} processes by {world.launcher}")
        return [], remarks
    if known.distributed:
        remarks.append(f"--distributed needs other processes: start them with {torchrun(4)}, or use --gpus all")
    if known.multi_gpu and told.explicit("strategy") and told.values["strategy"] != "dp":
        raise ConfigError(
            f"--multi_gpu means --strategy dp, which contradicts --strategy {told.values['strategy']}; use one"
        )
    chosen = told.explicit("gpus") or told.explicit("nproc")
    if known.multi_gpu and gpus > 1:
        number = len(choose(told.values["gpus"], visible_gpus()).gpus) if told.explicit("gpus") else gpus
        remarks.append(
            f"Model wrapped with DataParallel on {number} GPUs (--strategy dp); {torchrun(number)} is faster"
        )
        return ["--strategy=dp"] + ([] if chosen else ["--gpus=all"]), remarks
    if known.multi_gpu:
        remarks.append(f"--multi_gpu has no effect: this machine has {'one GPU' if gpus else 'no GPU'}")
    return [] if chosen else ["--gpus=1"], remarks


def _tiny(told: Resolved) -> tuple[list[str], list[str]]:
    """Adapts student and prompts to the tiny teacher, which knows only built-in shapes."""
    if str(told.values["teacher_path"]).lower() != "tiny":
        return [], []
    words: list[str] = []
    remarks: list[str] = []
    if _is_ours(told.values["student_config"], FOR_REAL_TEACHERS):
        small = Path(told.values["student_config"]).with_name(TINY_STUDENT)
        words.append(f"--student_config={small}")
        remarks.append(f"{told.values['student_config']} is for a real teacher: using {small} for the tiny one")
    if _is_ours(told.values["data_path"], (STATIC_PROMPTS,)):
        words.append("--data_path=shapes")
        remarks.append("the tiny teacher generates only coloured shapes: using --data_path shapes, its own prompts")
    return words, remarks


def _is_ours(path: str | None, names: Sequence[str]) -> bool:
    return path is not None and Path(path).resolve() in [HERE / name for name in names]


def _teacher(known: Known, told: Resolved, gpus: int) -> tuple[list[str], list[str]]:
    place, chosen = told.values["teacher_device_strategy"], told.explicit("teacher_device_strategy")
    remarks: list[str] = []
    words: list[str] = []
    if known.teacher_on_cpu:
        if chosen and place != "cpu":
            raise ConfigError(f"--teacher_on_cpu and --teacher_device_strategy {place} contradict each other; use one")
        remarks.append("--teacher_on_cpu is an old name of --teacher_device_strategy cpu")
        words, place, chosen = ["--teacher_device_strategy=cpu"], "cpu", True
    if place == "balanced" and not told.values["online"]:
        remarks.append(
            "--teacher_device_strategy balanced needs --online; using auto: during the roll-out each GPU has its own "
            "copy of the teacher, or moves it block by block if it does not fit"
        )
        return ["--teacher_device_strategy=auto"], remarks
    if chosen and place in _PLACES:
        there = _PLACES[place] if gpus else "without a GPU the teacher runs on the CPU"
        remarks.append(f"--teacher_device_strategy {place}: {there}")
    return words, remarks


def _length(told: Resolved, names: set[str]) -> tuple[list[str], list[str]]:
    remarks: list[str] = []
    if "num_steps" in names:
        remarks.append(
            "--num_steps counts optimizer steps of the whole run, on any number of GPUs (original script: of each "
            "process)"
        )
    limits = [name for name in ("max_steps", "num_epochs") if told.values[name] is not None]
    if not limits:
        remarks.append(f"no --num_steps and no --num_epochs: {NUM_EPOCHS} epochs (original script: at most 500 steps)")
    if "num_epochs" in names or not limits:
        remarks.append(
            "an epoch is a pass over everything that the teacher generated, at all noise levels: --rollouts × --pairs "
            "per prompt (original script: over the prompts)"
        )
    return [] if limits else [f"--num_epochs={NUM_EPOCHS}"], remarks


def _defaults(told: Resolved, names: set[str], gpus: int) -> tuple[list[str], list[str]]:
    """Notes about defaults that differ from the original script; the tiny teacher has its own."""
    remarks: list[str] = []
    if "mixed_precision" in names:
        kind = {"no": "32 bit"}.get(told.values["mixed_precision"], told.values["mixed_precision"])
        remarks.append(f"--mixed_precision takes effect: the student computes in {kind} (original script: ignored)")
    if str(told.values["teacher_path"]).lower() == "tiny":
        return [], remarks
    words = [] if told.explicit("num_workers") else [f"--num_workers={NUM_WORKERS}"]
    theirs = {"learning_rate": "1e-5", "mixed_precision": "no"}
    ours = {name: f"{told.values[name]:g}" if name == "learning_rate" else told.values[name] for name in theirs}
    if gpus:
        theirs, ours = {**theirs, "teacher_dtype": "float32"}, {**ours, "teacher_dtype": "bfloat16"}
    differ = [name for name in theirs if not told.explicit(name)]
    if differ:
        flags = ", ".join(f"--{'lr' if name == 'learning_rate' else name} {ours[name]}" for name in differ)
        remarks.append(f"defaults: {flags} (original script: {', '.join(theirs[name] for name in differ)})")
    return words, remarks


def _samples(known: Known, told: Resolved, world: World) -> tuple[list[str], list[str]]:
    """Converts the interval of sample images from epochs to steps."""
    if not (known.save_samples or known.sample_interval or known.sample_dir):
        return [], []
    remarks = [
        f"samples are in {told.values['output_dir']}/previews: the teacher's on the left, the student's on the right"
    ]
    if known.sample_dir:
        remarks[0] = f"--sample_dir {known.sample_dir} is not used: {remarks[0]}"
    if not (known.save_samples or known.sample_interval):
        return [], remarks
    interval = known.sample_interval or "1"
    if not (interval.isascii() and interval.isdecimal() and int(interval) > 0):
        raise ConfigError(f"--sample_interval: expected a number of epochs of at least 1, got {interval!r}")
    if told.explicit("preview_every"):
        if known.sample_interval:
            raise ConfigError("--sample_interval (epochs) and --preview_every (steps) contradict each other; use one")
        return [], remarks
    samples, batch = num_samples(told), _global_batch(told, world)
    steps = max(1, -(-samples * int(interval) // batch))
    remarks.append(
        f"--sample_interval {interval}: every {steps:,} steps (--preview_every), since an epoch has {samples:,} "
        f"samples and a step {batch}"
    )
    return [f"--preview_every={steps}"], remarks


def num_samples(told: Resolved) -> int:
    """Samples per epoch: prompts × roll-outs × noise levels."""
    from unisono.recipes.wan_distill.data.prompts import prompts_of  # imports torch

    values = told.values
    prompts = prompts_of(values["data_path"], values["eval_data_path"], values["num_eval"]).train
    return len(prompts) * int(values["rollouts"]) * max([1] if values["online"] else _levels(told))


def _levels(told: Resolved) -> Iterator[int]:
    values = told.values
    yield values["pairs"] if values["velocity_weight"] else 1
    for weight, number in (("trajectory_weight", "trajectory_points"), ("few_step_weight", "few_steps")):
        yield min(values[number], values["teacher_steps"]) if values[weight] else 1


def _global_batch(told: Resolved, world: World) -> int:
    values = told.values
    if values["global_batch_size"]:
        return int(values["global_batch_size"])
    if world.launcher != "plain":
        processes = world.size
    elif told.explicit("nproc"):
        processes = values["nproc"]
    else:
        processes = max(1, choose(values["gpus"], visible_gpus()).requested)
    return int(values["batch_size"] * processes * (values["gradient_accumulation_steps"] or 1))
