"""From texts and loaders to a trainer of unisono.multi_gpu, which has the engine's loop behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader

from unisono.errors import ConfigError
from unisono.multi_gpu.loaders import Loaded
from unisono.multi_gpu.manager import MultiGPUTrainingManager
from unisono.multi_gpu.trainers import OwnTrainer
from unisono.observe.status_line import print_line
from unisono.recipes.seo.front.data import texts_and_labels
from unisono.recipes.seo.front.devices import Devices, effective_batch, trainer_config
from unisono.recipes.seo.front.labels import Labels
from unisono.recipes.seo.front.learner import Judge, Learner, Padded, Tokens
from unisono.recipes.seo.front.loaders import OfRank
from unisono.recipes.seo.front.schedule import make_schedule


@dataclass(frozen=True)
class Material:
    """Texts with their labels, as a loader or a data set has them."""

    texts: list[str]
    labels: list[Any]
    batch_size: int | None = None
    shuffle: bool = True

    @classmethod
    def of(cls, source: Any, name: str) -> Material:
        """What is in a loader or a data set; one without labels is refused."""
        texts, labels = texts_and_labels(source, name)
        if not texts:
            raise ConfigError(f"{name} is empty; give it texts")
        if labels is None:
            raise ConfigError(f"{name} has no labels; a score is learned from real labels, one for each text")
        if not isinstance(source, DataLoader):
            return cls(texts, labels)
        if isinstance(source.sampler, OfRank):
            return cls(texts, labels, source.batch_size, source.sampler.order.shuffle)
        found = Loaded.of(source, name)  # refuses an order that is not ours to keep
        return cls(texts, labels, found.batch_size, bool(found.shuffle))


def make_trainer(
    learner: Learner,
    devices: Devices,
    train: Material,
    val: Material | None,
    *,
    epochs: int,
    output_dir: str | None,
) -> OwnTrainer:
    """The trainer of the learner's model on these texts; `epochs` is where the learning rate's schedule ends."""
    config = learner.config
    labels = learner.labels or Labels.of([*train.labels, *(val.labels if val else ())], config.label)
    if labels.regression and config.early_stopping_monitor == "val_accuracy":
        raise ConfigError("early_stopping_monitor val_accuracy: labels are numbers, which have none; use val_loss")
    model = learner.need_model(labels, train.texts)
    size = train.batch_size or config.batch_size
    batch = effective_batch(config, devices.asked, size)
    steps = -(-len(train.texts) // batch)
    if devices.world.is_main and config.lr_scheduler != "plateau" and config.warmup_steps > steps * epochs:
        print_line(
            f"note: warmup_steps {config.warmup_steps} are more than the {steps * epochs} steps of this run: the "
            f"learning rate never reaches {config.learning_rate:g}; use {max(1, steps * epochs // 10)}"
        )
    told = trainer_config(config, devices, size, shuffle=train.shuffle, output_dir=output_dir)
    return MultiGPUTrainingManager(told).create_trainer(
        model,
        _tokens(learner, labels, train, "train_loader", devices),
        None if val is None else _tokens(learner, labels, val, "val_loader", devices),
        loss_fn=Judge(labels),
        scheduler=make_schedule(config, steps, epochs),
        collate_fn=Padded(learner.tokenizer.pad_token_id, labels.regression),
    )


def _tokens(learner: Learner, labels: Labels, found: Material, name: str, devices: Devices) -> Tokens:
    rows, num_cut = learner.tokens(found.texts)
    if num_cut and devices.world.is_main:
        most = learner.config.max_length
        print_line(f"note: {name}: {num_cut} of {len(rows)} texts are longer than max_length {most}, and were cut")
    return Tokens(rows, labels.encode(found.labels))


def share(items: Sequence[Any], devices: Devices) -> Sequence[Any]:
    """Those that this process computes."""
    return items[devices.world.rank :: devices.world.size]


def gathered(part: list[Any], num: int, devices: Devices) -> list[Any]:
    """What all processes have computed of `num` items, in their order."""
    import torch.distributed as dist

    world = devices.world.size
    if world == 1:
        return part
    parts: list[Any] = [None] * world
    dist.all_gather_object(parts, part)
    return [parts[place % world][place // world] for place in range(num)]
