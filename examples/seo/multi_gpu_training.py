"""Runs three usage examples and a training run. Start it in any of these ways:

python multi_gpu_training.py                          one process, on one GPU, several GPUs or the CPU
torchrun --nproc_per_node=2 multi_gpu_training.py     the same training in two processes, on two GPUs or the CPU
python multi_gpu_training.py --model_name minilm      trains MiniLM with a LoRA instead of a tiny model

pages.csv contains short pages, labelled 1 if the page answers its question and 0 if it only promises an answer.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from advanced_llm_seo_engine import AdvancedLLMSEOEngine, SEOConfig

from unisono.errors import UnisonoError

PAGES = Path(__file__).parent / "pages.csv"


def basic_dataparallel() -> AdvancedLLMSEOEngine:
    """1. Use all GPUs from one process."""
    config = SEOConfig(
        use_multi_gpu=True,
        multi_gpu_strategy="dataparallel",
        num_gpus=2,
        batch_size=16
    )  # fmt: skip

    engine = AdvancedLLMSEOEngine(config)
    # Automatic setup and model wrapping
    return engine


def advanced_distributed() -> AdvancedLLMSEOEngine:
    """2. Use one process per GPU."""
    config = SEOConfig(
        use_multi_gpu=True,
        multi_gpu_strategy="distributed",
        num_gpus=4,
        distributed_backend="nccl",
        distributed_master_addr="192.168.1.100",
        distributed_master_port="12355",
        find_unused_parameters=True,
        bucket_cap_mb=50
    )  # fmt: skip

    engine = AdvancedLLMSEOEngine(config)
    # Full distributed training setup
    return engine


def status_monitoring(engine: AdvancedLLMSEOEngine) -> None:
    """3. Print the devices in use."""
    # Get current multi-GPU status
    status = engine.get_multi_gpu_status()
    print(f"Strategy: {status['strategy']}")
    print(f"Active GPUs: {status['num_gpus']}")
    print(f"Device: {status['device']}")

    # Synchronize GPUs during training
    engine.synchronize_gpus()

    # Cleanup after training
    engine.cleanup_multi_gpu()


def read_pages(path: Path = PAGES) -> tuple[list[str], list[int]]:
    """Reads texts and labels from a CSV file."""
    with open(path, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return [row["text"] for row in rows], [int(row["label"]) for row in rows]


def train(model_name: str, epochs: int) -> None:
    """Trains a model on the labels, and prints its accuracy and the score of a new page."""
    tiny = model_name == "tiny"
    config = SEOConfig(
        model_name=model_name,
        use_lora=not tiny,
        learning_rate=1e-3,
        num_epochs=epochs,
        warmup_steps=4,
        max_length=64,
        batch_size=4,
        effective_batch_size=8,  # over all processes, so training gives the same result on any number of them
        num_gpus=2,
        use_multi_gpu=True,
        multi_gpu_strategy="auto",
        dataloader_num_workers=0,
        early_stopping_patience=3,
        checkpoint_dir="checkpoints/pages",
    )
    engine = AdvancedLLMSEOEngine(config)
    train_loader, val_loader = engine.create_distributed_dataloaders(*read_pages())
    result = engine.train_with_early_stopping(train_loader, val_loader)
    metrics = engine.evaluate_model(val_loader)
    status = engine.get_multi_gpu_status()
    if status["rank"] == 0:
        print(f"effective batch {status['effective_batch_size']} on {status['num_devices']} device(s)")
        print(f"{result['epochs_completed']} epochs, validation loss {result['best_val_loss']:.4f}")
        print(f"accuracy {metrics['accuracy']:.2f}; baseline (constant prediction) {metrics['baseline_accuracy']:.2f}")
        page = "To descale a kettle, boil equal parts of water and vinegar, wait 20 minutes, and rinse it twice."
        analysis = engine.analyze_seo_score(page, ["descale a kettle"])
        print(f"learned score of a new page: {analysis['seo_score']:.2f}")
        for check in analysis["checks"]:
            print(f"  {check['name']}: {check['found']}")
    engine.cleanup_multi_gpu()


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the examples; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_name", default="tiny", help="tiny, minilm, a folder or a hub id")
    parser.add_argument("--epochs", type=int, default=8, help="number of epochs")
    options = parser.parse_args(arguments)
    try:
        if "RANK" not in os.environ:  # under torchrun, skip the examples that configure the processes themselves
            status_monitoring(basic_dataparallel())
            status_monitoring(advanced_distributed())
        train(options.model_name, options.epochs)
    except UnisonoError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
