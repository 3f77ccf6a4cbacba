"""Asks a recipe for a dataset and refuses one that cannot be read by index."""

from __future__ import annotations

from typing import Any
from zlib import crc32

from torch.utils.data import Dataset

from unisono.data.bits import Purpose, key_of
from unisono.data.seeding import seed_everything
from unisono.engine.recipe import Recipe
from unisono.errors import RecipeError


def build_dataset(recipe: Recipe, split: str, seed: int) -> Dataset[Any] | None:
    """The recipe's dataset of a split, checked; its random numbers are the same on every rank and at every start."""
    seed_everything(key_of(Purpose.BUILD, seed, crc32(split.encode())))
    dataset = recipe.dataset(split)
    if dataset is None:
        if split == "train":
            raise RecipeError('dataset("train") returned None; return a map-style data set')
        return None
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise RecipeError(f'dataset("{split}") returned {type(dataset).__name__}, which lacks __len__ or __getitem__')
    try:
        size = len(dataset)
    except (ValueError, TypeError, OverflowError) as error:  # what len() itself refuses: negative, not a whole number
        raise RecipeError(f'dataset("{split}"): its __len__() is not a number of samples ({error})') from error
    if size == 0:
        raise RecipeError(f'dataset("{split}") is empty; check the data path and filters')
    return dataset
