"""Connects this process to a Ray cluster, with one-line errors."""

from __future__ import annotations

import contextlib
import logging
import re
import signal
import socket
import threading
import warnings
from collections.abc import Iterator
from importlib.util import find_spec

from unisono.errors import ConfigError, UserError
from unisono.formatting import describe_exception

_CONNECT_S = 5.0


def address_in(on: str) -> str | None:
    """Returns the address in the value of `--on`, which is `ray` or `ray:HOST:PORT`; None if it contains no address."""
    backend, _, address = on.partition(":")
    if backend != "ray":
        raise ConfigError(f"on: expected ray or ray:HOST:PORT, got {on!r}")
    if address:
        check_address(address)
    return address or None


def check_address(address: str) -> None:
    """Raises ConfigError unless the address is HOST:PORT."""
    if address.startswith("ray://"):
        raise ConfigError(
            "Ray Client (ray://) is not supported; run the command on a node of the cluster, or with `ray job submit`"
        )
    port = address.rpartition(":")[2]
    if re.fullmatch(r"[^\s:]+:[0-9]{1,5}|\[[0-9a-fA-F:]+\]:[0-9]{1,5}", address) is None or not 1 <= int(port) <= 65535:
        raise ConfigError(
            f"address of the Ray cluster: expected HOST:PORT, for instance head-node:6379, got {address!r}"
        )


@contextlib.contextmanager
def connected(address: str | None) -> Iterator[None]:
    """Connects to the cluster at `address`; by default to the cluster of RAY_ADDRESS or of this machine.

    A program that is connected already, because it called `ray.init` or is a task of Ray, stays connected.
    """
    if find_spec("ray") is None:
        raise UserError('a run on Ray needs Ray; run: pip install "unisono[ray]"')
    import ray

    if ray.is_initialized():
        yield
        return
    if address is not None:
        check_address(address)
        _check_reachable(address)
    in_main_thread = threading.current_thread() is threading.main_thread()
    handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT)}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Ray's variables have no effect on unisono's ranks
            # The driver forwards the output of the machines itself, because Ray would drop repeated lines.
            ray.init(address=address or "auto", log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:
        where = f" at {address}" if address else ""
        reason = describe_exception(error).splitlines()[0]
        raise UserError(
            f"cannot connect to a Ray cluster{where} ({reason}); start one with `ray start --head`, pass --on "
            "ray:HOST:PORT, or use `ray job submit`"
        ) from None
    finally:
        if in_main_thread:
            for signum, handler in handlers.items():
                if handler is not None:
                    signal.signal(signum, handler)  # ray.init replaces the handlers
    try:
        yield
    finally:
        ray.shutdown()


def _check_reachable(address: str) -> None:
    """Raises an error at once if nothing answers at the address; ray.init would retry for minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
    except OSError as error:
        raise UserError(
            f"no Ray cluster answers at {address} ({error.strerror or error}); `ray start --head` prints the address "
            "of the cluster that it starts"
        ) from None
