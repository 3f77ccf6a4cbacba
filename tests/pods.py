"""What Kubernetes does with a manifest of `unisono k8s`, as far as one machine can: it starts the pods' real commands.

A pod is a process with the command and the variables of the manifest. Kubernetes replaces $(NAME) in both; the name of
pod 0 becomes an address of this machine. `Pods.verdict` applies the podFailurePolicy of the manifest to an exit code.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from command_line import end, start


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Replaces $(NAME) by a variable and $$ by $; an unknown name stays as it is."""

    def replaced(match: re.Match[str]) -> str:
        return "$" if match[0] == "$$" else variables.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", replaced, text)


def job_of(objects: list[dict[str, Any]]) -> dict[str, Any]:
    """The spec of the Job in a JobSet or a TrainingRuntime."""
    spec = objects[0]["spec"]
    spec = spec["template"]["spec"] if "template" in spec else spec
    return dict(spec["replicatedJobs"][0]["template"]["spec"])


def container_of(objects: list[dict[str, Any]]) -> dict[str, Any]:
    """The container of the pods, after the Trainer has put the TrainJob's command and variables into it."""
    container = dict(job_of(objects)["template"]["spec"]["containers"][0])
    for each in objects[1:]:
        trainer = each["spec"]["trainer"]
        container.update({key: trainer[key] for key in ("image", "command", "args", "env") if key in trainer})
    return container


class Pods:
    """The pods of one run."""

    def __init__(self, manifest: str, folder: Path, **more: str) -> None:
        self.objects = list(yaml.safe_load_all(manifest))
        self.folder, self.more = folder, more
        self.job, self.container = job_of(self.objects), container_of(self.objects)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.running: list[subprocess.Popen[str]] = []

    def start(self, index: int) -> subprocess.Popen[str]:
        """Starts the pod with this index."""
        given = {each["name"]: each["value"] for each in self.container["env"]}
        variables = {"JOB_COMPLETION_INDEX": str(index)}
        for name, value in given.items():
            variables[name] = expand(value, variables)
        variables["UNISONO_ALIVE_FILE"] = str(self.alive_file(index))
        words = [expand(word, variables) for word in (*self.container["command"], *self.container.get("args", []))]
        assert words[:3] == ["python3", "-P", "-m"]
        words = [re.sub(r"^--rdzv_endpoint=.*", f"--rdzv_endpoint=127.0.0.1:{self.port}", word) for word in words[2:]]
        process = start(words, cwd=Path(self.container["workingDir"]), **{**self.more, **variables})
        self.running.append(process)
        return process

    def alive_file(self, index: int) -> Path:
        """The file that the launcher of this pod touches."""
        return self.folder / f"alive-{index}"

    def probe(self, index: int, seconds: str | None = None) -> int:
        """Runs the liveness probe of a pod, optionally with another limit, and returns its exit code."""
        words = self.container["livenessProbe"]["exec"]["command"]
        assert words[:3] == ["python3", "-P", "-m"] and len(words) == 5
        arguments = [sys.executable, *words[1:4], seconds or words[4]]
        environ = {**os.environ, "UNISONO_ALIVE_FILE": str(self.alive_file(index))}
        environ["PYTHONPATH"] = str(Path(__file__).resolve().parent.parent / "src")
        return subprocess.run(arguments, env=environ, capture_output=True, check=False).returncode

    def verdict(self, code: int, *, disrupted: bool = False) -> str:
        """What the Job does after a container has ended: Complete, Ignore (replace), FailJob or Count (replace)."""
        if code == 0:
            return "Complete"
        for rule in self.job["podFailurePolicy"]["rules"]:
            if "onPodConditions" in rule and disrupted:
                return str(rule["action"])
            if "onExitCodes" in rule and code in rule["onExitCodes"]["values"]:
                assert rule["onExitCodes"]["operator"] == "In"
                assert rule["onExitCodes"]["containerName"] == self.container["name"]
                return str(rule["action"])
        return "Count"

    def stop(self) -> None:
        """Ends what is left of the pods."""
        for process in self.running:
            if process.poll() is None:
                os.kill(process.pid, signal.SIGCONT)
                process.kill()
                end(process)
