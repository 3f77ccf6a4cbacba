"""Checks names, quantities and labels against the rules of Kubernetes, before an API server rejects them.

Each function returns the value, or raises a ConfigError that names the option.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from unisono.errors import ConfigError

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_QUALIFIED = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
_IMAGE = re.compile(r"[a-z0-9][A-Za-z0-9._:/@-]*")
_BYTES = re.compile(r"\d+(\.\d+)?([KMGTPE]i|[kMGTPE])?")
_CORES = re.compile(r"\d+(\.\d+)?|\d+m")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
_LONGEST_LABEL, _LONGEST_SUBDOMAIN = 63, 253


class Mount(NamedTuple):
    """A persistent volume claim, and the folder of the container in which it is mounted."""

    claim: str
    path: str


def label(option: str, text: str) -> str:
    """Checks the name of a namespace (RFC 1123 label)."""
    _require(option, text, _LABEL, "lowercase letters, digits and -", _LONGEST_LABEL)
    return text


def subdomain(option: str, text: str) -> str:
    """Checks the name of a claim, secret or class (RFC 1123 subdomain)."""
    _require(option, text, _SUBDOMAIN, "lowercase letters, digits, - and dots", _LONGEST_SUBDOMAIN)
    return text


def image(option: str, text: str) -> str:
    """Checks a reference to a container image."""
    _require(option, text, _IMAGE, "a container image such as registry/name:tag", 500)
    return text


def num_bytes(option: str, text: str) -> str:
    """Checks a quantity of memory."""
    _require(option, text, _BYTES, "a quantity such as 64Gi")
    return text


def cores(option: str, text: str) -> str:
    """Checks a quantity of CPU cores."""
    _require(option, text, _CORES, "a number of cores such as 16 or 500m")
    return text


def resource_name(option: str, text: str) -> str:
    """Checks the name of an extended resource, such as nvidia.com/gpu."""
    prefix, slash, _ = text.partition("/")
    if not slash or prefix == "kubernetes.io":
        raise ConfigError(f"{option}: expected a name with a domain such as nvidia.com/gpu, got {text!r}")
    return key(option, text)


def key(option: str, text: str) -> str:
    """Checks the key of a label or taint: a name, optionally with a domain."""
    prefix, slash, name = text.rpartition("/")
    if slash:
        subdomain(option, prefix)
    _require(option, name, _QUALIFIED, "a key such as example.com/gpu", _LONGEST_LABEL, shown=text)
    return text


def label_value(option: str, text: str) -> str:
    """Checks the value of a label or taint, which may be empty."""
    if text:
        _require(option, text, _QUALIFIED, "a value of letters, digits, -, _ and dots", _LONGEST_LABEL)
    return text


def variable(option: str, text: str) -> str:
    """Checks the name of an environment variable."""
    _require(option, text, _VARIABLE, "NAME=VALUE", shown=text)
    return text


def mount(option: str, text: str, default_path: str) -> Mount:
    """Parses CLAIM or CLAIM:/PATH."""
    claim, colon, path = text.partition(":")
    subdomain(option, claim)
    return Mount(claim, folder(option, path if colon else default_path))


def folder(option: str, text: str) -> str:
    """Checks an absolute path of a folder in the container, other than the root and the pod's own mounts."""
    own = ("/dev", "/proc", "/sys", "/run")
    parts = text.split("/")
    plain = text.startswith("/") and text.isprintable() and not {".", ".."} & set(parts) and ":" not in text
    if not plain or not text.strip("/") or text.startswith(tuple(f"{each}/" for each in own)) or text in own:
        raise ConfigError(f"{option}: expected the absolute path of a folder in the container, got {text!r}")
    return "/" + "/".join(part for part in parts if part)


def pair(option: str, text: str) -> tuple[str, str]:
    """Parses KEY=VALUE of a label."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"{option}: expected KEY=VALUE, got {text!r}")
    return key(option, name), label_value(option, value)


def toleration(option: str, text: str) -> dict[str, str]:
    """Parses KEY, KEY=VALUE, KEY:EFFECT or KEY=VALUE:EFFECT, as `kubectl taint` writes a taint."""
    taint, colon, effect = text.partition(":")
    if colon and effect not in _EFFECTS:
        raise ConfigError(f"{option}: expected {', '.join(_EFFECTS)} after the colon, got {effect!r}")
    name, equals, value = taint.partition("=")
    tolerated = {"key": key(option, name), "operator": "Equal" if equals else "Exists"}
    if equals:
        tolerated["value"] = label_value(option, value)
    return {**tolerated, "effect": effect} if colon else tolerated


def _require(
    option: str, text: str, pattern: re.Pattern[str], expected: str, longest: int = 1000, shown: str | None = None
) -> None:
    if pattern.fullmatch(text) is None or len(text) > longest:
        limit = f" (at most {longest} characters)" if len(text) > longest else ""
        raise ConfigError(f"{option}: expected {expected}{limit}, got {text if shown is None else shown!r}")
