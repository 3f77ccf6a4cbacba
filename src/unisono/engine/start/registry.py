"""Loads a recipe class from a reference such as `my_file.py:MyRecipe`, and finds the reference of a class."""

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

from unisono.config.fields import fields_of
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

_REQUIRED: tuple[str, ...] = ("model", "dataset", "loss")
_REQUIRED_COUPLED = ("model", "dataset", "embed", "couple")
_REQUIRED_BY_ROWS = ("model", "dataset", "embed", "couple_rows")


def load_object(reference: str) -> Any:
    """Loads a function or class from `file.py:name` or `package.module:name`."""
    source, _, name = reference.rpartition(":")
    loaded = getattr(_load_module(source), name, None)
    if loaded is None:
        raise RecipeError(f"{source} has no {name!r}")
    return loaded


def load_recipe(reference: str) -> type[Recipe]:
    """Loads a recipe class by a built-in name, `file.py:Class` or `package.module:Class`."""
    source, _, name = BUILT_IN.get(reference, reference).rpartition(":")
    if not source or not name:
        built_in = f" or one of {', '.join(BUILT_IN)}" if BUILT_IN else ""
        raise UserError(f"recipe {reference!r}: expected file.py:Class or package.module:Class{built_in}")
    module = _load_module(source)
    recipe = getattr(module, name, None)
    if recipe is None:
        recipes = [key for key, value in vars(module).items() if _is_recipe(value)]
        near = difflib.get_close_matches(name, recipes, n=1) or recipes[:1]
        raise RecipeError(f"{source} has no class {name!r}{f'; did you mean {near[0]}?' if near else ''}")
    check_recipe(recipe)
    return recipe  # type: ignore[no-any-return]


def recipes_with(setting: str) -> list[str]:
    """Names of the built-in recipes that have a setting of this name in their own Config."""
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
    """The reference by which another process can load this class; None if none can (a notebook, a local class)."""
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


def _load_module(source: str) -> ModuleType:
    return _module_from_file(Path(source)) if source.endswith(".py") else _module_from_name(source)


def _module_from_file(file: Path) -> ModuleType:
    file = file.resolve()
    if not file.is_file():
        raise UserError(f"recipe file {file} does not exist")
    name = file.stem
    loaded = sys.modules.get(name)
    if loaded is not None and getattr(loaded, "__file__", None) == str(file):
        return loaded
    if loaded is not None or name in sys.stdlib_module_names:
        name = f"recipe_{name}"  # a recipe file called json.py must not replace the standard module
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    module._loaded_by_path = True  # type: ignore[attr-defined]
    # The module gets its own name, and its folder is on sys.path, so that it can import files next to it.
    sys.path.insert(0, str(file.parent))
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # a script that parses its own arguments raises SystemExit
        del sys.modules[name]
        raise RecipeError(f"{file} does not import: {_in_one_line(error, file)}") from error
    return module


def _module_from_name(name: str) -> ModuleType:
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # at the end, so that the current folder's modules shadow nothing
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise RecipeError(f"{name} does not import: {_in_one_line(error, None)}") from error


def _in_one_line(error: BaseException, file: Path | None) -> str:
    """The error in one line, with the line number in the user's file."""
    if isinstance(error, SyntaxError):
        return f"line {error.lineno}: {error.msg}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
    where = f"line {lines[-1]}: " if lines else ""
    return f"{where}{type(error).__name__}: {' '.join(str(error).split())}"
