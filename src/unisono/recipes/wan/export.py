"""Writes a trained transformer as a folder that `diffusers.WanPipeline.from_pretrained` loads."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from unisono.config.values import shown
from unisono.errors import ConfigError, UserError
from unisono.recipes.common.model_files import read_json
from unisono.recipes.wan.models.load import BOUNDARY, WanFolder, build_meta, transformer_config
from unisono.recipes.wan.models.weights import fill, refuse_pickle

if TYPE_CHECKING:
    from unisono.recipes.wan.tiny.models import PipelineParts

_SHARD = "5GB"
_LIBRARIES = ("diffusers", "transformers")
_KINDS = {".json", ".safetensors", ".model", ".txt"}  # no pickles, no code

Trained = nn.Module | Mapping[str, Tensor]


def other_parts(pipeline: WanFolder, trained: Sequence[str], expert: str) -> WanFolder:
    """A pipeline without its transformers, which are not those that were trained.

    One exception: next to an expert that was trained alone, a pipeline of two experts provides the other one.
    """
    alone = expert != "both" and len(trained) == 1 and len(pipeline.transformers) == 2
    kept = {name: place for name, place in pipeline.transformers.items() if alone and name not in trained}
    others = {
        name: kind
        for name, kind in pipeline.components.items()
        if name not in ("transformer", "transformer_2") or name in kept
    }
    boundary = pipeline.boundary_ratio if kept else BOUNDARY if trained == ["transformer_2"] else None
    return replace(pipeline, transformers=kept, components=others, boundary_ratio=boundary)


def write_pipeline(
    folder: Path,
    transformer: Trained | None,
    transformer_2: Trained | None = None,
    *,
    source: WanFolder | PipelineParts | None = None,
    config: Mapping[str, Any] | None = None,
    boundary_ratio: float | None = None,
    expand_timesteps: bool | None = None,
) -> str:
    """Writes trained transformers and the other parts of a pipeline to an empty folder; returns a description.

    The other parts come from `source`: the model that training started from (they are copied, and so is an expert that
    was not trained), or the parts themselves. `config` says how to build transformers that are given as weights only.
    Pipeline settings that are None are taken from the source.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is not an empty folder, and nothing is overwritten; choose another")
    trained = {"transformer": transformer, "transformer_2": transformer_2}
    models = {name: _module(it, config) for name, it in trained.items() if it is not None}
    if not models:
        raise ValueError("write_pipeline: no transformer was given")
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"boundary_ratio": boundary_ratio, "expand_timesteps": expand_timesteps}
    if isinstance(source, WanFolder):
        defaults = {"boundary_ratio": source.boundary_ratio, "expand_timesteps": source.expand_timesteps}
        settings = {name: defaults[name] if value is None else value for name, value in settings.items()}
        return _beside_source(folder, models, source, settings)
    if source is None:
        return _alone(folder, models, "there are no other parts")
    _save_objects(folder, models, source, settings)
    return "a pipeline for WanPipeline.from_pretrained"


def _module(trained: Trained, config: Mapping[str, Any] | None) -> Any:
    """The transformer as diffusers' own class, which can save itself."""
    if isinstance(trained, nn.Module):
        if any(".lora_" in name for name, _ in trained.named_parameters()):
            raise ValueError("write_pipeline: the transformer has a LoRA; merge it first, or save the LoRA alone")
        return trained
    if config is None:
        raise ValueError("write_pipeline: weights alone need a config")
    model = build_meta(config)
    model.load_state_dict(trained, assign=True)
    return model


def _save_objects(folder: Path, models: Mapping[str, Any], parts: PipelineParts, settings: Mapping[str, Any]) -> None:
    from diffusers import WanPipeline

    pipeline: Any = WanPipeline(  # type: ignore[no-untyped-call]
        **parts._asdict(),
        **{"transformer": None, "transformer_2": None, **models},
        boundary_ratio=settings["boundary_ratio"],
        expand_timesteps=bool(settings["expand_timesteps"]),
    )
    pipeline.save_pretrained(str(folder), max_shard_size=_SHARD, safe_serialization=True)


def _beside_source(folder: Path, models: Mapping[str, Any], source: WanFolder, settings: Mapping[str, Any]) -> str:
    for name in source.transformers:
        if name not in models and source.kind != "pipeline":  # its weights may have other names: convert them
            untrained = build_meta(transformer_config(source, part=name))
            fill(untrained, source.transformers[name])
            models = {**models, name: untrained}
    if source.kind != "pipeline":
        return _alone(folder, models, f"{source.path} has no VAE, text encoder and tokenizer in diffusers' layout")
    index = read_json(source.path / "model_index.json", dict)
    # This is how diffusers marks a transformer that the folder does not contain.
    index |= {
        name: [None, None]
        for name in ("transformer", "transformer_2")
        if name in index and name not in source.components
    }
    others = [name for name in source.components if name not in models]
    for name in others:
        _check_part(source, name)
    for name in others:
        _bring(source.path / name, folder / name)
    for name, model in models.items():
        model.save_pretrained(str(folder / name), max_shard_size=_SHARD, safe_serialization=True)
        index[name] = ["diffusers", "WanTransformer3DModel"]
    # Last: without it, a folder that a full disk left incomplete does not look like a pipeline.
    (folder / "model_index.json").write_text(json.dumps({**index, **settings}, indent=2) + "\n", encoding="utf-8")
    description = f"a pipeline for {index.get('_class_name')}.from_pretrained"
    if "transformer" not in (*models, *others):
        description += "; it lacks the high-noise expert: pass that as transformer"
    return description


def _alone(folder: Path, models: Mapping[str, Any], why: str) -> str:
    for name, model in models.items():
        model.save_pretrained(str(folder / name), max_shard_size=_SHARD, safe_serialization=True)
    return (
        f"only {' and '.join(models)}, since {why}: call WanPipeline.from_pretrained on a whole pipeline and pass, as "
        f"{next(iter(models))}, WanTransformer3DModel.from_pretrained({str(folder / next(iter(models)))!r})"
    )


def _check_part(source: WanFolder, name: str) -> None:
    library, kind = source.components[name]
    if library not in _LIBRARIES or not name.isidentifier():
        raise ConfigError(
            f"{source.path / 'model_index.json'}: {shown(name)} is a {shown(kind)} of {shown(library)}; only parts "
            f"from {' and '.join(_LIBRARIES)} are exported"
        )
    folder = source.path / name
    if not folder.is_dir():
        raise ConfigError(f"{source.path} lists {name}, but has no such folder; copy or download it again")
    if not any(folder.glob("*.safetensors")):
        for file in folder.iterdir():
            refuse_pickle(file)


def _bring(source: Path, folder: Path) -> None:
    """Copies a part's files. The hub's cache is full of links, so their targets are copied."""
    folder.mkdir()
    for file in sorted(source.iterdir()):
        if file.is_file() and file.suffix in _KINDS:
            _copy(file, folder / file.name)


def _copy(file: Path, to: Path) -> None:
    # No hard link: a program that later overwrites the copy in place would change the source too. copy_file_range lets
    # file systems share blocks, and network servers copy on their own.
    with file.open("rb") as source, to.open("xb") as target:
        try:
            while os.copy_file_range(source.fileno(), target.fileno(), 2**30):
                pass
        except OSError:  # not supported between some file systems
            source.seek(0)
            target.seek(0)
            shutil.copyfileobj(source, target, 2**24)
