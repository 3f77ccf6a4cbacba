"""A small classifier, trained only on drawn shapes, that recognises the content of generated samples.

A flow-matching loss proves little: a model that generates useless samples can have a low loss. A better criterion is
whether an independent classifier recognises the colour and the shape named in the caption.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unisono.recipes.wan.tiny.shapes import COLOURS, SHAPES, Shapes, labels

_SIZE = 32  # side length in pixels; images of other sizes are scaled to it
_NUM_STILLS, _NUM_CLIPS, _CLIP_FRAMES = 1440, 240, 5  # numbers of training samples, and of frames per clip
_STEPS, _BATCH = 300, 64
_NOISE = 0.1  # added to the training images, because generated samples are noisier than drawings


class ShapeClassifier(nn.Module):
    """A small convolutional network with one head for the colour and one for the shape."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 16, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(64 * (_SIZE // 8) ** 2, 64),
            nn.ReLU(),
        )
        self.colour = nn.Linear(64, len(COLOURS))
        self.shape = nn.Linear(64, len(SHAPES))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Maps images [images, 3, size, size] in [-1, 1] to logits of the colours and of the shapes."""
        features = self.features(images)
        return self.colour(features), self.shape(features)

    @torch.no_grad()
    def classify(self, frames: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the indices of the colours and shapes [samples] of [samples, 3, frames, height, width] in [-1, 1].

        Averages the log-probabilities over the frames of a clip.
        """
        num_samples, _, num_frames = frames.shape[:3]
        images = frames.transpose(1, 2).flatten(0, 1).float()
        if images.shape[-2:] != (_SIZE, _SIZE):
            images = F.interpolate(images, (_SIZE, _SIZE), mode="bilinear", antialias=True)
        with torch.autocast(images.device.type, enabled=False):  # the run may use 16-bit autocast
            logits = self(images)
        by_frame = (head.log_softmax(1).view(num_samples, num_frames, -1) for head in logits)
        colours, shapes = (scores.mean(1).argmax(1) for scores in by_frame)
        return colours, shapes


def recognised(frames: Tensor, colours: Tensor, shapes: Tensor) -> dict[str, Tensor]:
    """Returns whether each sample shows the right colour, and whether it shows the right shape, [samples] each.

    `colours` and `shapes` are labels as `shapes.labels` returns them.
    """
    found_colours, found_shapes = trained_classifier().classify(frames)
    return {"colour": found_colours == colours.to(frames.device), "shape": found_shapes == shapes.to(frames.device)}


@cache
def trained_classifier(seed: int = 0) -> ShapeClassifier:
    """Trains a classifier on drawings, in some seconds; later calls return the same classifier."""
    images, colours, shapes = _training_data(seed)
    # Disables autocast: a run may evaluate under 16-bit autocast, which would cache the weights' casts and not notice
    # when the weights change.
    with torch.random.fork_rng(devices=[]), torch.autocast("cpu", enabled=False):
        torch.manual_seed(seed)
        model = ShapeClassifier()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, _STEPS)
        with torch.enable_grad():
            for _ in range(_STEPS):
                rows = torch.randint(len(images), (_BATCH,))
                noisy = images[rows] + _NOISE * torch.rand(_BATCH, 1, 1, 1) * torch.randn(_BATCH, 3, _SIZE, _SIZE)
                colour_logits, shape_logits = model(noisy)
                loss = F.cross_entropy(colour_logits, colours[rows]) + F.cross_entropy(shape_logits, shapes[rows])
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                schedule.step()
    return model.eval().requires_grad_(False)


def _training_data(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns still images and all frames of clips, [images, 3, size, size], and their colours and shapes."""
    images, colours, shapes = [], [], []
    for num_samples, num_frames in ((_NUM_STILLS, 1), (_NUM_CLIPS, _CLIP_FRAMES)):
        drawings = Shapes(num_samples, num_frames, _SIZE, seed, split="judge")
        frames = torch.stack([drawings[i]["frames"] for i in range(num_samples)])
        of_colour, of_shape = labels([drawings.plan(i) for i in range(num_samples)])
        images.append(frames.transpose(1, 2).flatten(0, 1))
        colours.append(of_colour.repeat_interleave(num_frames))
        shapes.append(of_shape.repeat_interleave(num_frames))
    return torch.cat(images), torch.cat(colours), torch.cat(shapes)
