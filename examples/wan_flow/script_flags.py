"""Translates the command line of the original script into settings of unisono.

Most of its flags are flags or aliases of unisono (`unisono train wan-flow --help`). This module handles the other
flags: each has the effect that its name suggests, or is rejected with a reason and an alternative.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from unisono.cli import script_arguments
from unisono.cli.script_arguments import ArgumentReader, flag_name
from unisono.config import Resolved
from unisono.errors import ConfigError
from unisono.recipes.wan_flow.recipe import WanFlow
from unisono.recipes.wan_flow.settings import TINY

MODEL = Path("models/wan2.2_ti2v_5B_fp16.safetensors")
DATASET = Path("dataset")
MODEL_SETTINGS = {"shift": 5}  # usual for TI2V-5B
WITHOUT_TEXT_ENCODER = {"caption_dropout": 0, "guidance": 1}  # other values need the embedding of an empty caption
NUM_EPOCHS = 100
TINY_SIDE = 32  # side length of the tiny model's images, in pixels

_MEANS = {"use_8bit_adam": "--optimizer=adamw8bit", "fp8_optimizations": "--quantize=fp8"}
_WITHOUT_EFFECT = {
    "vae_gradient_checkpointing": "the VAE is not trained, and encodes each sample once without gradients "
    "(--gradient_checkpointing is for the transformer)",
}
FLAGS = {
    "--device cuda:N": "GPU number N; cpu, or cuda for any one GPU (--gpus)",
    "--model_dtype bf16": "compute precision: fp32, fp16 or bf16 (--mixed_precision)",
    "--use_ema": "EMA of the weights; on unless --ema_decay is 0",
    "--use_8bit_adam": "AdamW with moments in 8 bits (--optimizer adamw8bit)",
    "--fp8_optimizations": "matrix products in 8 bits (--quantize fp8)",
    "--local_rank N, --vae_gradient_checkpointing": "accepted, not needed",
}
_WITH_VALUE = ("local_rank", "device", "model_dtype")
_DTYPES = {"fp32": "no", "fp16": "fp16", "bf16": "bf16"}


def resolve(arguments: Sequence[str]) -> Resolved:
    """Resolves arguments of `unisono train wan-flow` to all settings."""
    return script_arguments.resolve_settings(WanFlow, arguments)


def completed(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the command line for `unisono train wan-flow`, with defaults, and notes for the user."""
    arguments = translated(argv)
    names = [flag_name(argument) for argument in argv]
    remarks = [f"--{name} has no effect: {_WITHOUT_EFFECT[name]}" for name in names if name in _WITHOUT_EFFECT]
    resolved = resolve(arguments)
    if "use_ema" in names and resolved.values["ema_decay"] == 0:
        raise ConfigError("--use_ema and --ema_decay 0 contradict each other; use one")
    if not resolved.explicit("gpus") and not resolved.explicit("nproc"):
        arguments.append("--gpus=1")  # ignored under a launcher, which assigns a GPU to each process
    if not resolved.values["model_path"] and not resolved.values["model_config"]:
        more, model_remarks = _default_model(resolved)
        arguments += more
        remarks += model_remarks
        resolved = resolve(arguments)
    if str(resolved.values["model_config"]).lower() == "tiny":
        more, data_remarks = _tiny_model(resolved)
        return arguments + more, remarks + data_remarks
    if not resolved.explicit("num_epochs") and not resolved.explicit("max_steps"):
        arguments.append(f"--num_epochs={NUM_EPOCHS}")
    return arguments, remarks


