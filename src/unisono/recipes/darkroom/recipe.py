"""The recipe `darkroom`: trains a transformer on learning histories, so that it learns in context.

It collects the histories of source learners (`sources/`), cuts contexts out of them (`data/windows.py`), trains a
transformer to predict the learner's next action (`models/transformer.py`), and lets it play tasks that it has never
seen (`models/rollout.py`).
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from unisono.engine.recipe import Loss, Recipe, Work
from unisono.errors import ConfigError
from unisono.recipes.darkroom import foreign_config, settings

if TYPE_CHECKING:  # keeps `unisono train darkroom --help` from importing torch
    from torch import Tensor, nn

    from unisono.data.noise import Noise
    from unisono.recipes.darkroom.data.windows import Contexts
    from unisono.recipes.darkroom.rooms import Room, Split

GROUPS = ("train", "validation", "unseen")
_LAST_EPISODES = 10
_SOLVED = 0.8  # fraction of the optimal return at which a task counts as solved
_RANDOM_EPISODES = 2000  # number of random episodes per task that `chance` plays
_KEY_TO_DOOR_TASKS = 500


class Darkroom(Recipe):
    """Algorithm Distillation (Laskin et al. 2022) on darkroom environments."""

    has_frozen_weights = False
    defaults: ClassVar[Mapping[str, Any]] = {
        "batch_size": 512,
        "max_steps": 4000,
        "learning_rate": 1e-3,
        "lr_schedule": "cosine",
        "warmup_steps": 100,
        "beta2": 0.99,
        "num_workers": 0,
        "eval_every": 1000,
        "save_every": 1000,
        "log_every": 50,
        "preview_every": 0,
        "eval_batch_size": 2048,
        "best_metric": "eval/validation_of_optimum",
        "best_mode": "max",
    }
    aliases: ClassVar[Mapping[str, str]] = foreign_config.ALIASES
    file_keys: ClassVar[Mapping[str, Any]] = foreign_config.FILE_KEYS
    fixed: ClassVar[Sequence[str]] = (
        # The tasks and their split:
        *("env", "grid_size", "horizon", "env_split_seed", "train_env_ratio", "num_validation", "num_tasks"),
        # The histories, and the contexts cut out of them:
        *("source", "alg_seed", "n_stream", "total_source_timesteps", "source_noise", "source_shared", "source_lr"),
        *("n_steps", "source_batch_size", "n_epochs", "traj_dir", "train_n_stream", "train_source_timesteps"),
        *("history_skip", "n_transit", "use_compressed_context", "compress_interval"),
        # The model. The weights would also load with a different number of heads, but compute a different function:
        *("tf_n_embd", "tf_n_layer", "tf_n_head", "tf_n_inner"),
    )
    Config = settings.Config

    @classmethod
    def translate(cls, values: dict[str, Any], where: str) -> Mapping[str, Any]:
        """Accepts the keys of other implementations' config files."""
        return foreign_config.translate(values, where)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        from unisono.recipes.darkroom.checks import check_config
        from unisono.recipes.darkroom.rooms import ROOMS

        self.room = ROOMS[config.env](config.grid_size, config.horizon)
        self.split = _split(config, self.room)
        check_config(config, self.room, len(self.split.all))
        self._histories: Sequence[Path] = ()
        self.labels = {"unseen_of_optimum_by_task": [self.room.describe(task) for task in self.split.unseen]}

    def prepare(self, work: Work) -> None:
        """Collects the histories that do not exist yet."""
        from unisono.recipes.darkroom.data.collect import collect
        from unisono.recipes.darkroom.data.histories import find_histories

        config = self.config
        folder = work.folder / "histories"
        if config.traj_dir:
            name = f"history_{config.env}_{config.source}_alg-seed{config.alg_seed}"
            self._histories = find_histories(Path(config.traj_dir), name)
            if self._histories:
                return
            folder = Path(config.traj_dir) / name
        self._histories = collect(
            self.room,
            config.source,
            self.split.all,
            config.n_stream,
            config.total_source_timesteps // config.n_stream,
            config.alg_seed,
            folder,
            _source_settings(config),
            work,
        )

    def model(self) -> nn.Module:
        """Builds a small causal transformer with one token per step."""
        from unisono.recipes.darkroom.models.transformer import HistoryTransformer, Shape

        config = self.config
        return HistoryTransformer(
            Shape(
                room_size=config.grid_size,
                context=config.n_transit,
                width=config.tf_n_embd,
                num_layers=config.tf_n_layer,
                num_heads=config.tf_n_head,
                inner=config.tf_n_inner,
                dropout=config.tf_dropout,
                attention_dropout=config.tf_attn_dropout,
                separators=config.use_compressed_context,
            )
        )

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """Returns no blocks: a model this small is compiled and sharded as a whole."""
        return []

    def dataset(self, split: str) -> Any:
        """Returns contexts of the histories for training, or (task, group) pairs to play for evaluation."""
        from unisono.recipes.darkroom.data.histories import read_histories
        from unisono.recipes.darkroom.data.windows import TwoRegions, Windows

        config, room = self.config, self.room
        if split == "eval":
            groups = (self.split.train[: config.eval_train_tasks], self.split.validation, self.split.unseen)
            return [(task, group) for group, tasks in enumerate(groups) for task in tasks]
        streams = min(config.train_n_stream, config.n_stream)
        steps = min(config.train_source_timesteps, config.total_source_timesteps // config.n_stream)
        histories = read_histories(self._histories, room, self.split.train, streams, steps)
        if config.use_compressed_context:
            return TwoRegions.cut(histories, room.horizon, config.compress_interval, config.history_skip)
        return Windows.of(histories, room.horizon, config.n_transit, config.history_skip)

    def example(self) -> Any:
        """Returns a context from a history of zeros."""
        import torch

        from unisono.recipes.darkroom.data.windows import TwoRegions, Windows
        from unisono.recipes.darkroom.sources.source import Histories

        config, horizon = self.config, self.room.horizon
        length = config.compress_interval if config.use_compressed_context else config.n_transit
        zeros = torch.zeros(1, 1, -(-length // horizon) * horizon, dtype=torch.uint8)
        histories = Histories(torch.zeros(1, dtype=torch.int64), zeros, zeros, zeros)
        if config.use_compressed_context:
            return TwoRegions.cut(histories, horizon, length)[0]
        return Windows.of(histories, horizon, length)[0]

    def collate(self, items: list[Any]) -> Any:
        """Joins contexts, each of which is a batch of one; evaluation samples are pairs of numbers instead."""
        from unisono.recipes.darkroom.data.windows import Contexts, joined

        return joined(items) if isinstance(items[0], Contexts) else super().collate(items)

    def loss(self, model: nn.Module, batch: Contexts, noise: Noise) -> Loss:
        """Computes the cross-entropy of the learner's next actions, summed over the positions that count."""
        import torch
        import torch.nn.functional as F

        logits: Tensor = model(batch.tokens)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        actions, learned = batch.actions, batch.learned
        if self.config.loss_positions == "last":
            # Uses only one random position per context, as if the context ended there.
            if learned is None:
                position = noise.integers(0, actions.shape[1], 1)
            else:  # chooses the position in the current region
                position = learned.int().argmax(1, keepdim=True) + noise.integers(0, self.config.compress_interval, 1)
            logits = logits.gather(1, position[..., None].expand(-1, -1, logits.shape[-1]))
            actions, learned = actions.gather(1, position), None
        losses = F.cross_entropy(
            logits.flatten(0, 1),
            actions.flatten(),
            reduction="none",
            label_smoothing=self.config.label_smoothing,
        )
        correct = (logits.argmax(-1) == actions).flatten()
        if learned is None:
            return Loss(losses.sum(), actions.numel(), {"accuracy": correct.sum()})
        weight = learned.flatten()
        return Loss(torch.where(weight, losses, 0.0).sum(), weight.sum(), {"accuracy": (correct & weight).sum()})

    def evaluate(self, model: nn.Module, batch: Any, noise: Noise) -> Mapping[str, Any]:
        """Plays tasks with frozen weights, and compares the returns of the last episodes with the optimum."""
        import torch

        from unisono.recipes.darkroom.models.rollout import RegionContext, SlidingContext, play

        tasks, groups = batch
        config, repeats = self.config, self.config.eval_repeats
        steps = config.eval_episodes * self.room.horizon
        uniform = noise.uniform(repeats * steps, dtype=torch.float32).view(-1, steps)
        device_type = tasks.device.type
        is_mixed = torch.is_autocast_enabled(device_type)
        dtype = torch.get_autocast_dtype(device_type) if is_mixed else torch.float32
        rows = tasks.repeat_interleave(repeats)
        context: SlidingContext | RegionContext = SlidingContext(config.n_transit, self.room.horizon)
        if config.use_compressed_context:
            context = RegionContext(config.compress_interval)
        with torch.compiler.set_stance("force_eager"):  # the model was compiled for one shape, but rollouts have many
            returns = play(model, self.room, rows, uniform, context, greedy=config.greedy, dtype=dtype)  # type: ignore[arg-type]
        returns = returns.view(len(tasks), repeats, -1).double().mean(1)  # [tasks, episodes]
        optimum = self.room.optimum(tasks).double()
        last = returns[:, -_LAST_EPISODES:].mean(1)
        metrics: dict[str, Any] = {}
        for group, name in enumerate(GROUPS):
            if name == "train" and not config.eval_train_tasks:  # its fraction of the optimum would be 0 / 0
                continue
            member = (groups == group).double()
            metrics[f"{name}_of_optimum"] = (last @ member, optimum @ member)
            metrics[f"{name}_return"] = (last @ member, member.sum())
            metrics[f"{name}_solved"] = ((last >= _SOLVED * optimum).double() @ member, member.sum())
            metrics[f"{name}_return_by_episode"] = (member @ returns, member.sum().expand(returns.shape[1]))
        unseen = torch.tensor(self.split.unseen, device=tasks.device)
        which = ((tasks[:, None] == unseen) & (groups == GROUPS.index("unseen"))[:, None]).double()  # [tasks, unseen]
        metrics["unseen_of_optimum_by_task"] = (last @ which, optimum @ which)
        return metrics

    @cached_property
    def source_curve(self) -> list[float]:
        """The source learners' mean return on the unseen tasks, by episode."""
        from unisono.recipes.darkroom.data.histories import read_histories

        config, horizon = self.config, self.room.horizon
        steps = config.total_source_timesteps // config.n_stream // horizon * horizon
        histories = read_histories(self._histories, self.room, self.split.unseen, config.n_stream, steps)
        curve: list[float] = histories.rewards.view(-1, steps // horizon, horizon).double().sum(-1).mean(0).tolist()
        return curve

    def optimum(self, group: str) -> float:
        """Returns the mean optimal return of an episode over the tasks of a group that are played."""
        import torch

        tasks = getattr(self.split, group)
        played = tasks[: self.config.eval_train_tasks] if group == "train" else tasks
        return self.room.optimum(torch.tensor(played)).double().mean().item()

    def chance(self, group: str) -> float:
        """Returns the mean return of an episode with uniformly random actions, over the tasks of a group."""
        import torch

        from unisono.recipes.darkroom.rooms import NUM_ACTIONS

        tasks = torch.tensor(getattr(self.split, group)).repeat(_RANDOM_EPISODES)
        generator, total = torch.Generator().manual_seed(0), 0.0
        episode = self.room.begin(tasks)
        for _ in range(self.room.horizon):
            actions = torch.randint(NUM_ACTIONS, tasks.shape, generator=generator)
            episode, rewards = self.room.step(episode, actions)
            total += rewards.double().mean().item()
        return total

    def preview(self, model: nn.Module, step: int) -> Mapping[str, Any] | None:
        """Draws a figure and a table of the return per episode, with source learner, optimum and chance."""
        if not self.evaluations:
            return None
        from unisono.recipes.darkroom.previews import draw

        return draw(self)


def _split(config: Any, room: Room) -> Split:
    from unisono.recipes.darkroom.rooms import Split, split_tasks

    default = _KEY_TO_DOOR_TASKS if config.env == "dark_key_to_door" else room.num_tasks
    number = config.num_tasks or min(room.num_tasks, default)
    if not 3 <= number <= room.num_tasks:
        raise ConfigError(f"num_tasks: expected 3 to {room.num_tasks}, got {number}")
    tasks = list(range(room.num_tasks))
    if number < room.num_tasks:
        tasks = sorted(random.Random(config.env_split_seed).sample(tasks, number))
    if not 0 < config.train_env_ratio < 1:
        raise ConfigError(f"train_env_ratio: expected more than 0 and less than 1, got {config.train_env_ratio}")
    split = split_tasks(number, config.env_split_seed, config.train_env_ratio, config.num_validation)
    if not split.train or not split.unseen:
        raise ConfigError(
            f"train_env_ratio {config.train_env_ratio} and num_validation {config.num_validation} leave "
            f"{len(split.train)} of {number} tasks to train on and {len(split.unseen)} unseen; both need at least one"
        )
    return Split(*([tasks[index] for index in part] for part in (split.train, split.validation, split.unseen)))


def _source_settings(config: Any) -> dict[str, Any]:
    if config.source == "explorer":
        return {"noise": config.source_noise}
    if config.source != "ppo":
        return {}
    ppo = {"lr": config.source_lr, "n_steps": config.n_steps, "minibatch": config.source_batch_size}
    ppo |= {"n_epochs": config.n_epochs, "shared": config.source_shared}
    return {name: value for name, value in ppo.items() if value is not None}
