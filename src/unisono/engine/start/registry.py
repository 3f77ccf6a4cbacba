"""Loads a recipe class from a reference such as `my_file.py:MyRecipe`, and finds the reference of a class."""

from __future__ import annotations

import difflib
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path

from unisono.config.fields import fields_of
from unisono.engine.recipe import Recipe
from unisono.errors import RecipeError, UserError
from unisono.references import load_module

BUILT_IN: dict[str, str] = {
    "darkroom": "unisono.recipes.darkroom.recipe:Darkroom",
    "wan-flow": "unisono.recipes.wan_flow.recipe:WanFlow",
    "wan-distill": "unisono.recipes.wan_distill.recipe:WanDistill",
    "clips": "unisono.recipes.clips.recipe:Clips",
    "seo": "unisono.recipes.seo.recipe:Seo",
}
"""Names of the recipes that come with unisono -> module:class."""

_REQUIRED: tuple[str, ...] = ("model", "dataset", "loss")
_REQUIRED_COUPLED = ("model", "dataset", "embed", "couple")
_REQUIRED_BY_ROWS = ("model", "dataset", "embed", "couple_rows")


def load_recipe(reference: str) -> type[Recipe]:
    """Loads a recipe class by a built-in name, `file.py:Class` or `package.module:Class`."""
    source, _, name = BUILT_IN.get(reference, reference).rpartition(":")
    if not source or not name:
        built_in = f" or one of {', '.join(BUILT_IN)}" if BUILT_IN else ""
        raise UserError(f"recipe {reference!r}: expected file.py:Class or package.module:Class{built_in}")
    module = load_module(source)
    recipe = getattr(module, name, None)
    if recipe is None:
        recipes = [key for key, value in vars(module).items() if _is_recipe(value)]
        near = difflib.get_close_matches(name, recipes, n=1) or recipes[:1]
        raise RecipeError(f"{source} has no class {name!r}{f'; did you mean {near[0]}?' if near else ''}")
    check_recipe(recipe)
    return recipe  # type: ignore[no-any-return]


def recipes_with(setting: str) -> list[str]:
    """Returns the names of the built-in recipes that have a setting of this name in their own Config."""
    return [name for name in BUILT_IN if setting in {field.name for field in fields_of(load_recipe(name).Config)}]


def check_recipe(recipe: object) -> None:
    """Rejects an object that is not a recipe class or lacks a required method."""
    if not _is_recipe(recipe):
        raise RecipeError(f"{recipe!r} is not a recipe; make it a class that extends unisono.Recipe")
    if not inspect.isclass(recipe.Config) or not isinstance(recipe.defaults, Mapping):  # type: ignore[attr-defined]
        raise RecipeError("a recipe's Config must be a dataclass, and its defaults a mapping of settings")
    methods = (*_REQUIRED, *_REQUIRED_COUPLED, *_REQUIRED_BY_ROWS)
    lacks = [method for method in methods if getattr(recipe, method) is getattr(Recipe, method)]
    required = _REQUIRED
    if "couple" not in lacks or "couple_rows" not in lacks:
        required = _REQUIRED_COUPLED if "couple_rows" in lacks else _REQUIRED_BY_ROWS
    missing = [method for method in required if method in lacks]
    if missing:
        raise RecipeError(
            f"{recipe.__name__} has no {missing[0]}(); a recipe needs "  # type: ignore[attr-defined]
            f"{', '.join(f'{method}()' for method in required)}"
        )
    for method in required:
        _check_parameters(recipe, method)  # type: ignore[arg-type]


def importable_name(recipe: type[Recipe]) -> str | None:
    """Returns the reference by which another process can load this class; None for a notebook or a local class."""
    module = sys.modules.get(recipe.__module__)
    if recipe.__module__ == "__main__" or "<locals>" in recipe.__qualname__ or module is None:
        return None
    file = getattr(module, "__file__", None)
    if file is None:
        return None
    if getattr(module, "_loaded_by_path", False) or not getattr(module, "__package__", ""):
        return f"{Path(file).resolve()}:{recipe.__qualname__}"
    return f"{recipe.__module__}:{recipe.__qualname__}"


def _check_parameters(recipe: type[Recipe], method: str) -> None:
    """Rejects a method with the wrong parameters, such as a `loss(self, model, batch)` from another trainer."""
    names = list(inspect.signature(getattr(Recipe, method)).parameters)
    static = inspect.getattr_static(recipe, method)
    if not inspect.isfunction(static):
        return
    try:
        inspect.signature(static).bind(*names)
    except TypeError:
        has = ", ".join(str(each) for each in inspect.signature(static).parameters.values())
        raise RecipeError(
            f"{recipe.__name__}.{method}({has}) has the wrong parameters; define {method}({', '.join(names)})"
        ) from None


def _is_recipe(value: object) -> bool:
    return inspect.isclass(value) and issubclass(value, Recipe) and value is not Recipe
