"""unisono's AdamW kernel computes what torch's does, stores the same state, skips steps, and can be recorded."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from unisono.engine.step.make_optimizer import from_settings
from unisono.optim import adamw
from unisono.optim.adamw import AdamW, adamw_for
from unisono.settings import OptimSettings

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

OPTIONS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
SHAPES = [(1536, 1536), (8960,), (1,), (3, 5, 7), (40_000,), (1, 6, 1536)]


def test_on_a_cpu_torchs_adamw_is_used() -> None:
    made = from_settings([("weight", nn.Parameter(torch.zeros(2)))], OptimSettings())
    assert type(made) is torch.optim.AdamW


@pytest.mark.parametrize("problem", ["raises", "other steps"])
def test_a_kernel_that_does_not_work_is_not_used(problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def step(self: AdamW, closure: Any = None) -> None:
        if problem == "raises":
            raise RuntimeError("Failed to find C compiler")
        for group in self.param_groups:
            for weight in group["params"]:
                weight.data.add_(1e-3)

    monkeypatch.setattr(adamw, "importlib", SimpleNamespace(util=SimpleNamespace(find_spec=lambda name: True)))
    adamw.kernel_works.cache_clear()
    torch_steps = adamw.kernel_works(torch.device("cpu"))  # without a GPU both classes take torch's steps
    monkeypatch.setattr(AdamW, "step", step)
    adamw.kernel_works.cache_clear()
    assert torch_steps and not adamw.kernel_works(torch.device("cpu"))
    adamw.kernel_works.cache_clear()


def parameters(device: str = "cuda", dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    drawn = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=drawn).to(device, dtype)) for shape in SHAPES]


def gradients(step: int) -> list[Tensor]:
    drawn = torch.Generator().manual_seed(1 + step)
    return [torch.randn(shape, generator=drawn) for shape in SHAPES]


def groups(weights: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": weights[:3]}, {"params": weights[3:], "lr": 3e-3, "weight_decay": 0.0}]


def off(weights: list[nn.Parameter], exact: list[nn.Parameter]) -> float:
    differences = [(weight.double().cpu() - right).norm() ** 2 for weight, right in zip(weights, exact, strict=True)]
    return float(sum(differences) / sum(right.norm() ** 2 for right in exact)) ** 0.5


def spied(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the addresses are aligned, for each launch of the kernel."""
    from unisono.optim import adamw_kernel

    launches, launch = [], adamw_kernel.adamw

    def noted(*inside: Any, is_aligned: bool) -> None:
        launches.append(is_aligned)
        launch(*inside, is_aligned=is_aligned)

    monkeypatch.setattr(adamw_kernel, "adamw", noted)
    return launches


@needs_gpu
def test_steps_and_skipped_steps_match_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = spied(monkeypatch)
    ours, theirs, exact = parameters(), parameters(), parameters("cpu", torch.float64)
    kinds = (adamw_for(ours[0]), torch.optim.AdamW, torch.optim.AdamW)
    assert kinds[0] is AdamW
    first, second, third = (
        kind(groups(weights), **OPTIONS, fused=True) for kind, weights in zip(kinds, (ours, theirs, exact), strict=True)
    )
    for step in range(8):
        skips = step in (0, 4)
        for number, gradient in enumerate(gradients(step)):
            if (step, number) == (5, 1):
                ours[number].grad = theirs[number].grad = exact[number].grad = None
                continue
            exact[number].grad = gradient.double()
            for weight in (ours[number], theirs[number]):
                weight.grad = (gradient * 8).cuda()
        before = [weight.grad.clone() for weight in ours if weight.grad is not None]
        for optimizer in (first, second):
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0).cuda(), torch.tensor(float(skips)).cuda()
            optimizer.step()
        kept = [weight.grad for weight in ours if weight.grad is not None]
        assert all(torch.equal(*pair) for pair in zip(before, kept, strict=True)), "gradients are only read"
        if not skips:
            third.step()
    assert len(launches) == 2 * 8
    assert off(ours, exact) < 1.2 * off(theirs, exact) < 1e-6
    for mine, other in zip(ours, theirs, strict=True):
        assert first.state[mine].keys() == second.state[other].keys()
        for slot, value in first.state[mine].items():
            torch.testing.assert_close(value, second.state[other][slot], rtol=1e-5, atol=1e-7)
    assert first.state[ours[1]]["step"] == 5 and first.state[ours[0]]["step"] == 6


