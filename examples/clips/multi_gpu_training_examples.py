"""Seven short examples of training your own model.

python multi_gpu_training_examples.py                 runs all examples in order
python multi_gpu_training_examples.py 1 6             runs the first and the sixth example

1 DataParallel  2 DistributedDataParallel  3 automatic strategy  4 benchmark  5 memory  6 your own loop  7 errors

Each example runs unchanged on the CPU, one GPU or several GPUs; all except the first also run under torchrun:

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
from quick_start_multi_gpu import FRAMES, SIZE, VideoClassificationModel
from torch import Tensor, nn
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
from unisono.multi_gpu.trainers import OwnTrainer

LEARNING_RATE = 0.02


def say(text: str) -> None:
    """Prints a line once, for any number of processes."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(text, flush=True)


class Stripes(Dataset[tuple[Tensor, int]]):
    """Clips with only noise (0), or with stripes over time (1), rows (2) or columns (3); learned in a few epochs."""

    def __init__(self, num: int, first: int = 0) -> None:
        self.num, self.first = num, first

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        draw = torch.Generator().manual_seed(self.first + index)
        label, phase = (int(torch.randint(4, (1,), generator=draw)) for _ in range(2))
        clip = 0.3 * torch.randn(1, FRAMES, SIZE, SIZE, generator=draw)
        if label:
            size = clip.shape[label]
            bright = ((torch.arange(size) + phase) // 2 % 2).float()
            clip = clip + bright.view([size if axis == label else 1 for axis in range(4)])
        return clip, label


def train(trainer: OwnTrainer, epochs: int = 5) -> float:
    """Trains some epochs, prints how the loss falls from chance level (1.39), and returns the last loss."""
    losses = [trainer.train_epoch(epoch)["train_loss"] for epoch in range(epochs)]
    say("   loss " + " -> ".join(f"{loss:.2f}" for loss in losses))
    return losses[-1]


def example_1_data_parallel(folder: Path) -> float:
    """All GPUs from one process, with your own DataLoader."""
    model = VideoClassificationModel(width=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    loader = DataLoader(Stripes(64), batch_size=16, shuffle=True)
    config = MultiGPUConfig(strategy="dataparallel", num_workers=0, output_dir=str(folder / "run"))
    with DataParallelTrainer(model, config, loader, optimizer=optimizer, loss_fn=nn.CrossEntropyLoss()) as trainer:
        return train(trainer)


def create_model() -> nn.Module:
    """For example 2: builds the model in every process."""
    return VideoClassificationModel(width=4)


def create_datasets() -> tuple[Dataset[object], Dataset[object]]:
    """For example 2: builds the datasets in every process."""
    return Stripes(64), Stripes(32, first=1_000_000)


def example_2_distributed(folder: Path) -> float:
    """One process per GPU, or two on the CPU. A single call starts all processes unless torchrun has done so."""
    world_size = int(os.environ.get("WORLD_SIZE", torch.cuda.device_count() or 2))
    config = MultiGPUConfig(strategy="distributed", batch_size=8, num_workers=0, output_dir=str(folder / "run"))
    result = launch_distributed_training(
        rank=int(os.environ.get("RANK", 0)),
        world_size=world_size,
        model_fn=create_model,
        dataset_fn=create_datasets,
        config=config,
        epochs=5,
        save_path=folder / "checkpoints",
        learning_rate=LEARNING_RATE,
    )
    say("   loss " + " -> ".join(f"{epoch['val_loss']:.2f}" for epoch in result["history"]))
    return float(result["best_loss"])


def example_3_automatic_strategy(folder: Path) -> float:
    """Automatic choice: one device, all GPUs of this process, or distributed under torchrun."""
    manager = MultiGPUTrainingManager(MultiGPUConfig(batch_size=16, num_workers=0, output_dir=str(folder / "run")))
    with manager.create_trainer(VideoClassificationModel(width=4), *create_datasets(), learning_rate=LEARNING_RATE):
        result = manager.train(epochs=5, save_path=folder / "checkpoints")
        say("   loss " + " -> ".join(f"{epoch['val_loss']:.2f}" for epoch in result["history"]))
        say(f"   strategy {manager.get_performance_stats()['strategy']}")
    return float(result["best_loss"])


def example_4_benchmark(folder: Path) -> float:
    """Throughput on all devices and on one."""
    config = MultiGPUConfig(batch_size=16, num_workers=0)
    speed = benchmark_multi_gpu_performance(create_model(), Stripes(64), config, steps=4, warmup_steps=1)
    say(f"   {speed['samples_per_second']:.0f} samples/s, {speed['speedup']:.2f} times one device")
    return float(speed["training_time"])


def example_5_memory(folder: Path) -> float:
    """The largest batch that fits, activation checkpointing and gradient accumulation."""
    model = VideoClassificationModel(width=4)
    size = get_optimal_batch_size(model, dataset=Stripes(8), max_batch_size=8)
    config = MultiGPUConfig(
        batch_size=size,
        gradient_accumulation_steps=2,
        activation_checkpointing=True,
        mixed_precision="bf16",
        learning_rate=LEARNING_RATE,
        num_workers=0,
        output_dir=str(folder / "run"),
    )
    with MultiGPUTrainingManager(config).create_trainer(model, Stripes(64)) as trainer:
        loss = train(trainer)
        most = max(device["max_allocated"] for device in trainer.get_memory_stats().values())
        say(f"   batch size {size}, {most / 2**20:.0f} MiB")
    return loss


def example_6_custom_loop(folder: Path) -> float:
    """Your own loop: train, validate, save the best model."""
    model = VideoClassificationModel(width=4)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)
    manager = MultiGPUTrainingManager(MultiGPUConfig(batch_size=16, num_workers=0, output_dir=str(folder / "run")))
    trainer = manager.create_trainer(model, *create_datasets(), optimizer=optimizer, scheduler=scheduler)

    best_loss = float("inf")
    for epoch in range(5):
        train_metrics = trainer.train_epoch(epoch)
        val_metrics = trainer.validate(epoch)
        say(f"   epoch {epoch}: loss {train_metrics['train_loss']:.2f}, unseen clips {val_metrics['val_loss']:.2f}")
        if val_metrics["val_loss"] < best_loss:
            best_loss = val_metrics["val_loss"]
            trainer.save_checkpoint(epoch, folder / "best_model.pth")
    trainer.load_checkpoint(folder / "best_model.pth")
    again = trainer.validate(epoch=5)["val_loss"]
    trainer.close()
    return abs(again - best_loss)


def example_7_errors(folder: Path) -> float:
    """Recovery from an injected out-of-memory error: smaller micro-batches, same result."""
    rehearsed = {"inject": "oom@rank0:step2"}  # injects the error; omit in real training
    config = MultiGPUConfig(batch_size=16, num_workers=0, output_dir=str(folder / "run"), settings=rehearsed)
    manager = MultiGPUTrainingManager(config)
    trainer = manager.create_trainer(VideoClassificationModel(width=4), Stripes(64), learning_rate=LEARNING_RATE)
    try:
        loss = train(trainer)
    except RuntimeError as error:  # if even one sample does not fit, or all losses are NaN
        say(f"   {error}")
        raise
    finally:
        trainer.close()
    times = (folder / "run/events.jsonl").read_text().count('"oom"')
    say(f"   out of memory {times} time(s), and training continued")
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
    """Yields a temporary folder that all processes share; deletes it when all of them are done."""
    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        if dist.is_initialized():
            dist.broadcast_object_list(folder, src=0)
        yield Path(folder[0])
        if dist.is_initialized():
            dist.barrier()


def main(words: Sequence[str]) -> int:
    """Runs the examples with the given numbers, or all examples."""
    if unknown := [word for word in words if word not in EXAMPLES]:
        print(f"there is no example {unknown[0]}; choose from 1 to 7", file=sys.stderr)
        return 2
    if "RANK" in os.environ:  # set by torchrun
        setup_distributed_training(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    for word in words or EXAMPLES:
        say(f"{word}  {EXAMPLES[word].__doc__}")
        torch.manual_seed(0)  # the same initial weights each time, and so the same loss
        try:
            with shared_folder() as folder:
                say(f"   {EXAMPLES[word](folder):.4f}")
        except UnisonoError as error:  # example 1 under torchrun, which has already started the processes
            print(f"example {word}: {error}", file=sys.stderr)
            return error.exit_code
    cleanup_distributed_training()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
