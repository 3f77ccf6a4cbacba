"""Every video once: its clips as arrays on disk, from where training and its workers read what they need.

    <folder>/<key>/frames.npy     uint8 [T, F, H, W, 3]
                   mel.npy        float16 [T, steps, bands]
                   stats.npy      float16 [T, len(STATS)]
                   features.npy   [T, D] in place of the frames, where a model or a file gives them
                   facts.json     what is there; written last
             bad/<key>.json       what is wrong with a file that could not be used

A key says everything that decides what is in it: the file's name, size and date, and the settings. The folder of a
video appears complete or not at all: a killed run goes on with the videos that are missing. Memory does not grow with
the length of a video.
"""

from __future__ import annotations

import math
import os
import threading
import time
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
from unisono.recipes.clips.arrays import ArrayFolder
from unisono.recipes.clips.feature_files import FeatureFile
from unisono.recipes.clips.features import BUILTIN, FILES, ExtractSettings, Features, fingerprint, model_of, read_blocks
from unisono.recipes.clips.video import clips
from unisono.recipes.common.bad_files import BadFiles, BadMedia, few, usable
from unisono.recipes.common.fingerprint import Keys
from unisono.recipes.common.progress import SAY_EVERY_S, bar, clock
from unisono.recipes.common.whole_files import remove_leftovers

_FORMAT = 2  # of what is kept; what has another one is not found
_MB = 1_000_000
_NAMED = 3  # in a message


class Source(Protocol):
    """What is extracted: a video, or features that are there already. A `Labelled` is one."""

    @property
    def name(self) -> str: ...
    @property
    def video(self) -> Path | None: ...
    @property
    def features(self) -> FeatureFile | None: ...


@dataclass(frozen=True)
class Extracted:
    """The arrays of one video, on disk. It is small and goes to workers as it is; arrays are opened when asked for."""

    source: Any
    folder: str
    arrays: dict[str, tuple[int, ...]]
    """Their shapes: of `frames`, `mel`, `stats`, `features`, those that are there."""
    num_clips: int
    duration: float
    has_sound: bool
    remark: str
    """What is wrong with the file, if anything: it is used as far as it can be read."""

    def array(self, name: str) -> NDArray[Any]:
        """One of `arrays`, memory-mapped: [num_clips, ...]."""
        # Opened each time: that takes microseconds, and nothing is shared between forked workers.
        found: NDArray[Any] = np.load(os.path.join(self.folder, f"{name}.npy"), mmap_mode="r", allow_pickle=False)
        return found


class _Stopped(Exception):
    pass


