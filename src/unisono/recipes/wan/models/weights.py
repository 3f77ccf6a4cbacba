"""Files of weights, read one tensor at a time, and a transformer filled from them.

Only safetensors files are read: other formats are pickles, which can run code when they are opened.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unisono.errors import ConfigError
from unisono.recipes.wan.models.native import Shapes, base_name, diffusers_names, num_layers

_PICKLES = {".pth", ".pt", ".bin", ".ckpt", ".pkl", ".pickle"}


class Weights:
    """The weights in safetensors files, under diffusers' names; each is read when it is asked for."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = [Path(file) for file in files]
        places: dict[str, Path] = {}
        self._opened: dict[Path, Any] = {}
        for file in self.files:
            for name in self._open(file).keys():  # noqa: SIM118 (not a mapping)
                if places.setdefault(name, file) != file:
                    raise ConfigError(
                        f"{file}: {name} is also in {places[name].name}; these are not parts of one model"
                    )
        self._places = {ours: (places[name], name) for ours, name in diffusers_names(places, self.told).items()}

    @property
    def told(self) -> str:
        """The files, as a message names them."""
        return str(self.files[0]) if len(self.files) == 1 else f"{self.files[0]} and {len(self.files) - 1} more files"

    def names(self) -> list[str]:
        """All names, in diffusers' words."""
        return list(self._places)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a weight, from the file's header."""
        return tuple(self._slice(name).get_shape())

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all weights."""
        return {name: self.shape(name) for name in self._places}

    def num_weights(self) -> int:
        """How many numbers there are."""
        return sum(math.prod(self.shape(name)) for name in self._places)

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """A weight, in memory of its own; in the file's type unless told otherwise."""
        return self._own(name, self._slice(name)[:], dtype)

    def slice(self, name: str, start: int, end: int, dtype: torch.dtype | None = None) -> Tensor:
        """Rows `start` to `end` of a weight's first dimension; only these are read."""
        return self._own(name, self._slice(name)[start:end], dtype)

    def _own(self, name: str, view: Tensor, dtype: torch.dtype | None) -> Tensor:
        if not view.is_floating_point():
            raise ConfigError(
                f"{self.told}: {name} has numbers of type {view.dtype}; training starts from floating point"
            )
        # What the file gives is a view of its own pages: writing into it would change what the next reader sees.
        return view.to(dtype=dtype, copy=True)

    def _slice(self, name: str) -> Any:
        file, theirs = self._places[name]
        return self._open(file).get_slice(theirs)

    def _open(self, file: Path) -> Any:
        from safetensors import SafetensorError, safe_open

        if file not in self._opened:
            refuse_pickle(file)
            if not file.is_file():  # a pipe would be waited for, for ever
                raise ConfigError(f"{file} is not a file; copy or download the model again")
            try:
                self._opened[file] = safe_open(str(file), framework="pt")
            except (SafetensorError, OSError) as error:
                raise ConfigError(
                    f"{file} cannot be read as safetensors ({error}); it is something else, or was cut short: "
                    "copy or download it again"
                ) from None
        return self._opened[file]


def open_weights(files: Path | Sequence[Path]) -> Weights:
    """The weights of a model: one or several safetensors files, or the folder they are in."""
    if isinstance(files, Path):
        files = weight_files(files)
    return Weights(files)


def weight_files(place: Path) -> list[Path]:
    """The safetensors files of one model: the file itself, or those in its folder."""
    if not place.is_dir():
        refuse_pickle(place)
        return [place]
    stem = "diffusion_pytorch_model"
    if (index := place / f"{stem}.safetensors.index.json").is_file():
        return _indexed(index)
    if (whole := place / f"{stem}.safetensors").is_file():
        return [whole]
    found = sorted(place.glob("*.safetensors"))
    if len(found) == 1:
        return found
    if found:
        names = ", ".join(file.name for file in found[:3])
        raise ConfigError(f"{place} has several weight files and no index ({names}); name the one you mean")
    for file in sorted(place.iterdir()):
        refuse_pickle(file)
    raise ConfigError(f"{place} has no weights; expected {stem}.safetensors, or its parts with an index")


def refuse_pickle(file: Path) -> None:
    """Refuses formats that can run code when they are opened."""
    if file.suffix.lower() in _PICKLES:
        raise ConfigError(
            f'{file} is a pickle, which can run code when it is opened; convert it: python -c "import torch, '
            f"safetensors.torch as s; s.save_file(torch.load('{file.name}', weights_only=True), "
            f"'{file.stem}.safetensors')\""
        )


def _indexed(index: Path) -> list[Path]:
    try:
        names = set(json.loads(index.read_bytes())["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ConfigError(f"{index} is damaged; copy or download it again") from None
    if not all(isinstance(name, str) and name == Path(name).name for name in names):
        raise ConfigError(f"{index} names files outside of its folder; such models are not read")
    files = [index.parent / name for name in sorted(names)]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ConfigError(f"{index.parent} lacks {', '.join(missing[:3])}; copy or download it again")
    return files


def fill(model: nn.Module, weights: Weights | Path | Sequence[Path], dtype: torch.dtype | None = None) -> None:
    """Loads a transformer's weights one by one; never a second copy of the whole model.

    Weights on meta get memory on the CPU, in the file's type unless `dtype` says another; others keep their own type. A
    LoRA that was added before keeps its weights.
    """
    if not isinstance(weights, Weights):
        weights = open_weights(weights)
    check_fit(model, weights)
    for name, parameter in list(model.named_parameters()):
        if (told := base_name(name)) is None:
            continue
        if parameter.is_meta:
            owner, _, leaf = name.rpartition(".")
            filled = nn.Parameter(weights.tensor(told, dtype), requires_grad=parameter.requires_grad)
            setattr(model.get_submodule(owner), leaf, filled)
        else:
            with torch.no_grad():
                parameter.copy_(weights.tensor(told))


def check_fit(model: nn.Module, weights: Weights) -> None:
    """Refuses weights that are not exactly those of the model."""
    own = {told: tuple(it.shape) for name, it in model.named_parameters() if (told := base_name(name)) is not None}
    theirs = weights.shapes()
    if own == theirs:
        return
    if (mine := _architecture(own)) != (other := _architecture(theirs)):
        raise ConfigError(
            f"{weights.told} is a checkpoint of another architecture: it has {other}, the model {mine}; give other "
            "weights, or the model_config that they were trained with"
        )
    missing, unexpected = [*(own.keys() - theirs.keys())], [*(theirs.keys() - own.keys())]
    what = [
        f"{word} {', '.join(sorted(names)[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
        for word, names in (
            ("lacks", missing),
            ("has", unexpected),
            ("has other shapes of", [name for name in own.keys() & theirs.keys() if own[name] != theirs[name]]),
        )
        if names
    ]
    raise ConfigError(f"{weights.told} does not fit the model: it {'; it '.join(what)}; is the download whole?")


def _architecture(shapes: Shapes) -> str:
    layers = num_layers(shapes)
    width, channels = (*shapes.get("patch_embedding.weight", ()), 0, 0)[:2]
    inner = (*shapes.get("blocks.0.ffn.net.0.proj.weight", ()), 0)[0]
    text = (*shapes.get("condition_embedder.text_embedder.linear_1.weight", ()), 0, 0)[1]
    return f"{layers} layers of width {width} and {inner}, {channels} channels and text of width {text}"
