"""Locates models (in a folder, on the hub, or in the MiniLM package) and checks that they can be loaded safely.

Model folders are not trusted: weights must be safetensors, all files must be inside the folder, and no code from the
folder is run.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from unisono.errors import ConfigError
from unisono.recipes.common.minilm import minilm_folder
from unisono.recipes.common.model_files import read_json

Pooling = Literal["mean", "cls", "last"]
Kind = Literal["query", "page"]

MINILM = "minilm"
_NEEDED = ("*.json", "*.txt", "*.model", "model*.safetensors")  # files to download from the hub
POOLINGS: Mapping[str, Pooling] = {"mean": "mean", "cls": "cls", "lasttoken": "last"}
"""Names of pooling modes in sentence-transformers -> unisono's names."""
_OLD_KEYS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_KINDS: Mapping[Kind, Sequence[str]] = {"query": ("query",), "page": ("document", "passage", "corpus")}


def locate(name: str) -> Path:
    """Returns the folder of a model; downloads a hub model unless it is cached or HF_HUB_OFFLINE is set."""
    if name == MINILM:
        return minilm_folder(f"model_name {MINILM}")
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ConfigError(f"model_name {name} is a file; pass its folder")
    if name.count("/") > 1 or name.startswith((".", "/", "~")) or "\\" in name:
        raise ConfigError(f"model_name {name}: there is no such folder")
    return _from_hub(name)


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        with quietly():
            return Path(snapshot_download(name, allow_patterns=list(_NEEDED), local_files_only=_offline.get()))
    except HFValidationError:
        raise ConfigError(f"model_name {name!r}: there is no such folder, and it is not a valid hub id") from None
    except LocalEntryNotFoundError:
        raise ConfigError(
            f"model_name {name}: there is no such folder, and the hub is offline or cannot be reached; pass a folder, "
            f"`minilm` or `tiny`"
        ) from None
    except RepositoryNotFoundError:
        raise ConfigError(
            f"model_name {name}: there is no such folder, and the hub has no such model (or requires a login)"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"model_name {name}: cannot be downloaded from the hub ({in_a_line(error)})") from None


def check_folder(folder: Path, name: str) -> None:
    """Rejects a folder that does not contain a model that can be loaded safely."""
    if (folder / "adapter_config.json").is_file():
        raise ConfigError(f"model_name {name}: {folder} is a LoRA; merge it into its model first (merge_and_unload)")
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"model_name {name}: {folder} has no config.json; expected a folder written by save_pretrained()"
        )
    kind = read_json(folder / "config.json", dict).get("model_type")
    from transformers import CONFIG_MAPPING

    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise ConfigError(
            f"model_name {name}: transformers does not support the model type {kind!r} (code in a model's folder is "
            "never run); use another model, or a newer version of transformers"
        )
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        parts = read_json(index, dict).get("weight_map")
        files = set(parts.values()) if isinstance(parts, dict) else {None}
        if not all(isinstance(file, str) and file == Path(file).name and (folder / file).is_file() for file in files):
            raise ConfigError(f"model_name {name}: {index} lists files that do not exist; download it again")
    elif not (folder / "model.safetensors").is_file():
        pickled = next((file.name for file in sorted(folder.glob("*.bin"))), None)
        raise ConfigError(
            f"model_name {name}: {folder} has only {pickled}, a pickle, which can run code when loaded; if you trust "
            "it, convert it with AutoModel.from_pretrained(FOLDER).save_pretrained(OTHER)"
            if pickled
            else f"model_name {name}: {folder} has no weights (model.safetensors)"
        )


_offline: ContextVar[bool] = ContextVar("_offline", default=False)


@contextmanager
def nothing_fetched() -> Iterator[None]:
    """Disables downloads inside the `with` block; hub models must be cached on this machine."""
    token = _offline.set(True)
    try:
        yield
    finally:
        _offline.reset(token)


