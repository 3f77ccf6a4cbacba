"""Feature extraction: decodes every video once into arrays on disk, which training reads memory-mapped.

    <folder>/<key>/frames.npy     uint8 [T, F, H, W, 3]
                   mel.npy        float16 [T, steps, bands]
                   stats.npy      float16 [T, len(STATS)]
                   features.npy   [T, D] instead of frames, when a model or a feature file provides them
                   facts.json     shapes and facts about the video; written last
             bad/<key>.json       the reason why a file cannot be used

A key is a hash of everything that determines the content: the file's name, size and modification time, and the
settings. The folder of a video appears atomically, so a restarted run continues with the missing videos. Memory use
does not depend on the length of a video.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from unisono.engine.recipe import Work
from unisono.errors import ConfigError
from unisono.recipes.clips.data.arrays import ArrayFolder
from unisono.recipes.clips.data.feature_files import FeatureFile
from unisono.recipes.clips.data.features import (
    FILES,
    ExtractSettings,
    FeatureModel,
    fingerprint,
    model_of,
    read_blocks,
)
from unisono.recipes.clips.video.clips import clips
from unisono.recipes.common.bad_files import BadFiles, BadMedia, first_few, usable_samples
from unisono.recipes.common.cache_files import remove_leftovers
from unisono.recipes.common.fingerprint import Keys

_FORMAT = 2  # part of the key, so arrays in another format are extracted again
_MB = 1_000_000
_MOST_MESSAGES = 3  # warnings about bad files during extraction; open() reports all bad files


class Source(Protocol):
    """A video or its precomputed features; implemented by `Labelled`."""

    @property
    def name(self) -> str: ...
    @property
    def video(self) -> Path | None: ...
    @property
    def features(self) -> FeatureFile | None: ...


@dataclass(frozen=True)
class Extracted:
    """The paths and shapes of one video's arrays; cheap to send to loader workers, which then open the arrays."""

    source: Any
    folder: str
    arrays: dict[str, tuple[int, ...]]
    """Shape of each existing array: `frames`, `mel`, `stats`, `features`."""
    num_clips: int
    duration: float
    has_sound: bool
    remark: str
    """Describes the damage to the file; empty if it is intact. Only the readable part is used."""

    def array(self, name: str) -> NDArray[Any]:
        """Returns one of `arrays`, memory-mapped: [num_clips, ...]."""
        # Opens the file for each read: this takes microseconds, and forked workers must not share a file handle.
        array: NDArray[Any] = np.load(os.path.join(self.folder, f"{name}.npy"), mmap_mode="r", allow_pickle=False)
        return array

    def scores(self) -> NDArray[np.float32]:
        """Returns the labelled scores [num_clips] of the video."""
        scores: NDArray[np.float32] = self.source.scores_for(
            self.num_clips, duration=self.duration, cut_off=bool(self.remark)
        )
        return scores


class _Stopped(Exception):
    pass


