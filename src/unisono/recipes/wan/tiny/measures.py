"""Metrics for a set of generated shapes: the diversity of one caption's samples, and the distance to another set.

A few-step sampler can show the right colour and shape in every sample and still always draw the same picture. This
module therefore measures the position and size of the shape from the pixels, and compares the distributions of the
small classifier's features (by the Fréchet distance, as in FID).
"""

from __future__ import annotations

import torch
from torch import Tensor

from unisono.recipes.wan.tiny.classifier import trained_classifier
from unisono.recipes.wan.tiny.shapes import COLOURS

_BORDER = 2  # pixels that show the background
_FAINT = 0.25  # smaller coverage of a pixel counts as noise


def places_and_sizes(images: Tensor, colours: Tensor) -> Tensor:
    """Measures the shape's centre (x, y) and size in each image, as fractions of the image's side, [images, 3].

    `images` [images, 3, side, side] are in [-1, 1], and `colours` are the indices of the captions' colours. The part of
    a pixel that the shape covers is derived from where the pixel's colour lies between the background and the caption's
    colour. The size is the square root of the area.
    """
    pixels, side = (images.float().clamp(-1, 1) + 1) / 2, images.shape[-1]
    rows = [pixels[..., :_BORDER, :], pixels[..., -_BORDER:, :]]
    columns = [pixels[..., :_BORDER], pixels[..., -_BORDER:]]
    border = torch.cat([part.flatten(2) for part in (*rows, *columns)], 2)
    background = border.median(2).values[..., None, None]
    towards = torch.tensor(list(COLOURS.values()))[colours][..., None, None] - background
    covered = ((pixels - background) * towards).sum(1) / towards.square().sum(1)
    covered = torch.where(covered > _FAINT, covered.clamp(max=1), 0)
    area = covered.sum((1, 2)).clamp(min=1e-6)
    middles = (torch.arange(side) + 0.5) / side
    x, y = (covered * middles).sum((1, 2)) / area, (covered * middles[:, None]).sum((1, 2)) / area
    return torch.stack([x, y, area.sqrt() / side], 1)


def spread(values: Tensor, captions: Tensor) -> Tensor:
    """Returns the standard deviation of values among samples of one caption, [values per sample].

    Averages the variances over captions before taking the root.
    """
    variances = [values[captions == caption].var(0) for caption in sorted(set(captions.tolist()))]
    return torch.stack(variances).mean(0).sqrt()


def diversity(images: Tensor, reference: Tensor, colours: Tensor, captions: Tensor) -> float:
    """Returns the spread of position and size within a caption, relative to the spread of the images `reference`."""
    spreads = [spread(places_and_sizes(each, colours), captions) for each in (images, reference)]
    return float((spreads[0] / spreads[1]).mean())


def feature_distance(images: Tensor, reference: Tensor) -> float:
    """Returns the Fréchet distance between the classifier's features of two sets of images."""
    classifier = trained_classifier()
    with torch.no_grad():
        first, second = (classifier.features(each.float()).double() for each in (images, reference))
    means = (first.mean(0) - second.mean(0)).square().sum()
    covariances = [torch.cov(each.T) for each in (first, second)]
    # Computes the trace of the product's square root from the product's eigenvalues, which are real and not negative.
    roots = torch.linalg.eigvals(covariances[0] @ covariances[1]).real.clamp(min=0).sqrt().sum()
    return float(means + covariances[0].trace() + covariances[1].trace() - 2 * roots)
