"""Sends a run to MLflow: to the server or store in MLFLOW_TRACKING_URI, or to files in the run folder."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unisono.observe.folder import EVENTS, RUN
from unisono.observe.trackers.tracker import EVERYTHING, TrackedRun, Tracker

_ID_TAG, _STATUS_TAG = "unisono.run", "unisono.status"
_MOST_PARAMS, _MOST_METRICS, _LONGEST = 100, 1000, 500  # MLflow's limits for one request
_STATES = {"done": "FINISHED", "stopped": "KILLED"}
_NOT_ALLOWED = re.compile(r"[^\w\-. /]")  # in the name of a metric or parameter


class MlflowTracker(Tracker):
    """Uses one MLflow run for all starts of a run, and finds it by a tag with the run's id."""

    def open(self, run: TrackedRun) -> int | None:
        """Creates or finds the MLflow run. Returns -1, because `log` itself skips metrics that MLflow already has."""
        os.environ.setdefault(
            "MLFLOW_ALLOW_FILE_STORE", "true"
        )  # required by MLflow, which has deprecated its file store
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param, RunTag

        self._metric, self._param, self._tag, self._folder = Metric, Param, RunTag, run.folder
        address = os.environ.get("MLFLOW_TRACKING_URI")
        if run.offline or not address:
            address = (run.folder / "mlruns").as_uri()
        self._client = MlflowClient(tracking_uri=address)
        stored = self._find_or_create(run)
        self._id = stored.info.run_id
        if stored.info.status != "RUNNING":  # MLflow's writes are not atomic, so avoid needless ones
            self._client.update_run(self._id, status="RUNNING")
        # MLflow adds a second value to a step that is logged twice, so the last step of each metric is needed.
        self._last = {metric.key: metric.step for metric in stored.data.to_proto().metrics}
        self._waiting: list[Any] = []
        self._events: Counter[str] = Counter()
        self._counted: dict[str, int] = {}
        self._log_settings(run, stored.data.params)
        self._client.log_artifact(self._id, str(run.folder / RUN))
        return EVERYTHING

    def _find_or_create(self, run: TrackedRun) -> Any:
        name = run.project or os.environ.get("MLFLOW_EXPERIMENT_NAME") or run.recipe
        experiment = self._client.get_experiment_by_name(name)
        if experiment is None:
            try:
                experiment_id = self._client.create_experiment(name)
            except Exception:  # another run created it at the same moment
                experiment = self._client.get_experiment_by_name(name)
                if experiment is None:
                    raise
        if experiment is not None:
            experiment_id = experiment.experiment_id
        found = self._client.search_runs([experiment_id], f"tags.`{_ID_TAG}` = '{run.id}'", max_results=1)
        if found:
            return found[0]
        return self._client.create_run(experiment_id, run_name=run.name, tags={_ID_TAG: run.id})

    def _log_settings(self, run: TrackedRun, before: Mapping[str, str]) -> None:
        """Logs settings as parameters. MLflow cannot change a parameter, so a new value becomes a tag."""
        values = {**run.config, **{name: run.facts[name] for name in ("seed", "global_batch") if name in run.facts}}
        texts = {_NOT_ALLOWED.sub("_", name): str(value)[:_LONGEST] for name, value in values.items()}
        params = [self._param(name, text) for name, text in texts.items() if name not in before]
        changed = {name: text for name, text in texts.items() if before.get(name, text) != text}
        tags = {**{f"changed.{name}": text for name, text in changed.items()}}
        tags |= {f"versions.{name}": str(text) for name, text in dict(run.facts.get("versions", {})).items()}
        for start in range(0, max(len(params), 1), _MOST_PARAMS):
            self._client.log_batch(self._id, params=params[start : start + _MOST_PARAMS])
        self._client.log_batch(self._id, tags=[self._tag(name, text) for name, text in tags.items()])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Collects the metrics that the MLflow run does not have yet; `flush` sends them."""
        now = int(time.time() * 1000)
        for name, value in metrics.items():
            key = _NOT_ALLOWED.sub("_", name)
            if step > self._last.get(key, EVERYTHING):
                self._waiting.append(self._metric(key, float(value), now, step))
                self._last[key] = step
        if len(self._waiting) >= _MOST_METRICS:
            self._send()

    def preview(self, step: int, path: Path) -> None:
        """Stores the file among the artifacts of the MLflow run."""
        self._client.log_artifact(self._id, str(path), "previews")

    def event(self, event: Mapping[str, Any]) -> None:
        """Counts the event; the tags events.KIND record how often each kind of event occurred."""
        self._events[str(event.get("kind"))] += 1

    def flush(self) -> None:
        """Sends the collected metrics and the counts of events."""
        self._send()
        changed = {kind: count for kind, count in self._events.items() if self._counted.get(kind) != count}
        tags = [self._tag(f"events.{kind}", str(count)) for kind, count in changed.items()]
        if tags:
            self._client.log_batch(self._id, tags=tags)
            self._counted |= changed

    def _send(self) -> None:
        while self._waiting:
            self._client.log_batch(self._id, metrics=self._waiting[:_MOST_METRICS])
            del self._waiting[:_MOST_METRICS]

    def close(self, status: str) -> None:
        """Stores run.json and events.jsonl among the artifacts, and ends the MLflow run."""
        for name in (RUN, EVENTS):
            self._client.log_artifact(self._id, str(self._folder / name))
        self._client.set_tag(self._id, _STATUS_TAG, status)
        self._client.set_terminated(self._id, _STATES.get(status, "FAILED"))
