"""Computes fingerprints of models and files; as cache keys, they ensure that a changed file never gets a stale result.

The fingerprint of a model on disk covers its config and tokenizer files in full, and evenly spaced blocks of each large
weight file: reading 11 GB whenever a run starts would take longer than a training step. Modification times are not
included, because copies on different machines must have the same fingerprint. The fingerprint of a model in memory
covers every weight. There may be millions of images and videos, so their fingerprints cover only name, size and
modification time, as in `make` and `rsync`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from unisono.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

_LENGTH = 32  # hexadecimal digits: 128 bits
_MODEL_SUFFIXES = (".json", ".model", ".safetensors")  # a changed README does not change the model
_MAX_WHOLE = 2**26  # maximum size in bytes of a file to hash in full; only some blocks of a larger file are hashed
_BLOCK, _NUM_BLOCKS = 2**12, 512


def combined(*parts: Any) -> str:
    """Returns one fingerprint for several values, which must be JSON-serializable."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, ensure_ascii=True).encode()).hexdigest()[:_LENGTH]


def of_folders(folders: Iterable[Path], *extra: str) -> str:
    """Returns the fingerprint of a model on disk; `extra` lists other properties that change its output."""
    parts: list[Any] = list(extra)
    for folder in folders:
        files = sorted(path for path in folder.iterdir() if path.suffix in _MODEL_SUFFIXES and path.is_file())
        if not files:
            raise ConfigError(f"{folder} contains no model; expected config.json and .safetensors files")
        parts += [[path.name, path.stat().st_size, _content(path)] for path in files]
    return combined(*parts)


def of_model(paths: Iterable[Path], *extra: str) -> str:
    """Returns the fingerprint of a model on disk whose parts are folders or single files."""
    parts = [of_folders([path]) if path.is_dir() else combined(path.stat().st_size, _content(path)) for path in paths]
    return combined(*extra, *parts)


def of_module(module: nn.Module) -> str:
    """Returns the fingerprint of a model in memory, from its config and all its weights."""
    digest = hashlib.sha256(json.dumps(_plain_config(module), sort_keys=True, default=str).encode())
    for name, tensor in module.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:_LENGTH]


def of_tokenizer(tokenizer: Any) -> str:
    """Returns the fingerprint of a tokenizer in memory."""
    description = json.loads(tokenizer.backend_tokenizer.to_str())
    # Excludes truncation and padding, which only reflect the tokenizer's last call.
    return combined({name: value for name, value in description.items() if name not in ("truncation", "padding")})


class Keys:
    """Cache keys for values that are computed from many files with the same method."""

    def __init__(self, *method: Any) -> None:
        """`method` is everything except the file that affects the result."""
        self._method = hashlib.sha256(combined(*method).encode())

    def of_file(self, name: str, path: Path) -> str:
        """Returns the key of a sample, from its name and the name, size and modification time of its file."""
        try:
            status = path.stat()
        except OSError:
            return self.of_text(f"{name}\0{path.name}")  # reading the file will raise the error later
        return self.of_text(f"{name}\0{path.name}\0{status.st_size}\0{status.st_mtime_ns}")

    def of_text(self, text: str) -> str:
        """Returns the key of a text."""
        digest = self._method.copy()
        digest.update(text.encode("utf-8", "surrogatepass"))  # file names need not be valid text
        return digest.hexdigest()[:_LENGTH]


def _content(path: Path) -> str:
    digest, size = hashlib.sha256(), path.stat().st_size
    with path.open("rb") as file:
        if size <= _MAX_WHOLE:
            digest.update(file.read())
        else:
            for number in range(_NUM_BLOCKS):
                file.seek(number * (size - _BLOCK) // (_NUM_BLOCKS - 1))
                digest.update(file.read(_BLOCK))
    return digest.hexdigest()


def _plain_config(module: nn.Module) -> dict[str, Any]:
    config: Any = getattr(module, "config", {})
    values = dict(config.to_dict() if hasattr(config, "to_dict") else config)
    # Excludes entries that do not change the output; the weights' dtypes are hashed with the weights.
    unrelated = ("architectures", "dtype", "torch_dtype", "transformers_version")
    return {name: value for name, value in values.items() if not name.startswith("_") and name not in unrelated}
