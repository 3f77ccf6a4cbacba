"""The manifests of `unisono k8s`: valid by the real schemas, and their pods are started and disturbed as processes."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from command_line import TINY, end, lines, losses, unisono, wait_until
from pods import Pods, container_of, expand, job_of
from tiny_recipe import HOLD
from unisono.cli.k8s import main as k8s_command
from unisono.cluster.alive import is_alive
from unisono.cluster.kubernetes.checks import Mount
from unisono.cluster.kubernetes.job import KubernetesJob
from unisono.cluster.kubernetes.manifests import manifests
from unisono.errors import ConfigError, UserError

SCHEMAS = Path(__file__).parent / "schemas"
STEPS = 8
TRAIN = [TINY, "--max_steps", STEPS, "--global_batch_size", 4, "--dtype", "float64", "--save_every", 2]
ALL_OPTIONS: list[object] = ["--min-nodes", 1, "--cpus", "16", "--memory", "256Gi", "--shm", "64Gi"]
ALL_OPTIONS += ["--volume", "data.v2:/data/sets", "--workdir", "/code", "--secret", "wandb", "--secret", "s3"]
ALL_OPTIONS += ["--resource", "rdma/ib=1", "--gpu-resource", "amd.com/gpu", "--name", "my-run", "--namespace", "team-a"]
ALL_OPTIONS += ["--env", "NCCL_DEBUG=INFO", "--image-pull-secret", "regcred", "--node-selector", "zone.io/gpu=h100"]
ALL_OPTIONS += ["--toleration", "nvidia.com/gpu:NoSchedule", "--toleration", "spot=true", "--priority-class", "high"]
ALL_OPTIONS += ["--queue", "gpus", "--service-account", "trainer", "--user", 2000, "--grace-period", 120]
ALL_OPTIONS += ["--pod-restarts", 5]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of an undisturbed run in one process."""
    place = tmp_path_factory.mktemp("one_rank")
    ended = unisono("train", *TRAIN, "--output_dir", "run", cwd=place)
    assert ended.code == 0, ended.err
    return losses(place / "run")


def command(*words: object, capsys: pytest.CaptureFixture[str]) -> str:
    """Runs `unisono k8s` in this process and returns what it prints to stdout."""
    assert k8s_command([str(word) for word in words]) == 0
    return capsys.readouterr().out


def problems(document: dict[str, Any]) -> list[str]:
    """What the schema of its kind says about an object."""
    schema = json.loads((SCHEMAS / f"{document['kind'].lower()}.json").read_text())
    return [f"{error.json_path}: {error.message}" for error in Draft202012Validator(schema).iter_errors(document)]


# --- valid objects


