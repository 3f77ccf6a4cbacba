"""Writes the Kubernetes objects of a run.

A JobSet (jobset.sigs.k8s.io) starts the pods of a run as one Indexed Job and gives each pod a DNS name through a
headless service. A TrainJob (Kubeflow Trainer, version 2) becomes a JobSet too: its TrainingRuntime is the template of
the pods, and the TrainJob adds the command, the variables and the resources of one run.
"""

from __future__ import annotations

from typing import Any, Literal

import yaml

from unisono.cluster.kubernetes.job import REPLICATED_JOB, KubernetesJob
from unisono.cluster.kubernetes.pod import container, environment, job_spec, labels, resources
from unisono.errors import ConfigError

Kind = Literal["jobset", "trainjob"]

_MOST_TRAINJOB_ARGUMENTS = 128  # a limit of TrainJob's schema
_RULES = """
# When a container ends:
#   75, 143, or the pod was evicted, preempted or lost its node: replaced, not counted; continues from the checkpoint
#   2 (user error), 3 (training failed): the job fails
#   anything else: replaced, up to backoffLimit times
"""


def manifests(job: KubernetesJob, kind: Kind) -> str:
    """Returns the objects of a run as YAML, with a comment on what happens when a container ends."""
    objects = [jobset(job)] if kind == "jobset" else [training_runtime(job), trainjob(job)]
    texts = [yaml.safe_dump(each, sort_keys=False, allow_unicode=True, width=120) for each in objects]
    return f"# Written by `unisono k8s`: one pod per machine.{_RULES}" + "---\n".join(texts)


def jobset(job: KubernetesJob) -> dict[str, Any]:
    """Returns the JobSet of the run."""
    whole = {
        **container(job),
        "command": job.command(),
        "env": environment(job),
        "resources": resources(job),
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _metadata(job, queued=True),
        "spec": _jobset_spec(job, whole, {}),
    }


def training_runtime(job: KubernetesJob) -> dict[str, Any]:
    """Returns the template of the pods of a TrainJob."""
    # The label tells the Trainer whose command and variables to replace.
    trainer = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": _metadata(job, queued=False),
        "spec": {
            "mlPolicy": {"numNodes": job.nodes},  # no torch policy, because unisono's launcher replaces torchrun
            "template": {"spec": _jobset_spec(job, container(job), trainer)},
        },
    }


def trainjob(job: KubernetesJob) -> dict[str, Any]:
    """Returns the TrainJob of the run."""
    command = job.command()
    program, arguments = command[:4], command[4:]
    if len(arguments) > _MOST_TRAINJOB_ARGUMENTS:
        raise ConfigError(
            f"a TrainJob has at most {_MOST_TRAINJOB_ARGUMENTS} arguments, but this run has {len(arguments)}; put "
            "settings into a file and pass --config"
        )
    trainer: dict[str, Any] = {
        "numNodes": job.nodes,
        "image": job.image,
        "command": program,
        "args": arguments,
        "env": environment(job),
    }
    if amounts := resources(job):
        trainer["resourcesPerNode"] = amounts
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _metadata(job, queued=True),
        "spec": {
            "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": job.name},
            "trainer": trainer,
        },
    }


def _jobset_spec(job: KubernetesJob, container: dict[str, Any], job_labels: dict[str, str]) -> dict[str, Any]:
    template: dict[str, Any] = {"spec": job_spec(job, container)}
    if job_labels:
        template = {"metadata": {"labels": job_labels}, **template}
    return {
        # The launchers find pod 0 by its name, also before it is ready.
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": 0},  # the podFailurePolicy of the Job decides about each pod
        "replicatedJobs": [{"name": REPLICATED_JOB, "replicas": 1, "template": template}],
    }


def _metadata(job: KubernetesJob, *, queued: bool) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": job.name}
    if job.namespace is not None:
        metadata["namespace"] = job.namespace
    metadata["labels"] = labels(job)
    if queued and job.queue is not None:
        metadata["labels"]["kueue.x-k8s.io/queue-name"] = job.queue
    return metadata
