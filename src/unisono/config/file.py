"""Reads config files (YAML or JSON) and writes YAML.

Unquoted scalars become `RawText`, which the field's type parses later. Only null, lists and mappings keep their YAML
meaning. A duplicate key is an error, because YAML readers disagree about which of its values to use.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.config.values import RawText, jsonable, text_is_ambiguous
from unisono.errors import ConfigError

if TYPE_CHECKING:
    from unisono.config.resolve import Resolved

_LARGEST = 2**20
_MOST_VALUES = 100_000


def read_file(path: Path) -> Mapping[Any, Any]:
    """Returns the mapping in a .yaml, .yml or .json file."""
    readers = {".yaml": _read_yaml, ".yml": _read_yaml, ".json": _read_json}
    if path.suffix.lower() not in readers:
        raise ConfigError(f"config file {path}: the name must end in .yaml, .yml or .json")
    try:
        content = readers[path.suffix.lower()](_read_text(path))
    except OSError as error:
        raise ConfigError(f"config file {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"config file {path} is not UTF-8 text") from None
    except RecursionError:
        raise ConfigError(f"config file {path} is nested too deeply") from None
    except ValueError as error:
        raise ConfigError(f"config file {path}, {error}") from None
    if content is None:  # for instance because every line is commented out
        return {}
    if not isinstance(content, Mapping):
        raise ConfigError(f"config file {path} must contain a mapping of fields to values, such as `batch_size: 4`")
    return content


def _read_text(path: Path) -> str:
    # Open without blocking, because opening a pipe would wait forever.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ConfigError(f"config file {path} is not a regular file")
        content = file.read(_LARGEST + 1)
    if len(content) > _LARGEST:
        raise ConfigError(f"config file {path} is larger than {_LARGEST // 2**20} MiB, too large for a config file")
    return content.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")


def as_yaml(resolved: Resolved) -> str:
    """Returns the configuration as YAML that resolves to the same configuration; comments name the sources."""
    import yaml

    lines: list[str] = []
    group = None
    for name, value in resolved.values.items():
        field = resolved.fields[name]
        if field.group != group:
            group = field.group
            lines += ["", f"# {group}"] if lines else [f"# {group}"]
        value = jsonable(value)
        content = {name: _quoted(value) if text_is_ambiguous(field.annotation) else value}
        text = yaml.dump(
            content, Dumper=_dumper(), default_flow_style=False, allow_unicode=True, width=2**31, sort_keys=False
        ).rstrip("\n")
        source = resolved.sources[name]
        lines.append(text if source == "default" or "\n" in text else f"{text}  # {source}")
    return "\n".join(lines) + "\n"


def _read_yaml(text: str) -> Any:
    import yaml

    loader = None
    try:
        loader = _loader()(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _check_size(node, {})
        return loader.construct_document(node)
    except (LookupError, AttributeError, TypeError):  # PyYAML raises these for `!!int ""` or `!!bool maybe`
        raise ValueError("a value does not fit the tag (!!…) before it") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f"line {mark.line + 1}: " if mark else ""
        raise ValueError(line + " ".join((error.problem or "not valid YAML").split())) from None
    except yaml.reader.ReaderError as error:
        line_number = text.count("\n", 0, error.position) + 1
        raise ValueError(f"line {line_number}: the character {chr(error.character)!r} is not allowed in YAML") from None
    finally:
        if loader is not None:
            loader.dispose()


def _check_size(node: Any, sizes: dict[int, int | None]) -> int:
    """Returns the number of values with all aliases expanded; a few lines of aliases can expand to billions."""
    if id(node) in sizes:
        size = sizes[id(node)]
        if size is None:
            raise ValueError(f"line {node.start_mark.line + 1}: a value contains itself")
        return size
    sizes[id(node)] = None
    inner = node.value if isinstance(node.value, list) else []
    parts = [part for item in inner for part in (item if isinstance(item, tuple) else (item,))]
    total = 1 + sum(_check_size(part, sizes) for part in parts)
    if total > _MOST_VALUES:
        raise ValueError(f"line {node.start_mark.line + 1}: more than {_MOST_VALUES:,} values with all aliases")
    sizes[id(node)] = total
    return total


def _read_json(text: str) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        content: dict[str, Any] = {}
        for key, value in pairs:
            if key in content:
                raise ValueError(f"the key {key!r} occurs twice")
            content[key] = value
        return content

    try:
        # Numbers stay text as well, because the field's type decides whether 1e999 or NaN is valid.
        return json.loads(
            text, object_pairs_hook=unique, parse_int=RawText, parse_float=RawText, parse_constant=RawText
        )
    except json.JSONDecodeError as error:
        raise ValueError(f"line {error.lineno}: {error.msg}") from None


@cache
def _loader() -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
            tag = super().resolve(kind, value, implicit)  # type: ignore[no-untyped-call]
            unquoted = kind is yaml.ScalarNode and implicit[0]
            special = ("tag:yaml.org,2002:null", "tag:yaml.org,2002:merge")
            return "!raw" if unquoted and tag not in special else tag

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            keys = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                    if key.value in keys:
                        raise yaml.MarkedYAMLError(
                            problem=f"the key {key.value!r} occurs twice", problem_mark=key.start_mark
                        )
                    keys.add(key.value)
            return super().construct_mapping(node, deep)

    def construct_raw(loader: Any, node: Any) -> RawText:
        return RawText(loader.construct_scalar(node))

    Loader.add_constructor("!raw", construct_raw)
    return Loader


@cache
def _dumper() -> Any:
    import yaml

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    def text(dumper: Any, value: str) -> Any:
        # In PyYAML's default style, line breaks such as U+0085 become spaces; only double quotes allow escapes.
        quotes = isinstance(value, _Quoted) or not value.isprintable()
        return dumper.represent_scalar("tag:yaml.org,2002:str", str(value), style='"' if quotes else None)

    def on_one_line(dumper: Any, items: list[Any]) -> Any:
        return dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=True)

    Dumper.add_representer(str, text)
    Dumper.add_representer(_Quoted, text)
    Dumper.add_representer(list, on_one_line)
    return Dumper


class _Quoted(str):
    """Text that the dumper writes in quotes, so that it is not read back as an unquoted scalar."""


def _quoted(value: Any) -> Any:
    if isinstance(value, str):
        return _Quoted(value)
    if isinstance(value, list):
        return [_quoted(item) for item in value]
    if isinstance(value, dict):
        return {key: _quoted(item) for key, item in value.items()}
    return value