class Extraction:
    """The feature extraction of a list of videos."""

    def __init__(self, folder: Path, sources: Sequence[Source], settings: ExtractSettings) -> None:
        self._folder, self._sources, self._settings = folder, sources, settings
        self._bad = BadFiles(folder / "bad")
        self._model: FeatureModel | None = None
        self._one_at_a_time = threading.Lock()
        self.remarks: list[str] = []
        """Warnings for the user; set by open()."""

    def fill(self, work: Work, workers: int = 1) -> None:
        """Extracts this process's share of the missing videos in `workers` threads; continues after an interruption."""
        self._folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(self._folder)
        sources = dict(zip(self._keys, self._sources, strict=True))
        # Processes divide all videos, not only the missing ones: a process that looked later would see fewer missing
        # videos and divide them differently.
        mine = [key for key in work.share(list(sources)) if ArrayFolder(self._folder / key).facts() is None]
        sizes = {key: _size(self._file_of(sources[key])) for key in sources}
        read, stop = _Megabytes(sizes, mine), threading.Event()
        pool = ThreadPoolExecutor(max(1, workers))

        def stopping() -> bool:
            return stop.is_set() or work.stopping

        try:
            with work.progress("extracting features", read.total, "MB", of=_megabytes(sum(sizes.values()))) as advance:
                waiting = {pool.submit(self._extract, stopping, work.device, key, sources[key], read) for key in mine}
                num_bad = 0
                while waiting:
                    done, waiting = wait(waiting, timeout=1.0, return_when=FIRST_COMPLETED)
                    advance.to(read.done)
                    for why in filter(None, (each.result() for each in done)):
                        num_bad += 1
                        if num_bad <= _MOST_MESSAGES:
                            work.message(f"bad file: {why}")
        except _Stopped:
            return
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)
            self._model = None
            if torch.device(work.device).type == "cuda":  # frees memory for training
                torch.cuda.empty_cache()

    def _extract(
        self, stopping: Callable[[], bool], device: str, key: str, source: Source, read: _Megabytes
    ) -> str | None:
        """Extracts a video; returns the problem if the video cannot be used."""
        if stopping():
            raise _Stopped
        try:
            if self._from_features(source):
                self._convert_features(key, source)
            else:
                self._extract_video(stopping, device, key, source, read)
        except BadMedia as error:
            self._bad.record(key, str(error))
            return str(error)
        finally:
            read.reached(key, 1.0)
        return None

    def _from_features(self, source: Source) -> bool:
        return self._settings.features == FILES or source.video is None

    def _file_of(self, source: Source) -> Path | None:
        if not self._from_features(source):
            return source.video
        return source.features.path if source.features else None

    def _convert_features(self, key: str, source: Source) -> None:
        if source.features is None:
            raise BadMedia(source.video or Path(source.name), "has no feature file next to it (.npy, .npz, .h5)")
        rows = source.features.clips(self._settings.clip_seconds)
        with ArrayFolder(self._folder / key).writing() as new:
            new.add({"features": rows})
            new.commit(duration=len(rows) * self._settings.clip_seconds, has_sound=False, remark="")

    def _extract_video(
        self, stopping: Callable[[], bool], device: str, key: str, source: Source, read: _Megabytes
    ) -> None:
        assert source.video is not None
        settings, model = self._settings, self._shared_model(device)
        reading = clips(
            source.video, settings.clip_seconds, settings.frames_per_clip, settings.decoded_size, settings.sample_rate
        )
        with closing(reading), ArrayFolder(self._folder / key).writing() as new:
            for block in read_blocks(reading, settings, model):
                if stopping():
                    raise _Stopped
                new.add(block)
                read.reached(key, reading.duration / max(reading.facts.duration, 1e-6))
            new.commit(duration=reading.duration, has_sound=reading.has_sound, remark=reading.remark)

    def _shared_model(self, device: str) -> FeatureModel | None:
        with self._one_at_a_time:
            if self._model is None and (model := model_of(self._settings.features, device)) is not None:

                def locked(frames: NDArray[np.uint8], sound: NDArray[np.float32], sample_rate: int) -> Any:
                    with self._one_at_a_time:  # a user's function need not be thread-safe
                        return model(frames, sound, sample_rate)

                self._model = locked
            return self._model

    def open(self, leave_out_bad: bool = False) -> list[Extracted]:
        """Returns the videos after all processes have extracted their shares.

        Raises an error for an unusable file, or skips it with `leave_out_bad`.
        """
        facts = {key: ArrayFolder(self._folder / key).facts() for key in set(self._keys)}
        extracted = {key: values for key, values in facts.items() if values is not None}
        if not self._sources:
            raise ConfigError("there are no videos to extract features from; check data_path")
        usable_indices, self.remarks = usable_samples(
            self._sources, [(extracted, self._keys)], self._bad, leave_out_bad
        )
        videos = [
            Extracted(self._sources[index], str(self._folder / self._keys[index]), **extracted[self._keys[index]])
            for index in usable_indices
        ]
        self._check_shapes(videos)
        self._add_remarks(videos)
        return videos

    def _check_shapes(self, videos: list[Extracted]) -> None:
        for video in videos[1:]:
            if {name: shape[1:] for name, shape in video.arrays.items()} != {
                name: shape[1:] for name, shape in videos[0].arrays.items()
            }:
                raise ConfigError(
                    f"{video.source.name} has {_shapes(video)}, but {videos[0].source.name} has {_shapes(videos[0])}; "
                    "in one run, all samples must be videos, or all must be features of the same width"
                )

    def _add_remarks(self, extracted: list[Extracted]) -> None:
        videos = {each.folder: each for each in extracted if "mel" in each.arrays}.values()
        if silent := [each.source.name for each in videos if not each.has_sound]:
            self.remarks.append(f"{len(silent):,} of {len(videos):,} videos have no sound: {first_few(silent)}")
        if damaged := [each.remark for each in videos if each.remark]:
            self.remarks.append(f"{len(damaged):,} of {len(videos):,} videos are damaged: {first_few(damaged)}")

    @cached_property
    def _keys(self) -> list[str]:
        settings = self._settings
        computed = Keys("clips", _FORMAT, asdict(settings), fingerprint(settings.features))
        from_file = Keys("features", _FORMAT, settings.clip_seconds)
        keys = []
        for source in self._sources:
            file = self._file_of(source)
            if file is None:
                keys.append(from_file.of_text(f"nothing\0{source.name}"))
            elif self._from_features(source) and source.features is not None:
                label = f"{source.name}\0{source.features.group}\0{source.features.seconds}"
                keys.append(from_file.of_file(label, file))
            else:
                keys.append(computed.of_file(source.name, file))
        return keys


class _Megabytes:
    """Measures progress in megabytes read, because decoding time grows with the file size."""

    def __init__(self, sizes: dict[str, int], mine: Sequence[str]) -> None:
        self._sizes, self._shares = sizes, dict.fromkeys(mine, 0.0)
        self.total = _megabytes(sum(sizes[key] for key in mine))

    def reached(self, key: str, share: float) -> None:
        """Sets the fraction of a file that has been read."""
        self._shares[key] = min(1.0, share)

    @property
    def done(self) -> int:
        """Megabytes read so far."""
        return _megabytes(sum(self._sizes[key] * share for key, share in self._shares.items()))


def _megabytes(size: float) -> int:
    return math.ceil(size / _MB)


def _size(path: Path | None) -> int:
    try:
        return path.stat().st_size if path else 0
    except OSError:  # extraction will report the error
        return 0


def _shapes(extracted: Extracted) -> str:
    return " and ".join(f"{name} of {' × '.join(map(str, shape[1:]))}" for name, shape in extracted.arrays.items())
