"""Reads structured data: JSON-LD, and microdata with extruct."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lxml.etree import _Element as Element

_MAX_BLOCK = 2**20  # maximum number of characters in a JSON-LD block
_MAX_MICRODATA = 2_000  # maximum number of elements with microdata, because extruct takes quadratic time
_MAX_ITEMS, _MAX_DEPTH = 200, 20
_CONTEXTS = ("http://schema.org", "https://schema.org", "http://www.schema.org", "https://www.schema.org")


@dataclass(frozen=True)
class Item:
    """An item that a page describes, such as a product."""

    types: tuple[str, ...]
    fields: frozenset[str]
    """Names of the fields that have a value."""
    syntax: str
    nested: bool = False
    """Whether the item is a value of another item."""


@dataclass
class Items:
    """The structured data of a page."""

    items: list[Item] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def items_in(root: Element, base: str) -> Items:
    """Returns the structured data of a page."""
    result = Items()
    for number, script in enumerate(root.iter("script"), start=1):
        if (script.get("type") or "").split(";")[0].strip().lower() != "application/ld+json":
            continue
        text = script.text or ""
        if len(text) > _MAX_BLOCK:
            result.problems.append(f"JSON-LD in script {number} is longer than {_MAX_BLOCK // 2**20} Mi characters")
            continue
        try:
            content = json.loads(text.strip().removesuffix(";"))
        except (ValueError, RecursionError) as error:
            reason = "nested too deeply" if isinstance(error, RecursionError) else " ".join(str(error).split())[:120]
            result.problems.append(f"JSON-LD in script {number} is not valid JSON ({reason})")
            continue
        _add_json(content, result, number)
    _add_microdata(root, base, result)
    return result


def _add_json(content: Any, result: Items, number: int) -> None:
    tops = content if isinstance(content, list) else [content]
    for top in tops:
        if not isinstance(top, dict):
            result.problems.append(f"JSON-LD in script {number} is not an object")
            continue
        context = top.get("@context")
        named = [context] if isinstance(context, str) else context if isinstance(context, list) else []
        if isinstance(context, dict):
            named = [context.get("@vocab")]
        if not any(isinstance(each, str) and each.rstrip("/").lower() in _CONTEXTS for each in named):
            result.problems.append(f"JSON-LD in script {number} has no @context https://schema.org")
        graph = top.get("@graph")
        for item in graph if isinstance(graph, list) else [top]:
            if isinstance(item, dict) and "@type" not in item and set(item) - {"@id", "@context"}:
                result.problems.append(f"JSON-LD in script {number} has an item without @type")
            result.items += list(_items_of_json(item, 0))[: _MAX_ITEMS - len(result.items)]


def _items_of_json(value: Any, depth: int) -> Iterator[Item]:
    if depth > _MAX_DEPTH:
        return
    if isinstance(value, list):
        for each in value[:_MAX_ITEMS]:
            if not isinstance(each, list):  # nested lists have no meaning, and their depth would be unlimited
                yield from _items_of_json(each, depth)
    elif isinstance(value, dict):
        types = value.get("@type")
        names = [types] if isinstance(types, str) else types if isinstance(types, list) else []
        if names:
            fields = frozenset(str(name) for name, content in value.items() if content not in (None, "", [], {}))
            yield Item(tuple(_local(str(name)) for name in names), fields, "JSON-LD", depth > 0)
        for name, each in value.items():
            if not str(name).startswith("@"):
                yield from _items_of_json(each, depth + 1)


def _add_microdata(root: Element, base: str, result: Items) -> None:
    number = 0
    for each in root.iter():
        number += "itemscope" in each.attrib or "itemprop" in each.attrib
        if number > _MAX_MICRODATA:
            result.problems.append(f"more than {_MAX_MICRODATA:,} elements with microdata were not checked")
            return
    if not number:
        return
    from unisono.errors import UserError

    try:
        from extruct.w3cmicrodata import MicrodataExtractor
    except ImportError:
        raise UserError('the site has microdata, which needs extruct: pip install "unisono[seo]"') from None
    try:
        found = MicrodataExtractor().extract_items(root, base)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        result.problems.append(f"microdata cannot be read ({' '.join(str(error).split())[:100]})")
        return
    for item in found:
        result.items += list(_items_of_microdata(item, 0))[: max(0, _MAX_ITEMS - len(result.items))]


def _items_of_microdata(item: Any, depth: int) -> Iterator[Item]:
    if isinstance(item, list):
        for each in item:
            yield from _items_of_microdata(each, depth)
    elif isinstance(item, dict) and "properties" in item and depth <= _MAX_DEPTH:
        properties, types = item["properties"], item.get("type") or []
        names = [types] if isinstance(types, str) else list(types)
        if names:
            fields = frozenset(name for name, content in properties.items() if content not in (None, "", [], {}))
            yield Item(tuple(_local(str(name)) for name in names), fields, "microdata", depth > 0)
        for each in properties.values():
            yield from _items_of_microdata(each, depth + 1)


def _local(name: str) -> str:
    """Returns the name of a type without its namespace."""
    return name.rstrip("/").rpartition("/")[2].rpartition(":")[2].rpartition("#")[2]
