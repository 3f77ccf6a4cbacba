"""The parts of a Wan model in diffusers' layout: its VAE, text encoder and tokenizer, each in a folder of its name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from unisono.config.values import shown
from unisono.errors import ConfigError

_OWN_ATTENTION = ("eager", "sdpa")


def part_of(model_path: str | Path, name: str) -> Path:
    """The folder of a part of a model; a hub id is downloaded first, unless it is here already."""
    path = Path(model_path).expanduser()
    if not path.exists():
        from unisono.recipes.wan.models.load import describe

        path = describe(model_path).path
    folder = path / name
    if not folder.is_dir():
        raise ConfigError(
            f"{model_path} has no folder {name}/; give a Wan model in diffusers' layout, "
            "such as Wan-AI/Wan2.1-T2V-1.3B-Diffusers or a copy of it"
        )
    return folder


def part_config(model_path: str | Path, name: str) -> dict[str, Any]:
    """The config of a part of a model."""
    from unisono.recipes.common.model_files import read_json

    return read_json(part_of(model_path, name) / "config.json", dict)


def load_part(kind: Any, model_path: str | Path, name: str, **options: Any) -> Any:
    """A part of a model, by its class of diffusers or transformers, with all its weights."""
    folder = part_of(model_path, name)
    _refuse_code(folder)
    with loading(folder), _quietly():
        # A .bin is a pickle, which may hold any program.
        model, told = kind.from_pretrained(folder, use_safetensors=True, output_loading_info=True, **options)
    if missing := sorted(told["missing_keys"]):  # both libraries would go on with random numbers in their place
        raise ConfigError(
            f"{folder} lacks {len(missing)} of the weights of {kind.__name__}, such as {missing[0]}; "
            "use a complete copy of the model"
        )
    return model


def _refuse_code(folder: Path) -> None:
    """Refuses what would make the libraries fetch and run programs, or models from other places."""
    from unisono.recipes.common.model_files import read_json

    if (adapter := folder / "adapter_config.json").exists():
        raise ConfigError(f"{adapter}: an adapter, which can name code and other models; remove it, or merge it first")
    config = read_json(folder / "config.json", dict)
    for key, value in config.items():
        if key.endswith("attn_implementation") and value not in (None, *_OWN_ATTENTION):
            raise ConfigError(
                f"{folder / 'config.json'}: {shown(key)} {shown(value)} can name code from the hub; remove that line"
            )
    if config.get("quantization_config"):
        raise ConfigError(f"{folder} is quantized; use a copy of the model in 16 or 32 bit")


def count_in(config: Mapping[str, Any], name: str, of: str, default: int | None = None) -> int:
    """A whole number above 0 in a config."""
    value = config.get(name)
    value = default if value is None else value
    if type(value) is not int or value < 1:
        raise ConfigError(f"the config of the {of} has {name} {shown(value)}; expected a whole number above 0")
    return value


@contextmanager
def loading(folder: Path) -> Iterator[None]:
    """While a library loads what is in a folder: what it has to say against it is told in one line."""
    try:
        yield
    except Exception as error:  # both libraries fail in many ways on what they do not expect
        said = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ConfigError(f"{folder} cannot be loaded ({said}); use a complete copy of the model") from None


@contextmanager
def _quietly() -> Iterator[None]:
    """Without bars and warnings, of which every rank would draw its own; what is wrong is told by us."""
    from diffusers.utils import logging as of_diffusers
    from transformers.utils import logging as of_transformers

    libraries: tuple[Any, ...] = (of_diffusers, of_transformers)
    before, bars = [library.get_verbosity() for library in libraries], of_transformers.is_progress_bar_enabled()
    of_transformers.disable_progress_bar()  # type: ignore[no-untyped-call]
    for library in libraries:
        library.set_verbosity_error()
    try:
        yield
    finally:
        for library, verbosity in zip(libraries, before, strict=True):
            library.set_verbosity(verbosity)
        if bars:
            of_transformers.enable_progress_bar()  # type: ignore[no-untyped-call]
