"""The recipe `darkroom`: histories of learners in, a transformer that learns in its context out.

Collect what source learners live through (`sources/`), cut contexts out of it (`windows.py`), teach a transformer to
say what the learner did next (`model.py`), and let it play tasks that it has never seen (`play.py`).
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from unisono.engine.recipe import Loss, Recipe, Work
from unisono.errors import ConfigError
from unisono.recipes.darkroom.foreign_config import ALIASES, FILE_KEYS, translate

if TYPE_CHECKING:  # `unisono train darkroom --help` need not wait for torch
    from torch import Tensor, nn

    from unisono.data.noise import Noise
    from unisono.recipes.darkroom.data.windows import Contexts, Windows
    from unisono.recipes.darkroom.play import Regions, Sliding
    from unisono.recipes.darkroom.rooms import Room, Split

GROUPS = ("train", "validation", "unseen")
_LAST_EPISODES = 10
_SOLVED = 0.8
_GAMES = 2000
_PAIRS = 500  # of key and door


class Darkroom(Recipe):
    """Algorithm Distillation (Laskin et al. 2022) on the darkroom and its relatives."""

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
    aliases: ClassVar[Mapping[str, str]] = ALIASES
    file_keys: ClassVar[Mapping[str, Any]] = FILE_KEYS
    fixed: ClassVar[Sequence[str]] = (
        # Which tasks there are, and which of them are unseen:
        *("env", "grid_size", "horizon", "env_split_seed", "train_env_ratio", "num_validation", "num_tasks"),
        # Whose histories are trained on, and how contexts are cut out of them:
        *("source", "alg_seed", "n_stream", "total_source_timesteps", "source_noise", "source_shared", "source_lr"),
        *("n_steps", "source_batch_size", "n_epochs", "traj_dir", "train_n_stream", "train_source_timesteps"),
        *("history_skip", "n_transit", "use_compressed_context", "compress_interval"),
        # The model; another number of heads would fit the weights and be another function:
        *("tf_n_embd", "tf_n_layer", "tf_n_head", "tf_n_inner"),
    )

    @classmethod
    def translate(cls, values: dict[str, Any], where: str) -> Mapping[str, Any]:
        """Takes the configuration files that people have."""
        return translate(values, where)

    @dataclass
    class Config:
        """Algorithm Distillation"""

        env: Literal["darkroom", "darkroom_permuted", "dark_key_to_door"] = "darkroom"
        """The room: an unknown goal; unknown actions; an unknown key and door."""
        grid_size: int = 9
        """Cells along each side of the room."""
        horizon: int = 0
        """Steps of an episode; 0 is the room's own (20, 20, 50)."""
        env_split_seed: int = 0
        """Names the split of the tasks into seen and unseen ones."""
        train_env_ratio: float = 0.9
        """Part of the tasks that is seen in training."""
        num_validation: int = 8
        """Tasks taken out of the seen ones to choose the best checkpoint by; they are not trained on either."""
        num_tasks: int = 0
        """Use so many of the room's tasks, drawn by env_split_seed; 0: all, but 500 of the pairs of key and door."""

        source: Literal["explorer", "q_learning", "noise", "ppo"] = "explorer"
        """The learner whose histories are distilled."""
        alg_seed: int = 42
        """Names the histories."""
        n_stream: int = 100
        """Independent learners per task."""
        total_source_timesteps: int = 100_000
        """Steps of all learners of a task together: each lives for total_source_timesteps / n_stream."""
        source_noise: float = 0.0
        """explorer: how often it does anything instead of what it wants."""
        source_shared: bool = False
        """ppo: the learners of a task share one policy, as in known implementations, instead of one each."""
        source_lr: float | None = None
        """ppo: learning rate (default 5e-3; shared 3e-4)."""
        n_steps: int = 20
        """ppo: steps of a rollout."""
        source_batch_size: int = 50
        """ppo: transitions of a minibatch (`batch_size` in an algorithm file)."""
        n_epochs: int | None = None
        """ppo: passes over a rollout (default 4; shared 20)."""
        traj_dir: str | None = None
        """Folder or HDF5 file with histories, collected into it if they are not there. Default: in the run's folder."""

        train_n_stream: int = 100
        """Use the first so many learners of each task."""
        train_source_timesteps: int = 1000
        """Use the first so many steps of each history."""
        history_skip: int = 1
        """Use every n-th episode of a history: the transformer then learns faster than its source did."""
        n_transit: int = 240
        """Tokens in the context: transitions, and with use_compressed_context the marks of a region."""
        loss_positions: Literal["every", "last"] = "every"
        """Where the next action is learned: at every transition of the context, or at the last one only."""
        use_compressed_context: bool = False
        """A context of two regions, the one before and the current one, instead of the last n_transit transitions."""
        compress_interval: int = 80
        """Transitions of a region."""

        tf_n_embd: int = 64
        """Width of the transformer."""
        tf_n_layer: int = 4
        """Its layers."""
        tf_n_head: int = 4
        """Its attention heads."""
        tf_n_inner: int = 256
        """Width of its feed-forward layers."""
        tf_dropout: float = 0.0
        """Dropout after embedding, attention and feed-forward layers."""
        tf_attn_dropout: float = 0.0
        """Dropout of attention weights."""
        label_smoothing: float = 0.0
        """Of the cross-entropy."""

        eval_episodes: int = 100
        """In-context episodes that are played."""
        eval_repeats: int = 4
        """How often each task is played."""
        eval_train_tasks: int = 8
        """So many of the tasks that are trained on are played too, for comparison."""
        greedy: bool = False
        """Play the likeliest action instead of drawing one."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        from unisono.recipes.darkroom.checks import check_config

        self.room = _room(config)
        self.split = _split(config, self.room)
        tasks = len(self.split.train) + len(self.split.validation) + len(self.split.unseen)
        check_config(config, self.room, tasks)
        self._histories: str | Path | Sequence[Path] = ()
        self.labels = {"unseen_of_optimum_by_task": [self.room.describe(task) for task in self.split.unseen]}

    def prepare(self, work: Work) -> None:
        """Lets the source learners live, all tasks at once, unless their histories are there already."""
        from unisono.recipes.darkroom.data.collect import collect
        from unisono.recipes.darkroom.data.histories import histories_in

        config = self.config
        name = f"history_{config.env}_{config.source}_alg-seed{config.alg_seed}"
        where = Path(config.traj_dir) if config.traj_dir else work.folder / "histories"
        known = histories_in(where, name) if config.traj_dir else []
        if known:
            self._histories = known
            return
        split, steps = self.split, config.total_source_timesteps // config.n_stream
        tasks = [*split.train, *split.validation, *split.unseen]
        self._histories = collect(
            self.room,
            config.source,
            tasks,
            config.n_stream,
            steps,
            config.alg_seed,
            where / name if config.traj_dir else where,
            work.share,
            work.device,
            lambda: work.stopping,
            _settings_of_source(config),
            work.progress,
        )

    def model(self) -> nn.Module:
        """A small causal transformer, one token per step."""
        from unisono.recipes.darkroom.model import HistoryReader, Shape

        config = self.config
        compressed = config.use_compressed_context
        return HistoryReader(
            Shape(
                room_size=config.grid_size,
                context=config.n_transit,
                width=config.tf_n_embd,
                num_layers=config.tf_n_layer,
                num_heads=config.tf_n_head,
                inner=config.tf_n_inner,
                dropout=config.tf_dropout,
                attention_dropout=config.tf_attn_dropout,
                marks=compressed,
            )
        )

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """None: a model this small is compiled as a whole."""
        return []

    def dataset(self, split: str) -> Any:
        """Contexts of the histories to train on; to evaluate on, tasks to play."""
        if split == "eval":
            groups = (self.split.train[: self.config.eval_train_tasks], self.split.validation, self.split.unseen)
            return [(task, group) for group, tasks in enumerate(groups) for task in tasks]
        return self._windows(self.split.train)

    def _windows(self, tasks: Sequence[int]) -> Windows:
        from unisono.recipes.darkroom.data.histories import read_histories
        from unisono.recipes.darkroom.data.windows import TwoRegions, Windows

        config = self.config
        lived = config.total_source_timesteps // config.n_stream
        streams, steps = min(config.train_n_stream, config.n_stream), min(config.train_source_timesteps, lived)
        histories = read_histories(self._histories, self.room, tasks, streams, steps)
        if config.use_compressed_context:
            return TwoRegions.cut(histories, self.room.horizon, config.compress_interval, config.history_skip)
        return Windows.of(histories, self.room.horizon, config.n_transit, config.history_skip)

    def loss(self, model: nn.Module, batch: Contexts, noise: Noise) -> Loss:
        """The cross-entropy of what the learner did next, summed over the steps where it is learned."""
        import torch
        import torch.nn.functional as F

        logits: Tensor = model(batch.tokens)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        actions, learned = batch.actions, batch.learned
        if self.config.loss_positions == "last":
            # The context as it is at some moment, and only what was done then: one action per context.
            if learned is None:
                position = noise.integers(0, actions.shape[1], 1)
            else:  # the current region: a slot before or after it would teach nothing
                position = learned.int().argmax(1, keepdim=True) + noise.integers(0, self.config.compress_interval, 1)
            logits = logits.gather(1, position[..., None].expand(-1, -1, logits.shape[-1]))
            actions, learned = actions.gather(1, position), None
        losses = F.cross_entropy(
            logits.flatten(0, 1),
            actions.flatten(),
            reduction="none",
            label_smoothing=self.config.label_smoothing,
        )
        right = (logits.argmax(-1) == actions).flatten()
        if learned is None:
            return Loss(losses.sum(), actions.numel(), {"accuracy": right.sum()})
        weight = learned.flatten()
        count = weight.sum()
        return Loss(torch.where(weight, losses, 0.0).sum(), count, {"accuracy": (right & weight).sum()})

    def evaluate(self, model: nn.Module, batch: Any, noise: Noise) -> Mapping[str, Any]:
        """Plays tasks with frozen weights: what it gets in the last episodes, against what could be got."""
        import torch

        from unisono.recipes.darkroom.play import play

        tasks, groups = batch
        config, repeats = self.config, self.config.eval_repeats
        steps = config.eval_episodes * self.room.horizon
        chances = noise.uniform(repeats * steps, dtype=torch.float32).view(-1, steps)
        on = tasks.device.type
        dtype = torch.get_autocast_dtype(on) if torch.is_autocast_enabled(on) else torch.float32
        rows = tasks.repeat_interleave(repeats)
        with torch.compiler.set_stance("force_eager"):  # compiled for one shape; playing has many
            returns = play(model, self.room, rows, chances, self._context(), greedy=config.greedy, dtype=dtype)  # type: ignore[arg-type]
        returns = returns.view(len(tasks), repeats, -1).double().mean(1)  # [tasks, episodes]
        optimum = self.room.optimum(tasks).double()
        last = returns[:, -_LAST_EPISODES:].mean(1)
        metrics: dict[str, Any] = {}
        for group, name in enumerate(GROUPS):
            if name == "train" and not config.eval_train_tasks:  # what was not played got no return of 0
                continue
            mine = (groups == group).double()
            metrics[f"{name}_of_optimum"] = (last @ mine, optimum @ mine)
            metrics[f"{name}_return"] = (last @ mine, mine.sum())
            metrics[f"{name}_solved"] = ((last >= _SOLVED * optimum).double() @ mine, mine.sum())
            metrics[f"{name}_return_by_episode"] = (mine @ returns, mine.sum().expand(returns.shape[1]))
        unseen = torch.tensor(self.split.unseen, device=tasks.device)
        which = ((tasks[:, None] == unseen) & (groups == GROUPS.index("unseen"))[:, None]).double()  # [tasks, unseen]
        metrics["unseen_of_optimum_by_task"] = (last @ which, optimum @ which)
        return metrics

    def _context(self) -> Sliding | Regions:
        from unisono.recipes.darkroom.play import Regions, Sliding

        if self.config.use_compressed_context:
            return Regions(self.config.compress_interval)
        return Sliding(self.config.n_transit, self.room.horizon)

    @cached_property
    def source_curve(self) -> list[float]:
        """Mean return of the source learners on the unseen tasks, episode by episode."""
        from unisono.recipes.darkroom.data.histories import read_histories

        config, horizon = self.config, self.room.horizon
        steps = config.total_source_timesteps // config.n_stream // horizon * horizon
        histories = read_histories(self._histories, self.room, self.split.unseen, config.n_stream, steps)
        curve: list[float] = histories.rewards.view(-1, steps // horizon, horizon).double().sum(-1).mean(0).tolist()
        return curve

    def optimum(self, group: str) -> float:
        """Mean over the tasks of a group that are played of the largest return of an episode."""
        import torch

        tasks = getattr(self.split, group)
        played = tasks[: self.config.eval_train_tasks] if group == "train" else tasks
        return self.room.optimum(torch.tensor(played)).double().mean().item()

    def chance(self, group: str) -> float:
        """Mean return on the tasks of a group of one who does anything, with equal chances."""
        import torch

        from unisono.recipes.darkroom.rooms import NUM_ACTIONS

        tasks = torch.tensor(getattr(self.split, group)).repeat(_GAMES)
        generator, total = torch.Generator().manual_seed(0), 0.0
        episode = self.room.begin(tasks)
        for _ in range(self.room.horizon):
            actions = torch.randint(NUM_ACTIONS, tasks.shape, generator=generator)
            episode, rewards = self.room.step(episode, actions)
            total += rewards.double().mean().item()
        return total

    def preview(self, model: nn.Module, step: int) -> Mapping[str, Any] | None:
        """The figure: return per in-context episode, against the source learner, the optimum and chance."""
        if not self.evaluations:
            return None
        from unisono.recipes.darkroom.previews import draw

        return draw(self)


def _room(config: Any) -> Room:
    from unisono.recipes.darkroom.rooms import ROOMS

    try:
        return ROOMS[config.env](config.grid_size, config.horizon)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _split(config: Any, room: Room) -> Split:
    from unisono.recipes.darkroom.rooms import Split, split_tasks

    number = config.num_tasks or min(room.num_tasks, _PAIRS if config.env == "dark_key_to_door" else room.num_tasks)
    if not 3 <= number <= room.num_tasks:
        raise ConfigError(f"num_tasks: expected 3 to {room.num_tasks}, got {number}")
    chosen = list(range(room.num_tasks))
    if number < room.num_tasks:
        chosen = sorted(random.Random(config.env_split_seed).sample(chosen, number))
    if not 0 < config.train_env_ratio < 1:
        raise ConfigError(
            f"train_env_ratio: expected more than 0 and less than 1, so that there are tasks to train on and unseen "
            f"ones, got {config.train_env_ratio}"
        )
    split = split_tasks(number, config.env_split_seed, config.train_env_ratio, config.num_validation)
    if not split.train or not split.unseen:
        raise ConfigError(
            f"of {number} tasks, train_env_ratio {config.train_env_ratio} and num_validation {config.num_validation} "
            f"leave {len(split.train)} to train on and {len(split.unseen)} unseen; there must be some of both"
        )
    return Split(*([chosen[index] for index in part] for part in (split.train, split.validation, split.unseen)))


def _settings_of_source(config: Any) -> dict[str, Any]:
    if config.source == "explorer":
        return {"noise": config.source_noise}
    if config.source != "ppo":
        return {}
    given = {"lr": config.source_lr, "n_steps": config.n_steps, "minibatch": config.source_batch_size}
    given |= {"n_epochs": config.n_epochs, "shared": config.source_shared}
    return {name: value for name, value in given.items() if value is not None}
