"""Checks multi-GPU training on this machine with real models. Start it in either of these ways:

python test_multi_gpu_training.py
torchrun --nproc_per_node=2 test_multi_gpu_training.py     two processes, on two GPUs or on the CPU

A check that needs more GPUs or processes than there are is skipped. The exit code is 0 if no check failed.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from advanced_llm_seo_engine import AdvancedLLMSEOEngine, SEOConfig
from multi_gpu_training import read_pages

PROCESSES = int(os.environ.get("WORLD_SIZE", "1"))
GPUS = torch.cuda.device_count()


class Skipped(Exception):
    """Raised by a check whose requirements are not met."""


def make_engine(**fields: object) -> AdvancedLLMSEOEngine:
    """Creates an engine with a tiny model."""
    values: dict[str, object] = {
        "model_name": "tiny",
        "use_lora": False,
        "max_length": 64,
        "batch_size": 8,
        "learning_rate": 1e-3,
        "num_epochs": 1,
        "warmup_steps": 2,
        "use_multi_gpu": True,
        "multi_gpu_strategy": "auto",
        "num_gpus": 2,
        "dataloader_num_workers": 0,
        "use_mixed_precision": False,
    }
    return AdvancedLLMSEOEngine(SEOConfig.from_dict({**values, **fields}))


def multi_gpu_configuration() -> None:
    """Every multi-GPU field exists and has its documented default."""
    config = SEOConfig()
    assert (config.use_multi_gpu, config.multi_gpu_strategy, config.num_gpus) == (False, "dataparallel", 1)
    assert (config.distributed_backend, config.distributed_init_method) == ("nccl", "env://")
    assert (config.distributed_world_size, config.distributed_rank) == (1, 0)
    assert (config.distributed_master_addr, config.distributed_master_port) == ("localhost", "12355")
    assert not (config.sync_batch_norm or config.find_unused_parameters or config.gradient_as_bucket_view)
    assert config.broadcast_buffers and config.bucket_cap_mb == 25 and not config.static_graph


def gpu_availability() -> None:
    """The status lists only devices that exist."""
    status = make_engine().get_multi_gpu_status()
    assert status["num_gpus"] <= max(GPUS, PROCESSES) and status["world_size"] == PROCESSES
    assert status["device"].startswith("cuda" if GPUS else "cpu")


def dataparallel_setup() -> None:
    """One process can use several GPUs."""
    if PROCESSES > 1 or GPUS < 2:
        raise Skipped("needs one process and two GPUs")
    status = make_engine(multi_gpu_strategy="dataparallel").get_multi_gpu_status()
    assert status["strategy"] == "dataparallel" and status["is_dataparallel"] and status["num_gpus"] == 2


def distributed_setup() -> None:
    """Several processes can use one GPU each."""
    if PROCESSES < 2:
        raise Skipped("needs torchrun --nproc_per_node=2")
    status = make_engine(multi_gpu_strategy="distributed").get_multi_gpu_status()
    assert status["strategy"] == "distributed" and status["is_distributed"]


def model_wrapping() -> None:
    """The wrapped model of a trained engine gives the same outputs as the unwrapped model."""
    engine = make_engine(save_checkpoints=False)
    loader, _ = engine.create_distributed_dataloaders(*read_pages())
    engine.train_epoch(loader)
    batch = next(iter(loader))
    batch = {name: batch[name].to(engine.device) for name in ("input_ids", "attention_mask")}
    assert engine.seo_model is not None
    engine.seo_model.eval()
    with torch.no_grad():
        plain, wrapped = engine.seo_model(**batch).logits, engine._wrap_model_for_multi_gpu()(**batch).logits
    assert torch.allclose(plain, wrapped, atol=1e-5)


def distributed_dataloaders() -> None:
    """All processes together read every text once."""
    engine = make_engine()
    texts, labels = read_pages()
    loader, val = engine.create_distributed_dataloaders(texts, labels, "pages", val_split=0.25)
    own = [text for batch in loader for text in batch["text"]]
    all_processes: list[list[str]] = [own] * PROCESSES
    if PROCESSES > 1:
        torch.distributed.all_gather_object(all_processes, own)
    held_out = [texts[index] for index in val.dataset.indices]
    assert sorted([*(text for part in all_processes for text in part), *held_out]) == sorted(texts)


def gpu_synchronization() -> None:
    """The barrier returns on every process."""
    make_engine().synchronize_gpus()


def effective_batch() -> None:
    """The effective batch matches the config on any hardware."""
    for size, steps in ((8, 1), (4, 2)):
        status = make_engine(batch_size=size, gradient_accumulation_steps=steps).get_multi_gpu_status()
        assert status["effective_batch_size"] == size * max(2, PROCESSES) * steps


def same_training() -> None:
    """The validation loss does not depend on the micro-batch size."""
    losses = []
    for size in (8, 2):
        engine = make_engine(batch_size=size, effective_batch_size=16, num_epochs=2, save_checkpoints=False)
        train, val = engine.create_distributed_dataloaders(*read_pages())
        losses.append(engine.train_with_early_stopping(train, val)["best_val_loss"])
    assert abs(losses[0] - losses[1]) < 1e-4


def multi_gpu_cleanup() -> None:
    """Clean-up destroys the process group."""
    engine = make_engine()
    engine.cleanup_multi_gpu()
    status = engine.get_multi_gpu_status()
    assert not status["is_dataparallel"] and not status["is_distributed"]
    assert not torch.distributed.is_initialized()


CHECKS: list[Callable[[], None]] = [
    multi_gpu_configuration,
    gpu_availability,
    dataparallel_setup,
    distributed_setup,
    model_wrapping,
    distributed_dataloaders,
    gpu_synchronization,
    effective_batch,
    same_training,
    multi_gpu_cleanup,  # destroys the process group, so it must be the last check
]


def main() -> int:
    """Runs all checks in a temporary folder."""
    main_process, failed = os.environ.get("RANK", "0") == "0", 0
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(Path(folder)):
        for check in CHECKS:
            try:
                check()
                outcome = "PASS"
            except Skipped as why:
                outcome = f"SKIP: {why}"
            except AssertionError as error:
                outcome, failed = f"FAIL: {error or check.__doc__}", failed + 1
            if main_process:
                print(f"{check.__name__}: {outcome}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
