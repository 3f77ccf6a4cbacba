"""Writes a run as a SkyPilot task, to start as a managed job.

SkyPilot starts the machines of a task, uploads the working directory, and runs `setup` and then `run` on every machine.
It passes to each machine its number and the addresses of all machines. If a spot machine is preempted or a machine
fails, a managed job starts all machines again, wherever machines are available, and runs the same commands; the run
then continues from the checkpoint on the storage. An exit code in `recover_on_exit_codes` has the same effect and is
not counted as an error.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import yaml

from unisono.cluster.kubernetes import checks
from unisono.errors import EXIT_STOPPED, ConfigError

PORT = 29400
"""Port of the rendezvous on machine 0; a task shares its machines with no other task."""

_FORMATS: dict[str, tuple[re.Pattern[str], str]] = {
    "name": (re.compile(r"[a-zA-Z0-9]+(?:[._-]{1,2}[a-zA-Z0-9]+)*"), "letters, digits, dots, - and _"),
    "gpus_per_node": (re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*:[1-9]\d*"), "type:number such as H100:8"),
    "infra": (re.compile(r"[A-Za-z0-9*][A-Za-z0-9_.:/*@-]*"), "cloud[/region[/zone]] such as aws/us-east-1, or k8s"),
    "cpus": (re.compile(r"\d+(\.\d+)?\+?"), "a number of cores such as 16, or 16+ for at least 16"),
    "memory": (re.compile(r"\d+(\.\d+)?\+?"), "a number of GiB such as 256, or 256+ for at least 256"),
}
_VOLUME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_BUCKET = re.compile(r"[a-z0-9]+://[A-Za-z0-9][A-Za-z0-9._/-]*")


class Storage(NamedTuple):
    """A volume of SkyPilot or a bucket, and the folder at which every machine mounts it."""

    source: str
    path: str


@dataclass(frozen=True)
class SkyPilotTask:
    """The machines to request and the command to run on each. The constructor checks all fields."""

    name: str
    train: Sequence[str]
    """The arguments after `unisono train`, without those that depend on the machine."""
    output_dir: str
    volumes: Sequence[Storage] = ()
    buckets: Sequence[Storage] = ()
    shared_folders: Sequence[str] = ()
    """Folders that all machines share without SkyPilot, for instance by NFS."""
    workdir: str | None = None
    setup: Sequence[str] = ()
    """Shell commands of the user."""
    image: str | None = None
    nodes: int = 1
    gpus_per_node: str | None = None
    cpus: str | None = None
    memory: str | None = None
    disk_size: int | None = None
    infra: str | None = None
    spot: bool = False
    environ: Mapping[str, str] = field(default_factory=dict)
    secrets: Sequence[str] = ()
    restarts_on_errors: int = 0

    def __post_init__(self) -> None:
        for option, (pattern, expected) in _FORMATS.items():
            value = getattr(self, option)
            if value is not None and pattern.fullmatch(value) is None:
                raise ConfigError(f"{option}: expected {expected}, got {value!r}")
        for option, least in (("nodes", 1), ("disk_size", 1), ("restarts_on_errors", 0)):
            value = getattr(self, option)
            if value is not None and value < least:
                raise ConfigError(f"{option}: expected at least {least}, got {value}")
        if self.image is not None:
            checks.image("image", self.image)
        for option, names in (("env", self.environ), ("secret", self.secrets)):
            for each in names:
                if checks.variable(option, each).startswith("SKYPILOT_"):
                    raise ConfigError(f"{option}: SkyPilot sets {each}; remove it")
        if self.image is None and not self.setup:
            raise ConfigError(
                "setup: pass --setup with the command that installs unisono on a machine, or --image with a container "
                "image that contains it"
            )
        for text in (*self.train, *self.setup, *self.environ.values(), self.workdir or ""):
            if not text.isprintable():
                raise ConfigError(f"{text!r} contains unprintable characters; remove them")
        if "$" in (self.workdir or ""):
            raise ConfigError(f"workdir: SkyPilot would replace $ in {self.workdir!r}; rename the folder")
        self._check_storage()

    def _check_storage(self) -> None:
        paths = [each.path for each in (*self.volumes, *self.buckets)] + list(self.shared_folders)
        if len(set(paths)) < len(paths):
            raise ConfigError(f"volume: two storages at {paths[-1]}; write NAME:/PATH with different paths")
        if not any(self._is_in(path) for path in paths):
            raise ConfigError(
                f"output_dir {self.output_dir}: it is not on a storage ({', '.join(paths) or 'there is none'}), so the "
                "checkpoints would be lost with the machine; pass --volume, --bucket or --shared-folder and a run "
                "folder in it"
            )
        if self.nodes > 1 and any(self._is_in(each.path) for each in self.buckets):
            raise ConfigError(
                f"output_dir {self.output_dir}: machines do not see each other's files in a bucket at once, so it can "
                "hold the run folder of one machine only; pass --volume or --shared-folder"
            )

    def _is_in(self, folder: str) -> bool:
        return self.output_dir.startswith(f"{folder}/") and ".." not in self.output_dir.split("/")


def storage(option: str, text: str, default_path: str) -> Storage:
    """Parses NAME[:/PATH] of a volume, or s3://BUCKET[:/PATH]."""
    source, colon, path = text.rpartition(":/")
    if not colon or path.startswith("/"):  # the colon is that of s3://
        source, path = text, default_path.removeprefix("/")
    pattern, expected = (_BUCKET, "s3://BUCKET[:/PATH]") if option == "bucket" else (_VOLUME, "NAME[:/PATH]")
    if pattern.fullmatch(source) is None:
        raise ConfigError(f"{option}: expected {expected}, got {text!r}")
    return Storage(source, folder(option, f"/{path}"))


