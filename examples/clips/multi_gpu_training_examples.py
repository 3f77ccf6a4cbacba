"""Seven ways to train a model of your own, a few lines each.

python multi_gpu_training_examples.py                 all of them, one after the other
python multi_gpu_training_examples.py 1 6             the first and the sixth

1 DataParallel  2 DistributedDataParallel  3 automatic strategy  4 benchmark  5 memory  6 a loop of your own  7 errors

Each runs on the CPU, on one GPU and on several, as it stands; all but the first also under torchrun:

torchrun --nproc_per_node=2 multi_gpu_training_examples.py 3 6
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from quick_start_multi_gpu import MovingSquares, VideoClassificationModel
from torch import nn
from torch.utils.data import DataLoader, Dataset

from unisono.errors import UnisonoError
from unisono.multi_gpu import (
    DataParallelTrainer,
    MultiGPUConfig,
    MultiGPUTrainingManager,
    benchmark_multi_gpu_performance,
    cleanup_distributed_training,
    get_optimal_batch_size,
    launch_distributed_training,
    setup_distributed_training,
)


def say(text: str) -> None:
    """Prints a line once, however many processes there are."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(text, flush=True)


def example_1_data_parallel(folder: Path) -> float:
    """All GPUs from one process; a loader as you have it."""
    model = VideoClassificationModel(width=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    loader = DataLoader(MovingSquares(64), batch_size=16, shuffle=True)
    config = MultiGPUConfig(strategy="dataparallel", num_workers=0, output_dir=str(folder / "run"))
    with DataParallelTrainer(model, config, loader, optimizer=optimizer, loss_fn=nn.CrossEntropyLoss()) as trainer:
        return trainer.train_epoch(0)["train_loss"]


def create_model() -> nn.Module:
    """For example 2: every process makes the model,"""
    return VideoClassificationModel(width=4)


def create_datasets() -> tuple[Dataset[object], Dataset[object]]:
    """and the data."""
    return MovingSquares(64), MovingSquares(32, first=1_000_000)


def example_2_distributed(folder: Path) -> float:
    """A process per GPU, or two on the CPU: one call starts them all, unless torchrun has."""
    world_size = int(os.environ.get("WORLD_SIZE", torch.cuda.device_count() or 2))
    config = MultiGPUConfig(strategy="distributed", batch_size=8, num_workers=0, output_dir=str(folder / "run"))
    found = launch_distributed_training(
        rank=int(os.environ.get("RANK", 0)),
        world_size=world_size,
        model_fn=create_model,
        dataset_fn=create_datasets,
        config=config,
        epochs=2,
        save_path=folder / "checkpoints",
    )
    return float(found["best_loss"])


def example_3_automatic_strategy(folder: Path) -> float:
    """Let it choose: one device, all GPUs of this process, or, under torchrun, one of several processes."""
    manager = MultiGPUTrainingManager(MultiGPUConfig(batch_size=16, num_workers=0, output_dir=str(folder / "run")))
    with manager.create_trainer(VideoClassificationModel(width=4), *create_datasets(), learning_rate=5e-3):
        found = manager.train(epochs=2, save_path=folder / "checkpoints")
        say(f"   strategy {manager.get_performance_stats()['strategy']}")
    return float(found["best_loss"])


def example_4_benchmark(folder: Path) -> float:
    """How fast, on all devices and on one."""
    config = MultiGPUConfig(batch_size=16, num_workers=0)
    found = benchmark_multi_gpu_performance(create_model(), MovingSquares(64), config, steps=4, warmup_steps=1)
    say(f"   {found['samples_per_second']:.0f} samples/s, {found['speedup']:.2f} times one device")
    return float(found["training_time"])


def example_5_memory(folder: Path) -> float:
    """As much at once as fits; recomputed activations and accumulation for what does not."""
    model = VideoClassificationModel(width=4)
    size = get_optimal_batch_size(model, dataset=MovingSquares(8), max_batch_size=16)
    config = MultiGPUConfig(
        batch_size=size,
        gradient_accumulation_steps=2,
        activation_checkpointing=True,
        mixed_precision="bf16",
        num_workers=0,
        output_dir=str(folder / "run"),
    )
    with MultiGPUTrainingManager(config).create_trainer(model, MovingSquares(64)) as trainer:
        loss = trainer.train_epoch(0)["train_loss"]
        most = max(device["max_allocated"] for device in trainer.get_memory_stats().values())
        say(f"   batch size {size}, {most / 2**20:.0f} MiB")
    return loss


def example_6_custom_loop(folder: Path) -> float:
    """Your own loop: train, validate, keep the best."""
    model = VideoClassificationModel(width=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)
    manager = MultiGPUTrainingManager(MultiGPUConfig(batch_size=16, num_workers=0, output_dir=str(folder / "run")))
    trainer = manager.create_trainer(model, *create_datasets(), optimizer=optimizer, scheduler=scheduler)

    best_loss = float("inf")
    for epoch in range(3):
        train_metrics = trainer.train_epoch(epoch)
        val_metrics = trainer.validate(epoch)
        say(f"   epoch {epoch}: {train_metrics} {val_metrics}")
        if val_metrics["val_loss"] < best_loss:
            best_loss = val_metrics["val_loss"]
            trainer.save_checkpoint(epoch, folder / "best_model.pth")
    trainer.load_checkpoint(folder / "best_model.pth")
    again = trainer.validate(epoch=3)["val_loss"]
    trainer.close()
    return abs(again - best_loss)


def example_7_errors(folder: Path) -> float:
    """A lack of memory is answered by smaller micro-batches with the same result; here it is rehearsed."""
    rehearsed = {"inject": "oom@rank0:step2"}  # for rehearsals only: leave it out
    config = MultiGPUConfig(batch_size=16, num_workers=0, output_dir=str(folder / "run"), settings=rehearsed)
    trainer = MultiGPUTrainingManager(config).create_trainer(VideoClassificationModel(width=4), MovingSquares(64))
    try:
        loss = trainer.train_epoch(0)["train_loss"]
    except RuntimeError as error:  # when even one sample does not fit, or nothing but NaN comes out
        say(f"   {error}")
        raise
    finally:
        trainer.close()
    times = (folder / "run/events.jsonl").read_text().count('"oom"')
    say(f"   out of memory {times} time(s), and trained on")
    return loss


EXAMPLES: dict[str, Callable[[Path], float]] = {
    "1": example_1_data_parallel,
    "2": example_2_distributed,
    "3": example_3_automatic_strategy,
    "4": example_4_benchmark,
    "5": example_5_memory,
    "6": example_6_custom_loop,
    "7": example_7_errors,
}


@contextmanager
def shared_folder() -> Iterator[Path]:
    """A temporary folder, the same for all processes; it goes when all of them are done with it."""
    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        if dist.is_initialized():
            dist.broadcast_object_list(folder, src=0)
        yield Path(folder[0])
        if dist.is_initialized():
            dist.barrier()


def main(words: Sequence[str]) -> int:
    """Runs the examples that are named, or all."""
    if unknown := [word for word in words if word not in EXAMPLES]:
        print(f"there is no example {unknown[0]}; there are 1 to 7", file=sys.stderr)
        return 2
    if "RANK" in os.environ:  # torchrun's
        setup_distributed_training(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    for word in words or EXAMPLES:
        say(f"{word}  {EXAMPLES[word].__doc__}")
        torch.manual_seed(0)  # the same first weights each time, and so the same loss
        try:
            with shared_folder() as folder:
                say(f"   {EXAMPLES[word](folder):.4f}")
        except UnisonoError as error:  # example 1 under torchrun, which has made the processes already
            print(f"example {word}: {error}", file=sys.stderr)
            return error.exit_code
    cleanup_distributed_training()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
