"""`--blocks_on_host` in a full fine-tune: weights, gradients and optimizer state on the host, equal results."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unisono
from command_line import TESTS
from command_line import unisono as unisono_command
from many_runs import Copy, Outcome, Run, identical, many_runs
from recipes_for_tests import Sentences
from unisono.engine.build import blocks_on_host
from unisono.engine.step.ema import Ema
from unisono.engine.step.optimizer_wrapper import OptimizerWrapper
from unisono.errors import ConfigError, UnisonoError
from unisono.parallel.blocks import streamed_update
from unisono.parallel.blocks import swap as swap_module
from unisono.parallel.blocks.gradients import HostGradients
from unisono.parallel.blocks.repeated import recompute_activations
from unisono.parallel.blocks.staging import Slot, Transfers
from unisono.parallel.blocks.streamed_update import StreamedUpdate
from unisono.parallel.blocks.swap import BlockSwap
from unisono.parallel.strategy import local_norm
from unisono.settings import EmaSettings, OptimSettings

BLOCKS = 5
COMMON: dict[str, Any] = {
    **{"num_blocks": BLOCKS, "num_samples": 12, "num_eval": 3, "global_batch_size": 6, "batch_size": 3},
    **{"max_steps": 4, "save_every": 2, "eval_every": 2, "guard_steps": 1, "grad_clip": 0.5},
}
DDP = {"strategy": "ddp"}
AVERAGED = {"ema_decay": 0.9}
# name -> ranks, settings; each run is bit-identical with and without --blocks_on_host
KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    "averaged, a step skipped": (1, AVERAGED | {"nan_ids": "3"}),
    "recomputed, bf16": (1, {"activation_checkpointing": True, "recompute_every": 2, "mixed_precision": "bf16"}),
    "chosen results recomputed": (1, {"activation_checkpointing": "selective"}),
    "float64, gradient not finite": (1, AVERAGED | {"dtype": "float64", "inf_gradient_ids": "3"}),
    "out of memory": (1, AVERAGED | {"inject": "oom@rank0:step2"}),
    "sgd": (1, {"optimizer": "sgd"}),
    "8 bit": (1, {"optimizer": "adamw8bit", "width": 64}),
    "muon": (1, {"optimizer": "muon"}),
    "two ranks": (2, DDP | AVERAGED | {"nan_ids": "3"}),
    "two ranks, a step repeated": (2, DDP | {"guard_steps": -1, "inject": "oom@rank1:step2"}),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    root = tmp_path_factory.mktemp("trained_on_host")
    planned = []
    for name, (world, settings) in KINDS.items():
        for num in (0, 2, BLOCKS):
            swapped = {"blocks_on_host": num} if num else {}
            planned.append(Run(f"{name} {num}", f"{name} {num}", world, COMMON | settings | swapped))
    first = next(iter(KINDS))
    for num in (0, 3):
        settings = COMMON | KINDS[first][1] | ({"blocks_on_host": num} if num else {})
        planned.append(Run(f"resumed {num}", f"resumed {num}", 1, settings, Copy(f"{first} {BLOCKS}", 2)))
    settings = COMMON | KINDS[first][1] | {"strategy": "fsdp"}
    planned.append(Run("resumed fsdp", "resumed fsdp", 2, settings, Copy(f"{first} {BLOCKS}", 2)))
    settings = COMMON | KINDS[first][1] | {"blocks_on_host": BLOCKS}
    planned.append(Run("from fsdp", "from fsdp", 1, settings, Copy("resumed fsdp", 4)))
    return many_runs(planned, root)


def assert_identical(run: Outcome, reference: Outcome) -> None:
    assert "error" not in run.main, run.main
    for name in ("loss", "grad_norm"):  # as text, because a number that is not a number differs from itself
        numbers = [repr(line[name]) for line in run.steps()]
        assert numbers == [repr(line[name]) for line in reference.steps()] and len(numbers) == COMMON["max_steps"]
    for prefix in ("model.", "optimizer.", "ema."):
        assert identical(run.weights(prefix=prefix), reference.weights(prefix=prefix)), prefix
    assert [line["eval/loss"] for line in run.evaluations()] == [line["eval/loss"] for line in reference.evaluations()]


@pytest.mark.parametrize("name", KINDS)
def test_a_run_with_trained_blocks_on_the_host_equals_the_run_without_bit_for_bit(
    runs: dict[str, Outcome], name: str
) -> None:
    for num in (2, BLOCKS):
        assert_identical(runs[f"{name} {num}"], runs[f"{name} 0"])
    if "nan_ids" in KINDS[name][1] or "inf_gradient_ids" in KINDS[name][1]:
        assert runs[f"{name} {BLOCKS}"].state()["skipped"] == 2
    if "inject" in KINDS[name][1]:
        assert runs[f"{name} {BLOCKS}"].events("oom")


@pytest.mark.parametrize("num", [0, 3])
def test_a_run_resumes_with_another_number_of_trained_blocks_on_the_host(runs: dict[str, Outcome], num: int) -> None:
    assert_identical(runs[f"resumed {num}"], runs[f"{next(iter(KINDS))} 0"])


def test_a_run_resumes_under_fsdp_and_back(runs: dict[str, Outcome]) -> None:
    reference = runs[f"{next(iter(KINDS))} 0"]
    losses = runs["resumed fsdp"].losses(), reference.losses()
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6, equal_nan=True)
    back = runs["from fsdp"]
    assert "error" not in back.main
    assert identical(back.weights(prefix="ema."), runs["resumed fsdp"].weights(prefix="ema."))


def refusal(tmp_path: Path, **settings: Any) -> str:
    with pytest.raises(UnisonoError) as error:
        unisono.train(Sentences, **{**COMMON, "output_dir": str(tmp_path / "run"), "gpus": "0", **settings})
    assert isinstance(error.value, ConfigError) and "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()
    return str(error.value)


def test_impossible_combinations_are_rejected_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "has 5 blocks with weights of their own; use at most 5" in refusal(tmp_path, blocks_on_host=6)
    for optimizer in ("prodigy", "schedule_free_adamw", "rmsprop"):
        text = refusal(tmp_path, blocks_on_host=2, optimizer=optimizer)
        assert "a few at a time" in text and "use optimizer adamw" in text
    assert "not with fsdp; use fsdp_cpu_offload" in refusal(tmp_path, blocks_on_host=2, strategy="fsdp")
    monkeypatch.setattr(blocks_on_host, "free_host_memory", lambda: 10_000)
    # A block has 10 tensors and less than 1,024 numbers; the weights are in host memory already.
    text = refusal(tmp_path, blocks_on_host=5)
    assert "blocks_on_host 5 needs" in text and "of host memory, and 9.8 KiB are free" in text


def test_the_banner_shows_how_much_memory_is_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {**COMMON, "output_dir": str(tmp_path / "run"), "gpus": "0", "max_steps": 1}
    unisono.train(Sentences, **settings, blocks_on_host=4)
    assert "of weights, gradients and optimizer state are stored in host memory" in capsys.readouterr().err


@pytest.mark.slow
def test_verify_finds_the_same_run(tmp_path: Path) -> None:
    recipe = f"{TESTS / 'recipes_for_tests.py'}:Sentences"
    words = ["verify", recipe, "--ranks", "1,2,3", "--blocks_on_host", "3", "--num_blocks", "4", "--steps", "3"]
    ended = unisono_command(*words, cwd=tmp_path)
    assert ended.code == 0 and "same" in ended.out, ended


# ---- the parts, without the engine: on the CPU, and on a GPU ----

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")),
]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Training:
    """Trains a few blocks as the engine does, `num` of them on the host."""

    def __init__(self, num: int, device: str, width: int, *, recompute: bool, compiles: bool = False) -> None:
        torch.manual_seed(0)
        self.device = torch.device(device)
        self.model = nn.ModuleList(Block(width) for _ in range(6))
        blocks = list(self.model)
        self.swap = BlockSwap(self.model, blocks[6 - num :], self.device, trained=True) if num else None
        if self.swap is None:
            self.model.to(self.device)
        else:
            self.swap.attach(blocks, compiles=compiles)
            with self.swap.set_aside():
                self.model.to(self.device)
        for block in blocks if recompute else ():
            recompute_activations(block)
        self.parameters = list(self.model.named_parameters())
        update = StreamedUpdate(self.swap) if self.swap else None
        settings = OptimSettings(learning_rate=1e-2)
        self.optimizer = OptimizerWrapper(self.parameters, settings, lambda _: None, 1.0, on_host=update)
        self.ema = Ema(self.parameters, EmaSettings(ema_decay=0.5), update)
        self.width, self.seed = width, 0

    @property
    def host_gradients(self) -> HostGradients | None:
        return self.swap.gradients if self.swap else None

    def step(self, micro_batches: int = 2, *, nan: bool = False, use_all: bool = True) -> Tensor:
        for _ in range(micro_batches):
            self.seed += 1
            generator = torch.Generator().manual_seed(self.seed)
            x = torch.randn(7, self.width, generator=generator).to(self.device)
            for block in self.model if use_all else list(self.model)[::2]:
                x = block(x)
            (x.square().mean() * (torch.nan if nan else 1)).backward()
        gradients = [weight.grad for _, weight in self.parameters if weight.grad is not None]
        norm = local_norm(gradients, self.device, self.host_gradients).double()
        found_inf = (norm * 0 != 0).double()
        self.optimizer.step(gradients, 1 / norm, found_inf)
        for _, weight in self.parameters:
            weight.grad = None
        if self.host_gradients:
            self.host_gradients.forget()
        if not nan:
            self.ema.update(self.seed)
        return norm

    def state(self) -> dict[str, Tensor]:
        averages = self.ema.tensors()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        state = {name: weight.detach().cpu().clone() for name, weight in self.parameters}
        state |= {f"average of {name}": value.cpu().clone() for name, value in averages.items()}
        return state | {str(key): value.cpu().clone() for key, value in self.optimizer.tensors().items()}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("recompute", [False, True])
def test_steps_equal_those_without_swapping(device: str, recompute: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    width = 24 if device == "cpu" else 1024
    for num_bytes in (1, 10 * width * width):  # a part for each weight, and several weights in a part
        monkeypatch.setattr(streamed_update, "_PART_BYTES", num_bytes)
        for num in (1, 2, 6):
            plain, swapped = (Training(each, device, width, recompute=recompute) for each in (0, num))
            for settings in ({}, {"nan": True}, {"micro_batches": 1}, {"use_all": False}, {"micro_batches": 3}):
                ours, theirs = swapped.step(**settings), plain.step(**settings)
                assert torch.equal(ours, theirs) or settings == {"nan": True}, (num, settings)
            assert identical(swapped.state(), plain.state()), num
            at_rest = {host.flat.untyped_storage().data_ptr() for host in swapped.swap.hosts}
            waiting = [weight for _, weight in swapped.parameters if weight.untyped_storage().data_ptr() in at_rest]
            assert len(waiting) == 7 * num


class LateTransfers(Transfers):
    """Copies as late as side streams could: to a slot when the computation waits, to the host when something does."""

    def __init__(self) -> None:
        self.to_device: dict[int, list[tuple[Tensor, int]]] = {}
        self.to_host: list[tuple[Slot, Tensor, int]] = []  # in the order of the stream

    def start(self, source: Tensor, slot: Slot, offset: int = 0, after: Any = None) -> None:
        self._write_until(lambda job: job[0] is slot or job[1] is after)
        slot.flat[offset:][: len(source)].fill_(0xFF)  # not a number
        self.to_device.setdefault(slot.address, []).append((source, offset))

    def wait(self, slot: Slot) -> None:
        for source, offset in self.to_device.pop(slot.address, []):
            slot.flat[offset:][: len(source)].copy_(source)

    def reuse(self, slot: Slot) -> None:
        self._write_until(lambda job: job[0] is slot)

    def write(self, slot: Slot, target: Tensor, offset: int = 0) -> Any:
        target.fill_(0xFF)
        self.to_host.append((slot, target, offset))
        return target

    def finish(self) -> None:
        self._write_until(lambda _: True)

    def _write_until(self, is_awaited: Callable[[tuple[Slot, Tensor, int]], bool]) -> None:
        """Copies everything up to the last job that is waited for."""
        last = max((number for number, job in enumerate(self.to_host) if is_awaited(job)), default=-1)
        for slot, target, offset in self.to_host[: last + 1]:
            target.copy_(slot.flat[offset:][: len(target)])
        del self.to_host[: last + 1]


@pytest.mark.parametrize("recompute", [False, True])
def test_every_copy_is_waited_for(recompute: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamed_update, "_PART_BYTES", 1)
    plain = Training(0, "cpu", 8, recompute=recompute)
    monkeypatch.setattr(swap_module, "transfers_to", lambda device: LateTransfers())
    swapped = Training(6, "cpu", 8, recompute=recompute)
    for settings in ({}, {"nan": True}, {"micro_batches": 1}, {"use_all": False}, {"micro_batches": 3}):
        plain.step(**settings)
        swapped.step(**settings)
    assert identical(swapped.state(), plain.state())


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("recompute", [False, True])
def test_compiled_blocks_train_like_eager_ones(device: str, recompute: bool) -> None:
    torch._dynamo.reset()
    torch.set_default_dtype(torch.float64)
    try:
        eager = Training(0, device, 16, recompute=recompute)
        compiled = [Training(num, device, 16, recompute=recompute, compiles=True) for num in (2, 6)]
        for training in (eager, *compiled):
            for micro_batches in (2, 1, 2):
                training.step(micro_batches)
        for training in compiled:
            torch.testing.assert_close(training.state(), eager.state(), rtol=1e-7, atol=1e-9)
            assert training.swap is not None and len(training.swap._slots) == 2
    finally:
        torch.set_default_dtype(torch.float32)
        torch._dynamo.reset()


def test_unused_weights_have_no_gradient_and_do_not_decay() -> None:
    training = Training(6, "cpu", 8, recompute=False)
    before = training.state()
    training.step()
    after = training.state()
    changed = {name for name, value in before.items() if not torch.equal(value, after[name])}
    assert "0.up.weight" in changed and not any("unused" in name for name in changed)


def test_reading_the_averages_between_steps_changes_nothing() -> None:
    looked, other = (Training(4, "cpu", 8, recompute=False) for _ in range(2))
    for _ in range(3):
        looked.step()
        other.step()
        looked.ema.tensors()
        with looked.ema.in_place_of_weights(lambda: None):
            pass
    assert identical(looked.state(), other.state())


def test_there_are_two_gradient_buffers_however_many_blocks_and_micro_batches() -> None:
    training = Training(6, "cpu", 8, recompute=True)
    for _ in range(2):
        training.step(micro_batches=3)
    assert training.host_gradients is not None and len(training.host_gradients._free) == 2
    assert training.swap is not None and len(training.swap._slots) == 2


def test_the_norm_does_not_read_gradients_in_host_memory_again() -> None:
    training = Training(6, "cpu", 8, recompute=False)
    x = torch.ones(7, 8)
    for block in training.model:
        x = block(x)
    x.sum().backward()
    gradients = [weight.grad for _, weight in training.parameters if weight.grad is not None]
    expected = local_norm(gradients, training.device)
    for gradient in gradients:  # as if the copies had not arrived yet
        gradient.fill_(torch.nan)
    assert torch.equal(local_norm(gradients, training.device, training.host_gradients), expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_gpu_holds_two_blocks_and_copies_overlap() -> None:
    """With copies one after the other a step takes at least the sum of the times of both directions."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    training = Training(6, "cuda", 2048, recompute=True)
    block = sum(weight.nbytes for weight in training.model[0].parameters())
    assert torch.cuda.memory_allocated() - before < 4.5 * block  # two for weights, two for gradients
    training.step(1)
    times = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        training.step(1)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    host, device = torch.empty(2**28, dtype=torch.uint8, pin_memory=True), torch.empty(2**28, dtype=torch.uint8)
    device = device.cuda()
    rates = []
    for source, target in ((host, device), (device, host)):
        target.copy_(source, non_blocking=True)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        target.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
        rates.append(2**28 / begin.elapsed_time(end))
    # Bytes per byte of weights: 2 + 5 to the device (with averages), 1 + 4 to the host.
    alone = 6 * block * (7 / rates[0] + 5 / rates[1])
    assert min(times) < 0.9 * alone, (times, alone)
