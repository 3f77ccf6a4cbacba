"""Splits the labelled videos of a run into training and held-out videos."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from unisono.engine.recipe import Work
from unisono.errors import ConfigError
from unisono.recipes.clips.data.labels import Labelled, read_labels
from unisono.recipes.clips.data.synthetic import LABELS, make
from unisono.recipes.clips.settings import MIRROR

_HELD_OUT_EVERY = 5  # without num_eval, one in this many videos is held out


def read_splits(config: Any, mirror: Path, remark: Callable[[str], object]) -> tuple[list[Labelled], list[Labelled]]:
    """Returns the labelled videos to train on and those to hold out.

    `mirror` is the folder of the mirror set (see `make_mirror`). Calls `remark` with warnings for the user.
    """
    if config.data_path == MIRROR:
        train, held_out = (
            _read(config, str(_mirror_folder(config, mirror, split)), remark) for split in _MIRROR_SPLITS
        )
        return train, held_out
    labelled = _read(config, config.data_path, remark)
    if config.eval_data_path:
        return labelled, _read(config, config.eval_data_path, remark)
    names = list(dict.fromkeys(each.name for each in labelled))  # all queries about a video are in the same split
    number = config.num_eval if config.num_eval is not None else len(names) // _HELD_OUT_EVERY
    if not number and config.num_eval is None:
        remark(
            f"no video is held out, so the run cannot measure how good the model is; data_path has only {len(names)} "
            f"videos and holds out one in {_HELD_OUT_EVERY}; pass --num_eval 1, or --eval_data_path with other labels"
        )
    if number >= len(names):
        raise ConfigError(
            f"num_eval {number}: data_path {config.data_path} has {len(names)} videos, which leaves none to train on; "
            f"use at most {len(names) - 1}"
        )
    held_out_names = {names[(2 * index + 1) * len(names) // (2 * number)] for index in range(number)}
    return (
        [each for each in labelled if each.name not in held_out_names],
        [each for each in labelled if each.name in held_out_names],
    )


def _read(config: Any, path: str, remark: Callable[[str], object]) -> list[Labelled]:
    return read_labels(
        Path(path).expanduser(),
        config.clip_seconds,
        media=Path(config.media_path).expanduser() if config.media_path else None,
        highest_score=config.highest_score,
        feature_seconds=config.feature_seconds,
        leave_out_bad=config.leave_out_bad,
        follow_links=config.follow_links,
        remark=remark,
    )


# The mirror set ------------------------------------------------------------------------------------------------

_MIRROR_SPLITS = ("train", "eval")


def make_mirror(config: Any, folder: Path, work: Work) -> None:
    """Generates the videos and labels of the mirror set that do not exist yet."""
    for split, number in zip(_MIRROR_SPLITS, (config.num_videos, max(1, config.num_videos // 4)), strict=True):
        for target in work.share([_mirror_folder(config, folder, split)]):
            if (target / LABELS).is_file():
                continue
            partial = target.with_name(f"{target.name}.part")
            if partial.exists():
                _remove_generated(partial)
            with work.progress(f"generating videos in {target}", number) as advance:
                make(partial, number, split=split, size=config.frame_size, on_video=advance)
            partial.rename(target)


def _mirror_folder(config: Any, folder: Path, split: str) -> Path:
    return folder / f"mirror_{split}_{config.num_videos}x{config.frame_size}"


def _remove_generated(folder: Path) -> None:
    """Removes a partial dataset that a killed process left: generated videos and labels, but no other files."""
    for file in folder.glob("*.mp4"):
        file.unlink()
    (folder / LABELS).unlink(missing_ok=True)
    folder.rmdir()
