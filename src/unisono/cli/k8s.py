"""`unisono k8s RECIPE --nodes 2 --gpus-per-node 8`: writes the manifests of a run on Kubernetes."""

from __future__ import annotations

import argparse
import posixpath
import re
import sys
import time
from pathlib import Path
from typing import get_args

from unisono.cli.arguments import OPTION_FOR, TrainingParser
from unisono.cli.job_files import public_variable, variable, whole_number, write_new
from unisono.cluster.kubernetes import checks
from unisono.cluster.kubernetes.job import KubernetesJob
from unisono.cluster.kubernetes.manifests import Kind, manifests
from unisono.config.resolve import Resolved
from unisono.engine.batch import plan_batch
from unisono.engine.checks import check_run
from unisono.engine.recipe import Recipe
from unisono.engine.start.registry import load_recipe
from unisono.engine.start.run import configure
from unisono.errors import EXIT_DONE, ConfigError
from unisono.formatting import format_count
from unisono.observe.stop_time import measured_seconds
from unisono.settings import Settings

_DESCRIPTION = """Write the manifests of a run on Kubernetes: a JobSet, or a TrainJob of Kubeflow Trainer.

Each pod is one machine, in which unisono's launcher starts a rank per GPU. A pod that is evicted or preempted saves a
checkpoint and is replaced, and the run continues. Every setting of `unisono train` is also a flag here: it is checked
now and written into the manifest. Paths are those in the container."""

_DEFAULT_MOUNT = "/data"
_SECRETS = "put it into a Secret of the cluster and pass --secret NAME"


def _parser() -> TrainingParser:
    usage = "RECIPE --image IMAGE --volume CLAIM --nodes 2 --gpus-per-node 8 [options] [settings]"
    parser = TrainingParser("k8s", usage, _DESCRIPTION)
    add, several = parser.add_option, parser.add_repeatable
    add("--image", "IMAGE", "container image with unisono and your recipe (see the Dockerfile in docs/kubernetes.md)")
    several(
        "--volume",
        "CLAIM[:/PATH]",
        f"persistent volume claim and where to mount it (default: {_DEFAULT_MOUNT}); the first one holds the run "
        "folder, and must be ReadWriteMany for several nodes",
    )
    parser.add_argument("--kind", choices=get_args(Kind), default="jobset", help="kind of manifest (default: jobset)")
    add("--nodes", "N", "number of pods, one per machine (default: 1)", type=whole_number)
    add(
        "--min-nodes",
        "N",
        "train on as many pods as are available, but at least this number (default: nodes)",
        type=whole_number,
    )
    add("--gpus-per-node", "N", "GPUs per pod (default: 0, train on CPUs with --nproc ranks)", type=whole_number)
    add("--cpus", "N", "CPU cores per pod")
    add("--memory", "M", "memory per pod, for instance 256Gi; it includes --shm")
    add("--shm", "M", "size of /dev/shm, which loader workers use (default: 8Gi)")
    several("--resource", "NAME=N", "further resource per pod, for instance rdma/ib=1")
    add("--gpu-resource", "NAME", "resource name of a GPU (default: nvidia.com/gpu)")
    add("--name", "NAME", "name of the objects (default: the recipe's name)")
    add("--namespace", "N", "namespace of the objects (default: kubectl's current namespace)")
    add("--workdir", "/PATH", "working directory, where relative paths begin (default: the first volume)")
    several("--env", "NAME=VALUE", "environment variable of the pods")
    several("--secret", "NAME", "Secret whose entries become environment variables, for instance credentials")
    several("--image-pull-secret", "NAME", "Secret with the credentials of the image's registry")
    several("--node-selector", "KEY=VALUE", "label that a node must have")
    several("--toleration", "KEY[=VALUE][:EFFECT]", "taint that a node may have")
    add("--priority-class", "NAME", "priority class of the pods")
    add("--queue", "NAME", "queue of Kueue, which starts all pods together")
    add("--service-account", "NAME", "service account of the pods; its token is not mounted")
    add(
        "--user",
        "UID",
        "user and group ID in the container, which owns the volumes (default: 1000)",
        type=whole_number,
    )
    add(
        "--grace-period",
        "S",
        "number of seconds that a pod has to save a checkpoint after SIGTERM (default: derived from --like, or 300)",
        type=whole_number,
    )
    add("--like", "RUN", "folder of a similar run, whose longest step and save determine --grace-period", type=Path)
    add(
        "--pod-restarts",
        "N",
        "number of pods to replace after crashes; disruptions do not count (default: 3)",
        type=whole_number,
    )
    add("--output", "FILE", "file to write (default: stdout)")
    parser.add_argument("--force", action="store_true", help="overwrite an existing file")
    return parser


def main(argv: list[str]) -> int:
    """Runs the command."""
    parser = _parser()
    recipe, config, flags, options = parser.parse_training(argv)
    if options.help:
        parser.print_help()
        return EXIT_DONE
    kind = load_recipe(recipe)
    resolved = configure(kind, file=config, flags=flags)
    _check(kind, resolved, options)
    job = _job(options, resolved, recipe, [recipe, *(f"--config={file}" for file in config), *flags])
    ranks_per_node = job.gpus_per_node or resolved.values["nproc"] or 1
    batch = plan_batch(resolved.build(Settings).batch, resolved.explicit, devices=job.nodes * ranks_per_node)
    text = manifests(job, options.kind)
    if options.output is None:
        print(text, end="")
    else:
        write_new(Path(options.output), text, option="--output", overwrite=options.force)
    _explain(job, options.kind, options.output, ranks_per_node, batch.global_batch)
    return EXIT_DONE