class Extraction:
    """What is extracted from a list of videos."""

    def __init__(self, folder: Path, sources: Sequence[Source], settings: ExtractSettings) -> None:
        self._folder, self._sources, self._settings = folder, sources, settings
        self._bad = BadFiles(folder / "bad")
        self._model: Features | None = None
        self._one_at_a_time = threading.Lock()
        self.remarks: list[str] = []
        """What the user should be told, once open() has been called."""

    def fill(self, work: Work, workers: int = 1) -> None:
        """Extracts this process's share of what is missing, in so many threads; resumable, whatever stopped it."""
        self._folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(self._folder)
        sources = dict(zip(self._keys, self._sources, strict=True))
        # Shared are all, not only the missing ones: those look different to a process that looks a moment later.
        mine = [key for key in work.share(list(sources)) if ArrayFolder(self._folder / key).facts() is None]
        sizes = {key: _size(self._file_of(sources[key])) for key in sources}
        progress, stop = _Megabytes(work, sizes, mine), threading.Event()
        pool = ThreadPoolExecutor(max(1, workers))

        def stopping() -> bool:
            return stop.is_set() or work.stopping

        try:
            waiting = {pool.submit(self._extract, stopping, work.device, key, sources[key], progress) for key in mine}
            num_bad = 0
            while waiting:
                progress.say()
                done, waiting = wait(waiting, timeout=1.0, return_when=FIRST_COMPLETED)
                for why in filter(None, (each.result() for each in done)):
                    num_bad += 1
                    if num_bad <= _NAMED:  # all of them are told of at the end
                        work.message(f"bad file: {why}")
            progress.end()
        except _Stopped:
            return
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)
            self._model = None
            if torch.device(work.device).type == "cuda":  # the training that follows may need every byte
                torch.cuda.empty_cache()

    def _extract(
        self, stopping: Callable[[], bool], device: str, key: str, source: Source, progress: _Megabytes
    ) -> str | None:
        """Extracts a video; what is wrong with it, if it cannot be used."""
        if stopping():
            raise _Stopped
        try:
            if self._from_features(source):
                self._keep_features(key, source)
            else:
                self._keep_video(stopping, device, key, source, progress)
        except BadMedia as error:
            self._bad.note(key, str(error))
            return str(error)
        finally:
            progress.reached(key, 1.0)
        return None

    def _from_features(self, source: Source) -> bool:
        return self._settings.features == FILES or source.video is None

    def _file_of(self, source: Source) -> Path | None:
        if not self._from_features(source):
            return source.video
        return source.features.path if source.features else None

    def _keep_features(self, key: str, source: Source) -> None:
        if source.features is None:
            raise BadMedia(source.video or Path(source.name), "there is no feature file beside it (.npy, .npz, .h5)")
        rows = source.features.clips(self._settings.clip_seconds)
        with ArrayFolder(self._folder / key).writing() as new:
            new.add({"features": rows})
            new.commit(duration=len(rows) * self._settings.clip_seconds, has_sound=False, remark="")

    def _keep_video(
        self, stopping: Callable[[], bool], device: str, key: str, source: Source, progress: _Megabytes
    ) -> None:
        assert source.video is not None
        settings, model = self._settings, self._shared_model(device)
        size: tuple[int, int] | int = settings.feature_size if model else (settings.size, settings.size)
        reading = clips(source.video, settings.clip_seconds, settings.frames_per_clip, size, settings.sample_rate)
        with closing(reading), ArrayFolder(self._folder / key).writing() as new:
            for block in read_blocks(reading, settings, model):
                if stopping():
                    raise _Stopped
                new.add(block)
                progress.reached(key, reading.duration / max(reading.facts.duration, 1e-6))
            if not reading.has_sound:  # known only now; silence would look like silence that was recorded
                new.zero("mel")
            new.commit(duration=reading.duration, has_sound=reading.has_sound, remark=reading.remark)

    def _shared_model(self, device: str) -> Features | None:
        with self._one_at_a_time:
            if self._model is None and self._settings.features not in (BUILTIN, FILES):
                model = model_of(self._settings.features, device)
                assert model is not None

                def locked(frames: NDArray[np.uint8], sound: NDArray[np.float32], sample_rate: int) -> Any:
                    with self._one_at_a_time:  # a user's function need not know of threads
                        return model(frames, sound, sample_rate)

                self._model = locked
            return self._model

    def open(self, leave_out_bad: bool = False) -> list[Extracted]:
        """The videos, once all processes have filled their share. Bad ones are an error, or left out."""
        facts = {key: ArrayFolder(self._folder / key).facts() for key in set(self._keys)}
        there = {key: told for key, told in facts.items() if told is not None}
        if not self._sources:
            raise ConfigError("there is not one video to extract")
        kept, self.remarks = usable(self._sources, [(there, self._keys)], self._bad, leave_out_bad)
        found = [
            Extracted(self._sources[index], str(self._folder / self._keys[index]), **there[self._keys[index]])
            for index in kept
        ]
        self._check_alike(found)
        self._remark(found)
        return found

    def _check_alike(self, found: list[Extracted]) -> None:
        for each in found[1:]:
            if {name: shape[1:] for name, shape in each.arrays.items()} != {
                name: shape[1:] for name, shape in found[0].arrays.items()
            }:
                raise ConfigError(
                    f"{each.source.name} gives {_shapes(each)}, and {found[0].source.name} gives {_shapes(found[0])}; "
                    "one run takes one kind: videos, or features of one width"
                )

    def _remark(self, found: list[Extracted]) -> None:
        videos = {each.folder: each for each in found if "mel" in each.arrays}.values()
        if silent := [each.source.name for each in videos if not each.has_sound]:
            self.remarks.append(f"{len(silent):,} of {len(videos):,} videos have no sound: {few(silent)}")
        if damaged := [each.remark for each in videos if each.remark]:
            self.remarks.append(f"{len(damaged):,} of {len(videos):,} videos are damaged: {few(damaged)}")

    @cached_property
    def _keys(self) -> list[str]:
        settings = self._settings
        computed = Keys("clips", _FORMAT, asdict(settings), fingerprint(settings.features))
        given = Keys("features", _FORMAT, settings.clip_seconds)
        keys = []
        for source in self._sources:
            file = self._file_of(source)
            if file is None:
                keys.append(given.of_text(f"nothing\0{source.name}"))
            elif self._from_features(source) and source.features is not None:
                told = f"{source.name}\0{source.features.group}\0{source.features.seconds}"
                keys.append(given.of_file(told, file))
            else:
                keys.append(computed.of_file(source.name, file))
        return keys


class _Megabytes:
    """How much of all files has been read: the work in a video goes with its size."""

    def __init__(self, work: Work, sizes: dict[str, int], mine: Sequence[str]) -> None:
        self._work, self._sizes, self._shares = work, sizes, dict.fromkeys(mine, 0.0)
        self._here, self._total = (_megabytes(sum(sizes[key] for key in keys)) for keys in (mine, sizes))
        self._begun = self._said = time.monotonic()
        if mine:
            share = f", {self._here:,} MB of it here" if self._here < self._total else ""
            work.message(f"extracting {self._total:,} MB of video{share}")

    def reached(self, key: str, share: float) -> None:
        """So much of a file is read; each is read in one thread."""
        self._shares[key] = min(1.0, share)

    def say(self) -> None:
        """Now and then."""
        now, read = time.monotonic(), self._read()
        if not read or now - self._said < SAY_EVERY_S:
            return
        self._said = now
        left = (now - self._begun) / read * (self._here - read)
        self._work.message(bar(read, self._here, left, " MB"))

    def end(self) -> None:
        """That was all."""
        if self._shares:
            self._work.message(f"  {self._read():,} MB in {clock(time.monotonic() - self._begun)}")

    def _read(self) -> int:
        return _megabytes(sum(self._sizes[key] * share for key, share in self._shares.items()))


def _megabytes(size: float) -> int:
    return math.ceil(size / _MB)


def _size(path: Path | None) -> int:
    try:
        return path.stat().st_size if path else 0
    except OSError:  # whoever reads it will say what is wrong with it
        return 0


def _shapes(extracted: Extracted) -> str:
    return " and ".join(f"{name} of {' × '.join(map(str, shape[1:]))}" for name, shape in extracted.arrays.items())