@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
@pytest.mark.parametrize("more", [[], ["--nodes", 4, *ALL_OPTIONS]], ids=["plain", "all options"])
def test_the_manifests_are_valid_by_the_schemas_of_their_projects(
    kind: str, more: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    text = command(
        TINY, "--image", "me/it:1", "--volume", "shared", "--gpus-per-node", 8, "--kind", kind, *more, capsys=capsys
    )
    objects = list(yaml.safe_load_all(text))
    kinds = ["JobSet"] if kind == "jobset" else ["TrainingRuntime", "TrainJob"]
    assert [each["kind"] for each in objects] == kinds
    assert [problems(each) for each in objects] == [[]] * len(objects)


def test_the_schemas_reject_what_an_api_server_rejects(capsys: pytest.CaptureFixture[str]) -> None:
    text = command(TINY, "--image", "me/it:1", "--volume", "shared", "--gpus-per-node", 8, capsys=capsys)
    for right, wrong in (
        ("podFailurePolicy", "podfailurepolicy"),
        ("mountPath", "path"),
        ("maxRestarts: 0", "maxRestarts: none"),
        ("parallelism: 1", "parallelism: one"),
        ("v1alpha2", "v1"),
    ):
        assert problems(yaml.safe_load(text.replace(right, wrong))), wrong


def test_all_options_reach_the_pods(capsys: pytest.CaptureFixture[str]) -> None:
    words = [TINY, "--image", "me/it:1", "--volume", "shared", "--nodes", 4, "--gpus-per-node", 8, *ALL_OPTIONS]
    [jobset] = objects = list(yaml.safe_load_all(command(*words, capsys=capsys)))
    job, container = job_of(objects), container_of(objects)
    pod = job["template"]["spec"]
    assert jobset["metadata"]["namespace"] == "team-a"
    assert jobset["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"
    assert (job["parallelism"], job["completions"], job["completionMode"]) == (4, 4, "Indexed")
    assert (job["backoffLimit"], pod["terminationGracePeriodSeconds"], pod["restartPolicy"]) == (5, 120, "Never")
    amounts = {"cpu": "16", "memory": "256Gi", "amd.com/gpu": "8", "rdma/ib": "1"}
    assert container["resources"] == {"requests": amounts, "limits": amounts}
    assert pod["volumes"][0]["emptyDir"] == {"medium": "Memory", "sizeLimit": "64Gi"}
    claims = [each["persistentVolumeClaim"]["claimName"] for each in pod["volumes"][2:]]
    assert claims == ["shared", "data.v2"]
    assert [each["mountPath"] for each in container["volumeMounts"]][2:] == ["/data", "/data/sets"]
    assert container["envFrom"] == [{"secretRef": {"name": "wandb"}}, {"secretRef": {"name": "s3"}}]
    assert {"name": "NCCL_DEBUG", "value": "INFO"} in container["env"] and container["workingDir"] == "/code"
    assert pod["tolerations"] == [
        {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
        {"key": "spot", "operator": "Equal", "value": "true"},
    ]
    assert pod["nodeSelector"] == {"zone.io/gpu": "h100"} and pod["priorityClassName"] == "high"
    assert pod["imagePullSecrets"] == [{"name": "regcred"}] and pod["serviceAccountName"] == "trainer"
    assert pod["securityContext"]["runAsUser"] == 2000 and pod["securityContext"]["runAsNonRoot"] is True
    assert "--nnodes=1:4" in container["command"] and "--gpus=8" in container["command"]
    assert "--rdzv_endpoint=my-run-node-0-0.my-run:29400" in container["command"]


def test_a_trainjob_and_a_jobset_run_the_same_pods(capsys: pytest.CaptureFixture[str]) -> None:
    words = [TINY, "--image", "me/it:1", "--volume", "shared", "--nodes", 2, "--gpus-per-node", 8]
    words += ["--output_dir", "/data/run"]
    jobset = list(yaml.safe_load_all(command(*words, capsys=capsys)))
    trainjob = list(yaml.safe_load_all(command(*words, "--kind", "trainjob", capsys=capsys)))
    first, second = container_of(jobset), container_of(trainjob)
    resources, command_words = first.pop("resources"), first.pop("command")
    assert resources == trainjob[1]["spec"]["trainer"]["resourcesPerNode"]
    assert command_words == second.pop("command") + second.pop("args") and first == second
    assert job_of(jobset)["podFailurePolicy"] == job_of(trainjob)["podFailurePolicy"]


# --- the pods, as processes


@pytest.fixture
def pods(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Pods]:
    """Two pods with one CPU rank each, whose volume is a folder."""
    words = [*TRAIN, "--image", "me/it:1", "--volume", f"shared:{tmp_path}", "--nodes", 2, "--nproc", 1]
    text = command(*words, "--output_dir", "run", "--env", f"{HOLD}={tmp_path / 'hold'}", capsys=capsys)
    (tmp_path / "hold").write_text("2 after 4")
    pods = Pods(text, tmp_path)
    yield pods
    pods.stop()


def test_an_evicted_pod_saves_and_the_replaced_pods_continue_the_same_run(
    pods: Pods, tmp_path: Path, one_rank: list[float]
) -> None:
    run = tmp_path / "run"
    processes = [pods.start(0), pods.start(1)]
    wait_until(lambda: len(lines(run)) >= 3, "three steps")
    assert [pods.probe(index) for index in (0, 1)] == [0, 0]
    processes[1].send_signal(signal.SIGTERM)  # a node is drained
    ended = [end(process) for process in processes]
    assert [each.code for each in ended] == [75, 75], ended
    assert [pods.verdict(each.code) for each in ended] == ["Ignore", "Ignore"], "both pods are replaced, uncounted"
    assert 0 < len(lines(run)) < STEPS
    (tmp_path / "hold").unlink()
    ended = [end(process) for process in [pods.start(0), pods.start(1)]]
    assert [pods.verdict(each.code) for each in ended] == ["Complete", "Complete"], ended
    assert losses(run) == pytest.approx(one_rank, rel=1e-10)


@pytest.mark.slow
def test_a_killed_pod_is_replaced_and_the_other_pod_waits_for_it(
    pods: Pods, tmp_path: Path, one_rank: list[float]
) -> None:
    run = tmp_path / "run"
    first, second = pods.start(0), pods.start(1)
    wait_until(lambda: len(lines(run)) >= 3, "three steps")
    second.kill()
    code = end(second).code
    assert pods.verdict(128 - code) == "Count" and pods.verdict(137, disrupted=True) == "Ignore"
    (tmp_path / "hold").unlink()
    time.sleep(3)  # pod 0 has noticed, and waits
    assert first.poll() is None and pods.probe(0) == 0
    ended = [end(process) for process in (pods.start(1), first)]
    assert [each.code for each in ended] == [0, 0], ended
    assert losses(run) == pytest.approx(one_rank, rel=1e-10)
    assert [event["left"] for event in lines(run, "events.jsonl") if event["kind"] == "machines"] == [[1]]


def test_a_user_error_fails_the_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*TRAIN, "--image", "me/it:1", "--volume", f"shared:{tmp_path}", "--output_dir", "run", "--num_samples", 0]
    pods = Pods(command(*words, capsys=capsys), tmp_path)
    ended = end(pods.start(0))
    assert (ended.code, pods.verdict(ended.code)) == (2, "FailJob"), ended
    assert pods.verdict(3) == "FailJob" and pods.verdict(1) == "Count"


def test_the_probe_fails_only_if_the_launcher_hangs(pods: Pods) -> None:
    assert pods.probe(0) == 1, "it has not started"
    launcher = pods.start(0)  # waits for pod 1, which never comes
    wait_until(pods.alive_file(0).exists, "the launcher's first sign of life")
    assert pods.probe(0) == 0
    stamp = pods.alive_file(0).stat().st_mtime
    wait_until(lambda: pods.alive_file(0).stat().st_mtime > stamp, "a sign of life while it waits for pod 1")
    launcher.send_signal(signal.SIGSTOP)
    wait_until(lambda: pods.probe(0, "2") == 1, "the probe to notice")
    launcher.send_signal(signal.SIGCONT)
    wait_until(lambda: pods.probe(0, "2") == 0, "the probe to notice that it works again")
    launcher.send_signal(signal.SIGTERM)
    ended = end(launcher)
    assert pods.verdict(ended.code) == "Ignore", "a pod that is evicted while it waits does not count"


def test_the_probe_tolerates_a_missing_file_and_an_old_one(tmp_path: Path) -> None:
    path = tmp_path / "alive"
    assert not is_alive(str(path), 60)
    path.touch()
    assert is_alive(str(path), 60)
    os.utime(path, (0, 0))
    assert not is_alive(str(path), 60)


def test_a_healthy_launcher_survives_minutes_without_a_sign_of_life(capsys: pytest.CaptureFixture[str]) -> None:
    words = [TINY, "--image", "me/it:1", "--volume", "shared", "--gpus-per-node", 8]
    container = container_of(list(yaml.safe_load_all(command(*words, capsys=capsys))))
    startup, liveness = container["startupProbe"], container["livenessProbe"]
    assert liveness["periodSeconds"] * liveness["failureThreshold"] >= 600
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 1800
    assert startup["exec"] == liveness["exec"] and liveness["timeoutSeconds"] >= 30
    alone = container_of(list(yaml.safe_load_all(command(*words[:-1], 1, "--max_restarts", 0, capsys=capsys))))
    assert "livenessProbe" not in alone, "a single rank without restarts has no launcher to watch"


# --- the command


def job(**more: Any) -> KubernetesJob:
    inputs: dict[str, Any] = {"name": "tiny", "image": "me/it:1", "train": ["a.py:A"], "output_dir": "runs/a"}
    return KubernetesJob(**{**inputs, "volumes": [Mount("shared", "/data")], "workdir": "/data", **more})


def test_every_argument_reaches_the_program_unchanged() -> None:
    strange = ["a b", "$HOME", "$(JOB_COMPLETION_INDEX)", "$$", "it's", '"', "*", "\\", "--x=ü: #", "- y", "null"]
    for kind in ("jobset", "trainjob"):
        text = manifests(job(train=strange, nodes=2, environ={"STRANGE": "$(USER) $$x"}), kind)  # type: ignore[arg-type]
        container = container_of(list(yaml.safe_load_all(text)))
        variables = {"JOB_COMPLETION_INDEX": "1", "USER": "me"}
        words = [expand(word, variables) for word in [*container["command"], *container.get("args", [])]]
        assert words[5 : 5 + len(strange)] == strange and "--node_rank=1" in words
        [value] = [each["value"] for each in container["env"] if each["name"] == "STRANGE"]
        assert expand(value, variables) == "$(USER) $$x"


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("name", "My_run", "name: expected lowercase letters"),
        ("name", "1run", "beginning with a letter"),
        ("name", "a" * 49, "name: expected at most 48 characters, got 49"),
        ("name", "a\nb", "name: expected"),
        ("image", "me/it 1", "image: expected a container image"),
        ("image", "-x", "image: expected"),
        ("cpus", "many", "cpus: expected a number of cores"),
        ("memory", "64 GB", "memory: expected a quantity"),
        ("shm", "1G\n", "shm: expected"),
        ("namespace", "a.b", "namespace: expected"),
        ("priority_class", "High", "priority_class: expected"),
        ("service_account", "a_b", "service_account: expected"),
        ("queue", "$(id)", "queue: expected"),
        ("secrets", ["My Secret"], "secret: expected"),
        ("gpu_resource", "gpu", "gpu_resource: expected a name with a domain"),
        ("resources", {"kubernetes.io/x": 1}, "resource: expected a name with a domain"),
        ("environ", {"A-B": ""}, "env: expected NAME=VALUE"),
        ("environ", {"JOB_COMPLETION_INDEX": "0"}, "env: Kubernetes sets JOB_COMPLETION_INDEX"),
        ("environ", {"A": "b\nc"}, "unprintable characters"),
        ("train", ["a\x00b"], "unprintable characters"),
        ("nodes", 0, "nodes: expected at least 1"),
        ("user", 0, "the pods do not run as root"),
        ("grace_period", 0, "grace_period: expected at least 1"),
        ("min_nodes", 2, "min_nodes: expected 1 to 1 (nodes)"),
        ("output_dir", "/tmp/run", "output_dir /tmp/run: it is not on a volume (/data)"),
        ("output_dir", "../run", "it is not on a volume"),
        ("workdir", "/code", "output_dir runs/a: it is not on a volume"),
        ("volumes", [Mount("a", "/data"), Mount("b", "/data")], "volume: two volumes at /data"),
    ],
)
def test_bad_values_are_refused_by_name(field: str, value: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        job(**{field: value})


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--batch_sise", 2], "unknown flag --batch_sise; did you mean --batch_size"),
        (["--gpu-per-node", 2], "did you mean --gpus-per-node?"),
        (["--batch_size", 0], "batch_size: expected at least 1"),
        (["--gpus", 2], "gpus: on Kubernetes the manifest determines this setting; use --gpus-per-node instead"),
        (["--node_rank", 0], "node_rank: on Kubernetes the manifest determines this setting; use --nodes instead"),
        (["--gpus-per-node", 2, "--nproc", 2], "nproc: a pod has one rank per GPU (2)"),
        (["--nodes", "two"], "--nodes: expected a whole number, got 'two'"),
        (["--kind", "pod"], "--kind: invalid choice"),
        (["--resume", "never"], "resume: never would prevent a replaced pod from continuing"),
        (["--env", "HOME"], "env: expected NAME=VALUE, got 'HOME'"),
        (["--env", "HF_TOKEN=abc"], "env: HF_TOKEN is a secret"),
        (["--env", "URL=https://me:pw@host"], "env: URL is a secret"),
        (["--volume", "Shared"], "volume: expected lowercase letters"),
        (["--volume", "a:data"], "volume: expected the absolute path of a folder"),
        (["--volume", "a:/dev/shm"], "volume: expected the absolute path of a folder"),
        (["--volume", "a:/data/../etc"], "volume: expected the absolute path of a folder"),
        (["--node-selector", "gpu"], "node_selector: expected KEY=VALUE"),
        (["--node-selector", "gpu=a b"], "node_selector: expected a value"),
        (["--toleration", "gpu:Never"], "toleration: expected NoSchedule, PreferNoSchedule, NoExecute"),
        (["--resource", "rdma/ib"], "resource: expected NAME=N"),
        (["--output_dir", "/run"], "it is not on a volume"),
    ],
)
def test_a_user_error_is_found_before_anything_is_written(
    words: list[object], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = [TINY, "--image", "me/it:1", "--volume", "shared", "--output", "job.yaml", *words]
    with pytest.raises(UserError, match=re.escape(says)):
        k8s_command([str(word) for word in given])
    assert not list(tmp_path.iterdir())


def test_the_grace_period_is_long_enough_for_a_similar_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "events.jsonl").write_text('{"kind": "save", "seconds": 400}\n')
    words = [TINY, "--image", "me/it:1", "--volume", "shared", "--like", tmp_path]
    text = command(*words, capsys=capsys)
    assert job_of(list(yaml.safe_load_all(text)))["template"]["spec"]["terminationGracePeriodSeconds"] == 830
    with pytest.raises(UserError, match="it is not a run folder, or the run has saved no checkpoint"):
        command(*words[:-1], tmp_path / "none", capsys=capsys)