@dataclass(frozen=True)
class Layout:
    """The settings of a sentence-transformers folder."""

    transformer: Path
    """Folder of the transformer."""
    pooling: Pooling | None = None
    prompts: Mapping[Kind, str] = field(default_factory=dict)
    max_length: int | None = None


def read_layout(folder: Path, name: str, *, any_pooling: bool = False) -> Layout:
    """Reads pooling, prompts and maximum length from a folder; raises ConfigError for unsupported modules.

    `any_pooling` ignores the folder's pooling, even if it is not supported.
    """
    if not (folder / "modules.json").is_file():
        return Layout(folder)
    modules = read_json(folder / "modules.json", list)
    if not all(isinstance(module, dict) for module in modules):
        raise ConfigError(f"model_name {name}: {folder / 'modules.json'} is not a list of modules")
    transformer, pooling = folder, None
    prompts = _prompts(folder)
    for module in modules:
        kind, place = str(module.get("type", "")).rpartition(".")[2], _inside(folder, module.get("path", ""), name)
        if kind == "Transformer":
            transformer = place
        elif kind == "Pooling":
            pooling = None if any_pooling else _pooling(place, name, prompted=any(prompts.values()))
        elif kind != "Normalize":  # embeddings are always normalised
            raise ConfigError(
                f"model_name {name}: its modules.json has a {kind or '?'} module, which is not supported; use a model "
                "with only the modules Transformer, Pooling and Normalize"
            )
    length = _lengths(transformer, name)
    return Layout(transformer, pooling, prompts, length)


def _inside(folder: Path, path: Any, name: str) -> Path:
    place = folder / str(path)
    if not place.resolve().is_relative_to(folder.resolve()):
        raise ConfigError(f"model_name {name}: modules.json names {path}, which is outside the folder")
    return place


def _pooling(folder: Path, name: str, *, prompted: bool) -> Pooling:
    config = read_json(folder / "config.json", dict)
    modes = config.get("pooling_mode") or [mode for key, mode in _OLD_KEYS.items() if config.get(key)] or ["mean"]
    modes = [str(mode) for mode in modes] if isinstance(modes, list) else [str(modes)]
    if len(modes) != 1 or modes[0] not in POOLINGS:
        raise ConfigError(
            f"model_name {name}: its pooling mode {' + '.join(modes)} is not supported; pass --pooling mean, cls or "
            "last instead"
        )
    if prompted and config.get("include_prompt") is False:
        raise ConfigError(
            f"model_name {name}: its pooling excludes the prompt, which is not supported; use another model"
        )
    return POOLINGS[modes[0]]


def _prompts(folder: Path) -> dict[Kind, str]:
    file = folder / "config_sentence_transformers.json"
    config = read_json(file, dict) if file.is_file() else {}
    prompts = config.get("prompts")
    if not isinstance(prompts, dict):
        return {}
    default = str(prompts.get(str(config.get("default_prompt_name") or ""), ""))
    return {
        kind: next((str(prompts[name]) for name in names if prompts.get(name)), default)
        for kind, names in _KINDS.items()
    }


def _lengths(folder: Path, name: str) -> int | None:
    file = folder / "sentence_bert_config.json"
    config = read_json(file, dict) if file.is_file() else {}
    if config.get("do_lower_case"):
        raise ConfigError(
            f"model_name {name}: {file.name} sets do_lower_case, which is not supported; set it to false there and "
            "to true in tokenizer_config.json"
        )
    length = config.get("max_seq_length")
    return length if isinstance(length, int) and length > 0 else None


@contextmanager
def quietly() -> Iterator[None]:
    """Silences the progress bars and warnings of the libraries."""
    from huggingface_hub import utils
    from transformers.utils import logging

    log: Any = logging  # both libraries are partly untyped
    hub: Any = utils
    verbosity, log_bars = log.get_verbosity(), log.is_progress_bar_enabled()
    hub_bars = not hub.are_progress_bars_disabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    hub.disable_progress_bars()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.set_verbosity(verbosity)
        if log_bars:
            log.enable_progress_bar()
        if hub_bars:
            hub.enable_progress_bars()


def in_a_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
