"""Reads weights from safetensors files, one tensor at a time, and fills a transformer with them.

Only safetensors files are read: other formats are pickles, which can run code when they are opened.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from unisono.checkpoint.pickles import how_to_convert, is_pickle
from unisono.checkpoint.tensor_file import BadTensorFile, TensorFile
from unisono.errors import ConfigError
from unisono.formatting import printable
from unisono.recipes.wan.models.scaled_weights import check_formats, num_per_row, scaled, split_names
from unisono.recipes.wan.models.weight_names import (
    MAGNITUDE,
    Shapes,
    base_name,
    diffusers_names,
    num_layers,
    plain_name,
)


class Weights:
    """The weights in safetensors files, by diffusers' names; reads a weight only when it is requested."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = [Path(file) for file in files]
        places: dict[str, Path] = {}
        self._opened: dict[Path, TensorFile] = {}
        for file in self.files:
            for name in self._open(file).entries:
                if places.setdefault(name, file) != file:
                    raise ConfigError(
                        f"{file}: {name} is also in {places[name].name}; these are not parts of one model"
                    )
        weights, scales = split_names(places, self.label)
        self._places = {ours: (places[name], name) for ours, name in diffusers_names(weights, self.label).items()}
        self._scales = {
            weight: [(places[name], name, self._num_per_row(places, weight, name)) for name in names]
            for weight, names in scales.items()
        }
        for opened in self._opened.values():
            with reading_safetensors(opened.path):
                check_formats(opened, self.label)

    def _num_per_row(self, places: Mapping[str, Path], weight: str, scale: str) -> int:
        of_weight, of_scale = (self._open(places[name]).entries[name].shape for name in (weight, scale))
        return num_per_row(of_weight, of_scale, f"{self.label}: {scale}")

    @property
    def label(self) -> str:
        """Name of the files in messages."""
        return str(self.files[0]) if len(self.files) == 1 else f"{self.files[0]} and {len(self.files) - 1} more files"

    def names(self) -> list[str]:
        """Returns the diffusers names of all weights."""
        return list(self._places)

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a weight, from the file's header."""
        file, theirs = self._places[name]
        return self._open(file).entries[theirs].shape

    def dtype(self, name: str) -> torch.dtype:
        """Returns the dtype of `tensor`'s result: the file's dtype, or float32 if the weight has scales."""
        file, theirs = self._places[name]
        return torch.float32 if self._scales.get(theirs) else self._open(file).dtype(theirs)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of all weights."""
        return {name: self.shape(name) for name in self._places}

    def num_weights(self) -> int:
        """Returns the total number of elements."""
        return sum(math.prod(self.shape(name)) for name in self._places)

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Reads a weight into new memory, as `dtype` or in the file's dtype (float32 if it has scales)."""
        return self._read(name, dtype, None)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Reads only the rows `start` to `stop` of a weight's first dimension, in the file's dtype."""
        base = base_name(name)
        if base is None:
            raise ValueError(f"{name} belongs to a LoRA, which has no pretrained weights")
        return self._read(base, None, (start, stop))

    def _read(self, name: str, dtype: torch.dtype | None, rows: tuple[int, int] | None) -> Tensor:
        file, theirs = self._places[name]
        tensor = self._stored(file, theirs, rows)
        for scale_file, scale, per_row in self._scales.get(theirs, ()):
            tensor = scaled(tensor, self._stored(scale_file, scale, rows if per_row else None), per_row)
        return tensor.to(dtype=dtype)

    def _stored(self, file: Path, name: str, rows: tuple[int, int] | None) -> Tensor:
        """Reads a tensor from a file, or only some of its rows."""
        opened = self._open(file)
        with reading_safetensors(file):
            kind = opened.dtype(name)
            if not kind.is_floating_point:
                raise ConfigError(f"{self.label}: {name} has dtype {kind}; expected floating point")
            return opened.tensor(name) if rows is None else opened.rows(name, *rows)

    def _open(self, file: Path) -> TensorFile:
        if file not in self._opened:
            refuse_pickle(file)
            with reading_safetensors(file):
                self._opened[file] = TensorFile(file)
        return self._opened[file]


class ExpertWeights:
    """The weights of one transformer, or of two experts, in files."""

    def __init__(self, files: Mapping[str, Weights]) -> None:
        self._files = files

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Reads only the rows `start` to `stop` of a weight."""
        transformer, _, inside = name.partition(".")
        layer, magnitude, _ = plain_name(inside).partition(f".{MAGNITUDE}.")
        if magnitude:  # a DoRA initially has no effect, because its magnitudes are the norms of the weight's rows
            rows = self._files[transformer].rows(f"{layer}.weight", start, stop)
            norms: Tensor = torch.linalg.norm(rows.float().flatten(1), dim=1)
            return norms
        return self._files[transformer].rows(inside, start, stop)


