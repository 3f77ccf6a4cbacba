"""A real Jupyter kernel: runs cells and collects what a notebook would show."""

from __future__ import annotations

import json
import queue
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from command_line import environment


class Kernel:
    """An IPython kernel in its own process. Use it in a `with` block."""

    def __init__(self, folder: Path) -> None:
        from jupyter_client.kernelspec import KernelSpec
        from jupyter_client.manager import KernelManager

        command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        spec = KernelSpec(argv=command, display_name="unisono", language="python")
        self._manager = KernelManager(kernel_name="unisono", connection_file=str(folder / "kernel.json"))
        self._manager._kernel_spec = spec
        self._folder = folder

    def __enter__(self) -> Kernel:
        variables = environment(IPYTHONDIR=str(self._folder / ".ipython"))
        variables.pop("PYTEST_CURRENT_TEST", None)  # with it, ipykernel does not show what child processes print
        self._manager.start_kernel(cwd=str(self._folder), env=variables)
        self._client = self._manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=120)
        return self

    def __exit__(self, *error: object) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)

    def run(self, code: str, seconds: float = 240, during: Callable[[Cell], None] | None = None) -> Cell:
        """Runs a cell to its end; `during` is called after each output. Fails the test if the cell raises."""
        cell = Cell()
        message = self._client.execute(code)
        deadline = time.monotonic() + seconds
        while True:
            assert time.monotonic() < deadline, f"not done after {seconds} s: {cell.text}"
            try:
                each = self._client.get_iopub_msg(timeout=1)
            except queue.Empty:
                continue
            if each["parent_header"].get("msg_id") != message:
                continue
            kind, content = each["msg_type"], each["content"]
            if kind == "status" and content["execution_state"] == "idle":
                break
            cell.add(kind, content)
            if during is not None:
                during(cell)
        return cell

    def interrupt(self) -> None:
        """Presses the notebook's stop button."""
        self._manager.interrupt_kernel()


class Cell:
    """The outputs of a cell."""

    def __init__(self) -> None:
        self.text = ""
        """Everything printed to stdout and stderr."""
        self.shown: list[dict[str, Any]] = []
        """All displayed objects by MIME type, each update of a display as an entry of its own."""
        self.displays: set[str] = set()
        self.result: dict[str, Any] = {}
        self.error = ""

    def add(self, kind: str, content: dict[str, Any]) -> None:
        """Adds a message of the kernel."""
        if kind == "stream":
            self.text += content["text"]
        elif kind in ("display_data", "update_display_data"):
            self.shown.append(content["data"])
            self.displays.add(content.get("transient", {}).get("display_id", ""))
        elif kind == "execute_result":
            self.result = content["data"]
        elif kind == "error":
            self.error = f"{content['ename']}: {content['evalue']}"

    def value(self) -> Any:
        """The result of the cell, which is a string that contains JSON."""
        assert not self.error, f"{self.error}\n{self.text}"
        return json.loads(eval(self.result["text/plain"], {"__builtins__": {}}))
