"""The objective of Wan: signs, scales and noise levels, against diffusers' own scheduler and models."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanTransformer3DModel
from diffusers.models.attention_dispatch import AttentionBackendName
from torch import Tensor, nn

from unisono.data.noise import Noise
from unisono.recipes.wan.models.experts import Experts, levels_of
from unisono.recipes.wan.models.float32_weights import float32_weights, keep_time_embedding_in_float32
from unisono.recipes.wan.models.kernels import attention
from unisono.recipes.wan.models.kernels.attention import choose, use
from unisono.recipes.wan.objective import NoiseLevels, data_from, noised, shift_for, velocity
from unisono.recipes.wan.sample import euler, sample
from unisono.recipes.wan_flow.evaluation import loss_by_level
from unisono.recipes.wan_flow.loss import FlowLoss, with_first_frame

SMALL = {"num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4, "text_dim": 16}
SMALL |= {"freq_dim": 32, "ffn_dim": 32, "num_layers": 2, "rope_max_seq_len": 32}
KINDS = [
    NoiseLevels(),
    NoiseLevels(shift=3.0),
    NoiseLevels(mean=-0.5, std=0.7, shift=5.0),
    NoiseLevels("uniform"),
    NoiseLevels("uniform", shift=12.0),
    NoiseLevels("mode"),
    NoiseLevels("mode", mode_scale=-0.8, shift=3.0),
]


def small(seed: int = 0) -> WanTransformer3DModel:
    torch.manual_seed(seed)
    return WanTransformer3DModel(**SMALL)


@pytest.mark.parametrize("sigma", [0.001, 0.1, 0.37, 0.5, 0.875, 0.999, 1.0])
def test_one_scheduler_step_with_the_true_velocity_leads_from_noise_to_data(sigma: float) -> None:
    """With the target velocity, diffusers' scheduler arrives at the data, so no sign or scale is wrong."""
    data, noise = torch.randn(2, 4, 1, 4, 4).double(), torch.randn(2, 4, 1, 4, 4).double()
    scheduler = FlowMatchEulerDiscreteScheduler(shift=1.0)
    scheduler.set_timesteps(sigmas=[sigma])  # set_timesteps(1) would only ever test sigma 1
    time = scheduler.timesteps[0]
    assert time.item() == pytest.approx(1000 * sigma, rel=1e-6)
    noisy = noised(data, noise, torch.full((2,), sigma, dtype=torch.float64))
    arrived = scheduler.step(velocity(data, noise), time, noisy, return_dict=False)[0]
    torch.testing.assert_close(arrived, data, rtol=0, atol=1e-6)
    torch.testing.assert_close(data_from(noisy, velocity(data, noise), torch.tensor([sigma] * 2)), data)
    torch.testing.assert_close(scheduler.scale_noise(data, time[None], noise), noisy, rtol=0, atol=1e-6)


@pytest.mark.parametrize("levels", KINDS, ids=str)
def test_a_quantile_has_that_fraction_of_the_draws_below_it(levels: NoiseLevels) -> None:
    shares = torch.linspace(0.01, 0.99, 99, dtype=torch.float64)
    sigmas = levels.quantile(shares)
    assert (sigmas.diff() > 0).all() and sigmas.min() > 0 and sigmas.max() < 1
    for share in (0.05, 0.5, 0.93):
        sigma = levels.quantile(torch.tensor(share, dtype=torch.float64)).item()
        assert levels.cdf(sigma) == pytest.approx(share, abs=1e-9)


def test_logit_normal_draws_have_the_mean_and_spread_of_their_logit() -> None:
    sigma = NoiseLevels(mean=0.4, std=0.8).quantile(torch.rand(200_000, dtype=torch.float64))
    logit = torch.logit(sigma)
    assert logit.mean().item() == pytest.approx(0.4, abs=0.01) and logit.std().item() == pytest.approx(0.8, abs=0.01)


