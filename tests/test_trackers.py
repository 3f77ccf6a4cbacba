"""Trackers: each step once over kills and resumes, in the real libraries' own stores, and never in the way of a run."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from command_line import TINY, Ended, lines, losses, unisono
from tiny_recipe import Tiny
from unisono import Tracker
from unisono.errors import ConfigError
from unisono.observe.folder import RunFolder
from unisono.observe.redaction import REDACTED, is_redacted, redacted, redacted_text
from unisono.observe.trackers.follower import Follower, tracked_run
from unisono.observe.trackers.named import check_track, load_tracker, named, wants_tensorboard

SECRET, KEY = "correct-horse-battery", "0123456789abcdef0123456789abcdef01234567"
FIRST_END, END = 18, 24
KILLED_AT = 12
RECEIVED = 9
"""The step that every tracker has received before the kill."""


class Drawing(Tiny):
    """A recipe with evaluations, previews and a secret, which waits for its trackers before it is killed."""

    defaults = {**Tiny.defaults, "eval_every": 6, "preview_every": 6, "save_every": 4, "eval_first": True}

    @dataclass
    class Config(Tiny.Config):
        hub_token: str = ""
        """A secret."""
        source: str = ""
        """Address of the data."""

    def dataset(self, split: str) -> Any:
        return [(i / 10, self.config.slope * i / 10) for i in range(self.config.num_samples if split == "train" else 6)]

    def preview(self, model: Any, step: int) -> dict[str, Any]:
        from PIL import Image

        return {"line.png": Image.new("RGB", (8, 8), (step, 0, 0)), "answer.txt": f"the slope at step {step}"}

    def loss(self, model: Any, batch: Any, noise: Any) -> Any:
        folder = Path(os.environ["RUN"])
        if self.clock.step + 2 == KILLED_AT:
            deadline = time.monotonic() + 100
            while time.monotonic() < deadline and not all_have(folder, RECEIVED):
                time.sleep(0.1)
        return super().loss(model, batch, noise)


def all_have(folder: Path, step: int) -> bool:
    """Whether every tracker's files contain the metrics of a step. (W&B writes a step when the next one arrives.)"""
    from unisono.observe.trackers.wandb_store import last_step

    mine = next(folder.glob(".tracked/*Lines.json"), None)
    histories = list(folder.glob("mlruns/*/*/metrics/loss"))
    progress = json.loads(mine.read_text()) if mine else {"step": -1, "events": 0}
    return (
        progress["step"] >= step
        and progress["events"] >= len([event for event in lines(folder, "events.jsonl") if event["kind"] != "preview"])
        and any(len(history.read_text().splitlines()) >= step for history in histories)
        and last_step(folder / "wandb", RunFolder.read(folder)["id"]) >= step - 1  # type: ignore[index]
    )


class Lines(Tracker):
    """Writes a line for each call, and does not know which steps it has."""

    def open(self, run: Any) -> int | None:
        self.path = run.folder / "lines.txt"
        self.write("open", run.name, run.config["hub_token"])
        return None

    def write(self, *words: object) -> None:
        with self.path.open("a") as file:
            print(*words, file=file)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.write("log", step, *(name for name in ("loss", "eval/loss") if name in metrics))

    def preview(self, step: int, path: Path) -> None:
        self.write("preview", step, path.name)

    def event(self, event: Mapping[str, Any]) -> None:
        self.write("event", event["kind"])

    def close(self, status: str) -> None:
        self.write("close", status)


