"""Reads the fields that define the settings of a run from dataclasses.

A field is declared once: its name, type and default in a dataclass, and its documentation as the string literal below
it. A dataclass inside a dataclass forms a group in --help. Users set its fields like all others, without a prefix.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, get_type_hints

from unisono.config.values import Mismatch, coerce, did_you_mean, supported
from unisono.errors import RecipeError


@dataclass(frozen=True)
class Field:
    """A setting: its name, type, default and documentation."""

    name: str
    annotation: Any
    default: Any
    """dataclasses.MISSING if the field is required."""
    doc: str
    group: str
    """Title of the group under which --help lists the field."""
    owner: str
    """Name of the class that declares the field."""

    @property
    def required(self) -> bool:
        """Whether the field has no default."""
        return self.default is MISSING


def fields_of(cls: type, group_title: str | None = None) -> list[Field]:
    """Returns all fields of a dataclass and of the dataclasses inside it, in order of declaration."""
    return _fields_of(cls, group_title or _title(cls), MISSING)


def fields_by_name(classes: Sequence[type]) -> dict[str, Field]:
    """Returns the fields of several dataclasses together; raises RecipeError for a duplicate name."""
    fields: dict[str, Field] = {}
    for cls in classes:
        for field in fields_of(cls):
            if field.name in fields:
                first = fields[field.name].owner
                raise RecipeError(
                    f"{field.name} is a field of both {first} and {field.owner}; rename it in {field.owner}"
                    if first != field.owner
                    else f"{field.name} occurs twice in {cls.__qualname__}; rename one of them"
                )
            fields[field.name] = field
    return fields


def with_aliases(fields: Mapping[str, Field], aliases: Mapping[str, str]) -> dict[str, Field]:
    """Returns the fields by name and by alias; `aliases` maps each alias to a name."""
    named = dict(fields)
    for alias, name in aliases.items():
        if name not in fields:
            raise RecipeError(
                f"aliases: {alias} is an alias of {name}, which is not a setting{did_you_mean(name, list(fields))}"
            )
        if alias in fields:
            raise RecipeError(
                f"aliases: {alias} cannot be an alias of {name}, because it is a setting of {fields[alias].owner}"
            )
        named[alias] = dataclasses.replace(fields[name], name=alias)
    return named


def groups_in(cls: type) -> dict[str, type]:
    """Returns the dataclasses inside a dataclass, by attribute name."""
    hints = _hints(cls).items()
    return {name: hint for name, hint in hints if isinstance(hint, type) and dataclasses.is_dataclass(hint)}


def _fields_of(cls: type, title: str, instance: Any) -> list[Field]:
    hints, groups, docs = _hints(cls), groups_in(cls), _docs(cls)
    fields: list[Field] = []
    for declared in dataclasses.fields(cls):
        name = declared.name
        if not declared.init:
            continue
        default: Any = declared.default
        if instance is not MISSING:
            default = getattr(instance, name)
        elif callable(declared.default_factory):
            default = declared.default_factory()
        if name in groups:
            fields += _fields_of(groups[name], _title(groups[name]), default)
            continue
        qualified_name = f"{cls.__qualname__}.{name}"
        if not supported(hints[name]):
            raise RecipeError(
                f"{qualified_name}: a setting cannot have the type {declared.type}; "
                "use int, float, str, bool, Path, Literal, Enum, list, tuple, dict[str, ...] or a union of these"
            )
        if default is not MISSING:
            try:
                default = coerce(hints[name], default)
            except Mismatch as error:
                raise RecipeError(f"{qualified_name}: the default does not fit the type: {error}") from None
        doc = docs.get(name) or declared.metadata.get("help", "")
        fields.append(Field(name, hints[name], default, doc, title, cls.__qualname__))
    return fields


@lru_cache(maxsize=512)  # each start of a run looks up the same classes dozens of times
def _hints(cls: type) -> Mapping[str, Any]:
    # The fields that a subclass without the decorator adds would silently be lost.
    bare = inspect.get_annotations(cls) and "__dataclass_fields__" not in vars(cls)
    if not dataclasses.is_dataclass(cls) or bare:
        raise RecipeError(f"{getattr(cls, '__qualname__', cls)} is not a dataclass; write @dataclass above it")
    try:
        hints = get_type_hints(cls)
    except (NameError, AttributeError, TypeError, SyntaxError) as error:
        raise RecipeError(
            f"{cls.__qualname__}: the type of a field is not defined ({error}); "
            "define or import it at the top of the file, outside `if TYPE_CHECKING`"
        ) from None
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _title(cls: type) -> str:
    owner, _, _ = cls.__qualname__.rpartition(".")
    if cls.__name__ == "Config" and owner and not owner.endswith("<locals>"):
        return owner.rpartition(".")[2]  # users know MyRecipe.Config as MyRecipe
    doc = (vars(cls).get("__doc__") or "").strip()
    # For a class without a docstring, the decorator @dataclass sets the signature as the docstring.
    return cls.__name__ if not doc or doc.startswith(f"{cls.__name__}(") else doc.splitlines()[0].rstrip(".")


def _docs(cls: type) -> dict[str, str]:
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        module = sys.modules.get(base.__module__)
        if module is None or base is object:
            continue
        try:
            docs |= _docs_in(inspect.getsource(module)).get(base.__qualname__, {})
        except (OSError, TypeError, SyntaxError):  # defined in a notebook, or in a file that changed after the import
            continue
    return docs


@lru_cache
def _docs_in(source: str) -> dict[str, dict[str, str]]:
    """Returns the documentation of each field, by class. Parses a file only once, unlike inspect.getsource(cls)."""
    docs: dict[str, dict[str, str]] = {}

    def visit(node: ast.AST, path: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                docs[path + child.name] = _docs_under(child.body)
                visit(child, f"{path}{child.name}.")
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                visit(child, f"{path}{child.name}.<locals>.")
            elif isinstance(child, ast.stmt):
                visit(child, path)

    visit(ast.parse(source), "")
    return docs


def _docs_under(body: list[ast.stmt]) -> dict[str, str]:
    docs = {}
    for field, below in pairwise(body):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
            and isinstance(below.value.value, str)
        ):
            docs[field.target.id] = inspect.cleandoc(below.value.value)
    return docs
