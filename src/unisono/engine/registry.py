"""From the words `my_file.py:MyRecipe` to a recipe class, and back to words that another process understands."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from unisono.engine.recipe import Recipe
from unisono.errors import RecipeError, UserError

BUILT_IN: dict[str, str] = {
    "darkroom": "unisono.recipes.darkroom.recipe:Darkroom",
    "wan-flow": "unisono.recipes.wan_flow.recipe:WanFlow",
    "wan-distill": "unisono.recipes.wan_distill.recipe:WanDistill",
    "clips": "unisono.recipes.clips.recipe:Clips",
    "seo": "unisono.recipes.seo.recipe:Seo",
}
"""Names of the recipes that come with unisono -> module:class."""

_REQUIRED = ("model", "dataset", "loss")
_REQUIRED_COUPLED = ("model", "dataset", "embed", "couple")


def load_object(words: str) -> Any:
    """What `words` name, file.py:name or package.module:name: a function, a class."""
    place, _, name = words.rpartition(":")
    module = _module_from_file(Path(place)) if place.endswith(".py") else _module_from_name(place)
    found = getattr(module, name, None)
    if found is None:
        raise RecipeError(f"{place} has no {name!r}")
    return found


def load_recipe(words: str) -> type[Recipe]:
    """The recipe class that `words` name: a built-in name, file.py:Class or package.module:Class."""
    place, _, name = BUILT_IN.get(words, words).rpartition(":")
    if not place or not name:
        known = f" or one of {', '.join(BUILT_IN)}" if BUILT_IN else ""
        raise UserError(f"recipe {words!r}: expected file.py:Class or package.module:Class{known}")
    module = _module_from_file(Path(place)) if place.endswith(".py") else _module_from_name(place)
    found = getattr(module, name, None)
    if found is None:
        recipes = [key for key, value in vars(module).items() if _is_recipe(value)]
        near = difflib.get_close_matches(name, recipes, n=1) or recipes[:1]
        raise RecipeError(f"{place} has no class {name!r}{f'; did you mean {near[0]}?' if near else ''}")
    check_recipe(found)
    return found  # type: ignore[no-any-return]


def check_recipe(recipe: object) -> None:
    """Refuses what is not a recipe class, or lacks a method it must have."""
    if not _is_recipe(recipe):
        raise RecipeError(f"{recipe!r} is not a recipe; make it a class that extends unisono.Recipe")
    if not inspect.isclass(recipe.Config) or not isinstance(recipe.defaults, Mapping):  # type: ignore[attr-defined]
        raise RecipeError("a recipe's Config must be a dataclass, and its defaults a mapping of settings")
    lacks = [
        method for method in (*_REQUIRED, *_REQUIRED_COUPLED) if getattr(recipe, method) is getattr(Recipe, method)
    ]
    required = _REQUIRED if "couple" in lacks else _REQUIRED_COUPLED
    missing = [method for method in required if method in lacks]
    if missing:
        raise RecipeError(
            f"{recipe.__name__} has no {missing[0]}(); a recipe needs "  # type: ignore[attr-defined]
            f"{', '.join(f'{method}()' for method in required)}"
        )


def words_for(recipe: type[Recipe]) -> str | None:
    """Words from which another process can load this class, or None (a notebook, `__main__`, a local class)."""
    module = sys.modules.get(recipe.__module__)
    if recipe.__module__ == "__main__" or "<locals>" in recipe.__qualname__ or module is None:
        return None
    file = getattr(module, "__file__", None)
    if file is None:
        return None
    if getattr(module, "_loaded_by_path", False) or not getattr(module, "__package__", ""):
        return f"{Path(file).resolve()}:{recipe.__qualname__}"
    return f"{recipe.__module__}:{recipe.__qualname__}"


def _is_recipe(value: object) -> bool:
    return inspect.isclass(value) and issubclass(value, Recipe) and value is not Recipe


def _module_from_file(file: Path) -> ModuleType:
    file = file.resolve()
    if not file.is_file():
        raise UserError(f"recipe file {file} does not exist")
    name = file.stem
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None) == str(file):
        return known
    if known is not None or name in sys.stdlib_module_names:
        name = f"recipe_{name}"  # a recipe called json.py must not take the real one's place
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    module._loaded_by_path = True  # type: ignore[attr-defined]
    # Under its own name and with its folder on the path, as if it had been run: its neighbours can be imported.
    sys.path.insert(0, str(file.parent))
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # SystemExit: a script that parses arguments of its own
        del sys.modules[name]
        raise RecipeError(f"{file} does not import: {_shortly(error, file)}") from error
    return module


def _module_from_name(name: str) -> ModuleType:
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # last: modules of the current folder are found, but replace nothing
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise RecipeError(f"{name} does not import: {_shortly(error, None)}") from error


def _shortly(error: BaseException, file: Path | None) -> str:
    """The error in one line, with the line of the user's file it came from."""
    if isinstance(error, SyntaxError):
        return f"line {error.lineno}: {error.msg}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
    where = f"line {lines[-1]}: " if lines else ""
    return f"{where}{type(error).__name__}: {' '.join(str(error).split())}"