def test_noise_levels_are_shifted_like_the_schedulers() -> None:
    sigma = torch.linspace(0.01, 1, 50, dtype=torch.float64)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(sigmas=sigma.flip(0).tolist())
    torch.testing.assert_close(
        NoiseLevels("uniform", shift=3.0).quantile(sigma).flip(0), scheduler.sigmas[:-1].double(), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("levels", KINDS, ids=str)
@pytest.mark.parametrize(("low", "high"), [(0.875, 1.0), (0.0, 0.875), (0.2, 0.6)])
def test_an_expert_draws_noise_levels_inside_its_range_without_clamping(
    levels: NoiseLevels, low: float, high: float
) -> None:
    shares = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    mine = levels.within(shares, low, high)
    assert mine.min() >= low and mine.max() <= high
    assert mine.unique().numel() == 20_000  # clamping would make thousands of them equal
    everything = levels.quantile((torch.arange(400_000, dtype=torch.float64) + 0.5) / 400_000)
    inside = everything[(everything > low) & (everything < high)]  # the same density, restricted to the range
    for share in (0.1, 0.5, 0.9):
        assert mine.quantile(share).item() == pytest.approx(inside.quantile(share).item(), abs=2e-3)


def test_the_experts_of_a14b_cover_all_noise_levels() -> None:
    assert levels_of(["transformer"], 0.875) == (0.875, 1.0)
    assert levels_of(["transformer_2"], 0.875) == (0.0, 0.875)
    assert levels_of(["transformer", "transformer_2"], 0.875) == (0.0, 1.0)
    assert levels_of(["transformer"], None) == (0.0, 1.0)


def test_larger_images_get_more_noise() -> None:
    assert shift_for(480 * 832) == pytest.approx(3.0)
    assert shift_for(4 * 480 * 832) == pytest.approx(6.0) and shift_for(16 * 16) == 1.0


def test_each_sample_is_trained_by_the_expert_of_its_noise_level() -> None:
    high, low = small(1), small(2)
    experts = Experts({"transformer": high, "transformer_2": low}, 0.875)
    noisy, text = torch.randn(4, 4, 1, 4, 4), torch.randn(4, 6, 16)
    sigma = torch.tensor([0.9, 0.3, 0.875, 0.5])
    velocity = experts(noisy, sigma, text)
    for row, model in ((0, high), (1, low), (2, high), (3, low)):
        alone = model(noisy[row : row + 1], 1000 * sigma[row : row + 1], text[row : row + 1], return_dict=False)[0]
        torch.testing.assert_close(velocity[row : row + 1], alone, rtol=1e-5, atol=1e-5)


def test_an_expert_without_samples_still_has_gradients() -> None:
    """Otherwise ranks would wait for each other in its collectives."""
    experts = Experts({"transformer": small(1), "transformer_2": small(2)}, 0.875)
    experts(torch.randn(2, 4, 1, 4, 4), torch.tensor([0.9, 0.95]), torch.randn(2, 6, 16)).square().sum().backward()
    idle = [parameter.grad for parameter in experts.transformer_2.parameters()]
    assert all(gradient is not None and not gradient.any() for gradient in idle)
    assert any(parameter.grad.any() for parameter in experts.transformer.parameters())


class KnownOutput(nn.Module):
    """A model with known outputs."""

    config = type("Config", (), {"patch_size": (1, 2, 2)})

    def __init__(self, answer: Tensor) -> None:
        super().__init__()
        self.answer, self.seen = answer, ()

    def forward(
        self, noisy: Tensor, sigma: Tensor, text: Tensor, times: Tensor | None = None, condition: Any = None
    ) -> Tensor:
        self.seen = (noisy, sigma, text, times)
        return self.answer


def test_a_video_counts_as_much_as_an_image() -> None:
    """Each sample's loss is the mean over its own elements."""
    flow = FlowLoss(NoiseLevels(), 0.0, 1.0)
    losses = []
    for frames in (1, 5):
        latent, noise = torch.zeros(2, 4, frames, 4, 4), Noise(0, torch.tensor([3, 4]))
        draws = Noise(0, torch.tensor([3, 4]))
        draws.uniform(3, dtype=torch.float64)
        wrong = draws.normal(*latent.shape[1:]) + 2.0  # the velocity is the noise itself
        loss = flow.loss(KnownOutput(wrong), latent, torch.zeros(2, 6, 16), torch.zeros(()), noise)
        losses.append(loss.total.item())
        assert loss.count == 2
    assert losses == pytest.approx([8.0, 8.0], rel=1e-5)


def test_caption_dropout_replaces_the_captions_of_single_samples_by_the_empty_one() -> None:
    flow, text, empty = (
        FlowLoss(NoiseLevels(), 0.0, 1.0, caption_dropout=0.3),
        torch.ones(400, 2, 3),
        torch.full((2, 3), 7.0),
    )
    model = KnownOutput(torch.zeros(400, 4, 1, 2, 2))
    flow.loss(model, torch.zeros(400, 4, 1, 2, 2), text, empty, Noise(0, torch.arange(400)))
    texts = model.seen[2]
    dropped = (texts == 7).all((1, 2))
    assert ((texts == 1).all((1, 2)) | dropped).all() and 80 < dropped.sum() < 160
    flow.loss(
        KnownOutput(torch.zeros(1, 4, 1, 2, 2)),
        torch.zeros(1, 4, 1, 2, 2),
        text[:1],
        empty,
        Noise(0, torch.tensor([9])),
    )


def test_a_conditioning_first_frame_has_no_noise_timestep_0_and_no_loss() -> None:
    latent, noisy = torch.randn(2, 4, 3, 4, 6), torch.randn(2, 4, 3, 4, 6)
    mixed, times = with_first_frame(noisy, latent, torch.tensor([0.5, 0.8]), torch.tensor([True, False]), (1, 2, 2))
    torch.testing.assert_close(mixed[0, :, 0], latent[0, :, 0])
    torch.testing.assert_close(mixed[0, :, 1:], noisy[0, :, 1:])
    torch.testing.assert_close(mixed[1], noisy[1])
    assert (
        times.shape == (2, 18) and (times[0, :6] == 0).all() and (times[0, 6:] == 500).all() and (times[1] == 800).all()
    )

    flow = FlowLoss(NoiseLevels(), 0.0, 1.0, first_frame=1.0)
    answer = torch.zeros(2, 4, 3, 4, 6)
    answer[:, :, 0] = 1e6  # whatever it predicts for the given first frame
    there = flow.loss(KnownOutput(answer), latent, torch.zeros(2, 6, 16), torch.zeros(()), Noise(0, torch.arange(2)))
    answer[:, :, 0] = 0
    same = flow.loss(KnownOutput(answer), latent, torch.zeros(2, 6, 16), torch.zeros(()), Noise(0, torch.arange(2)))
    assert there.total.item() == same.total.item() < 100


def test_timesteps_per_token_have_the_shape_that_the_model_takes() -> None:
    model = small()
    latent, text = torch.randn(1, 4, 3, 4, 6), torch.randn(1, 6, 16)
    _, times = with_first_frame(latent, latent, torch.tensor([0.5]), torch.tensor([False]), (1, 2, 2))
    together = model(latent, torch.tensor([500.0]), text, return_dict=False)[0]
    torch.testing.assert_close(model(latent, times, text, return_dict=False)[0], together, rtol=1e-4, atol=1e-5)


def test_evaluation_uses_fixed_noise_levels() -> None:
    flow, latent = FlowLoss(NoiseLevels(shift=3.0), 0.0, 1.0), torch.randn(3, 4, 1, 4, 4)
    model = Experts({"transformer": small()}, None)
    text = torch.zeros(3, 6, 16)
    evaluations = [loss_by_level(flow, model, latent, text, Noise(0, torch.arange(3)), 4) for _ in range(2)]
    assert torch.equal(evaluations[0]["loss_by_level"][0], evaluations[1]["loss_by_level"][0])
    total, count = evaluations[0]["sigma_by_level"]
    expected = NoiseLevels(shift=3.0).quantile(torch.tensor([0.125, 0.375, 0.625, 0.875]))
    torch.testing.assert_close(total / count, expected, rtol=1e-6, atol=0)
    assert evaluations[0]["loss"][0].item() == pytest.approx(evaluations[0]["loss_by_level"][0].mean().item())


def test_a_kernel_is_chosen_only_if_it_is_clearly_faster_than_torchs_choice() -> None:
    assert choose({"auto": 1.0, "cudnn": 0.99, "flash": 1.5}) == "auto"
    assert choose({"auto": 1.0, "cudnn": 0.9, "flash": 1.5}) == "cudnn"
    assert choose({"flash": 1.5}) == "flash" and choose({}) == "auto"


@pytest.mark.parametrize(("tokens", "samples"), [(8, 1024), (1024, 8), (8192, 1), (32760, 1)])
def test_kernels_are_timed_on_inputs_of_sufficient_size(
    tokens: int, samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtypes = []

    def timed(inside: list[torch.Tensor], kernel: str) -> float:
        dtypes.append((kernel, *inside[0].shape))
        return 1.0

    monkeypatch.setattr(attention, "_milliseconds", timed)
    attention.measure(2, 4, tokens, torch.float32, "cpu")
    assert dtypes == [(kernel, samples, 2, tokens, 4) for kernel in ("auto", "cudnn", "flash", "efficient")]


@pytest.mark.parametrize("kernel", ["auto", "math"])
def test_a_kernel_changes_results_only_by_rounding(kernel: str) -> None:
    model, noisy, text, times = small(), torch.randn(1, 4, 3, 4, 6), torch.randn(1, 6, 16), torch.tensor([300.0])
    before = model(noisy, times, text, return_dict=False)[0]
    use(kernel, model)
    assert {block.attn1.processor._attention_backend for block in model.blocks} == (
        {None} if kernel == "auto" else {AttentionBackendName._NATIVE_MATH}
    )
    torch.testing.assert_close(model(noisy, times, text, return_dict=False)[0], before, rtol=1e-5, atol=1e-5)


def test_the_time_embedding_is_computed_in_float32_in_a_16_bit_model() -> None:
    model = small()
    sinusoid = model.condition_embedder.timesteps_proj(torch.tensor([123.4, 987.6]))
    exact = model.condition_embedder.time_embedder(sinusoid)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = model.condition_embedder.time_embedder(sinusoid)
    keep_time_embedding_in_float32(model)
    with torch.autocast("cpu", torch.bfloat16):
        kept = model.condition_embedder.time_embedder(sinusoid)
    assert torch.equal(kept, exact) and not torch.equal(rounded.float(), exact)


def test_the_float32_modules_are_those_that_diffusers_keeps_in_float32() -> None:
    model = small()
    ours = float32_weights(model)
    theirs = [
        name
        for name, _ in model.named_parameters()
        if any(part in name.split(".") for part in WanTransformer3DModel._keep_in_fp32_modules)
    ]
    assert theirs and set(theirs) <= set(ours)
    small_ones = sum(dict(model.named_parameters())[name].numel() for name in ours)
    assert small_ones < 0.2 * sum(parameter.numel() for parameter in model.parameters())


def test_sampling_with_the_true_velocity_reaches_the_data() -> None:
    data = torch.randn(2, 4, 1, 4, 4)

    class Perfect(nn.Module):
        def forward(self, noisy: Tensor, times: Tensor, text: Tensor, return_dict: bool) -> tuple[Tensor]:
            sigma = (times / 1000).view(-1, 1, 1, 1, 1)
            goal = torch.cat([data] * (len(noisy) // 2))
            return ((noisy - goal) / sigma.clamp(min=1e-6),)

    model, text = Experts({"transformer": Perfect()}, None), (torch.zeros(2, 3, 4), torch.zeros(2, 3, 4))
    for guidance in (1.0, 4.0):
        arrived = sample(model, torch.randn(2, 4, 1, 4, 4), text, euler(3.0), steps=12, guidance=guidance)
        torch.testing.assert_close(arrived, data, rtol=0, atol=1e-3)
    above = sample(model, torch.randn(2, 4, 1, 4, 4), text, euler(3.0), steps=12, guidance=1.0, low=0.875)
    torch.testing.assert_close(above, data, rtol=0, atol=1e-3)  # predicts the direction
    hidden = noised(data, torch.randn_like(data), torch.tensor([0.875] * 2))
    below = sample(model, hidden, text, euler(3.0), steps=12, guidance=1.0, high=0.875)
    assert (below - data).norm() < 0.05 * data.norm()


def test_guidance_extrapolates_from_the_unconditional_output() -> None:
    class Reader(nn.Module):
        def forward(self, noisy: Tensor, times: Tensor, text: Tensor, return_dict: bool) -> tuple[Tensor]:
            return (torch.ones_like(noisy) * text.mean((1, 2)).view(-1, 1, 1, 1, 1),)

    model, start = Experts({"transformer": Reader()}, None), torch.zeros(1, 4, 1, 2, 2)
    text = (torch.ones(1, 2, 2), torch.zeros(1, 2, 2))
    one, three = (sample(model, start, text, euler(1.0), steps=4, guidance=scale) for scale in (1.0, 3.0))
    torch.testing.assert_close(three, 3 * one)
    assert math.isclose(one.mean().item(), -1.0, rel_tol=1e-3)
