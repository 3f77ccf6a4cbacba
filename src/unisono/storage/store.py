"""A folder in object storage. Objects appear complete or not at all, and cannot be renamed.

Each fsspec file system raises its own exceptions, so the store converts them to a `StorageError` with a one-line reason
that contains no credentials. If a call fails because of the network or the server, it can be repeated.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeVar

from unisono.errors import UserError
from unisono.storage.file_systems import file_system

T = TypeVar("T")

_CONNECT_S, _READ_S = 10, 60  # a request fails after this many seconds without an answer
_PAUSES_S = (0.5, 1.0, 2.0, 4.0)  # pauses between the attempts of `patiently`
_SECRET_VARIABLES = re.compile(r"KEY|SECRET|TOKEN|PASSWORD|CREDENTIAL", re.IGNORECASE)
_SHORTEST_SECRET = 6
_REASONS = {
    "NoCredentialsError": "there are no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile",
    "PartialCredentialsError": "the credentials are incomplete",
    "EndpointConnectionError": "the server cannot be reached",
    "ConnectTimeoutError": "the server cannot be reached",
    "ClientConnectorError": "the server cannot be reached",
    "ClientConnectionError": "the connection failed",
    "ConnectionClosedError": "the connection was closed",
    "ReadTimeoutError": "the server does not answer",
}


class StorageError(UserError):
    """Raised if a call to object storage fails; the message names the address and the reason."""

    def __init__(self, address: str, error: BaseException) -> None:
        super().__init__(f"{address}: {reason_of(error)}")
        self.is_missing = isinstance(error, FileNotFoundError) and not _lacks_bucket(error)
        """Whether the file does not exist."""
        lasts = isinstance(error, FileNotFoundError | PermissionError) or "Credentials" in type(error).__name__
        self.may_pass = not lasts
        """Whether the same call may succeed later."""


class Store:
    """The files below an address, identified by relative names such as `checkpoints/best.json`."""

    def __init__(self, address: str) -> None:
        """`address` is the result of `check_address`."""
        self.address = address
        self._root = address.partition("://")[2]
        self._system: Any = None

    def files(self, folder: str = "") -> dict[str, int]:
        """Returns the size of every file in a folder and its subfolders, by name; empty if there are no files."""
        entries = self._call(folder, lambda system: system.find(self._path(folder), withdirs=False, detail=True))
        prefix = f"{self._root}/"
        return {path.removeprefix(prefix): int(entry["size"]) for path, entry in entries.items()}

    def read(self, name: str) -> bytes | None:
        """Returns the content of a small file; None if it does not exist."""
        try:
            return bytes(self._call(name, lambda system: system.cat_file(self._path(name))))
        except StorageError as error:
            if error.is_missing:
                return None
            raise

    def write(self, name: str, content: bytes) -> None:
        """Creates or replaces a small file."""
        self._call(name, lambda system: system.pipe_file(self._path(name), content))

    def upload(self, source: Path, name: str) -> None:
        """Copies a local file into the store."""
        self._call(name, lambda system: system.put_file(str(source), self._path(name)))

    def download(self, name: str, target: Path) -> None:
        """Copies a file of the store to a local path, overwriting an existing file."""
        self._call(name, lambda system: system.get_file(self._path(name), str(target)))

    def delete(self, names: Collection[str]) -> None:
        """Deletes files."""
        if names:
            self._call("", lambda system: system.rm([self._path(name) for name in sorted(names)]))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _call(self, name: str, call: Callable[[Any], T]) -> T:
        try:
            if self._system is None:
                self._system = _opened(self.address)
            return call(self._system)
        except UserError:
            raise
        except Exception as error:
            address = f"{self.address}/{name}" if name else self.address
            raise StorageError(address, error) from error


def patiently(call: Callable[[], T]) -> T:
    """Makes a call, and repeats it for some seconds while it raises a StorageError that may be temporary."""
    for pause in _PAUSES_S:
        try:
            return call()
        except StorageError as error:
            if not error.may_pass:
                raise
        time.sleep(pause)
    return call()


def reason_of(error: BaseException) -> str:
    """Describes in one line without secrets why a call to object storage failed."""
    name = type(error).__name__
    if name in _REASONS:
        return _REASONS[name]
    text = " ".join(str(getattr(error, "strerror", None) or error).split())
    text = re.sub(r"(?<=://)[^/\s@]+@", "", text)
    text = re.sub(r"\?[^\s\"']*", "", text)
    for variable, value in os.environ.items():
        if len(value) >= _SHORTEST_SECRET and _SECRET_VARIABLES.search(variable):
            text = text.replace(value, "(redacted)")
    if isinstance(error, FileNotFoundError):
        return text[:160] if _lacks_bucket(error) else "no such file"
    return f"{name}: {text[:160]}" if text else name


def _opened(address: str) -> Any:
    options: dict[str, Any] = {"use_listings_cache": False}  # another process may change the files
    if address.startswith("s3://"):
        options["config_kwargs"] = {"connect_timeout": _CONNECT_S, "read_timeout": _READ_S}
    return file_system(address, **options)


def _lacks_bucket(error: BaseException) -> bool:
    return "bucket" in str(error).lower() and "does not exist" in str(error).lower()
