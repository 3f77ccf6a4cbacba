"""Train your own model on all GPUs in one minute.

python quick_start_multi_gpu.py --check               reports the installation, the visible devices and any problems
python quick_start_multi_gpu.py --epochs 10           runs a short real training on every device
python quick_start_multi_gpu.py --interactive         asks questions, writes a config file and prints the command
python quick_start_multi_gpu.py --config FILE         trains with a config file written by --interactive
python quick_start_multi_gpu.py --benchmark           measures throughput on all devices and on one device

The task: in which of four directions does a square move? A single frame does not reveal it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import yaml
from torch import Tensor, nn
from torch.utils.data import Dataset

from unisono.cli.main import main as unisono
from unisono.errors import ConfigError, UnisonoError
from unisono.multi_gpu import (
    MultiGPUConfig,
    benchmark_multi_gpu_performance,
    get_gpu_info,
    get_optimal_batch_size,
    launch_multi_gpu_training,
    load_weights,
)

T = TypeVar("T")

STRATEGIES = ("auto", "single", "dataparallel", "distributed", "sharded")
PRECISIONS = ("no", "fp16", "bf16")
DIRECTIONS = ((0, 1), (0, -1), (1, 0), (-1, 0))
FRAMES, SIZE = 6, 16


class MovingSquares(Dataset[tuple[Tensor, int]]):
    """Clips of a bright square that moves one pixel per frame; generated on access from the index alone."""

    def __init__(self, num: int, first: int = 0) -> None:
        self.num, self.first = num, first

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        draw = torch.Generator().manual_seed(self.first + index)
        row, column, label = (int(torch.randint(high, (1,), generator=draw)) for high in (SIZE, SIZE, len(DIRECTIONS)))
        clip = 0.3 * torch.randn(1, FRAMES, SIZE, SIZE, generator=draw)
        for frame in range(FRAMES):
            down, right = (frame * each for each in DIRECTIONS[label])
            rows, columns = (torch.arange(start, start + 4) % SIZE for start in (row + down, column + right))
            clip[0, frame, rows[:, None], columns] += 1
        return clip, label


class VideoClassificationModel(nn.Module):
    """Three convolutions over space and time."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv3d(1, width, 3, padding=1), nn.ReLU(), nn.MaxPool3d((1, 2, 2)),
            nn.Conv3d(width, width, 3, padding=1), nn.ReLU(), nn.MaxPool3d((1, 2, 2)),
            nn.Conv3d(width, width, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool3d(1), nn.Flatten(),
            nn.Linear(width, len(DIRECTIONS)),
        )  # fmt: skip

    def forward(self, clips: Tensor) -> Tensor:
        """Returns a score for each direction."""
        scores: Tensor = self.layers(clips)
        return scores


def create_model() -> nn.Module:
    """Builds the model, in every process."""
    return VideoClassificationModel()


def create_datasets() -> tuple[Dataset[Any], Dataset[Any]]:
    """Returns the training and validation datasets."""
    return MovingSquares(512), MovingSquares(128, first=1_000_000)


def create_demo_model_and_dataset() -> tuple[nn.Module, Dataset[Any], Dataset[Any]]:
    """Returns the model and both datasets."""
    return create_model(), *create_datasets()


def check_requirements() -> int:
    """Checks the installation like `unisono doctor`; returns 1 if it finds a problem."""
    code = unisono(["doctor"])
    info = get_gpu_info()
    names = ", ".join(device["name"] for device in info["devices"])
    print(f"{info['count']} GPUs ({names})" if names else "no GPU: training uses the CPU")
    return code


def get_optimal_configuration() -> MultiGPUConfig:
    """Returns a config for this machine: all GPUs, a batch that fits on each, and bf16 if the hardware supports it."""
    model, train, _ = create_demo_model_and_dataset()
    size = get_optimal_batch_size(model, dataset=train, loss_fn=nn.CrossEntropyLoss(), max_batch_size=16)
    modern = torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    return MultiGPUConfig(
        batch_size=size, learning_rate=5e-3, num_workers=0, mixed_precision="bf16" if modern else "no"
    )


def run_quick_training(config: MultiGPUConfig, epochs: int, save_path: str = "checkpoints") -> dict[str, Any]:
    """Trains on all devices of the config and prints the accuracy of the best model on unseen clips."""
    loss = nn.CrossEntropyLoss()
    result = launch_multi_gpu_training(
        create_model, create_datasets, config, epochs=epochs, loss_fn=loss, save_path=save_path
    )
    model, _, val = create_demo_model_and_dataset()
    model.load_state_dict(load_weights(result["checkpoint"]))
    clips, labels = zip(*(val[index] for index in range(len(val))), strict=True)  # type: ignore[arg-type]
    with torch.no_grad():
        right = (model.eval()(torch.stack(clips)).argmax(1) == torch.tensor(labels)).float().mean().item()
    for row in result["history"]:
        print(f"epoch {row['epoch']}: train_loss {row['train_loss']:.4f}  val_loss {row['val_loss']:.4f}")
    print(f"{right:.0%} of {len(labels)} unseen clips are classified correctly (chance: 25%)")
    print(f"the best model is {result['checkpoint']}")
    return {**result, "correct": right}


