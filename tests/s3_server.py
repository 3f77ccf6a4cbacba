"""A real S3-compatible server on loopback: moto, whose objects this program also stores on disk.

    python tests/s3_server.py FOLDER PORT

moto keeps everything in memory. To be killed and started again as a real server can be, it writes each object to FOLDER
before it answers. While the file FOLDER/hold exists, a PUT whose path contains its text waits, and FOLDER/held exists.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

BUCKET = "bucket"
KEY_ID, SECRET = "AKIDEXAMPLE0123456", "wJalrXUtnFEMIbPxRfiCYEXAMPLEKEY"


class S3Server:
    """The server as a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Its address, for clients."""
        return f"http://127.0.0.1:{self.port}"

    def environ(self, port: int | None = None) -> dict[str, str]:
        """The environment in which clients find it; `port` is that of a proxy."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port or self.port}",
            "AWS_ACCESS_KEY_ID": KEY_ID,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def start(self) -> None:
        """Starts the server, with the objects that it had before."""
        with open(self.folder / "log", "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(self.folder), str(self.port)], stdout=log, stderr=log
            )
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            assert self._process.poll() is None, (self.folder / "log").read_text()
            try:
                urllib.request.urlopen(self.url, timeout=5).close()
                return
            except urllib.error.HTTPError:
                return
            except OSError:
                time.sleep(0.1)
        raise AssertionError("the S3 server does not answer")

    def kill(self) -> None:
        """Kills the server, with all requests in progress."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def objects(self, prefix: str = "") -> dict[str, bytes]:
        """All objects of the bucket whose names begin with a prefix."""
        files = {unquote(path.name): path for path in (self.folder / BUCKET).iterdir() if path.name[0] != "."}
        return {name.removeprefix(prefix): path.read_bytes() for name, path in files.items() if name.startswith(prefix)}

    def put(self, name: str, content: bytes) -> None:
        """Replaces an object behind the back of its writer; the server must not be running."""
        assert self._process is None
        (self.folder / BUCKET / quote(name, safe="")).write_bytes(content)


class OnDisk:
    """WSGI middleware that stores the objects of moto on disk after each request that changes some."""

    def __init__(self, app: Callable[..., Iterable[bytes]], folder: Path) -> None:
        self._app, self._folder, self._lock = app, folder, threading.Lock()
        self._stored: dict[str, str] = {}
        self._load()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> list[bytes]:
        """Answers a request."""
        if environ["REQUEST_METHOD"] == "PUT":
            self._wait_while_held(environ["PATH_INFO"])
        body = list(self._app(environ, start_response))
        if environ["REQUEST_METHOD"] in ("PUT", "POST", "DELETE"):
            self._store()
        return body

    def _wait_while_held(self, path: str) -> None:
        hold = self._folder / "hold"
        while hold.exists() and hold.read_text() in path:
            (self._folder / "held").touch()
            time.sleep(0.02)

    def _load(self) -> None:
        s3 = _backend()
        s3.create_bucket(BUCKET, "us-east-1")
        (self._folder / BUCKET).mkdir(exist_ok=True)
        for path in sorted((self._folder / BUCKET).iterdir()):
            if path.name[0] != ".":
                s3.put_object(BUCKET, unquote(path.name), path.read_bytes())
        self._stored = {name: key.etag for name, key in s3.buckets[BUCKET].keys.items()}

    def _store(self) -> None:
        with self._lock:
            keys = {name: key for name, key in list(_backend().buckets[BUCKET].keys.items()) if hasattr(key, "etag")}
            for name, key in keys.items():
                if self._stored.get(name) != key.etag:
                    target = self._folder / BUCKET / quote(name, safe="")
                    temporary = target.with_name(".new")
                    temporary.write_bytes(key.value)
                    os.replace(temporary, target)
                    self._stored[name] = key.etag
            for name in self._stored.keys() - keys.keys():
                (self._folder / BUCKET / quote(name, safe="")).unlink(missing_ok=True)
                del self._stored[name]


def _backend() -> Any:
    from moto.backends import get_backend
    from moto.core import DEFAULT_ACCOUNT_ID

    return get_backend("s3")[DEFAULT_ACCOUNT_ID]["aws"]


def main() -> None:
    """Serves until it is killed."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import run_simple

    app = OnDisk(DomainDispatcherApplication(create_backend_app), Path(sys.argv[1]))
    run_simple("127.0.0.1", int(sys.argv[2]), app, threaded=True)


if __name__ == "__main__":
    main()
