"""Translates the command line of the original script into settings of unisono.

Most of its flags are flags or aliases of unisono (`unisono train wan-flow --help`). This module handles the others:
each does what its name says, or is rejected with the reason and an alternative.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from unisono.cli import known_words
from unisono.cli.known_words import KnownWords, flag_name
from unisono.config import Resolved
from unisono.errors import ConfigError
from unisono.recipes.wan_flow.recipe import WanFlow
from unisono.recipes.wan_flow.settings import TINY

MODEL = Path("models/wan2.2_ti2v_5B_fp16.safetensors")
DATASET = Path("dataset")
MODEL_SETTINGS = {"shift": 5}  # usual for TI2V-5B
WITHOUT_TEXT_ENCODER = {"caption_dropout": 0, "guidance": 1}  # both need the embedding of an empty caption
NUM_EPOCHS = 100
TINY_SIDE = 32  # pixels; the size that the tiny model is made for

REFUSED = {
    "use_8bit_adam": "the optimizer state is in 32 bit; if it does not fit, --strategy fsdp shards it over the GPUs, "
    "and a LoRA (--lora_rank 32) has almost none",
    "vae_gradient_checkpointing": "the VAE is not trained and encodes each sample once without gradients; drop "
    "this flag (--gradient_checkpointing is for the transformer)",
    "fp8_optimizations": "8-bit matrix products are not supported; drop this flag (--model_dtype bf16 and "
    "--torch_compile are the fastest)",
}
KNOWN = {
    "--device cuda:N": "GPU number N; cpu, or cuda for any one GPU (--gpus)",
    "--model_dtype bf16": "compute precision: fp32, fp16 or bf16 (--mixed_precision)",
    "--use_ema": "EMA of the weights; on unless --ema_decay is 0",
    "--local_rank N": "accepted, not needed",
}
_WITH_VALUE = ("local_rank", "device", "model_dtype")
_DTYPES = {"fp32": "no", "fp16": "fp16", "bf16": "bf16"}


def settings_of(words: Sequence[str]) -> Resolved:
    """Resolves a command line with unisono's own flags."""
    return known_words.settings_of(WanFlow, words)


def completed(given: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the command line for `unisono train wan-flow`, with defaults, and notes for the user."""
    words = in_our_words(given)
    remarks: list[str] = []
    told = settings_of(words)
    if "use_ema" in map(flag_name, given) and told.values["ema_decay"] == 0:
        raise ConfigError("--use_ema and --ema_decay 0 contradict each other; use one")
    if not told.explicit("gpus") and not told.explicit("nproc"):
        words.append("--gpus=1")  # not under a launcher, where each process already has its GPU
    if not told.values["model_path"] and not told.values["model_config"]:
        more, remarks = _without_a_model(told)
        words += more
        told = settings_of(words)
    if str(told.values["model_config"]).lower() == "tiny":
        more, also = _for_the_tiny_model(told)
        return words + more, remarks + also
    if not told.explicit("num_epochs") and not told.explicit("max_steps"):
        words.append(f"--num_epochs={NUM_EPOCHS}")
    return words, remarks


def _without_a_model(told: Resolved) -> tuple[list[str], list[str]]:
    """The model of the original script if its file exists, otherwise the tiny one."""
    if not MODEL.is_file():
        remark = f"no --model_path, no --model_config and no {MODEL}: training a tiny model (--model_config tiny)"
        if told.values["num_epochs"] is not None and not told.explicit("max_steps"):
            epochs = told.values["num_epochs"]
            remark += f" for {epochs} epochs, as asked; it learns the shapes in {TINY['max_steps']} steps (--max_steps)"
        return ["--model_config=tiny"], [remark]
    settings = MODEL_SETTINGS | ({} if told.values["parts_path"] else WITHOUT_TEXT_ENCODER)
    words = [f"--{name}={value}" for name, value in settings.items() if not told.explicit(name)]
    remark = " ".join([f"training {MODEL}", *words]).replace("=", " ")
    if not told.values["parts_path"]:
        remark += (
            " on precomputed latents and embeddings in the data folder; latents must be normalised, or use --latents "
            "raw (see README.md). To encode the data, pass --parts_path FOLDER with a VAE and a text encoder"
        )
    return [f"--model_path={MODEL}", *words], [remark]


def _effective_batch(told: Resolved) -> int:
    """Samples per step as far as the command line determines them."""
    if told.explicit("global_batch_size") or told.explicit("gradient_accumulation_steps"):
        return int(TINY["batch_size"])
    processes = os.environ.get("WORLD_SIZE") or told.values["nproc"] or 1
    return int(processes) * int(told.values["batch_size"])


def _for_the_tiny_model(told: Resolved) -> tuple[list[str], list[str]]:
    """The user's data if the folder exists, otherwise the built-in shapes."""
    words: list[str] = []
    remarks: list[str] = []
    path = str(told.values["dataset_path"] if told.explicit("dataset_path") else DATASET)
    if path != "shapes" and Path(path) == DATASET and not DATASET.exists():
        words.append("--dataset_path=shapes")
        remarks.append(f"no ./{DATASET}: training on built-in shapes (--dataset_path shapes)")
        path = "shapes"
    if path == "shapes":
        enough = int(TINY["batch_size"])
        if _effective_batch(told) < enough:
            remarks.append(f"the shapes need about {enough} samples per step to be learned: use --batch_size {enough}")
    else:
        if not told.explicit("dataset_path"):
            words.append(f"--dataset_path={path}")
        if not any(told.explicit(name) for name in ("height", "width", "max_pixels")):
            words += [f"--height={TINY_SIDE}", f"--width={TINY_SIDE}"]
            remarks.append(
                f"training on {path}, resized to {TINY_SIDE} × {TINY_SIDE} for the tiny model (--height, --width)"
            )
    return words, remarks


def in_our_words(words: Sequence[str]) -> list[str]:
    """Returns the command line without flags that unisono does not have."""
    ours: list[str] = []
    reader = KnownWords(words)
    for word in reader:
        name = flag_name(word)
        if name in REFUSED:
            raise ConfigError(f"--{name}: {REFUSED[name]}")
        if name == "use_ema":  # on unless --ema_decay is 0
            continue
        if name not in _WITH_VALUE:
            ours.append(word)
            continue
        value = reader.value(word)
        if name == "device":
            ours.append(f"--gpus={_gpus(value)}")
        elif name == "model_dtype":
            ours.append(f"--mixed_precision={_precision(value)}")
        # The last one is local_rank, which the launcher also sets in the environment.
    return ours


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
