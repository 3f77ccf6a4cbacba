"""Writes the pods of a run: one container per machine, in which unisono's launcher starts a rank per GPU.

The `podFailurePolicy` of the Job decides what happens when a container ends:

- exit code 75 (stopped by a signal, with a checkpoint), 143 (SIGTERM while waiting for other machines), and a pod that
  was evicted, preempted or lost its node: Kubernetes replaces the pod, which does not count as a failure. The other
  launchers wait for the new pod and continue from the last checkpoint.
- exit codes 2 and 3 (user error; training failed after all restarts): the job fails, because another attempt would end
  the same way.
- everything else, such as a container that ran out of memory: Kubernetes replaces the pod, up to `backoffLimit` times.
"""

from __future__ import annotations

from typing import Any

from unisono.cluster.alive import ALIVE_FILE
from unisono.cluster.kubernetes.job import REPLICATED_JOB, KubernetesJob, literal
from unisono.errors import EXIT_FAILED, EXIT_STOPPED, EXIT_USER_ERROR

_EXIT_SIGTERM = 143
_ALIVE_FOLDER = "/run/unisono"
_PROBE_PERIOD_S = 60
# The probe fails if the launcher has not touched its file for a minute. Ten failures in a row kill the container, so
# that neither a clock that jumps nor a machine that freezes for minutes ends a healthy run.
_STALE_S, _LIVENESS_FAILURES = 60, 10
_STARTUP_FAILURES = 30  # half an hour until the launcher starts, because importing from a cold image or volume is slow


def job_spec(job: KubernetesJob, container: dict[str, Any]) -> dict[str, Any]:
    """Returns the spec of the Job: an index for each pod, and what to do when a pod ends."""
    ends: list[dict[str, Any]] = [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "Ignore", "onExitCodes": _on_exit_codes(EXIT_STOPPED, _EXIT_SIGTERM)},
        {"action": "FailJob", "onExitCodes": _on_exit_codes(EXIT_USER_ERROR, EXIT_FAILED)},
    ]
    return {
        "completionMode": "Indexed",
        "parallelism": job.nodes,
        "completions": job.nodes,
        "backoffLimit": job.pod_restarts,
        "podReplacementPolicy": "Failed",  # never two pods with the same index
        "podFailurePolicy": {"rules": ends},
        "template": {"metadata": {"labels": labels(job)}, "spec": _pod_spec(job, container)},
    }


def labels(job: KubernetesJob) -> dict[str, str]:
    """Returns the labels by which `kubectl` finds all objects of this run."""
    return {"app.kubernetes.io/name": "unisono", "app.kubernetes.io/instance": job.name}


def environment(job: KubernetesJob) -> list[dict[str, str]]:
    """Returns the environment variables of the container."""
    # Some libraries look up the name of the user, which the image may not define.
    variables = {"USER": "unisono", ALIVE_FILE: f"{_ALIVE_FOLDER}/alive", **job.environ}
    return [{"name": name, "value": literal(value)} for name, value in variables.items()]


def resources(job: KubernetesJob) -> dict[str, dict[str, str]]:
    """Returns the limits of the container's resources, which are also its requests."""
    amounts: dict[str, str] = {}
    if job.cpus is not None:
        amounts["cpu"] = job.cpus
    if job.memory is not None:
        amounts["memory"] = job.memory
    if job.gpus_per_node:
        amounts[job.gpu_resource] = str(job.gpus_per_node)
    amounts.update({name: str(count) for name, count in job.resources.items()})
    return {"requests": amounts, "limits": dict(amounts)} if amounts else {}


def container(job: KubernetesJob) -> dict[str, Any]:
    """Returns the container without command, variables and resources, which a TrainJob specifies separately."""
    volumes = [{"name": f"volume-{i}", "mountPath": mount.path} for i, mount in enumerate(job.volumes)]
    spec: dict[str, Any] = {
        "name": REPLICATED_JOB,
        "image": job.image,
        "workingDir": job.workdir,
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "shm", "mountPath": "/dev/shm"},
            {"name": "alive", "mountPath": _ALIVE_FOLDER},
            *volumes,
        ],
    }
    if job.secrets:
        spec["envFrom"] = [{"secretRef": {"name": name}} for name in job.secrets]
    if job.has_launcher:
        spec["startupProbe"] = _probe(_STARTUP_FAILURES)
        spec["livenessProbe"] = _probe(_LIVENESS_FAILURES)
    return spec


def _pod_spec(job: KubernetesJob, container: dict[str, Any]) -> dict[str, Any]:
    claims = [
        {"name": f"volume-{i}", "persistentVolumeClaim": {"claimName": mount.claim}}
        for i, mount in enumerate(job.volumes)
    ]
    spec: dict[str, Any] = {
        "restartPolicy": "Never",  # the podFailurePolicy decides
        "terminationGracePeriodSeconds": job.grace_period,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": job.user,
            "runAsGroup": job.user,
            "fsGroup": job.user,
            # Without this, Kubernetes changes the owner of every file of the volume whenever a pod starts.
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [
            # Loader workers pass batches through shared memory, of which containers have 64 MiB by default.
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": job.shm}},
            {"name": "alive", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
            *claims,
        ],
    }
    optional: dict[str, Any] = {
        "priorityClassName": job.priority_class,
        "serviceAccountName": job.service_account,
        "nodeSelector": dict(job.node_selector),
        "tolerations": [dict(each) for each in job.tolerations],
        "imagePullSecrets": [{"name": name} for name in job.image_pull_secrets],
    }
    spec.update({name: value for name, value in optional.items() if value})
    return spec


def _probe(failures: int) -> dict[str, Any]:
    return {
        "exec": {"command": ["python3", "-P", "-m", "unisono.cluster.alive", str(_STALE_S)]},
        "periodSeconds": _PROBE_PERIOD_S,
        "timeoutSeconds": _PROBE_PERIOD_S // 2,
        "failureThreshold": failures,
    }


def _on_exit_codes(*codes: int) -> dict[str, Any]:
    return {"containerName": REPLICATED_JOB, "operator": "In", "values": sorted(codes)}