def _check(kind: type[Recipe], resolved: Resolved, options: argparse.Namespace) -> None:
    for name, instead in OPTION_FOR.items():
        if resolved.explicit(name):
            raise ConfigError(f"{name}: on Kubernetes the manifest determines this setting; use --{instead} instead")
    if options.gpus_per_node and resolved.explicit("nproc"):
        raise ConfigError(f"nproc: a pod has one rank per GPU ({options.gpus_per_node}); remove it")
    check_run(kind, resolved)  # report bad settings now, before the pods wait hours for GPUs
    if resolved.values["resume"] == "never":
        raise ConfigError("resume: never would prevent a replaced pod from continuing; use a new output_dir instead")
    if options.image is None:
        raise ConfigError("image: pass --image with a container image that contains unisono and your recipe")
    if not options.volume:
        raise ConfigError("volume: pass --volume CLAIM, a persistent volume claim for the run folder")
    for text in options.env:
        public_variable(text, _SECRETS)


def _job(options: argparse.Namespace, resolved: Resolved, recipe: str, training: list[str]) -> KubernetesJob:
    name = options.name or _plain(recipe.rpartition(":")[2] or recipe)
    volumes = [checks.mount("volume", text, _DEFAULT_MOUNT) for text in options.volume]
    workdir = checks.folder("workdir", options.workdir or volumes[0].path)
    # The manifest contains the run folder, so that new pods, or the same manifest applied again, continue the run.
    stamp = time.strftime("%Y%m%d-%H%M%S")
    output = resolved.values["output_dir"] or posixpath.join(volumes[0].path, "runs", f"{name}-{stamp}")
    gpus, nodes = options.gpus_per_node or 0, options.nodes or 1
    # An explicit max_restarts also starts the launcher for a single rank; the probes watch the launcher.
    own = {
        "output_dir": output,
        "max_restarts": resolved.values["max_restarts"],
        "gpus": gpus,
        # A scheduler may take longer than the default to replace a pod, so the other pods must not give up waiting.
        **({"join_timeout": 0} if nodes > 1 else {}),
    }
    flags = [f"--{flag}={value}" for flag, value in own.items() if not resolved.explicit(flag)]
    optional = ("namespace", "priority_class", "service_account", "queue", "cpus", "memory", "min_nodes")
    defaults = ("shm", "gpu_resource", "user", "grace_period", "pod_restarts")
    chosen = {each: getattr(options, each) for each in (*optional, *defaults) if getattr(options, each) is not None}
    if options.like is not None and "grace_period" not in chosen:
        chosen["grace_period"] = measured_seconds(options.like)
    return KubernetesJob(
        name=name,
        image=options.image,
        train=(*training, *flags),
        output_dir=output,
        volumes=volumes,
        workdir=workdir,
        nodes=nodes,
        gpus_per_node=gpus,
        resources=dict(_resource(text) for text in options.resource),
        node_selector=dict(checks.pair("node_selector", text) for text in options.node_selector),
        tolerations=[checks.toleration("toleration", text) for text in options.toleration],
        secrets=options.secret,
        image_pull_secrets=options.image_pull_secret,
        environ=dict(variable(text) for text in options.env),
        has_launcher=resolved.values["max_restarts"] > 0 or nodes > 1 or max(gpus, resolved.values["nproc"] or 1) > 1,
        **chosen,
    )


def _resource(text: str) -> tuple[str, int]:
    name, equals, count = text.partition("=")
    if not equals or not (count.isascii() and count.isdecimal()):
        raise ConfigError(f"resource: expected NAME=N, got {text!r}")
    return name, int(count)


def _plain(name: str) -> str:
    """Replaces all characters that are not allowed in the name of an object."""
    return re.sub(r"[^a-z0-9-]+", "-", name.lower()).strip("-").lstrip("0123456789-") or "run"


def _explain(job: KubernetesJob, kind: Kind, output: str | None, ranks_per_node: int, global_batch: int) -> None:
    """Describes the manifest on stderr, because stdout may be the manifest itself."""
    per_node = format_count(ranks_per_node, "GPU" if job.gpus_per_node else "CPU rank")
    size = f"{format_count(job.nodes, 'pod')} with {per_node} each, {global_batch} samples per step"
    claims = ", ".join(f"{mount.claim} at {mount.path}" for mount in job.volumes)
    shared = " (must be ReadWriteMany)" if job.nodes > 1 else ""
    lines = [
        f"{output or 'manifest'}: {'JobSet' if kind == 'jobset' else 'TrainJob'} {job.name}, {size}",
        f"  run folder     {job.output_dir}, from {job.workdir}",
        f"  volumes        {claims}{shared}",
        f"  disruption     a pod has {job.grace_period} s to save a checkpoint; it is replaced, and the run continues",
        f"  crash          Kubernetes replaces a pod up to {format_count(job.pod_restarts, 'time')}",
    ]
    if output is not None:
        lines.append(f"Start it with: kubectl apply -f {output}")
    print("\n".join(lines), file=sys.stderr)
