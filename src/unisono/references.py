"""Loads a class or function of the user by a reference such as `my_file.py:MyRecipe` or `package.module:name`."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from unisono.errors import RecipeError, UserError


def load_object(reference: str, kind: str = "recipe") -> Any:
    """Loads a function or class from `file.py:name` or `package.module:name`; messages call the file a `kind` file."""
    source, _, name = reference.rpartition(":")
    loaded = getattr(load_module(source, kind), name, None)
    if loaded is None:
        raise RecipeError(f"{source} has no {name!r}")
    return loaded


def load_module(source: str, kind: str = "recipe") -> ModuleType:
    """Imports a module by the path of its file (`….py`) or by its name."""
    return _module_from_file(Path(source), kind) if source.endswith(".py") else _module_from_name(source)


def _module_from_file(file: Path, kind: str) -> ModuleType:
    file = file.resolve()
    if not file.is_file():
        raise UserError(f"{kind} file {file} does not exist")
    name = file.stem
    loaded = sys.modules.get(name)
    if loaded is not None and getattr(loaded, "__file__", None) == str(file):
        return loaded
    if loaded is not None or name in sys.stdlib_module_names:
        name = f"{kind}_{name}"  # a file called json.py must not replace the standard module
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
    """Formats the error as one line, with the line number in the user's file."""
    if isinstance(error, SyntaxError):
        return f"line {error.lineno}: {error.msg}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
    where = f"line {lines[-1]}: " if lines else ""
    return f"{where}{type(error).__name__}: {' '.join(str(error).split())}"