class Broken(Tracker):
    """Raises at every step."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        raise ConnectionError(f"no route to https://me:{SECRET}@host")


class Hanging(Tracker):
    """Never returns."""

    def open(self, run: Any) -> int | None:
        (run.folder / "opened").touch()
        time.sleep(3600)
        return None


@pytest.fixture(scope="module")
def killed_and_resumed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Ended]]:
    """A run with three trackers and TensorBoard that is killed once and continued by a second command."""
    for package in ("wandb", "mlflow", "tensorboard"):
        pytest.importorskip(package)
    place = tmp_path_factory.mktemp("tracked")
    folder = place / "run"
    words = ["train", f"{__file__}:Drawing", "--track", f"wandb,mlflow,tensorboard,{__file__}:Lines", "--output_dir"]
    words += [folder, "--nproc", "1", "--max_restarts", "3", "--hub_token", SECRET, "--max_steps"]
    secrets = {"WANDB_API_KEY": KEY, "MLFLOW_TRACKING_URI": f"http://me:{SECRET}@nowhere.invalid", "RUN": str(folder)}
    secrets |= {"WANDB_MODE": "offline", "WANDB_CACHE_DIR": str(place / "cache")}
    inject = f"kill@rank0:step{KILLED_AT}"
    source = f"https://me:{SECRET}@host/data"
    first = unisono(*words, FIRST_END, "--inject", inject, "--track_offline", "--source", source, cwd=place, **secrets)
    second = unisono(*words, END, "--track_offline", "--inject", inject, cwd=place, **secrets)
    return folder, [first, second]


def test_the_run_was_killed_and_resumed(killed_and_resumed: tuple[Path, list[Ended]]) -> None:
    folder, ended = killed_and_resumed
    assert [each.code for each in ended] == [0, 0], ended[-1].err + ended[0].err
    assert len(losses(folder)) == END
    kinds = [event["kind"] for event in lines(folder, "events.jsonl")]
    assert (kinds.count("restart"), kinds.count("resume"), kinds.count("done")) == (1, 2, 2)
    assert "tracker" not in kinds, "no tracker complained"


def test_mlflow_has_one_run_with_each_step_once(killed_and_resumed: tuple[Path, list[Ended]]) -> None:
    folder, _ = killed_and_resumed
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=(folder / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("Drawing")
    [run] = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status, run.data.tags["unisono.status"]) == ("run", "FINISHED", "done")
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [(metric.step, metric.value) for metric in history] == list(enumerate(losses(folder), 1))
    evaluations = [line for line in lines(folder) if "eval/loss" in line]
    history = client.get_metric_history(run.info.run_id, "eval/loss")
    assert [(each.step, each.value) for each in history] == [(line["step"], line["eval/loss"]) for line in evaluations]
    assert run.data.metrics["eval/loss"] == evaluations[-1]["eval/loss"], "the final metrics"
    assert run.data.params["learning_rate"] == "0.001"
    assert run.data.params["max_steps"] == str(FIRST_END) and run.data.tags["changed.max_steps"] == str(END)
    assert run.data.tags["events.restart"] == "1"
    assert {"run.json", "events.jsonl", "previews"} <= {each.path for each in client.list_artifacts(run.info.run_id)}
    shown = {Path(each.path).name for each in client.list_artifacts(run.info.run_id, "previews")}
    assert shown == {path.name for path in (folder / "previews").iterdir()} and len(shown) >= 2 * END // 6


def test_wandb_has_one_run_with_each_step_once(killed_and_resumed: tuple[Path, list[Ended]]) -> None:
    folder, _ = killed_and_resumed
    from unisono.observe.trackers.wandb_store import files_of, rows

    starts = 3
    assert len(list((folder / "wandb").glob("offline-run-*"))) == starts
    files = files_of(folder / "wandb", json.loads((folder / "run.json").read_text())["id"])
    assert len(files) == starts, "all starts have the same run id, which wandb sync puts together"
    found = [row for file in files for row in rows(file)]
    steps = [row["_step"] for row in found]
    assert steps == sorted(set(steps)), "each step is in one row"
    assert [row["loss"] for row in found if "loss" in row] == losses(folder)
    evaluations = {line["step"]: line["eval/loss"] for line in lines(folder) if "eval/loss" in line}
    assert {row["_step"]: row["eval/loss"] for row in found if "eval/loss" in row} == evaluations
    drawn = [line["step"] for line in lines(folder, "events.jsonl") if line.get("file", "").endswith("line.png")]
    assert drawn and [row["_step"] for row in found if "previews/line/path" in row] == drawn
    assert [row["_step"] for row in found if "previews/answer/path" in row] == drawn
    assert list((folder / "wandb").glob("*/files/media/images/previews/line_*.png"))

    import wandb.proto.wandb_internal_pb2 as proto

    from unisono.observe.trackers.wandb_store import _records

    config, summary = {}, {}
    for file in files:
        for data in _records(file.read_bytes()):
            record = proto.Record()
            record.ParseFromString(data)
            for updated, values in ((config, record.config.update), (summary, record.summary.update)):
                updated |= {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in values}
            config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
    assert (config["learning_rate"], config["max_steps"], config["unisono"]["seed"]) == (0.001, END, 0)
    assert (summary["status"], summary["events/restart"]) == ("done", 1)


def test_an_own_tracker_gets_each_step_once(killed_and_resumed: tuple[Path, list[Ended]]) -> None:
    folder, _ = killed_and_resumed
    said = [line.split() for line in (folder / "lines.txt").read_text().splitlines()]
    assert [int(words[1]) for words in said if words[0] == "log" and "loss" in words] == list(range(1, END + 1))
    evaluated = [line["step"] for line in lines(folder) if "eval/loss" in line]
    assert [int(words[1]) for words in said if words[0] == "log" and "eval/loss" in words] == evaluated
    events = [event["kind"] for event in lines(folder, "events.jsonl") if event["kind"] != "preview"]
    assert [words[1] for words in said if words[0] == "event"] == events
    assert sorted(words[2] for words in said if words[0] == "preview") == sorted(
        path.name for path in (folder / "previews").iterdir()
    )
    assert [words for words in said if words[0] == "open"] == [["open", "run", REDACTED]] * 3
    assert [words[1] for words in said if words[0] == "close"] == ["done", "done"]


def test_tensorboard_has_each_step_once_and_the_settings(killed_and_resumed: tuple[Path, list[Ended]]) -> None:
    folder, _ = killed_and_resumed
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    seen = EventAccumulator(str(folder / "tb")).Reload()
    assert [point.step for point in seen.Scalars("loss")] == list(range(1, END + 1))
    assert {"settings", "events"} <= {tag.partition("/")[0] for tag in seen.Tags()["tensors"]}
    assert b"learning_rate: 0.001" in seen.Tensors("settings")[-1].tensor_proto.string_val[0]


def test_wandb_without_its_server_writes_to_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    from unisono.observe.trackers import wandb_tracker
    from unisono.observe.trackers.wandb_store import files_of, rows

    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # refuses connections
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setitem(wandb_tracker._PRIVATE, "init_timeout", 2.0)
    folder, said = run_folder(tmp_path), list[str]()
    tracker = wandb_tracker.WandbTracker()
    tracker.say = said.append
    try:
        following = follower(folder, tracker, offline=False)
        folder.metrics({"step": 1, "loss": 0.5})
        following.deliver()
        following.close()
    finally:
        wandb.teardown()
    assert [text.partition(" (")[0] for text in said] == ["no connection"]
    [row] = [row for file in files_of(tmp_path / "wandb", "1234") for row in rows(file)]
    assert (row["_step"], row["loss"]) == (1, 0.5)


def test_no_file_and_no_message_contains_a_secret(killed_and_resumed: tuple[Path, list[Ended]]) -> None:
    folder, ended = killed_and_resumed
    texts = {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    texts |= {f"output {number}": (each.out + each.err).encode() for number, each in enumerate(ended)}
    for secret in (SECRET, KEY):
        assert [name for name, text in texts.items() if secret.encode() in text] == []
    config = json.loads((folder / "run.json").read_text())["config"]
    assert (config["hub_token"], config["learning_rate"]) == (REDACTED, 0.001)
    assert "source is a secret, which run.json does not store; pass it again" in ended[1].err


def test_a_tracker_that_fails_or_hangs_does_not_change_or_stop_a_run(tmp_path: Path) -> None:
    flags = ["--max_steps", "6", "--output_dir"]
    assert unisono("train", TINY, *flags, "alone", cwd=tmp_path).code == 0
    trackers = f"{__file__}:Broken,{__file__}:Hanging"
    ended = unisono("train", TINY, *flags, "run", "--track", trackers, "--track_timeout", "6", cwd=tmp_path)
    assert ended.code == 0
    assert losses(tmp_path / "run") == losses(tmp_path / "alone")
    assert (tmp_path / "run" / "opened").exists()
    warnings = [line for line in (ended.out + ended.err).splitlines() if line.startswith("track ")]
    assert len([line for line in warnings if line.startswith("track Broken: failed (ConnectionError")]) == 1
    assert len([line for line in warnings if line.startswith("track Hanging: did not finish in time")]) == 1
    assert SECRET not in ended.out + ended.err
    assert SECRET not in (tmp_path / "run" / "events.jsonl").read_text()


@pytest.mark.parametrize(
    ("track", "reason"),
    [
        ("wandbb", "track wandbb: expected wandb, mlflow, tensorboard, or your own as my_file.py:MyTracker"),
        ("gone.py:Mine", "tracker file .*gone.py does not exist"),
        (TINY, "track .*Tiny: it is not a tracker; make it a class that extends unisono.Tracker"),
    ],
)
def test_an_unknown_tracker_is_one_line_and_nothing_is_written(track: str, reason: str, tmp_path: Path) -> None:
    ended = unisono("train", TINY, "--track", track, cwd=tmp_path)
    assert ended.code == 2
    assert re.search(reason, ended.err) and len(ended.err.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("track", "package"), [("wandb", "wandb"), ("mlflow", "mlflow-skinny")])
def test_a_missing_package_is_one_line_with_the_command(
    track: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, track, None)  # importing it raises ImportError
    with pytest.raises(ConfigError, match=f"track {track}: {track} is not installed; run pip install {package}$"):
        check_track(f"tensorboard,{track}")


def test_names_of_trackers_are_read_once_each() -> None:
    assert named("wandb, mlflow,wandb,tensorboard") == ["wandb", "mlflow"]
    assert named(None) == named("none") == []
    assert wants_tensorboard("mlflow,tensorboard") and not wants_tensorboard("mlflow")
    assert type(load_tracker(f"{__file__}:Lines")).__name__ == "Lines"


# --- following a run folder


class Calls(Tracker):
    """Remembers its calls; `last` is the step that it already has."""

    def __init__(self, last: int | None = None) -> None:
        self.last, self.calls, self.fails = last, list[tuple[Any, ...]](), 0

    def open(self, run: Any) -> int | None:
        return self.last

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self.fails:
            self.fails -= 1
            raise OSError("no network")
        self.calls.append(("log", step))

    def preview(self, step: int, path: Path) -> None:
        self.calls.append(("preview", step))

    def event(self, event: Mapping[str, Any]) -> None:
        self.calls.append(("event", event["kind"]))


def run_folder(path: Path) -> RunFolder:
    folder = RunFolder(path)
    folder.open({"recipe": "Tiny", "id": "1234", "config": {}, "seed": 0})
    return folder


def follower(folder: RunFolder, tracker: Tracker, *, offline: bool = True) -> Follower:
    follower = Follower(tracker, tracked_run(folder.path, project=None, offline=offline), "Calls")
    follower.open()
    return follower


def show(folder: RunFolder, step: int) -> None:
    (folder.path / "previews").mkdir(exist_ok=True)
    (folder.path / "previews" / f"step_{step}.txt").touch()
    folder.event("preview", step=step, file=f"step_{step}.txt")


def test_a_tracker_that_comes_later_gets_what_it_lacks(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    for step in range(1, 6):
        folder.metrics({"step": step, "loss": 1.0})
    knows = Calls(last=3)
    follower(folder, knows).deliver()
    assert knows.calls == [("log", 4), ("log", 5)]
    new = Calls()
    follower(folder, new).deliver()
    assert new.calls == [("log", step) for step in range(1, 6)]
    again = Calls()
    follower(folder, again).deliver()
    assert again.calls == [], "unisono remembers what a tracker has received"
    folder.rewind_metrics(3)
    for step in (4, 5, 6):
        folder.metrics({"step": step, "loss": 1.0})
    follower(folder, again).deliver()
    assert again.calls == [("log", 6)]


def test_a_preview_comes_before_the_metrics_of_later_steps(tmp_path: Path) -> None:
    folder, tracker = run_folder(tmp_path), Calls()
    following = follower(folder, tracker)
    folder.metrics({"step": 10, "loss": 1.0})
    show(folder, 15)
    following.deliver()
    assert tracker.calls == [("log", 10)], "the preview waits, because metrics of step 11 could follow"
    folder.metrics({"step": 20, "loss": 1.0})
    show(folder, 25)
    following.deliver()
    assert tracker.calls == [("log", 10), ("preview", 15), ("log", 20)]
    following.deliver(everything=True)
    assert tracker.calls[3:] == [("preview", 25)]


def test_a_call_that_fails_is_made_again_and_none_is_lost(tmp_path: Path) -> None:
    folder, tracker = run_folder(tmp_path), Calls()
    following = follower(folder, tracker)
    for step in (1, 2, 3):
        folder.metrics({"step": step, "loss": 1.0})
    folder.metrics({"step": 3, "eval/loss": 1.0})
    folder.event("save", step=3)
    tracker.fails = 2
    for _ in range(2):
        with pytest.raises(OSError, match="no network"):
            following.deliver()
    following.deliver()
    assert tracker.calls == [("log", 1), ("log", 2), ("log", 3), ("log", 3), ("event", "save")]


# --- secrets


@pytest.mark.parametrize("name", ["api_key", "hub_token", "token", "password", "aws_secret_access_key", "hf_tokens"])
def test_a_setting_with_the_name_of_a_secret_is_redacted(name: str) -> None:
    assert redacted({name: "x"}) == {name: REDACTED}
    assert redacted({"storage": {name: "x", "region": "y"}}) == {"storage": {name: REDACTED, "region": "y"}}
    assert redacted({name: ""}) == {name: ""} and redacted({name: 3}) == {name: 3}


@pytest.mark.parametrize("name", ["max_tokens", "stop_token", "tokenizer_path", "keep_last", "pad_token", "key_frames"])
def test_a_setting_with_a_similar_name_is_not_redacted(name: str) -> None:
    assert redacted({name: "x"}) == {name: "x"}


def test_secrets_inside_of_texts_are_redacted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SERVICE_TOKEN", "a-long-secret")
    assert redacted_text("s3://me:pw@host/x and a-long-secret") == f"s3://{REDACTED}@host/x and {REDACTED}"
    assert redacted_text("mail me@host, step 3: hf_" + "a" * 30) == f"mail me@host, step 3: {REDACTED}"
    assert is_redacted({"a": ["b", f"x{REDACTED}"]}) and not is_redacted({"a": ["b", 3]})