@pytest.mark.parametrize("missing", ["image", "volume"])
def test_an_image_and_a_volume_are_required(missing: str) -> None:
    words = {"image": ["--volume", "shared"], "volume": ["--image", "me/it:1"]}[missing]
    with pytest.raises(ConfigError, match=f"{missing}: pass --{missing}"):
        k8s_command([TINY, *words])


def test_a_manifest_is_not_overwritten_and_keeps_its_run_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [TINY, "--image", "me/it:1", "--volume", "shared", "--gpus-per-node", 8, "--nodes", 2, "--batch-size", 2]
    assert k8s_command([*map(str, words), "--output", "job.yaml"]) == 0
    printed = capsys.readouterr()
    assert printed.out == "" and "kubectl apply -f job.yaml" in printed.err
    assert "job.yaml: JobSet tiny, 2 pods with 8 GPUs each, 32 samples per step" in printed.err
    assert re.search(r"--output_dir=/data/runs/tiny-\d{8}-\d{6}\n", (tmp_path / "job.yaml").read_text())
    (tmp_path / "job.yaml").write_text("mine")
    with pytest.raises(UserError, match=r"job.yaml already exists; pass --force"):
        k8s_command([*map(str, words), "--output", "job.yaml"])
    assert (tmp_path / "job.yaml").read_text() == "mine"
    assert k8s_command([*map(str, words), "--output", "job.yaml", "--force"]) == 0
    assert "kind: JobSet" in (tmp_path / "job.yaml").read_text()
