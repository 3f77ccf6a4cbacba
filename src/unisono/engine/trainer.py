"""The loop: next batch, step, observe, maybe evaluate, maybe save, maybe stop."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from typing import Any

import torch.distributed as dist
from torch.utils.data import Dataset

from unisono.checkpoint.save import Best, Saver
from unisono.cluster.agree import Agreement
from unisono.cluster.pulse import Pulse
from unisono.cluster.signals import StopRequest
from unisono.data.bits import Purpose, key_of
from unisono.data.loader import BadSample
from unisono.data.order import Order, Strides
from unisono.data.seeding import seed_everything
from unisono.engine.batch import BatchPlan
from unisono.engine.build import Parts
from unisono.engine.evaluate import Evaluation
from unisono.engine.feed import Feed
from unisono.engine.length import Length, Result
from unisono.engine.memory import OutOfMemoryHere, OutOfMemoryTogether, advice
from unisono.engine.optim import learning_rate_factor
from unisono.engine.precision import autocast
from unisono.engine.preview import Drawing, LeftOut, write_previews
from unisono.engine.recipe import Work
from unisono.engine.resume import extra_of, tensors_of
from unisono.engine.sizing import Sizing
from unisono.engine.step import OptimizerStep, StepReport
from unisono.engine.watch import Watch
from unisono.errors import TrainingFailed, TryAgain, UnisonoError
from unisono.observe.folder import RunFolder, append_event
from unisono.settings import Settings

_LAST_SAVE_S = 60.0


class Trainer:
    """Trains the parts that were built, on this rank, together with all others."""

    def __init__(
        self,
        parts: Parts,
        settings: Settings,
        batch: BatchPlan,
        data: Dataset[Any],
        evaluation: Evaluation | None,
        folder: RunFolder,
        watch: Watch,
        stop: StopRequest,
        agreement: Agreement,
        save_group: dist.ProcessGroup | None,
        identity: Mapping[str, Any],
        pulse: Pulse,
        work: Work,
    ) -> None:
        self._pulse, self._work, self._refreshed = pulse, work, False
        self.parts, self.settings, self.state = parts, settings, parts.state
        place = parts.strategy.place
        self._main = place.rank == 0
        self._evaluation = evaluation
        self._folder, self._watch, self._stop, self._agreement = folder, watch, stop, agreement
        largest = batch.share if place.device.type == "cuda" else settings.batch.batch_size
        self._sizing = Sizing(
            batch,
            self.state,
            folder.path,
            # Only where trying costs nothing: elsewhere each try that fails is a restart.
            may_rise=settings.batch.micro_batch == "auto" and parts.strategy.guardable,
            # Before anything is found out in place, the plan knows what the attempt before has found out the hard way.
            largest=largest if self.state.micro_batch else min(largest, batch.micro_batch),
        )
        self._order = Order(len(data), settings.run.seed, settings.data.shuffle)  # type: ignore[arg-type]
        whole = parts.recipe.whole_epochs
        self.length = Length.of(settings, self._order.num_samples, self.state, whole_epochs=whole)
        # Whoever drives the run may go on behind this end: where epochs end with a step, nothing is read differently.
        end = None if whole else self.length.samples
        self._feed = Feed(data, self._order, parts.recipe, place, self.state, settings.data, folder.path, end)
        self._step = OptimizerStep(parts, settings, agreement, pulse)
        self._save_group, self._identity = save_group, identity
        self.on_report: Callable[[StepReport], None] = lambda report: None
        """Told of every step, one step late and before anything is saved: for a caller that drives the run."""
        self._saver = Saver(
            folder.path / "checkpoints",
            rank=place.rank,
            world=place.world,
            group=save_group,
            keep_last=settings.save.keep_last,
            asynchronous=settings.save.async_save,
            identity=identity,
            injector=pulse.injector,
        )
        self._saves_are_warm = False
        self._saved_step = self.state.step if self.state.step else -1

    def train(self) -> Result:
        """Trains to the end, or until a signal; always leaves a checkpoint of the last step."""
        with self._ending_well():
            return self._train()

    @contextmanager
    def _ending_well(self) -> Iterator[None]:
        """Around all that may fail: what is being saved is not lost, and a lack of memory is told to the next start."""
        try:
            yield
        except TrainingFailed as error:  # on all ranks together: a save that is under way still counts
            self._folder.event("failed", step=self.state.step, error=str(error))
            self._saver.wait()
            self._watch.close()
            raise
        except OutOfMemoryHere as error:
            self._saver.let_finish(_LAST_SAVE_S)
            raise self._next_attempt(error) from None
        except Exception:  # the other ranks' save threads need this one's: a checkpoint under way is worth a moment
            self._saver.let_finish(_LAST_SAVE_S)
            raise

    def _train(self) -> Result:
        try:
            self._find_micro_batch()
            self._feed.begin(self._sizing.plan)
            stopped = self._loop()
        finally:
            self._feed.close()
        if self.state.step > 0:
            self._watch.first_step_done()  # there may have been none to do
            self._save()  # first: evaluation and preview are the recipe's code and may fail
        if not stopped:
            self._saver.let_finish(math.inf)
            stopped = self._evaluate_and_preview(last=True)
        self._report_saves(wait=True)
        self._saver.tidy(self.state.step)
        self._watch.close()
        folder, step = self._folder.path, self.state.step
        if not stopped:
            self._watch.message(f"done after step {step}; its weights: unisono export {folder} FOLDER")
        return Result(folder, "stopped" if stopped else "done", step, dict(self.state.last_metrics))

    def _loop(self) -> bool:
        """Steps until the end; True when a signal ended it earlier."""
        settings = self.settings
        if self.state.owes_evaluation and self._evaluate_and_preview():
            return self._stopping()
        while self.state.samples < self.length.samples:
            if self._refresh():
                return self._stopping()
            if self._sizing.rise():
                self._feed.begin(self._sizing.plan)
            try:
                wishes = self._step_once()
            except OutOfMemoryTogether as error:
                self._shrink(error)
                continue  # the same samples again, in smaller pieces
            evaluates = self._due(settings.eval.eval_every) or self._due(settings.eval.preview_every)
            if self._due(settings.save.save_every):
                self.state.owes_evaluation = evaluates  # what comes next is the recipe's code and may fail
                self._save()
            self._report_saves()
            stopped = self._evaluate_and_preview() if evaluates else False
            if wishes["stop"] or stopped:
                return self._stopping()
        self._settle()
        return False

    def _refresh(self) -> bool:
        """Lets the recipe replace what it trains on, when it is time; True when somebody asked to stop meanwhile."""
        recipe, step = self.parts.recipe, self.state.step
        every = recipe.refresh_every
        if every <= 0 or (self._refreshed and step % every):
            return False
        self._settle()
        with self._watch.aside():
            self._pulse.at("prepare", step)
            recipe.refresh(step // every * every, self._work)
            stopping = self._work.meet()
        self._refreshed = not stopping
        return stopping

    def _step_once(self) -> Mapping[str, float]:
        """One optimizer step; what all ranks together want besides."""
        samples = min(self._strides.end(self.state.samples), self.length.samples)
        wishes = {"stop": self._stop.requested is not None}
        with self._watch.step():
            stepped = self._step.run(self._watch.waiting(self._feed), self._learning_rate(), samples, wishes)
        self.state.step, self.state.samples = self.state.step + 1, samples
        self._note_bad(stepped.bad)
        self._observe(stepped.before)
        self._warm_up_saves()
        return stepped.wishes

    @property
    def _strides(self) -> Strides:
        return Strides(self.state.global_batch, self._order.num_samples if self.parts.recipe.whole_epochs else None)

    def _stopping(self) -> bool:
        self._settle()
        asked = {rank: name for rank, name in enumerate(self._agreement.agree_all(self._stop.requested)) if name}
        rank, name = next(iter(asked.items()), (None, None))
        where = f" on rank {rank}" if self.parts.strategy.place.world > len(asked) else ""
        self._watch.message(f"stopping after step {self.state.step}: {name}{where}")
        self._folder.event("signal", step=self.state.step, rank=rank, signal=name)
        return True

    def _shrink(self, error: OutOfMemoryTogether) -> None:
        """All ranks know that one ran out of memory, and nothing of the step has happened."""
        found = {rank: text for rank, text in enumerate(self._agreement.agree_all(error.here)) if text is not None}
        rank, text = next(iter(found.items()))
        if not self._sizing.shrink(self._feed.most_at_once(self._sizing.plan)):
            recomputes = self.settings.precision.activation_checkpointing
            raise TrainingFailed(advice(rank, text, self.parts, recomputes=recomputes))
        size, step = self.state.micro_batch, self.state.step + 1
        self._folder.event("oom", step=step, rank=rank, ranks=list(found), error=text, micro_batch=size, in_place=True)
        self._watch.message(
            f"step {step}: rank {rank} ran out of memory; the same samples again, at most {size} at once per device"
        )
        self._feed.begin(self._sizing.plan)

    def _next_attempt(self, error: OutOfMemoryHere) -> UnisonoError:
        """What to raise where only a restart helps; the next attempt will know what to do."""
        rank, step = self.parts.strategy.place.rank, self.state.step + 1
        size = self._sizing.leave_for_next_attempt(self._feed.most_at_once(self._sizing.plan))
        if size is None:
            recomputes = self.settings.precision.activation_checkpointing
            return TrainingFailed(advice(rank, str(error), self.parts, recomputes=recomputes))
        details = {"ranks": [rank], "error": str(error), "micro_batch": size, "in_place": False}
        append_event(self._folder.path, "oom", step=step, rank=rank, **details)
        return TryAgain(f"out of memory: {error}; next time at most {size} at once per device")

    def _find_micro_batch(self) -> None:
        """With --micro_batch auto: before the first step, the most samples at once that fit on every device."""
        if self.settings.batch.micro_batch != "auto" or self.state.micro_batch or not self.parts.strategy.guardable:
            return
        trials = self._sizing.find(self._try_out)
        size = self.state.micro_batch
        self._watch.message(f"micro_batch auto: {size} samples at once per device fit ({trials} trials)")
        self._folder.event("micro_batch", step=self.state.step, micro_batch=size, trials=trials)

    def _try_out(self, plan: BatchPlan) -> None:
        with closing(self._feed.for_trial(plan)) as loader:
            self._step.try_out(loader)

    def _note_bad(self, bad: Sequence[BadSample], *, evaluating: bool = False) -> None:
        self.state.bad_samples += 0 if evaluating else len(bad)
        for sample in bad:
            what = "evaluation" if evaluating else "step"
            self._watch.message(f"{what} {self.state.step} leaves out {sample}")
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

    def _learning_rate(self) -> float:
        if (own := self.parts.recipe.learning_rate(self.state.step)) is not None:
            return own
        factor = learning_rate_factor(self.state.step, self.length.steps, self.settings.optim)
        return self.parts.updater.set_learning_rate(factor)

    def _due(self, every: int) -> bool:
        return every > 0 and self.state.step % every == 0 and self.state.samples < self.length.samples

    def _due_or(self, last: bool, every: int) -> bool:
        return self._due(every) or (last and every >= 0)

    def _settle(self) -> None:
        """Waits for the last step's numbers: before anything that looks at weights or counters."""
        self._observe(self._step.settle())

    def _observe(self, report: StepReport | None) -> None:
        """Notes a step; reports come one step late, with the step they belong to."""
        if report is None:
            return
        self._watch.add_step(report)
        self.on_report(report)
        self._watch.first_step_done()  # the recipe is sound: from now on there is a folder
        last = report.samples == self.length.samples
        if report.skipped:
            self._watch.message(f"step {report.step} skipped: non-finite loss or gradient")
            kind = "overflow" if self.parts.scale is not None and math.isfinite(report.loss) else "nan"
            self._folder.event(kind, step=report.step, loss=report.loss, grad_norm=report.grad_norm)
        if report.step % self.settings.observe.log_every == 0 or last:
            record = self._watch.step_record(report, self._order.num_samples, self.state.skipped)
            self.state.last_metrics |= {key: record[key] for key in ("loss", "lr", "grad_norm")}

    def _averaged(self) -> AbstractContextManager[None]:
        ema = self.parts.ema
        return nullcontext() if ema is None else ema.in_place_of_weights(self.parts.strategy.weights_changed)

    def _evaluate_and_preview(self, last: bool = False) -> bool:
        """True when a signal came before it was over: it is owed to the next start."""
        self._settle()
        settings = self.settings.eval
        metrics: dict[str, float | list[float]] | None = {}
        with self._watch.aside(), self._averaged():
            if self._evaluation is not None and self._due_or(last, settings.eval_every):
                metrics = self._evaluate()
            if metrics is not None and self._due_or(last, settings.preview_every):
                self._preview()
        self.state.owes_evaluation = metrics is None
        if metrics:  # out here, where weights and average are in their own places again: this may save
            self._keep_best(metrics)
        return metrics is None

    def _evaluate(self) -> dict[str, float | list[float]] | None:
        assert self._evaluation is not None
        with self._watch.saying_if_slow(f"step {self.state.step}: evaluating"):
            metrics = self._evaluation.run(self.state.step)
        self._note_bad(self._evaluation.bad, evaluating=True)
        if metrics:
            self.state.last_metrics |= {k: v for k, v in metrics.items() if not isinstance(v, list)}
            self.parts.recipe.evaluations.append({"step": self.state.step, **metrics})
            self._watch.evaluated(self.state.step, self.state.samples, metrics, self.parts.recipe.headline)
        return metrics

    def _preview(self) -> None:
        recipe, strategy, step = self.parts.recipe, self.parts.strategy, self.state.step
        self._pulse.at("preview", step)
        # The same on every rank: a sharded model needs all of them to make the same number of forward passes.
        seed_everything(key_of(Purpose.PREVIEW, self.settings.run.seed, step), strategy.place.devices)
        drawing = Drawing(strategy.place, strategy.sharded, self._agreement, self._folder.path)
        recipe._over_ranks = drawing.each_once
        found: Mapping[str, Any] | None = None
        try:
            # As in training: weights that are 16 bit (frozen ones, gathered ones) need inputs of their type.
            computing = autocast(strategy.place.device, self.settings.precision)
            with self._watch.saying_if_slow(f"step {step}: drawing a preview"), strategy.evaluating(), computing:
                found = drawing.run(lambda: strategy.infer(lambda model: recipe.preview(model, step)))
        except LeftOut as why:
            self._folder.event("preview_left_out", step=step, rank=why.rank, error=str(why))
            self._watch.message(f"step {step}: preview left out, rank {why.rank} ran out of memory: {why}")
        strategy.weights_changed()
        if found and self._main:
            try:
                for path in write_previews(found, self._folder.path / "previews", step):
                    self._folder.event("preview", step=step, file=path.name)
            except OSError as error:
                if error.errno is None:  # not the disk's: a picture that its kind of file cannot hold
                    raise
                # A full disk: as with a checkpoint, the next one may be written.
                self._folder.event("preview_left_out", step=step, rank=0, error=str(error))
                self._watch.message(f"step {step}: preview left out, it cannot be written: {error}")

    def _keep_best(self, metrics: Mapping[str, float | list[float]]) -> None:
        settings = self.settings.eval
        if settings.best_metric is None:
            return
        if settings.best_metric not in metrics:
            raise TrainingFailed(f"best_metric {settings.best_metric}: evaluation gave {', '.join(sorted(metrics))}")
        value = metrics[settings.best_metric]
        if isinstance(value, list):
            raise TrainingFailed(f"best_metric {settings.best_metric} is a curve; choose a single number")
        best = self.state.best
        better = best is None or (value < best["value"] if settings.best_mode == "min" else value > best["value"])
        if better and not math.isnan(value):
            self.state.best = {"metric": settings.best_metric, "value": value, "step": self.state.step}
            self._save(as_best=True)

    def _warm_up_saves(self) -> None:
        """After the first step, when the optimizer has all its state."""
        if not self._saves_are_warm:
            self._saver.warm_up(tensors_of(self.parts))
            self._saves_are_warm = True

    def _save(self, as_best: bool = False) -> None:
        if self._saved_step == self.state.step and not as_best:  # saved again, a checkpoint is only marked as the best
            return
        self._settle()
        self._pulse.at("save", self.state.step)
        best = self.state.best
        is_best = best is not None and best["step"] == self.state.step
        mark = Best(best["metric"], best["value"]) if best is not None and is_best else None
        with self._watch.aside():
            self.parts.strategy.share_buffers()
            self._saver.save(self.state.step, tensors_of(self.parts), extra_of(self.parts), best=mark)
        self._saved_step = self.state.step

    def _report_saves(self, wait: bool = False) -> None:
        for result in self._saver.wait() if wait else self._saver.poll():
            if result.path is not None:
                self._folder.event("save", step=result.step, seconds=round(result.seconds, 3), bytes=result.bytes)
            if result.error is None:
                continue
            what = "was not saved" if result.path is None else "is saved, but tidying up failed"
            self._folder.event("save_failed", step=result.step, error=result.error)
            self._watch.message(f"checkpoint of step {result.step} {what}: {result.error}")
            if wait and result.path is None and result.step == self.state.step:
                raise TrainingFailed(f"the last checkpoint (step {result.step}) could not be saved: {result.error}")
