"""Which steps are recorded as CUDA graphs, and that replays are correct; a fake recorder replaces the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tiny_recipe import Tiny
from unisono import Loss
from unisono.cluster.agree import Agreement
from unisono.cluster.hangs.heartbeat import Heartbeat
from unisono.data.resident import is_resident
from unisono.engine.batch import BatchPlan
from unisono.engine.build.components import build_components
from unisono.engine.step.accumulate import GradientAccumulator
from unisono.engine.step.cuda_graph import GraphedFunction
from unisono.engine.step.guard import Guard
from unisono.engine.step.optimizer_wrapper import OptimizerWrapper
from unisono.errors import ConfigError, TrainingFailed
from unisono.parallel.ddp import DDP
from unisono.parallel.single import Single
from unisono.parallel.strategy import Placement
from unisono.settings import OptimSettings, ParallelSettings, PrecisionSettings, Settings

CPU = torch.device("cpu")


class Recorder:
    """Replays a Captured by calling its function again, with the inputs and into the output of the recording."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ending: Exception | None = None  # the exception raised at the end of a recording
        self.captured: GraphedFunction
        self.replays = self.recordings = 0
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: self)
        monkeypatch.setattr(torch.cuda, "graph", self._recording)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: CPU)

    def of(self, function: Any) -> GraphedFunction:
        self.captured = GraphedFunction(function)
        return self.captured

    @contextmanager
    def _recording(self, graph: Any, *, stream: Any, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local", "other threads pin memory meanwhile"
        self.recordings += 1
        try:
            yield
        finally:
            if self.ending is not None:
                raise self.ending

    def replay(self) -> None:
        self.replays += 1
        assert self.captured._output is not None
        self.captured._output.copy_(self.captured._function(*self.captured._inputs))


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(monkeypatch)


def total(batch: dict[str, Any]) -> Tensor:
    x: Tensor = batch["x"]
    times: int = batch.get("times", 1)
    return x.sum() * times


def batch(size: int, **more: Any) -> dict[str, Any]:
    return {"x": torch.arange(float(size)), **more}


def test_python_numbers_in_a_batch_are_not_frozen_by_the_recording(recorder: Recorder) -> None:
    captured = recorder.of(total)
    for times in [1] * 6 + [2, 3, 1, True]:
        assert captured(batch(3, times=times)).item() == 3 * times
    assert recorder.replays == 4  # of those with 1


def test_inputs_that_cannot_be_copied_into_a_recording_are_rejected(recorder: Recorder) -> None:
    captured = recorder.of(total)
    with pytest.raises(
        TrainingFailed, match="the batch holds a object, and a recorded step would always use the first"
    ):
        for _ in range(4):
            captured(batch(3, what=object()))
    assert recorder.recordings == 0


def test_micro_batches_of_two_alternating_sizes_are_recorded(recorder: Recorder) -> None:
    captured = recorder.of(total)
    for _ in range(10):
        for size in (2, 3, 3):
            assert captured(batch(size)).item() == sum(range(size))
    assert recorder.recordings == 1 and recorder.replays >= 17


def test_a_new_size_is_recorded_if_the_first_one_does_not_recur(recorder: Recorder) -> None:
    captured = recorder.of(total)
    for size in [2] * 10 + [3] * 100:
        assert captured(batch(size)).item() == sum(range(size))
    assert recorder.recordings == 2 and recorder.replays == 7 + 50


@pytest.mark.parametrize(
    ("first", "told"),
    [(torch.OutOfMemoryError("out of memory"), torch.OutOfMemoryError), (RuntimeError("first cause"), TrainingFailed)],
)
def test_the_first_cause_of_a_failed_recording_is_reported(
    first: Exception, told: type[Exception], recorder: Recorder
) -> None:
    fails = False
    recorder.ending = RuntimeError("operation failed due to a previous error during capture")

    def function(x: Tensor) -> Tensor:
        if fails:
            raise first
        return x

    captured = recorder.of(function)
    for _ in range(3):
        captured(torch.ones(()))
    fails = True
    with pytest.raises(told, match=str(first)):
        captured(torch.ones(()))


class Net(nn.Module):
    """A model with an unused weight, two weights whose gradients share one tensor, and a counter."""

    calls: Tensor
    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(2, 2))
        self.unused = nn.Parameter(torch.ones(2))
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("table", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return ((self.one + self.other.view(4)) * x).sum()


def single() -> Single:
    return Single(Net(), [], Placement(CPU, 0, 1, [CPU], None), ParallelSettings())


def test_fixed_gradients_do_not_share_memory_and_unused_weights_get_none() -> None:
    strategy, x = single(), torch.arange(4.0)
    model = strategy.model
    assert isinstance(model, Net)
    assert strategy.fix_gradient_addresses() and not strategy.has_fixed_gradients
    strategy.clear_gradients()  # from a step that failed early
    assert not strategy.has_fixed_gradients
    places = []
    for step in range(4):
        for _ in range(3):
            strategy.train(nn.Module.__call__, x).backward()
        assert model.unused.grad is None, "an optimizer would apply weight decay to it"
        assert model.one.grad is not None and model.other.grad is not None
        places.append((model.one.grad.data_ptr(), model.other.grad.data_ptr()))
        if step > 0:
            assert torch.equal(model.one.grad, 3 * x) and torch.equal(model.other.grad.view(4), 3 * x)
        strategy.clear_gradients()
        assert strategy.has_fixed_gradients == (step > 0)
    assert len(set(places[1:])) == 1 and places[1][0] != places[1][1]


def test_buffers_that_a_replay_changed_are_still_restored() -> None:
    strategy = single()
    model = strategy.model
    assert isinstance(model, Net)
    guard = Guard(strategy, -1)
    for _ in range(4):
        guard.buffers.save()
        model.calls.data.add_(1)  # like recorded kernels, this does not change the tensor's version
        guard.count_step(guarded=False)
    guard.buffers.save()
    assert guard.buffers.num_copied == 1, "a table need not be kept again"
    model.calls.data.add_(1)
    guard.restore()
    assert model.calls.item() == 4


def test_a_tensor_can_be_the_dataset() -> None:
    assert not is_resident(torch.zeros(3, 2))


def test_a_learning_rate_is_rounded_as_recorded_kernels_read_it() -> None:
    def optimizer(dtype: torch.dtype) -> OptimizerWrapper:
        weights = [("weight", nn.Parameter(torch.ones(2, dtype=dtype)))]
        return OptimizerWrapper(weights, OptimSettings(learning_rate=1e-3), lambda parameters: None, 1.0)

    plain, recorded, exact = optimizer(torch.float32), optimizer(torch.float32), optimizer(torch.float64)
    assert recorded.make_capturable()
    for each in (plain, recorded, exact):
        assert each.set_learning_rate(1 / 3) == 1e-3 / 3
    assert plain.optimizer.param_groups[0]["lr"] == recorded.optimizer.param_groups[0]["lr"].item() != 1e-3 / 3
    assert exact.optimizer.param_groups[0]["lr"] == 1e-3 / 3


def test_recomputed_activations_are_not_recorded() -> None:
    settings = Settings(
        precision=PrecisionSettings(cuda_graph=True, activation_checkpointing=True),
        parallel=ParallelSettings(strategy="single"),
    )
    placement = Placement(torch.device("cuda"), 0, 1, [CPU], None)
    with pytest.raises(ConfigError, match="cuda_graph cannot record activation_checkpointing"):
        build_components(Tiny(Tiny.Config()), settings, placement, BatchPlan(8, 8, 1), Agreement(alone=True))


class Averaging(nn.Module):
    """Assigns a new tensor to its buffer in every forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = self.mean / 2 + x.detach().mean()
        return self.linear(x)


class Averages(Tiny):
    def model(self) -> nn.Module:
        return Averaging()

    def loss(self, model: nn.Module, batch: Any, noise: Any) -> Loss:
        return Loss(model(batch).sum(), len(batch))


def test_an_assigned_buffer_is_copied_to_where_recorded_kernels_read_it() -> None:
    settings = Settings(parallel=ParallelSettings(strategy="single"))
    placement = Placement(CPU, 0, 1, [CPU], None)
    components = replace(
        build_components(Averages(Averages.Config()), settings, placement, BatchPlan(2, 2, 1), Agreement(alone=True)),
        captures=True,
    )
    gradient = GradientAccumulator(components, settings, Agreement(alone=True), Heartbeat())
    gradient._names = ["total", "count"]
    model: Any = components.strategy.model
    recorded = model.mean
    for expected in (1.0, 1.5, 1.75):
        gradient._forward_and_backward(torch.ones(2, 1), torch.arange(2))
        assert model.mean is recorded and recorded.item() == expected


@pytest.mark.parametrize(
    ("settings", "guardable", "stay"),
    [({}, True, True), ({"gradient_as_bucket_view": False}, True, False), ({"static_graph": True}, False, False)],
)
def test_ddp_keeps_fixed_gradients_only_in_its_buckets(settings: dict[str, Any], guardable: bool, stay: bool) -> None:
    strategy = object.__new__(DDP)
    strategy.settings, strategy.guardable = ParallelSettings(**settings), guardable
    assert strategy.fix_gradient_addresses() is stay


@pytest.mark.parametrize("devices", [1, 2])
def test_copies_that_data_parallel_makes_are_not_compiled(devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would all use the weights of the first one, which the compiled code belongs to."""
    compiled: list[Any] = []
    monkeypatch.setattr("unisono.engine.build.components.compile_blocks", lambda *given: compiled.append(given))
    settings = Settings(precision=PrecisionSettings(compile=True), parallel=ParallelSettings(strategy="single"))
    components = build_components(
        Tiny(Tiny.Config()),
        settings,
        Placement(CPU, 0, 1, [CPU] * devices, None),
        BatchPlan(8, 8, 1),
        Agreement(alone=True),
    )
    assert len(compiled) == (devices == 1)
    assert any("model copies cannot be compiled" in remark for remark in components.remarks) == (devices > 1)
