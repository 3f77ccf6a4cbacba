"""The settings of the recipe `darkroom`. Most names are those of other implementations' config files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from unisono.engine.recipe import Recipe


@dataclass
class Config(Recipe.Config):
    """Algorithm Distillation"""

    env: Literal["darkroom", "darkroom_permuted", "dark_key_to_door"] = "darkroom"
    """Environment to train on. The agent does not know where the goal is (darkroom), what its actions do (darkroom_permuted), or where the key and the door are (dark_key_to_door)."""
    grid_size: int = 9
    """Number of cells along each side of the grid."""
    horizon: int = 0
    """Number of steps per episode. 0 uses the environment's usual length: 20, or 50 for dark_key_to_door."""
    env_split_seed: int = 0
    """Random seed of the split of the tasks into training, validation and unseen tasks."""
    train_env_ratio: float = 0.9
    """Fraction of the tasks to use for training and validation. The rest are unseen until evaluation."""
    num_validation: int = 8
    """Number of tasks to hold out from the training fraction for validation, which selects the best checkpoint."""
    num_tasks: int = 0
    """Number of tasks to use, drawn with env_split_seed. 0 uses all tasks, or 500 for dark_key_to_door."""

    source: Literal["explorer", "q_learning", "noise", "ppo"] = "explorer"
    """Source learner whose learning histories are distilled."""
    alg_seed: int = 42
    """Random seed of the source learners. Part of the history file's name."""
    n_stream: int = 100
    """Number of source learners per task."""
    total_source_timesteps: int = 100_000
    """Number of environment steps per task, summed over its n_stream source learners."""
    source_noise: float = 0.0
    """explorer: probability of taking a random action."""
    source_shared: bool = False
    """ppo: train one policy per task on the steps of all its learners, as other implementations do, instead of one per learner."""
    source_lr: float | None = None
    """ppo: learning rate. Default: 5e-3, or 3e-4 with source_shared."""
    n_steps: int = 20
    """ppo: number of steps per rollout."""
    source_batch_size: int = 50
    """ppo: number of transitions per minibatch (`batch_size` in an algorithm file)."""
    n_epochs: int | None = None
    """ppo: number of passes over each rollout. Default: 4, or 20 with source_shared."""
    traj_dir: str | None = None
    """HDF5 file of learning histories, or a folder to read them from or collect them into. Default: a folder inside the run folder."""

    train_n_stream: int = 100
    """Number of source learners per task to train on."""
    train_source_timesteps: int = 1000
    """Number of steps at the start of each history to train on."""
    history_skip: int = 1
    """Train only on every n-th episode of each history, so that the transformer learns faster in context than its source learner. 1 uses all episodes."""
    n_transit: int = 240
    """Context length in tokens: one per transition, and two separators with use_compressed_context."""
    loss_positions: Literal["every", "last"] = "every"
    """Positions at which the loss predicts the next action: all positions of the context, or only the last one of a context of random length."""
    use_compressed_context: bool = False
    """Use the previous and the current region of the history as context, instead of the last n_transit transitions."""
    compress_interval: int = 80
    """Number of transitions per region, with use_compressed_context."""

    tf_n_embd: int = 64
    """Hidden size of the transformer."""
    tf_n_layer: int = 4
    """Number of transformer layers."""
    tf_n_head: int = 4
    """Number of attention heads; must divide tf_n_embd."""
    tf_n_inner: int = 256
    """Hidden size of the feed-forward layers."""
    tf_dropout: float = 0.0
    """Dropout probability after the embedding, attention and feed-forward layers."""
    tf_attn_dropout: float = 0.0
    """Dropout probability of the attention weights."""
    label_smoothing: float = 0.0
    """Label smoothing of the cross-entropy loss."""

    eval_episodes: int = 100
    """Number of episodes to play in context per task and repetition of an evaluation."""
    eval_repeats: int = 4
    """Number of repetitions of each task in an evaluation."""
    eval_train_tasks: int = 8
    """Number of training tasks to play in evaluations, for comparison with unseen tasks."""
    greedy: bool = False
    """Take the most likely action in evaluations instead of sampling one."""
