"""Opens the fsspec file system of a URL. Nothing imports fsspec before it is needed."""

from __future__ import annotations

from typing import Any

from unisono.errors import UserError
from unisono.storage.addresses import PACKAGES, shown

_OTHER_PACKAGES = {"hf": "huggingface_hub"}


def file_system(url: str, **options: Any) -> Any:
    """Opens the fsspec file system of a URL, with its own connection, because connections do not survive a fork."""
    protocol = url.partition("://")[0]
    try:
        import fsspec

        return fsspec.filesystem(protocol, skip_instance_cache=True, **options)
    except ImportError as error:
        package = (PACKAGES | _OTHER_PACKAGES).get(protocol, "fsspec[http]")
        raise UserError(f"{shown(url)} needs a package that is not installed; pip install {package}") from error
    except ValueError as error:
        raise UserError(f"{shown(url)}: {error}") from error
