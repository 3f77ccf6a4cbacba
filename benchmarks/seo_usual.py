"""Trains the same pairs with the sentence-transformers trainer; used by seo.py.

    python benchmarks/seo_usual.py --pairs PAIRS.jsonl --model FOLDER --batch 64 --steps 40 --output FOLDER

Prints one line of JSON: samples per second after the first steps, measured by a callback.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--output", required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--warm", type=int, default=5)
    parser.add_argument("--learning_rate", type=float, default=5e-5)
    parser.add_argument("--warmup_steps", type=int, default=50)
    parser.add_argument("--max_length", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    import torch
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.losses import MultipleNegativesRankingLoss
    from transformers import TrainerCallback

    class Clock(TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.ends: list[float] = []

        def on_step_end(self, arguments: Any, state: Any, control: Any, **named: Any) -> None:
            # Synchronize only at both ends of the measurement: waiting after each step would slow the trainer down.
            if torch.cuda.is_available() and state.global_step in (options.warm + 1, options.steps):
                torch.cuda.synchronize()
            self.ends.append(time.perf_counter())

    rows = [json.loads(line) for line in options.pairs.read_text().splitlines()]
    data = Dataset.from_dict({name: [row[name] for row in rows] for name in ("query", "positive")})
    model = SentenceTransformer(options.model, local_files_only=True)
    model.max_seq_length = options.max_length
    cuda = torch.cuda.is_available()
    arguments = SentenceTransformerTrainingArguments(
        output_dir=options.output,
        max_steps=options.steps,
        per_device_train_batch_size=options.batch,
        learning_rate=options.learning_rate,
        warmup_steps=options.warmup_steps,
        lr_scheduler_type="linear",
        weight_decay=0.01,
        seed=options.seed,
        bf16=cuda,
        use_cpu=not cuda,
        report_to="none",
        save_strategy="no",
        logging_steps=1000,
        disable_tqdm=True,
        dataloader_num_workers=2 if cuda else 0,
    )
    clock = Clock()
    trainer = SentenceTransformerTrainer(
        model=model, args=arguments, train_dataset=data, loss=MultipleNegativesRankingLoss(model), callbacks=[clock]
    )
    trainer.train()
    model.save_pretrained(options.output)
    times = [b - a for a, b in zip(clock.ends[options.warm :], clock.ends[options.warm + 1 :], strict=False)]
    rate = options.batch * len(times) / sum(times)
    print(json.dumps({"samples_per_s": rate, "steps": len(times)}))


if __name__ == "__main__":
    main()
