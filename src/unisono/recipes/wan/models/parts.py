"""Loads the parts of a Wan model in diffusers' layout: VAE, text encoder and tokenizer, each in its own folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from unisono.config.values import shown
from unisono.errors import ConfigError

_OWN_ATTENTION = ("eager", "sdpa")


def load_part(kind: Any, folder: Path, **options: Any) -> Any:
    """Loads a part of a model from its folder; `kind` is its class in diffusers or transformers."""
    _reject_code(folder)
    with loading(folder), _quietly():
        # Never loads .bin files, which are pickles and can execute arbitrary code.
        model, loading_info = kind.from_pretrained(folder, use_safetensors=True, output_loading_info=True, **options)
    if missing := sorted(loading_info["missing_keys"]):  # diffusers and transformers would use random weights instead
        raise ConfigError(
            f"{folder} lacks {len(missing)} of the weights of {kind.__name__}, such as {missing[0]}; "
            "use a complete copy of the model"
        )
    return model


def _reject_code(folder: Path) -> None:
    """Raises ConfigError if a file would make diffusers or transformers run downloaded code, or load other models."""
    from unisono.recipes.common.model_files import read_json

    if (adapter := folder / "adapter_config.json").exists():
        raise ConfigError(f"{adapter}: an adapter can load code and other models; remove it, or merge it first")
    config = read_json(folder / "config.json", dict)
    for key, value in config.items():
        if key.endswith("attn_implementation") and value not in (None, *_OWN_ATTENTION):
            raise ConfigError(
                f"{folder / 'config.json'}: {shown(key)} {shown(value)} can load code from the hub; remove that line"
            )
    if config.get("quantization_config"):
        raise ConfigError(f"{folder} is quantized; use a copy of the model in 16 or 32 bit")


def count_in(config: Mapping[str, Any], name: str, of: str, default: int | None = None) -> int:
    """Reads a whole number above 0 from a config; `of` names the model in the error message."""
    value = config.get(name)
    value = default if value is None else value
    if type(value) is not int or value < 1:
        raise ConfigError(f"the config of the {of} has {name} {shown(value)}; expected a whole number above 0")
    return value


@contextmanager
def loading(folder: Path) -> Iterator[None]:
    """Turns any exception that a library raises while it loads a folder into a one-line ConfigError."""
    try:
        yield
    except Exception as error:  # diffusers and transformers raise many kinds of exceptions for bad files
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ConfigError(f"{folder} cannot be loaded ({reason}); use a complete copy of the model") from None


@contextmanager
def _quietly() -> Iterator[None]:
    """Silences progress bars and warnings, because every rank would print its own."""
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
