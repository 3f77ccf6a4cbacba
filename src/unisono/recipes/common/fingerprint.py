"""Names for models and files by what is in them, so that nothing computed from another one is ever used.

A model on disk is known by its configs and tokenizer files in full and by a sample of its weights: blocks from
everywhere in each file, because reading 11 GB at every start would take longer than training a step or two. Dates are
left out: machines with a copy each must agree. A model in memory is known by every number in it. A picture or film is
known by its name, size and date, as `make` and `rsync` know files: there may be millions of them.
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
_READ = (".json", ".model", ".safetensors")  # what models are loaded from; a changed README changes nothing
_WHOLE = 2**26  # bytes; larger files are sampled
_BLOCK, _NUM_BLOCKS = 2**12, 512


def together(*parts: Any) -> str:
    """One name for several things: text, numbers, lists of them."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, ensure_ascii=True).encode()).hexdigest()[:_LENGTH]


def of_folders(folders: Iterable[Path], *further: str) -> str:
    """The name of a model on disk; `further` is what else decides what it computes, such as its dtype."""
    parts: list[Any] = list(further)
    for folder in folders:
        files = sorted(path for path in folder.iterdir() if path.suffix in _READ and path.is_file())
        if not files:
            raise ConfigError(f"{folder} has no part of a model in it; expected config.json and .safetensors files")
        parts += [[path.name, path.stat().st_size, _content(path)] for path in files]
    return together(*parts)


def of_model(places: Iterable[Path], *further: str) -> str:
    """The name of a model on disk whose parts are folders or single files."""
    parts = [
        of_folders([place]) if place.is_dir() else together(place.stat().st_size, _content(place)) for place in places
    ]
    return together(*further, *parts)


def of_module(module: nn.Module) -> str:
    """The name of a model in memory: its config and every number in it."""
    digest = hashlib.sha256(json.dumps(_plain_config(module), sort_keys=True, default=str).encode())
    for name, tensor in module.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:_LENGTH]


def of_tokenizer(tokenizer: Any) -> str:
    """The name of a tokenizer in memory."""
    told = json.loads(tokenizer.backend_tokenizer.to_str())
    # Those two are left over from its last call.
    return together({name: value for name, value in told.items() if name not in ("truncation", "padding")})


class Keys:
    """Names for what is computed from many files in the same way."""

    def __init__(self, *like: Any) -> None:
        self._like = hashlib.sha256(together(*like).encode())

    def of_file(self, name: str, path: Path) -> str:
        """The key of a sample by its name and its file's name, size and date."""
        try:
            facts = path.stat()
        except OSError:
            return self.of_text(f"{name}\0{path.name}")  # whoever reads it will say what is wrong with it
        return self.of_text(f"{name}\0{path.name}\0{facts.st_size}\0{facts.st_mtime_ns}")

    def of_text(self, text: str) -> str:
        """The key of a text."""
        digest = self._like.copy()
        digest.update(text.encode("utf-8", "surrogatepass"))  # names of files need not be text
        return digest.hexdigest()[:_LENGTH]


def _content(path: Path) -> str:
    digest, size = hashlib.sha256(), path.stat().st_size
    with path.open("rb") as file:
        if size <= _WHOLE:
            digest.update(file.read())
        else:
            for number in range(_NUM_BLOCKS):
                file.seek(number * (size - _BLOCK) // (_NUM_BLOCKS - 1))
                digest.update(file.read(_BLOCK))
    return digest.hexdigest()


def _plain_config(module: nn.Module) -> dict[str, Any]:
    config: Any = getattr(module, "config", {})
    told = dict(config.to_dict() if hasattr(config, "to_dict") else config)
    # Where it came from and who wrote it do not decide what it computes; types are told with the weights.
    unrelated = ("architectures", "dtype", "torch_dtype", "transformers_version")
    return {name: value for name, value in told.items() if not name.startswith("_") and name not in unrelated}
