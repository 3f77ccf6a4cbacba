"""Addresses of folders in object storage, such as `s3://bucket/run`.

An address appears in messages, in run.json and in the banner, so it must not contain credentials. unisono reads
credentials only from where the storage's own tools read them: environment variables, and files such as
~/.aws/credentials.
"""

from __future__ import annotations

import importlib.util
import re
from urllib.parse import urlsplit, urlunsplit

from unisono.errors import ConfigError

PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}
"""Maps schemes of object storage to the package that fsspec needs; each package contains a module of the same name."""

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_PLAIN = re.compile(r"[^\x00-\x20\x7f\\*?\[\]{}#%]+")
_LONGEST = 500  # S3 limits a key to 1024 bytes, and unisono appends file names to the address


def is_address(path: str | None) -> bool:
    """Returns whether a path is an address with a scheme, not a path in the local file system."""
    return path is not None and _SCHEME.match(path) is not None


def is_remote(url: str) -> bool:
    """Returns whether fsspec opens this path."""
    return "://" in url and not url.startswith("file://")


def shown(url: str) -> str:
    """Removes user name, password and query from a URL, which may contain secrets; returns a path unchanged."""
    if not is_remote(url):
        return url
    try:
        parts = urlsplit(url)
    except ValueError:  # unbalanced brackets
        return f"{url.partition('://')[0]}://…"
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def check_address(setting: str, address: str) -> str:
    """Returns the address of a folder in normalised form; raises ConfigError if it is invalid.

    `setting` is the name of the setting that contains the address. The error message never contains possible secrets.
    """
    scheme, _, rest = address.partition("://")
    scheme = scheme.lower()
    if scheme not in PACKAGES:
        known = ", ".join(f"{each}://" for each in PACKAGES)
        raise ConfigError(f"{setting}: unknown scheme {scheme[:40]}://; use {known} or a local folder")
    netloc, _, path = rest.partition("/")
    if "@" in netloc and scheme != "abfs":  # abfs://container@account/… contains no secret
        raise ConfigError(
            f"{setting}: the address contains a user name or a password; remove it, and pass credentials by "
            "environment variables or in a file of the storage's own tools (see docs/storage.md)"
        )
    if "?" in rest or "#" in rest:
        raise ConfigError(f"{setting}: the address contains a query, which may be a secret; remove all from ? or # on")
    names = [name for name in path.split("/") if name]
    is_plain = all(_PLAIN.fullmatch(name) and name not in (".", "..") for name in (netloc, *names))
    if not netloc or not names or not is_plain or len(rest) > _LONGEST:
        raise ConfigError(
            f"{setting}: expected an address such as {scheme}://BUCKET/FOLDER, got {shown(address)[:200]}"
        )
    if importlib.util.find_spec(PACKAGES[scheme]) is None:
        hint = "'unisono[storage]'" if scheme == "s3" else PACKAGES[scheme]
        raise ConfigError(
            f"{setting}: {scheme}:// needs {PACKAGES[scheme]}, which is not installed; run pip install {hint}"
        )
    return f"{scheme}://{netloc}/{'/'.join(names)}"
