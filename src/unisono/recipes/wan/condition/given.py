"""Reads the frames that a model is given: frames of the video itself, or pictures next to it.

`a.first.png` and `a.last.png` replace the first and the last frame of `a.mp4`. They are scaled and cropped like the
video. A sample with only a latent (`a.latent.safetensors`) needs these pictures, because it has no frames to read.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from unisono.recipes.common.bad_files import BadMedia
from unisono.recipes.wan.condition.kind import ConditionKind
from unisono.recipes.wan.data import media
from unisono.recipes.wan.data.crop import Crop, media_of
from unisono.recipes.wan.data.media import Fit
from unisono.recipes.wan.data.sources import Source
from unisono.recipes.wan.models.vae import Geometry

_ASPECT = 0.01  # largest relative difference between the aspect ratios of a picture and its video


class GivenFrames:
    """Reads the given frames of samples."""

    def __init__(self, kind: ConditionKind, crop: Crop, geometry: Geometry) -> None:
        self._kind, self._crop, self._geometry = kind, crop, geometry

    def pictures_of(self, source: Source) -> list[Path | None]:
        """Returns the picture that replaces each given frame, or None where the video's own frame is used."""
        return [source.first, source.last][: self._kind.num_frames]

    def read(self, source: Source, latent: tuple[int, ...] = ()) -> tuple[Tensor, int]:
        """Returns the given frames, uint8 [n, H, W, 3], and the number of frames in the sample.

        `latent` is the shape of the sample's precomputed latent, if it has one.
        """
        fit = self.fit(source, latent)
        pictures = self.pictures_of(source)
        frames: Tensor | None = None
        if None in pictures:
            path = self._video_of(source)
            own = self._crop.fit(path, self._geometry.multiple)
            if own != fit:
                raise BadMedia(
                    path, f"its sample has {_size(own)}, but its latent has {_size(fit)}; encode the latent again"
                )
            frames = self._crop.read(path, fit)
        return self.chosen(source, fit, frames), fit.frames

    def chosen(self, source: Source, fit: Fit, frames: Tensor | None) -> Tensor:
        """Returns the given frames, uint8 [n, H, W, 3]; `frames` [F, H, W, 3] is the sample, if it was read already."""
        given = []
        for picture, number in zip(self.pictures_of(source), (0, -1), strict=False):
            if picture is not None:
                self._check_size(picture, source, fit)
                given.append(media.read(picture, Fit(1, fit.height, fit.width), fps=0.0)[0])
            else:
                assert frames is not None
                given.append(frames[number])
        return torch.stack(given)

    def fit(self, source: Source, latent: tuple[int, ...] = ()) -> Fit:
        """Returns the frame count and size of the sample; raises BadMedia if no frame is left to generate."""
        path = source.media if source.latent is None else source.latent
        assert path is not None
        if latent:
            geometry, (_, frames, height, width) = self._geometry, latent
            factor = geometry.spatial_factor
            fit = Fit(1 + (frames - 1) * geometry.temporal_factor, height * factor, width * factor)
        else:
            fit = self._crop.fit(path, self._geometry.multiple)
        if fit.frames == 1:
            raise BadMedia(path, "an image-to-video model needs videos of at least 5 frames, but this one has 1")
        return fit

    def check(self, source: Source, fit: Fit) -> None:
        """Raises BadMedia if a picture does not fit the sample; does not read the video."""
        for picture in filter(None, self.pictures_of(source)):
            self._check_size(picture, source, fit)

    def _video_of(self, source: Source) -> Path:
        if source.media is None:
            missing = [
                name
                for name, picture in zip(("first", "last"), self.pictures_of(source), strict=False)
                if picture is None
            ]
            assert source.latent is not None
            raise BadMedia(
                source.latent,
                f"the model needs its {' and '.join(missing)} frame, but there is no video; put "
                f"{' and '.join(f'{Path(source.name).name}.{name}.png' for name in missing)} next to it",
            )
        return media_of(source)

    def _check_size(self, picture: Path, source: Source, fit: Fit) -> None:
        facts = media.probe(picture)
        if source.media is not None:
            of_video = media.probe(source.media)
            whole, name = (of_video.height, of_video.width), source.media.name
            same = abs(facts.width * whole[0] / (facts.height * whole[1]) - 1) <= _ASPECT
        else:  # the sample is a latent, whose size was rounded down from the video's
            whole, name = (fit.height, fit.width), "its latent"
            same = abs(facts.width * fit.height / facts.height - fit.width) < self._geometry.multiple
        if not same or facts.height < fit.height or facts.width < fit.width:
            raise BadMedia(
                picture,
                f"a picture of {facts.height} × {facts.width} pixels does not fit {name} of {whole[0]} × {whole[1]}; "
                f"use one of the same aspect ratio and at least {fit.height} × {fit.width}",
            )


def _size(fit: Fit) -> str:
    return f"{fit.frames} frames of {fit.height} × {fit.width}"
