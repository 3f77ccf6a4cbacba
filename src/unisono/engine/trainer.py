"""The loop: next batch, step, observe, maybe evaluate, maybe save, maybe stop."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from unisono.checkpoint.save import Best, Saver
from unisono.data.loader import BadSample
from unisono.data.order import Order, Strides
from unisono.engine.activation_levels import choose_levels
from unisono.engine.batch import BatchPlan
from unisono.engine.checks import check_measured
from unisono.engine.clock import Clock
from unisono.engine.evaluate import Evaluation
from unisono.engine.feed import Feed
from unisono.engine.length import Result
from unisono.engine.memory.advice import advice
from unisono.engine.memory.micro_batch_size import MicroBatchSizer
from unisono.engine.previews import draw_preview
from unisono.engine.profiling import make_recorder
from unisono.engine.resume import extra_of, remembered_by, tensors_of
from unisono.engine.step.optimizer_step import StepReport
from unisono.engine.step.out_of_memory import OutOfMemoryHere, OutOfMemoryTogether
from unisono.engine.step.steps_in_turn import StepsInTurn
from unisono.engine.training_run import TrainingRun
from unisono.errors import TrainingFailed, TryAgain, TrySmaller, UnisonoError
from unisono.observe.folder import append_event

_LAST_SAVE_S = 60.0


class Trainer:
    """Trains a run on this rank, together with all other ranks."""

    def __init__(self, run: TrainingRun, open_folder: Callable[[], None]) -> None:
        """`open_folder` is called once the first step has succeeded."""
        components, settings, placement = run.components, run.settings, run.components.strategy.placement
        self._run, self.length = run, run.length
        self.components, self.settings, self.state = components, settings, components.state
        self._rank, self._heartbeat, self._agreement = run.rank, run.rank.heartbeat, run.rank.agreement
        self._main = placement.rank == 0
        self._folder, self._recorder = run.folder, make_recorder(run, open_folder)
        self._evaluation = None if run.datasets.evaluation is None else Evaluation(run)
        self._refreshed = False
        components.recipe.clock = self._clock = Clock()
        remembered_by(components.recipe)
        size = run.datasets.num_samples
        per_epoch = components.recipe.samples_per_epoch or size
        self._order = Order(per_epoch, settings.run.seed, settings.data.shuffle, size, run.datasets.windows)
        self._sizer = self._make_sizer(run.batch)
        self._feed = Feed(run, self._order)
        self._step = StepsInTurn(components, settings, self._agreement, self._heartbeat)
        self._recorder.measure_flops(self._step.flops)
        self.on_report: Callable[[StepReport], None] = lambda report: None
        """Called with every step's report, one step late and before any save; for a caller that drives the run."""
        self._saver = self._make_saver(run.entered.checkpoints, keep_last=settings.save.keep_last)
        self._saves_are_warm = False
        self._saved_step = self.state.step if self.state.step else -1

    def _make_saver(
        self, folder: Path, *, keep_last: int, asynchronous: bool | None = None, replaces: bool = False
    ) -> Saver:
        placement = self.components.strategy.placement
        return Saver(
            folder,
            rank=placement.rank,
            world=placement.world,
            group=self._run.save_group,
            keep_last=keep_last,
            asynchronous=self.settings.save.async_save if asynchronous is None else asynchronous,
            identity=self._run.identity,
            injector=self._heartbeat.injector,
            replaces=replaces,
        )

    def _make_sizer(self, batch: BatchPlan) -> MicroBatchSizer:
        strategy, settings = self.components.strategy, self.settings.batch
        largest = batch.share if strategy.placement.device.type == "cuda" else settings.batch_size
        return MicroBatchSizer(
            batch,
            self.state,
            self._folder.path,
            # The size may rise only if a failed trial costs nothing; under some strategies it costs a restart.
            may_rise=settings.micro_batch == "auto" and strategy.guardable,
            # If the checkpoint stores no size, the plan contains the size that a failed attempt left for this one.
            largest=largest if self.state.micro_batch else min(largest, batch.micro_batch),
        )

    def train(self) -> Result:
        """Trains to the end or until a signal; saves a checkpoint of the last step in both cases."""
        with self._finishing_saves():
            return self._train()

    @contextmanager
    def _finishing_saves(self) -> Iterator[None]:
        """A context for training: on failure, finishes saves and stores a smaller micro-batch for the next attempt."""
        try:
            yield
        except TrainingFailed as error:  # raised on all ranks: wait for a save in progress
            self._folder.event("failed", step=self.state.step, error=str(error))
            self._saver.wait()
            self._recorder.close()
            raise
        except OutOfMemoryHere as error:
            self._saver.let_finish(_LAST_SAVE_S)
            raise self._next_attempt(error) from None
        except Exception:  # the save threads of other ranks wait for this rank's thread: finish a save in progress
            self._saver.let_finish(_LAST_SAVE_S)
            raise

    def _train(self) -> Result:
        try:
            self._find_micro_batch()
            choose_levels(self._run, self._recorder.message, lambda: self._try_out(self._sizer.plan))
            self._feed.begin(self._sizer.plan)
            stopped = self._loop()
        finally:
            self._feed.close()
        if self.state.step > 0:
            self._recorder.first_step_done()  # needed even if no step was left to do
            self._save()  # saves before evaluation and preview, which are the recipe's code and may fail
        if not stopped:
            self._saver.let_finish(math.inf)
            stopped = self._evaluate_and_preview(last=True)
        self._report_saves(wait=True)
        self._saver.tidy(self.state.step)
        self._recorder.close()
        folder, step = self._folder.path, self.state.step
        if not stopped:
            self._recorder.message(f"done after step {step}; to export its weights: unisono export {folder} FOLDER")
        return Result(folder, "stopped" if stopped else "done", step, dict(self.state.last_metrics))

    def _loop(self, end: int | None = None) -> bool:
        """Trains to the end of the run, or to sample `end`; returns True if a signal ended it earlier."""
        settings, end = self.settings, self.length.samples if end is None else end
        if self._evaluate_first() or (self.state.owes_evaluation and self._evaluate_and_preview()):
            return self._stopping()
        while self.state.samples < end:
            if self._refresh():
                return self._stopping()
            if self._sizer.rise():
                self._feed.begin(self._sizer.plan)
            try:
                requests = self._step_once()
            except OutOfMemoryTogether as error:
                self._shrink(error)
                continue  # computes the same samples again, in smaller micro-batches
            evaluates = self._due(settings.eval.eval_every) or self._due(settings.eval.preview_every)
            if self._due(settings.save.save_every):
                self.state.owes_evaluation = evaluates  # evaluation is the recipe's code and may fail
                self._save()
            self._report_saves()
            stopped = self._evaluate_and_preview() if evaluates else False
            if requests["stop"] or stopped:
                return self._stopping()
        self._settle()
        return False

    def _refresh(self) -> bool:
        """Calls Recipe.refresh() when it is due; returns True if a stop request came during the call."""
        recipe, step = self.components.recipe, self.state.step
        every = recipe.refresh_every
        if every <= 0 or (self._refreshed and step % every):
            return False
        self._settle()
        with self._recorder.not_training():
            self._heartbeat.at("prepare", step)
            with recipe.context.apart():  # ranks share this work: each computes whole samples
                recipe.refresh(step // every * every, self._run.work)
            stopping = self._run.work.meet()
        self._refreshed = not stopping
        return stopping

    def _step_once(self) -> Mapping[str, float]:
        """Runs one optimizer step; returns the flags that any rank has set, such as a stop request."""
        self._clock.set(self.state.step, self.length.steps)
        group = self.components.begin_step(self.state.step)
        samples = min(self._strides.end(self.state.samples), self.length.samples)
        requests = {"stop": self._rank.is_asked_to_stop}
        with self._recorder.step():
            stepped = self._step.run(group, self._recorder.waiting(self._feed), self.length.steps, samples, requests)
        self.state.step, self.state.samples = self.state.step + 1, samples
        self._note_bad(stepped.bad)
        self._observe(stepped.previous)
        self._warm_up_saves()
        return stepped.requests

    @property
    def _strides(self) -> Strides:
        return Strides(
            self.state.global_batch, self._order.num_samples if self.components.recipe.whole_epochs else None
        )

    def _stopping(self) -> bool:
        self._settle()
        by_rank = self._agreement.all_gather(self._rank.stop.requested)
        signals = {rank: name for rank, name in enumerate(by_rank) if name}
        rank, name = next(iter(signals.items()), (None, None))
        where = f" on rank {rank}" if len(by_rank) > len(signals) else ""
        self._recorder.message(f"stopping after step {self.state.step}: {name}{where}")
        self._folder.event("signal", step=self.state.step, rank=rank, signal=name)
        return True

    def _shrink(self, error: OutOfMemoryTogether) -> None:
        """Shrinks the micro-batch on all ranks, after a rank ran out of memory in a step that has changed nothing."""
        failures = {rank: text for rank, text in enumerate(self._agreement.all_gather(error.here)) if text is not None}
        rank, text = next(iter(failures.items()))
        if not self._sizer.shrink(self._feed.most_at_once(self._sizer.plan)):
            raise self._does_not_fit(rank, text)
        size, step = self.state.micro_batch, self.state.step + 1
        self._folder.event(
            "oom", step=step, rank=rank, ranks=list(failures), error=text, micro_batch=size, in_place=True
        )
        self._recorder.message(
            f"step {step}: rank {rank} ran out of memory; repeating the step with at most {size} samples at once"
        )
        self._feed.begin(self._sizer.plan)

    def _next_attempt(self, error: OutOfMemoryHere) -> UnisonoError:
        """Returns the exception to raise if only a restart helps; stores a smaller micro-batch for the next attempt."""
        rank, step = self.components.strategy.placement.rank, self.state.step + 1
        if (size := self._sizer.leave_for_next_attempt(self._feed.most_at_once(self._sizer.plan))) is None:
            return self._does_not_fit(rank, str(error))
        details = {"ranks": [rank], "error": str(error), "micro_batch": size, "in_place": False}
        append_event(self._folder.path, "oom", step=step, rank=rank, **details)
        # TrySmaller does not count as a restart, so the next attempt must have a smaller micro-batch: otherwise it
        # could fail in the same way, and the restarts would never end.
        kind = TrySmaller if self._sizer.is_new_to_next_attempt(size) else TryAgain
        return kind(f"out of memory: {error}; the next attempt uses at most {size} samples at once per device")

    def _does_not_fit(self, rank: int, text: str) -> TrainingFailed:
        recomputes, flags = self.settings.precision.activation_checkpointing is True, self._run.advice.flags()
        return TrainingFailed(advice(rank, text, self.components, recomputes=recomputes, flags=flags))

    def _find_micro_batch(self) -> None:
        """Finds a micro-batch that fits on every device, before the first step, where a failure costs nothing yet.

        With --micro_batch auto, finds the largest. Under fsdp, without repeatable steps, halves the size until it fits.
        """
        strategy, size = self.components.strategy, self._sizer.plan.micro_batch
        searches = self.settings.batch.micro_batch == "auto" and not self.state.micro_batch
        if not strategy.can_try_out:
            if searches:
                text = f"starting with {size} samples, and with half as many if they do not fit"
                self._recorder.message(f"micro_batch auto: cannot try sizes here; {text}")
            return
        if searches:
            trials = self._sizer.find(self._try_out)
            size = self.state.micro_batch
            self._recorder.message(f"micro_batch auto: {size} samples fit on each device ({trials} trials)")
            self._folder.event("micro_batch", step=self.state.step, micro_batch=size, trials=trials)
        elif strategy.sharded and strategy.placement.device.type == "cuda" and self._sizer.fit(self._try_out):
            fits = self.state.micro_batch
            self._recorder.message(f"{size} samples do not fit on each device; training with at most {fits} at once")
            self._folder.event("micro_batch", step=self.state.step, micro_batch=fits)

    def _try_out(self, plan: BatchPlan) -> None:
        self._clock.set(self.state.step, self.length.steps)
        for group in self.components.groups:  # all of them must fit
            self.components.begin_turn(group)
            with closing(self._feed.for_trial(plan)) as loader:
                self._step.try_out(group, loader)

    def _note_bad(self, bad: Sequence[BadSample], *, evaluating: bool = False) -> None:
        self.state.bad_samples += 0 if evaluating else len(bad)
        for sample in bad:
            phase = "evaluation" if evaluating else "step"
            self._recorder.message(f"{phase} {self.state.step} skips {sample}")
            self._folder.event(
                "bad_sample",
                step=self.state.step,
                index=sample.index,
                position=sample.position,
                error=sample.error,
                traceback=sample.traceback,
                split="eval" if evaluating else "train",
                so_far=self.state.bad_samples,
            )

    def _due(self, every: int) -> bool:
        return every > 0 and self.state.step % every == 0 and self.state.samples < self.length.samples

    def _due_or(self, last: bool, every: int) -> bool:
        return self._due(every) or (last and every >= 0)

    def _settle(self) -> None:
        """Waits for the last step's numbers; needed before anything that reads weights or counters."""
        self._observe(self._step.settle())

    def _observe(self, report: StepReport | None) -> None:
        """Records the report of a step; it arrives one step late."""
        if report is None:
            return
        self._recorder.add_step(report)
        self.on_report(report)
        if (measured := self._step.measured) is not None:
            check_measured(self.components.recipe, self.settings, measured)
        self._recorder.first_step_done()  # creates the run folder, because the first step has succeeded
        last = report.samples == self.length.samples
        if remark := self._step.counts_remark(ended=last):
            self._recorder.message(f"note: {remark}")
        if report.skipped:
            self._recorder.message(f"step {report.step} skipped: {report.why_skipped}")
            kind = "overflow" if self.components.groups[0].scale is not None and math.isfinite(report.loss) else "nan"
            details: dict[str, Any] = {"group": report.group} if report.group else {}
            self._folder.event(kind, step=report.step, loss=report.loss, grad_norm=report.grad_norm, **details)
        if report.step % self.settings.observe.log_every == 0 or last:
            record = self._recorder.step_record(report, self._order.num_samples, self.state.skipped)
            names = ["loss", "lr", "grad_norm", *(f"{group.prefix}loss" for group in self.components.groups)]
            self.state.last_metrics |= {key: record[key] for key in names if key in record}

    def _evaluate_and_preview(self, last: bool = False) -> bool:
        """Evaluates and draws a preview when due; returns True if a signal interrupted it (a resume repeats it)."""
        self._settle()
        self._clock.set(self.state.step, self.length.steps)
        settings = self.settings.eval
        metrics: dict[str, float | list[float]] | None = {}
        with self._recorder.not_training(), self.components.averaged():
            if self._evaluation is not None and self._due_or(last, settings.eval_every):
                metrics = self._evaluate()
            if metrics is not None and self._due_or(last, settings.preview_every):
                self._heartbeat.at("preview", self.state.step)
                draw_preview(self._run, self.state.step, self._recorder)
        self.state.owes_evaluation = metrics is None
        if metrics:  # only after the weights have replaced the average again, because this may save a checkpoint
            self._keep_best(metrics)
        return metrics is None

    def _evaluate_first(self) -> bool:
        """Evaluates before the first step if --eval_first is set; returns True if a signal interrupted it."""
        if self._evaluation is None or self.state.step or not self.settings.eval.eval_first:
            return False
        with self._recorder.not_training(), self.components.averaged():
            return self._evaluate() is None  # never counts as the best, because there is no checkpoint to keep yet

    def _evaluate(self) -> dict[str, float | list[float]] | None:
        assert self._evaluation is not None
        self._clock.set(self.state.step, self.length.steps)
        with self._recorder.message_if_slow(f"step {self.state.step}: evaluating"):
            metrics = self._evaluation.run(self.state.step)
        self._note_bad(self._evaluation.bad, evaluating=True)
        if metrics:
            self.state.last_metrics |= {k: v for k, v in metrics.items() if not isinstance(v, list)}
            self.components.recipe.evaluations.append({"step": self.state.step, **metrics})
            self._recorder.evaluated(self.state.step, self.state.samples, metrics, self.components.recipe.headline)
        return metrics

    def _keep_best(self, metrics: Mapping[str, float | list[float]]) -> None:
        settings = self.settings.eval
        if settings.best_metric is None:
            return
        if settings.best_metric not in metrics:
            raise TrainingFailed(
                f"best_metric {settings.best_metric} is not a metric of the evaluation ({', '.join(sorted(metrics))})"
            )
        value = metrics[settings.best_metric]
        if isinstance(value, list):
            raise TrainingFailed(f"best_metric {settings.best_metric} is a curve; choose a single number")
        best = self.state.best
        better = best is None or (value < best["value"] if settings.best_mode == "min" else value > best["value"])
        if better and not math.isnan(value):
            self.state.best = {"metric": settings.best_metric, "value": value, "step": self.state.step}
            self._save(as_best=True)

    def _warm_up_saves(self) -> None:
        """Allocates memory for saves after the first step, when the optimizer has all its state."""
        if not self._saves_are_warm:
            self._saver.warm_up(tensors_of(self.components))
            self._saves_are_warm = True

    def _save(self, as_best: bool = False) -> None:
        if self._saved_step == self.state.step and not as_best:  # a second save can only mark it as the best
            return
        self._settle()
        self._heartbeat.at("save", self.state.step)
        best = self.state.best
        is_best = best is not None and best["step"] == self.state.step
        mark = Best(best["metric"], best["value"]) if best is not None and is_best else None
        with self._recorder.not_training():
            self.components.strategy.share_buffers()
            extra = extra_of(self.components) | self._feed.to_json()
            self._saver.save(self.state.step, tensors_of(self.components), extra, best=mark)
        self._saved_step = self.state.step

    def _report_saves(self, wait: bool = False) -> None:
        for result in self._saver.wait() if wait else self._saver.poll():
            if result.path is not None:
                self._folder.event("save", step=result.step, seconds=round(result.seconds, 3), bytes=result.bytes)
            if result.error is None:
                continue
            problem = "was not saved" if result.path is None else "is saved, but removing old checkpoints failed"
            self._folder.event("save_failed", step=result.step, error=result.error)
            self._recorder.message(f"checkpoint of step {result.step} {problem}: {result.error}")
            if wait and result.path is None and result.step == self.state.step:
                raise TrainingFailed(f"the last checkpoint (step {result.step}) could not be saved: {result.error}")
