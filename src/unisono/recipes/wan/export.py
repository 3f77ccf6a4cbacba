"""Writes a trained transformer as a folder that `diffusers.WanPipeline.from_pretrained` loads."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from unisono.config.values import shown
from unisono.errors import ConfigError, UserError
from unisono.recipes.common.model_files import read_json
from unisono.recipes.wan.models.load import BOUNDARY, WanFolder, build_meta, transformer_config
from unisono.recipes.wan.models.weight_names import is_adapter
from unisono.recipes.wan.models.weights import fill, refuse_pickle

if TYPE_CHECKING:
    from unisono.recipes.wan.tiny.models import PipelineParts

_SHARD = "5GB"
_LIBRARIES = ("diffusers", "transformers")
_KINDS = {".json", ".safetensors", ".model", ".txt"}  # file types to copy; excludes pickles and code


TEXT_TO_VIDEO, IMAGE_TO_VIDEO = "WanPipeline", "WanImageToVideoPipeline"
"""diffusers' pipeline classes."""


def other_parts(pipeline: WanFolder, trained: Sequence[str], expert: str, boundary: float = BOUNDARY) -> WanFolder:
    """Returns the pipeline parts to export next to the trained transformers: all except the pipeline's transformers.

    Exception: if only one of two experts was trained, the pipeline's other expert is exported too. `boundary` is the
    noise level that divides the experts; it is used if the pipeline does not state one.
    """
    alone = expert != "both" and len(trained) == 1 and len(pipeline.transformers) == 2
    other_expert = {name: place for name, place in pipeline.transformers.items() if alone and name not in trained}
    others = {
        name: kind
        for name, kind in pipeline.components.items()
        if name not in ("transformer", "transformer_2") or name in other_expert
    }
    alone_ratio = boundary if trained == ["transformer_2"] else None
    ratio = pipeline.boundary_ratio if other_expert else alone_ratio
    return replace(pipeline, transformers=other_expert, components=others, boundary_ratio=ratio)


def write_pipeline(
    folder: Path,
    transformer: nn.Module | None,
    transformer_2: nn.Module | None = None,
    *,
    source: WanFolder | PipelineParts | None = None,
    boundary_ratio: float | None = None,
    has_given_frames: bool = False,
) -> str:
    """Writes trained transformers and the other pipeline parts to an empty folder; returns a description of the result.

    The other parts, including an expert that was not trained, are copied from `source`: the model that training started
    from, or its `other_parts`. If boundary_ratio is None, the source's value is used. `has_given_frames`: whether this
    is an image-to-video model.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is not an empty folder, and an export never overwrites files; choose another folder")
    trained = {"transformer": transformer, "transformer_2": transformer_2}
    models = {name: model for name, model in trained.items() if model is not None}
    if not models:
        raise ValueError("write_pipeline: no transformer was given")
    if any(is_adapter(name) for model in models.values() for name, _ in model.named_parameters()):
        raise ValueError("write_pipeline: the transformer has a LoRA; save the LoRA alone")
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(source, WanFolder):
        boundary_ratio = source.boundary_ratio if boundary_ratio is None else boundary_ratio
        return _with_copied_parts(folder, models, source, boundary_ratio, has_given_frames)
    kind = IMAGE_TO_VIDEO if has_given_frames else TEXT_TO_VIDEO
    if source is None:
        return _only_transformers(folder, models, "there are no other parts", kind)
    import diffusers

    transformers = {"transformer": None, "transformer_2": None, **models}
    pipeline: Any = getattr(diffusers, kind)(**source._asdict(), **transformers, boundary_ratio=boundary_ratio)
    pipeline.save_pretrained(str(folder), max_shard_size=_SHARD, safe_serialization=True)
    return f"a pipeline for {kind}.from_pretrained"


def _with_copied_parts(
    folder: Path, models: Mapping[str, Any], source: WanFolder, boundary_ratio: float | None, has_given_frames: bool
) -> str:
    if source.kind != "pipeline":
        models = dict(models)
        for name, path in source.transformers.items():
            if name not in models:  # converted, because its weights may have other names than in diffusers
                models[name] = build_meta(transformer_config(source, part=name))
                fill(models[name], path)
        why = f"{source.path} has no VAE, text encoder and tokenizer in diffusers' layout"
        return _only_transformers(folder, models, why, IMAGE_TO_VIDEO if has_given_frames else TEXT_TO_VIDEO)
    index = read_json(source.path / "model_index.json", dict)
    # diffusers expects this entry for a transformer that the folder does not contain.
    index |= {
        name: [None, None]
        for name in ("transformer", "transformer_2")
        if name in index and name not in source.components
    }
    if has_given_frames:  # the other parts may be from a text-to-video pipeline
        index["_class_name"] = IMAGE_TO_VIDEO
    others = [name for name in source.components if name not in models]
    for name in others:
        _check_part(source, name)
    for name in others:
        _copy_part(source.path / name, folder / name)
    for name, model in models.items():
        model.save_pretrained(str(folder / name), max_shard_size=_SHARD, safe_serialization=True)
        index[name] = ["diffusers", "WanTransformer3DModel"]
    # Written last, so that an incomplete folder (after a full disk, for example) cannot be taken for a complete one.
    index |= {"boundary_ratio": boundary_ratio, "expand_timesteps": source.expand_timesteps}
    (folder / "model_index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    description = f"a pipeline for {index.get('_class_name')}.from_pretrained"
    if "transformer" not in (*models, *others):
        description += "; it lacks the high-noise expert: pass that expert as transformer"
    return description


def _only_transformers(folder: Path, models: Mapping[str, Any], why: str, kind: str) -> str:
    for name, model in models.items():
        model.save_pretrained(str(folder / name), max_shard_size=_SHARD, safe_serialization=True)
    return (
        f"only {' and '.join(models)}, since {why}: call {kind}.from_pretrained on a whole pipeline and pass, as "
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


def _copy_part(source: Path, folder: Path) -> None:
    """Copies a part's files. The hub's cache is full of links, so their targets are copied."""
    folder.mkdir()
    for file in sorted(source.iterdir()):
        if file.is_file() and file.suffix in _KINDS:
            _copy(file, folder / file.name)


def _copy(file: Path, to: Path) -> None:
    # Does not use a hard link, because a program that overwrites the copy in place would then change the source too.
    # copy_file_range lets a file system share the blocks, and a network server copy without sending the data.
    with file.open("rb") as source, to.open("xb") as target:
        try:
            while os.copy_file_range(source.fileno(), target.fileno(), 2**30):
                pass
        except OSError:  # some file systems do not support it
            source.seek(0)
            target.seek(0)
            shutil.copyfileobj(source, target, 2**24)
