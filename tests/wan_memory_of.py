"""Memory of a step of a Wan with a tenth of 14B's width: counts every allocation, without communication.

python wan_memory_of.py single|fsdp BLOCKS none|all FRAMES    prints GiB at the real width: a hundred times the measured
value
"""

from __future__ import annotations

import gc
import sys
import weakref
from typing import Any

import torch
import torch.distributed as dist
from diffusers import WanTransformer3DModel
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

from unisono.engine.step.optimizer_wrapper import OptimizerWrapper
from unisono.parallel import fsdp
from unisono.parallel.blocks.repeated import recompute_activations
from unisono.parallel.fsdp import FSDP
from unisono.parallel.single import Single
from unisono.parallel.strategy import Placement, cast_weights
from unisono.recipes.wan.models.experts import Experts
from unisono.recipes.wan.models.float32_weights import float32_weights, keep_time_embedding_in_float32
from unisono.recipes.wan.models.kernels.block import make_fast
from unisono.recipes.wan.models.load import CONFIGS
from unisono.settings import OptimSettings, ParallelSettings

TENTH = {"num_attention_heads": 4, "attention_head_dim": 128, "ffn_dim": 1382, "text_dim": 410, "freq_dim": 26}
SCALE = 100  # weights have two widths; tokens are a tenth, and their activations have one
WORLD = 8


def fill(tensor: Any, *_: Any, **__: Any) -> Any:
    """Replaces random initialisation, which takes longer than everything else."""
    return tensor.data.fill_(1e-3)


def main(strategy: str, blocks: int, recompute: str, frames: int) -> float:
    """Peak GiB of the second step."""
    torch.nn.init.kaiming_uniform_ = torch.nn.init.uniform_ = fill  # type: ignore[assignment]
    transformer: Any = WanTransformer3DModel(**dict(CONFIGS["14b"]) | TENTH | {"num_layers": blocks})
    keep_time_embedding_in_float32(transformer)
    for block in transformer.blocks:
        make_fast(block, ("cpu",))
        if recompute == "all":
            recompute_activations(block)
    model = Experts({"transformer": transformer}, None).train()
    exact = float32_weights(model)
    cast_weights(model, torch.float32, torch.bfloat16, exact)
    world = WORLD if strategy == "fsdp" else 1
    if world > 1:
        dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
        # Gathers in 16 bit as on a GPU; on the CPU it would be 32 bit.
        fsdp.MixedPrecisionPolicy = lambda **_: MixedPrecisionPolicy(  # type: ignore[misc,assignment]
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    placement = Placement(torch.device("cpu"), 0, world, [torch.device("cpu")], torch.bfloat16)
    kind = FSDP if world > 1 else Single
    made: Any = kind(model, list(transformer.blocks), placement, ParallelSettings(), exact)
    optimizer = OptimizerWrapper(made.parameters, OptimSettings(), lambda _: None, 1.0)
    # A tenth of the tokens of 480 x 832: 156 per latent frame.
    noisy, text = torch.randn(1, 16, 1 + (frames - 1) // 4, 24, 26), torch.randn(1, 51, 410).bfloat16()

    def loss(_: Any, noisy: Any, text: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            velocity = transformer(noisy, torch.tensor([500.0]), text, return_dict=False)[0]
        return {"total": velocity.float().square().sum()}

    def step() -> None:
        made.begin_step(guarded=False)
        with made.accumulating(last=True):
            total = made.train(loss, noisy, text)["total"]
        made.reduce_in_backward()
        total.backward()
        del total
        tensors = made.gradients()
        made.norm(tensors)
        optimizer.step(tensors, torch.ones((), dtype=torch.float64), torch.zeros((), dtype=torch.float64))
        gradients = [weakref.ref(gradient) for gradient in tensors]
        del tensors
        made.clear_gradients()
        assert not any(gradient() is not None for gradient in gradients), "somebody keeps gradients"

    step()
    gc.collect()
    there: dict[int, int] = {}
    for each in gc.get_objects():
        if isinstance(each, torch.Tensor) and each.device.type == "cpu":
            storage = (each.to_local() if hasattr(each, "to_local") else each).untyped_storage()
            if storage.data_ptr():
                there[storage.data_ptr()] = storage.nbytes()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as seen:
        step()
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return (sum(there.values()) + most) * SCALE / 2**30


if __name__ == "__main__":
    print(main(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])))