@needs_gpu
def test_gradients_at_unaligned_addresses_are_read_correctly(monkeypatch: pytest.MonkeyPatch) -> None:
    launches, ours, exact = spied(monkeypatch), parameters(), parameters("cpu", torch.float64)
    first, second = adamw_for(ours[0])(ours, **OPTIONS), torch.optim.AdamW(exact, **OPTIONS)
    for step in range(3):
        drawn = gradients(step)
        bucket = torch.empty(1 + sum(gradient.numel() for gradient in drawn), device="cuda")
        offset = 1
        for weight, right, gradient in zip(ours, exact, drawn, strict=True):
            weight.grad = bucket[offset : offset + gradient.numel()].view(gradient.shape).copy_(gradient)
            offset += gradient.numel()
            right.grad = gradient.double()
        first.step()
        second.step()
    assert launches == [False] * 3 and off(ours, exact) < 1e-6


@needs_gpu
def test_every_weight_of_a_large_group_is_updated(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = spied(monkeypatch)
    ours, theirs = ([nn.Parameter(torch.ones(2**20 + 4, device="cuda")) for _ in range(300)] for _ in range(2))
    for weights, kind in ((ours, adamw_for(ours[0])), (theirs, torch.optim.AdamW)):
        for number, weight in enumerate(weights):
            weight.grad = torch.full_like(weight, 1.0 + number)
        kind(weights, **OPTIONS, fused=True).step()
    assert launches == [True]
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other)


@needs_gpu
def test_torch_updates_what_the_kernel_does_not_support(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = spied(monkeypatch)
    for options, change in (({"amsgrad": True}, lambda weight: weight), ({}, lambda weight: weight.bfloat16())):
        weight = nn.Parameter(change(torch.ones(64, device="cuda")))
        weight.grad = torch.ones_like(weight)
        adamw_for(weight)([weight], **OPTIONS, **options).step()
        assert (weight < 1).all()
    assert not launches


def recorded(step: Callable[[], None]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    return graph


@needs_gpu
def test_recorded_steps_match_eager_steps() -> None:
    ours, other = parameters(), parameters()
    for weights in (ours, other):
        for weight in weights:
            weight.grad = torch.zeros_like(weight)
    first, second = (adamw_for(weights[0])(weights, **OPTIONS) for weights in (ours, other))
    for optimizer in (first, second):
        optimizer.grad_scale, optimizer.found_inf = torch.ones((), device="cuda"), torch.ones((), device="cuda")
        for group in optimizer.param_groups:
            group["capturable"], group["lr"] = True, torch.full((), 1e-2, device="cuda")
        optimizer.step()
    graph = recorded(first.step)
    for step in range(6):
        for optimizer in (first, second):
            optimizer.found_inf.fill_(float(step == 3))
            optimizer.param_groups[0]["lr"].fill_(1e-2 / (1 + step))
        for weights in (ours, other):
            for weight, gradient in zip(weights, gradients(step), strict=True):
                weight.grad.copy_(gradient)
        if step == 4:  # an input of another shape runs without the graph, with gradients elsewhere
            kept = [weight.grad for weight in ours]
            for weight in ours:
                weight.grad = weight.grad.clone()
            first.step()
            for weight, gradient in zip(ours, kept, strict=True):
                weight.grad = gradient
        else:
            graph.replay()
        second.step()
    for mine, right in zip(ours, other, strict=True):
        assert torch.equal(mine, right)
