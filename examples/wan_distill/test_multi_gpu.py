"""Five small checks of this machine: python test_multi_gpu.py (needs no GPU and no download).

Also: python -m pytest test_multi_gpu.py
"""

from __future__ import annotations

import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from script_flags import completed, resolve
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler
from train_distillation import cleanup_distributed, is_main_process, setup_distributed

from unisono.data.order import Order
from unisono.devices import visible_gpus
from unisono.recipes.wan.models.load import build
from unisono.recipes.wan.tiny.models import TEXT_LENGTH, tiny_transformer_config
from unisono.recipes.wan_distill.data.prompts import read_prompts
from unisono.recipes.wan_distill.models.random_weights import initialise_randomly
from unisono.recipes.wan_distill.models.student import student_of

HERE = Path(__file__).resolve().parent
PIXELS_OF_A_LATENT = 4  # of the tiny VAE
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]


def student(seed: int = 0) -> Any:
    """Builds the student in config/tiny_student.json: a small WanTransformer3DModel."""
    config = student_of(str(HERE / "config/tiny_student.json"), tiny_transformer_config(), PIXELS_OF_A_LATENT).config
    model = build(config)
    initialise_randomly(model, seed)
    return model


def weights(model: Any) -> Tensor:
    """Returns all weights as one vector."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_1_multi_gpu_uses_all_gpus() -> None:
    gpus = visible_gpus()
    assert len(gpus) == torch.cuda.device_count()
    arguments, remarks = completed(["--teacher_path", "tiny", "--data_path", "shapes", "--multi_gpu"])
    values = resolve(arguments).values
    if len(gpus) > 1:
        assert (values["strategy"], values["gpus"]) == ("dp", "all")
        assert any(f"DataParallel on {len(gpus)} GPUs" in remark for remark in remarks)
    else:
        assert (values["strategy"], values["gpus"]) == ("auto", "1")
        assert any("--multi_gpu has no effect" in remark for remark in remarks)


def test_2_without_a_launcher_there_is_one_process() -> None:
    assert setup_distributed() == (0, 1, 0)
    assert is_main_process() and is_main_process(0) and not is_main_process(1)
    cleanup_distributed()


def test_3_two_processes_start_with_the_same_student() -> None:
    ended = subprocess.run([*TORCHRUN, __file__, "--as-a-process"], cwd=HERE, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert ended.stdout.count("2 processes, the same student") == 1, "only the main process prints it"


def test_4_the_student_predicts_a_velocity_and_every_weight_learns() -> None:
    model = student()
    noisy = torch.randn(2, 8, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    text = torch.randn(2, TEXT_LENGTH, 64, generator=torch.Generator().manual_seed(2))
    target = torch.randn(noisy.shape, generator=torch.Generator().manual_seed(3))

    def velocity() -> Tensor:
        predicted: Tensor = model(noisy, torch.tensor([100.0, 900.0]), text, return_dict=False)[0]
        return predicted

    assert velocity().shape == noisy.shape and not velocity().any(), "a random student has a zero output layer"
    before, optimizer = weights(model), torch.optim.AdamW(model.parameters(), 1e-3)
    for _ in range(3):
        optimizer.zero_grad()
        (velocity() - target).square().mean().backward()
        optimizer.step()
    assert velocity().isfinite().all() and not torch.equal(velocity()[0], velocity()[1])
    assert (weights(model) != before).float().mean() > 0.99


def test_5_every_prompt_is_read_once_per_epoch() -> None:
    prompts, _ = read_prompts(str(HERE / "data/static_prompts.txt"), "data_path")
    assert len(prompts) == 55
    read: list[str] = []
    for rank in range(2):
        sampler: DistributedSampler[str] = DistributedSampler(prompts, 2, rank, shuffle=True, seed=5)  # type: ignore[arg-type]
        sampler.set_epoch(3)
        loader: DataLoader[str] = DataLoader(prompts, batch_size=4, sampler=sampler)  # type: ignore[arg-type]
        read += [prompt for batch in loader for prompt in batch]
    assert set(read) == set(prompts) and len(read) == 56, "torch's sampler gives one of 55 twice"
    order = Order(len(prompts), seed=5)
    epoch = [prompts[order[position]] for position in range(3 * 55, 4 * 55)]
    assert sorted(epoch) == sorted(prompts), "ours gives each once, on any number of processes"


def as_a_process() -> None:
    """Runs in each of two processes that torchrun starts."""
    rank, world_size, _ = setup_distributed()
    mine = weights(student())
    from_all_ranks = [torch.empty_like(mine) for _ in range(world_size)]
    torch.distributed.all_gather(from_all_ranks, mine)
    same = all(torch.equal(each, mine) for each in from_all_ranks)
    if is_main_process(rank):
        print(f"{world_size} processes, {'the same student' if same else 'DIFFERENT students'}")
    cleanup_distributed()


def main() -> int:
    """Runs all checks."""
    checks = {name: check for name, check in globals().items() if name.startswith("test_")}
    failed = 0
    for name, check in checks.items():
        try:
            check()
            print(f"✓ {name}")
        except Exception:
            failed += 1
            print(f"✗ {name}\n{traceback.format_exc()}")
    print(f"{len(checks) - failed} of {len(checks)} pass")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(as_a_process() if "--as-a-process" in sys.argv else main())