@contextmanager
def reading_safetensors(file: Path) -> Iterator[None]:
    """Turns errors that occur while a weight file is read into a ConfigError."""
    try:
        yield
    except (BadTensorFile, OSError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"{file} cannot be read as safetensors ({why}); it is another format, or truncated: copy or download it "
            "again"
        ) from None


def open_weights(files: Path | Sequence[Path]) -> Weights:
    """Opens a model's weights, given one or several safetensors files or the folder that contains them."""
    if isinstance(files, Path):
        files = weight_files(files)
    return Weights(files)


def weight_files(path: Path) -> list[Path]:
    """Returns the safetensors files of one model: the file itself, or the files in the folder."""
    if not path.is_dir():
        refuse_pickle(path)
        return [path]
    stem = "diffusion_pytorch_model"
    if (index := path / f"{stem}.safetensors.index.json").is_file():
        return _indexed(index)
    if (whole := path / f"{stem}.safetensors").is_file():
        return [whole]
    files = sorted(path.glob("*.safetensors"))
    if len(files) == 1:
        return files
    if files:
        names = ", ".join(file.name for file in files[:3])
        raise ConfigError(f"{path} has several weight files and no index ({names}); pass the path of one of them")
    for file in sorted(path.iterdir()):
        refuse_pickle(file)
    raise ConfigError(f"{path} has no weights; expected {stem}.safetensors, or its parts with an index")


def refuse_pickle(file: Path) -> None:
    """Raises ConfigError for formats that can run code when they are opened."""
    if is_pickle(file):
        raise ConfigError(how_to_convert(file))


def _indexed(index: Path) -> list[Path]:
    try:
        names = set(json.loads(index.read_bytes())["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ConfigError(f"{index} is damaged; copy or download it again") from None
    if not names:
        raise ConfigError(f"{index} lists no weights; copy or download it again")
    if not all(isinstance(name, str) and name == Path(name).name for name in names):
        raise ConfigError(f"{index} names files outside of its folder, which is not allowed")
    files = [index.parent / name for name in sorted(names)]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        names_of_few = printable(", ".join(missing[:3]))
        raise ConfigError(f"{index.parent} lacks {names_of_few}; copy or download it again")
    return files


def fill(model: nn.Module, path: Path, *, device: str = "cpu", own_dtypes: bool = False) -> None:
    """Fills a transformer that is on the meta device, weight by weight; never holds a second copy of the whole model.

    `own_dtypes` casts each weight to its dtype in the model; otherwise each weight keeps the file's dtype. A LoRA that
    was added before keeps its weights.
    """
    weights = open_weights(path)
    check_fit(model, weights)
    for name, parameter in list(model.named_parameters()):
        if (base := base_name(name)) is not None:
            owner, _, leaf = name.rpartition(".")
            tensor = weights.tensor(base, parameter.dtype if own_dtypes else None).to(device)
            filled = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
            setattr(model.get_submodule(owner), leaf, filled)


def check_fit(model: nn.Module, weights: Weights) -> None:
    """Raises ConfigError unless the names and shapes of the weights are exactly those of the model."""
    own = {base: tuple(it.shape) for name, it in model.named_parameters() if (base := base_name(name)) is not None}
    theirs = weights.shapes()
    if own == theirs:
        return
    if (mine := _architecture(own)) != (other := _architecture(theirs)):
        raise ConfigError(
            f"{weights.label} is a checkpoint of another architecture: it has {other}, the model {mine}; pass other "
            "weights, or the model_config that they were trained with"
        )
    missing, unexpected = [*(own.keys() - theirs.keys())], [*(theirs.keys() - own.keys())]
    differences = [
        f"{verb} {', '.join(sorted(names)[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
        for verb, names in (
            ("lacks", missing),
            ("has", unexpected),
            ("has other shapes of", [name for name in own.keys() & theirs.keys() if own[name] != theirs[name]]),
        )
        if names
    ]
    why = "the download may be incomplete" if missing else "it belongs to a kind of model that cannot be trained"
    raise ConfigError(f"{weights.label} does not fit the model: it {'; it '.join(differences)}; {why}")


def _architecture(shapes: Shapes) -> str:
    layers = num_layers(shapes)
    width, channels = (*shapes.get("patch_embedding.weight", ()), 0, 0)[:2]
    inner = (*shapes.get("blocks.0.ffn.net.0.proj.weight", ()), 0)[0]
    text = (*shapes.get("condition_embedder.text_embedder.linear_1.weight", ()), 0, 0)[1]
    return f"{layers} layers of width {width} and {inner}, {channels} channels and text of width {text}"