def folder(option: str, text: str) -> str:
    """Checks an absolute path on the machines."""
    path = checks.folder(option, text)
    if "$" in path:
        raise ConfigError(f"{option}: SkyPilot would replace $ in {text!r}; use another path")
    return path


def task_file(task: SkyPilotTask) -> str:
    """Returns the task as YAML."""
    resources: dict[str, Any] = {
        "infra": task.infra,
        "accelerators": task.gpus_per_node,
        "cpus": task.cpus,
        "memory": task.memory,
        "disk_size": task.disk_size,
        "image_id": None if task.image is None else f"docker:{task.image}",
        "use_spot": task.spot,
        "job_recovery": {
            "max_restarts_on_errors": task.restarts_on_errors,
            "recover_on_exit_codes": [EXIT_STOPPED],
        },
    }
    fields: dict[str, Any] = {
        "name": task.name,
        "num_nodes": task.nodes,
        "resources": {key: value for key, value in resources.items() if value is not None},
        "workdir": task.workdir,
        "volumes": {each.path: each.source for each in task.volumes},
        # A run folder needs to append to files and to rename folders, which MOUNT cannot do; MOUNT_CACHED can.
        "file_mounts": {each.path: {"source": each.source, "mode": "MOUNT_CACHED"} for each in task.buckets},
        "envs": dict(task.environ),
        "secrets": dict.fromkeys(task.secrets),
        "setup": "\n".join(["set -e", *task.setup, ""]) if task.setup else None,
        "run": _run(task),
    }
    document = {key: value for key, value in fields.items() if value not in (None, {})}
    text = yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100_000)
    codes = (
        f"# Exit code {EXIT_STOPPED} (stopped by a signal, with a checkpoint) and lost machines: continues, uncounted."
    )
    return f"# Written by `unisono skypilot`, for `sky jobs launch`.\n{codes}\n{text}"


def _run(task: SkyPilotTask) -> str:
    words = ['"${train[@]}"', '--gpus="$SKYPILOT_NUM_GPUS_PER_NODE"']
    lines = [f"train=(train {' '.join(map(shlex.quote, task.train))})"]
    if task.nodes > 1:
        lines.append("head=${SKYPILOT_NODE_IPS%%$'\\n'*}  # one address per line; the first is that of machine 0")
        words += ['--nnodes="$SKYPILOT_NUM_NODES"', '--node_rank="$SKYPILOT_NODE_RANK"']
        words += [f'--rdzv_endpoint="$head:{PORT}"']
    # Use no `exec` or `exit`: SkyPilot appends lines that wait until the bucket has all files, then return this code.
    return "\n".join([*lines, f"python3 -P -m unisono {' '.join(words)}", ""])


class _Dumper(yaml.SafeDumper):
    """Writes scripts as blocks, so that a person can read them."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _represent_text)