def interactive_setup() -> Path:
    """Asks for the most important settings and writes a new config file. Repeats a question after an invalid answer."""
    count = get_gpu_info()["count"]
    print(f"{count} GPUs found." if count else "No GPU found; using the CPU.")
    answers = {
        "num_gpus": _ask("how many GPUs", str(count), _whole(0)),
        "strategy": _ask(f"strategy ({', '.join(STRATEGIES)})", "auto", _one_of(STRATEGIES)),
        "batch_size": _ask("samples per GPU and step", "16", _whole(1)),
        "learning_rate": _ask("learning rate", "0.005", _rate),
        "mixed_precision": _ask(f"mixed precision ({', '.join(PRECISIONS)})", "no", _one_of(PRECISIONS)),
        "num_workers": _ask("loader processes per GPU", "2", _whole(0)),
    }
    epochs = _ask("epochs", "10", _whole(1))

    def write(name: str) -> Path:
        try:
            with open(name, "x", encoding="utf-8") as file:  # never overwrites a file
                yaml.safe_dump(answers, file, sort_keys=False)
        except FileExistsError:
            raise ValueError(f"{name} already exists; choose another name") from None
        except OSError as error:
            raise ValueError(f"{name} cannot be written ({error.strerror}); choose another name") from None
        return Path(name)

    path = _ask("file to write", "multi_gpu.yaml", write)
    print(f"wrote {path}; train with:\n  python {Path(__file__).name} --config {path} --epochs {epochs}")
    return path


def _ask(question: str, default: str, read: Callable[[str], T]) -> T:
    """Asks until `read` accepts the answer, and returns its result."""
    while True:
        print(f"{question} [{default}]: ", end="", flush=True)
        if not (line := sys.stdin.readline()):
            raise ConfigError("input ended before all questions were answered; nothing was written")
        try:
            return read(line.strip() or default)
        except ValueError as error:
            print(f"  {error}")


def _whole(least: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not (text.isascii() and text.isdecimal() and int(text) >= least):
            raise ValueError(f"{text}: answer with a whole number of at least {least}")
        return int(text)

    return read


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = -1
    if not 0 < rate < 1e6:
        raise ValueError(f"{text}: answer with a number above 0")
    return rate


def _one_of(choices: Sequence[str]) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in choices:
            raise ValueError(f"{text}: answer with {', '.join(choices[:-1])} or {choices[-1]}")
        return text

    return read


def run_benchmark(config: MultiGPUConfig) -> dict[str, Any]:
    """Prints the throughput on all devices and on one device."""
    model, train, _ = create_demo_model_and_dataset()
    result = benchmark_multi_gpu_performance(model, train, config, loss_fn=nn.CrossEntropyLoss())
    print(f"{'':16}{'devices':>10}{'samples/s':>12}{'seconds':>10}{'memory MiB':>12}")
    alone = result["num_devices"] == 1
    rows = [(result["strategy"], result), ("one device", result["single_device"])]
    for name, row in rows[alone:]:
        most = max(device["max_allocated"] for device in row["memory"].values()) / 2**20
        print(
            f"{name:16}{row['num_devices']:>10}{row['samples_per_second']:>12.1f}{row['training_time']:>10.2f}{most:>12.0f}"
        )
    if not alone:
        print(f"speed-up {result['speedup']:.2f}, efficiency {result['efficiency']:.0%}")
    return result


def main(words: Sequence[str] | None = None) -> int:
    """Runs the selected action; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="check the installation")
    parser.add_argument("--epochs", type=int, help="number of epochs to train")
    parser.add_argument("--interactive", action="store_true", help="create a config file by answering questions")
    parser.add_argument("--benchmark", action="store_true", help="measure the throughput")
    parser.add_argument("--config", help="config file, as written by --interactive")
    parser.add_argument("--save_path", default="checkpoints", help="folder for the best model")
    arguments = parser.parse_args(words)
    try:
        if arguments.check:
            return check_requirements()
        if arguments.interactive:
            interactive_setup()
            return 0
        own = arguments.config
        config = MultiGPUConfig.from_file(own) if own is not None else get_optimal_configuration()
        if arguments.benchmark:
            run_benchmark(config)
        else:
            run_quick_training(config, 3 if arguments.epochs is None else arguments.epochs, arguments.save_path)
    except UnisonoError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
