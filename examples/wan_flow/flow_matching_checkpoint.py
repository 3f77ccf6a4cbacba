"""Reads and writes a FlowMatchingTrainer's checkpoints: folders with safetensors files and a JSON file, no pickles."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from unisono.errors import ConfigError

_COUNTS = ("global_step", "epoch", "samples", "seed")


class Saved(NamedTuple):
    """The contents of a checkpoint."""

    weights: dict[str, Tensor]
    averages: dict[str, Tensor]
    optimizer: dict[str, Any]
    counts: dict[str, int]


def write_checkpoint(
    folder: Path,
    weights: Mapping[str, Tensor],
    averages: Mapping[str, Tensor],
    optimizer: Mapping[str, Any],
    counts: Mapping[str, int],
) -> None:
    """Writes a new checkpoint folder atomically."""
    if folder.exists():
        raise ConfigError(f"{folder} already exists and is not overwritten; choose another name")
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        moments = {
            f"{number}.{name}": value for number, state in optimizer["state"].items() for name, value in state.items()
        }
        for name, tensors in {"model": weights, "ema": averages, "optimizer": moments}.items():
            save_file({key: value.contiguous() for key, value in tensors.items()}, unfinished / f"{name}.safetensors")
        state = {**counts, "param_groups": optimizer["param_groups"]}
        (unfinished / "state.json").write_text(json.dumps(state, indent=1))
        unfinished.chmod(0o755)
        unfinished.rename(folder)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def read_checkpoint(folder: Path, device: str) -> Saved:
    """Reads a checkpoint that `write_checkpoint` wrote; raises ConfigError if the folder is incomplete."""
    if folder.is_file():
        raise ConfigError(f"{folder} is a file; checkpoints are folders, and files of torch.save are not supported")
    try:
        state = json.loads((folder / "state.json").read_bytes())
        counts = {name: int(state[name]) for name in _COUNTS}
        weights, averages, moments = (
            load_file(folder / f"{name}.safetensors", device) for name in ("model", "ema", "optimizer")
        )
        by_number: dict[int, dict[str, Tensor]] = {}
        for key, value in moments.items():
            number, name = key.split(".")
            by_number.setdefault(int(number), {})[name] = value
        optimizer = {"state": by_number, "param_groups": list(state["param_groups"])}
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise ConfigError(f"{folder} is not a complete checkpoint ({error}); use another one") from None
    return Saved(weights, averages, optimizer, counts)