def _default_model(resolved: Resolved) -> tuple[list[str], list[str]]:
    """Chooses the original script's model if its file exists, otherwise the tiny model."""
    if not MODEL.is_file():
        remark = f"no --model_path, no --model_config and no {MODEL}: training a tiny model (--model_config tiny)"
        if resolved.values["num_epochs"] is not None and not resolved.explicit("max_steps"):
            epochs = resolved.values["num_epochs"]
            remark += f" for {epochs} epochs (--num_epochs); {TINY['max_steps']} steps are enough to learn the shapes"
        return ["--model_config=tiny"], [remark]
    settings = MODEL_SETTINGS | ({} if resolved.values["parts_path"] else WITHOUT_TEXT_ENCODER)
    arguments = [f"--{name}={value}" for name, value in settings.items() if not resolved.explicit(name)]
    remark = " ".join([f"training {MODEL}", *arguments]).replace("=", " ")
    if not resolved.values["parts_path"]:
        remark += (
            " on precomputed latents and embeddings in the data folder; latents must be normalised, or use --latents "
            "raw (see README.md). To encode the data, pass --parts_path FOLDER with a VAE and a text encoder"
        )
    return [f"--model_path={MODEL}", *arguments], [remark]


def _effective_batch(resolved: Resolved) -> int:
    """Returns the number of samples per step, if the command line determines it."""
    if resolved.explicit("global_batch_size") or resolved.explicit("gradient_accumulation_steps"):
        return int(TINY["batch_size"])
    processes = os.environ.get("WORLD_SIZE") or resolved.values["nproc"] or 1
    return int(processes) * int(resolved.values["batch_size"])


def _tiny_model(resolved: Resolved) -> tuple[list[str], list[str]]:
    """Trains on the user's data if the folder exists, otherwise on the built-in shapes."""
    arguments: list[str] = []
    remarks: list[str] = []
    path = str(resolved.values["dataset_path"] if resolved.explicit("dataset_path") else DATASET)
    if path != "shapes" and Path(path) == DATASET and not DATASET.exists():
        arguments.append("--dataset_path=shapes")
        remarks.append(f"no ./{DATASET}: training on built-in shapes (--dataset_path shapes)")
        path = "shapes"
    if path == "shapes":
        batch_size = int(TINY["batch_size"])
        if _effective_batch(resolved) < batch_size:
            remarks.append(f"the shapes need about {batch_size} samples per step: use --batch_size {batch_size}")
    else:
        if not resolved.explicit("dataset_path"):
            arguments.append(f"--dataset_path={path}")
        if not any(resolved.explicit(name) for name in ("height", "width", "max_pixels")):
            arguments += [f"--height={TINY_SIDE}", f"--width={TINY_SIDE}"]
            remarks.append(
                f"training on {path}, resized to {TINY_SIDE} × {TINY_SIDE} for the tiny model (--height, --width)"
            )
    return arguments, remarks


def translated(argv: Sequence[str]) -> list[str]:
    """Returns the command line with the original script's flags replaced by unisono's."""
    arguments: list[str] = []
    reader = ArgumentReader(argv)
    for argument in reader:
        name = flag_name(argument)
        if name == "use_ema" or name in _WITHOUT_EFFECT:  # the EMA is on unless --ema_decay is 0
            continue
        argument = _MEANS.get(name or "", argument)
        if name not in _WITH_VALUE:
            arguments.append(argument)
            continue
        value = reader.value(argument)
        if name == "device":
            arguments.append(f"--gpus={_gpus(value)}")
        elif name == "model_dtype":
            arguments.append(f"--mixed_precision={_precision(value)}")
        # local_rank is dropped: the launcher also sets it in the environment.
    return arguments


def _gpus(device: str) -> str:
    if device in ("cpu", "cuda"):
        return "0" if device == "cpu" else "1"
    if match := re.fullmatch(r"cuda:([0-9]+)", device):
        return f"{match[1]},"  # a GPU number; without the comma it would be a count
    raise ConfigError(f"--device: expected cpu, cuda or cuda:N, got {device!r}; use --gpus 0,2 for several")


def _precision(dtype: str) -> str:
    if dtype not in _DTYPES:
        raise ConfigError(f"--model_dtype: expected {', '.join(_DTYPES)}, got {dtype!r}")
    return _DTYPES[dtype]
