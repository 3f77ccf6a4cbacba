"""Describes a run on Kubernetes: its pods, their resources, and the command that each pod runs."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from unisono.cluster.kubernetes import checks
from unisono.cluster.kubernetes.checks import Mount
from unisono.errors import ConfigError
from unisono.storage.addresses import is_address

PORT = 29400
"""Port of the rendezvous in pod 0; pods have their own addresses, so runs do not interfere."""

REPLICATED_JOB = "node"
"""Name of the JobSet's only group of pods, and of their container; Kubeflow's Trainer expects it."""

_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_LONGEST_NAME = 63
_RANDOM_SUFFIX = "-abcde"  # Kubernetes appends five characters to the name of a pod


@dataclass(frozen=True)
class KubernetesJob:
    """The pods to request from Kubernetes and the command to run. The constructor checks all fields."""

    name: str
    image: str
    train: Sequence[str]
    """The arguments after `unisono train`, without the arguments of the rendezvous."""
    output_dir: str
    volumes: Sequence[Mount]
    """The first volume holds the run folder."""
    workdir: str
    nodes: int = 1
    min_nodes: int | None = None
    gpus_per_node: int = 0
    gpu_resource: str = "nvidia.com/gpu"
    cpus: str | None = None
    memory: str | None = None
    shm: str = "8Gi"
    resources: Mapping[str, int] = field(default_factory=dict)
    """Further extended resources per pod, for instance network adapters."""
    namespace: str | None = None
    priority_class: str | None = None
    service_account: str | None = None
    queue: str | None = None
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: Sequence[Mapping[str, str]] = ()
    secrets: Sequence[str] = ()
    image_pull_secrets: Sequence[str] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    user: int = 1000
    grace_period: int = 300
    pod_restarts: int = 3
    has_launcher: bool = True
    """Whether each pod runs unisono's launcher, which the probes watch; a single rank may run without a launcher."""

    def __post_init__(self) -> None:
        self._check_name()
        checks.image("image", self.image)
        for option, value in (("cpus", self.cpus), ("memory", self.memory), ("shm", self.shm)):
            if value is not None:
                (checks.cores if option == "cpus" else checks.num_bytes)(option, value)
        for option in ("namespace", "queue"):
            if (value := getattr(self, option)) is not None:
                checks.label(option, value)
        for option in ("priority_class", "service_account"):
            if (value := getattr(self, option)) is not None:
                checks.subdomain(option, value)
        for option, names in (("secret", self.secrets), ("image_pull_secret", self.image_pull_secrets)):
            for each in names:
                checks.subdomain(option, each)
        for each in (self.gpu_resource, *self.resources):
            checks.resource_name("gpu_resource" if each == self.gpu_resource else "resource", each)
        for each in self.environ:
            if checks.variable("env", each) == "JOB_COMPLETION_INDEX":
                raise ConfigError("env: Kubernetes sets JOB_COMPLETION_INDEX; remove it")
        self._check_numbers()
        self._check_paths()
        for text in (*self.train, *self.environ.values()):
            if not text.isprintable():
                raise ConfigError(f"{text!r} contains unprintable characters; remove them")

    def _check_name(self) -> None:
        if _NAME.fullmatch(self.name) is None:
            raise ConfigError(
                f"name: expected lowercase letters, digits and -, beginning with a letter, got {self.name!r}"
            )
        longest = _LONGEST_NAME - len(f"-{REPLICATED_JOB}-0-{max(self.nodes, 1) - 1}{_RANDOM_SUFFIX}")
        if len(self.name) > longest:
            raise ConfigError(f"name: expected at most {longest} characters, got {len(self.name)}: {self.name}")

    def _check_numbers(self) -> None:
        for option, least in (
            ("nodes", 1),
            ("gpus_per_node", 0),
            ("user", 1),
            ("grace_period", 1),
            ("pod_restarts", 0),
        ):
            value = getattr(self, option)
            if not least <= value < 2**31:
                reason = "; the pods do not run as root" if option == "user" else ""
                raise ConfigError(f"{option}: expected at least {least}, got {value}{reason}")
        if self.min_nodes is not None and not 1 <= self.min_nodes <= self.nodes:
            raise ConfigError(f"min_nodes: expected 1 to {self.nodes} (nodes), got {self.min_nodes}")

    def _check_paths(self) -> None:
        paths = [mount.path for mount in self.volumes]
        if len(set(paths)) < len(paths):
            raise ConfigError(f"volume: two volumes at {paths[-1]}; write CLAIM:/PATH with distinct paths")
        if is_address(self.output_dir):
            raise ConfigError("output_dir: all pods need one folder on a volume; use it, and --mirror ADDRESS")
        run_folder = posixpath.normpath(posixpath.join(self.workdir, self.output_dir))
        if not any(run_folder.startswith(f"{path}/") for path in paths):
            raise ConfigError(
                f"output_dir {self.output_dir}: it is not on a volume ({', '.join(paths) or 'there is none'}), so the "
                "checkpoints would be lost with the pod; pass --volume CLAIM:/PATH and a run folder in it"
            )

    @property
    def endpoint(self) -> str:
        """The rendezvous in pod 0, by the name that the JobSet's headless service gives to it."""
        return f"{self.name}-{REPLICATED_JOB}-0-0.{self.name}:{PORT}"

    def command(self) -> list[str]:
        """Returns the command of every pod, in which Kubernetes replaces the index of the pod."""
        words = ["python3", "-P", "-m", "unisono", "train", *map(literal, self.train)]
        if self.nodes > 1:
            nnodes = f"{self.min_nodes}:{self.nodes}" if self.min_nodes not in (None, self.nodes) else str(self.nodes)
            words += [f"--nnodes={nnodes}", "--node_rank=$(JOB_COMPLETION_INDEX)", f"--rdzv_endpoint={self.endpoint}"]
        return words


def literal(text: str) -> str:
    """Escapes `$`, because Kubernetes replaces $(NAME) in commands and in values of environment variables."""
    return text.replace("$", "$$")
