"""The interface between a recipe and the engine.

A recipe defines what to train: a model, data, a loss. It never sees a rank, a device count, a wrapper or a
micro-batch size. The engine distributes the work, which must not change the result.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from unisono.engine.clock import Clock
from unisono.engine.turns.group import Group as Group
from unisono.engine.work import Part as Part
from unisono.engine.work import Work as Work

if TYPE_CHECKING:  # `unisono --help` must not wait for torch
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.utils.data import Dataset

    from unisono.data.noise import Noise
    from unisono.parallel.context import Context
    from unisono.parallel.materialize import Weights
    from unisono.parallel.row_shards import RowShards
    from unisono.settings import Settings


@dataclass(frozen=True)
class Loss:
    """The loss of a micro-batch as a sum over items and the number of items summed.

    It is never a mean: the engine divides by the count of the whole global batch (all micro-batches of all ranks). Only
    then do accumulation and several ranks give the result of one large batch. `metrics` holds further sums over the
    same items, and (sum, count) pairs over other items: {"accuracy": (right, len(batch))} in a loss that counts tokens.
    """

    total: Tensor
    count: Tensor | int | float
    metrics: Mapping[str, Tensor | float | tuple[Tensor | float, Tensor | float]] = field(default_factory=dict)


class Recipe:
    """Defines what to train. Subclass it, write `model`, `dataset` and `loss`, and pass it to `unisono train`."""

    defaults: ClassVar[Mapping[str, Any]] = {}
    """This recipe's own defaults of engine settings, e.g. {"batch_size": 512}."""

    aliases: ClassVar[Mapping[str, str]] = {}
    """Alternative names of settings, in config files and as flags, e.g. {"lr": "learning_rate"}."""

    file_keys: ClassVar[Mapping[str, Any]] = {}
    """Additional keys that translate() accepts, with their types, e.g. {"alg": str}; they become flags too."""

    fixed: ClassVar[Sequence[str]] = ()
    """Settings of this recipe that cannot change when a run is resumed: the engine rejects a different value.

    List every setting that decides which data is trained on or held out (paths, splits, what a sample contains), or the
    model's shape or the meaning of its weights. Other settings may change; the run records the change.
    """

    verify_precision: ClassVar[str] = "float64"
    """The default precision of `unisono verify`; change it for a model that casts to float32 itself."""

    title: str = ""
    """The title in the start-up banner; by default the name of the class."""

    headline: ClassVar[Sequence[str]] = ()
    """The metrics that each evaluation prints, e.g. "eval/mAP"; by default all of them."""

    labels: Mapping[str, Sequence[str]] = {}
    """Names for the entries of a metric of evaluate() that is a list, e.g. {"right_by_class": ["cat", "dog"]}; the
    report then shows named bars instead of a curve."""

    evaluations: list[dict[str, Any]]
    """The results of the run's evaluations so far, each with its step; set by the engine, for use in `preview`."""

    global_batch: int = 0
    """Number of samples per optimizer step across all ranks; set by the engine before it calls model()."""

    part: Part = Part(0, 1)
    """The part of a stream that this rank reads (see dataset()); set by the engine before it calls prepare()."""

    shards: RowShards | None = None
    """The sharding of the weights across ranks, for optimizers of `unisono.optim`; set before optimizer() is called."""

    clock: Clock = Clock()
    """The current step, the same on every rank: `self.clock.step`, and `self.clock.progress` from 0 to 1.

    Use it in loss(), embed(), couple(), evaluate() and preview(). Do not use it in datasets and collate(), which run
    ahead of the step in other processes.
    """

    group: str = ""
    """The name of the group of weights that this step trains, in a recipe with groups(); set by the engine.

    It is set for loss(), optimizer(), learning_rate() and flops(); in evaluate() and preview(), to the first group.
    """

    supports_context_parallel: ClassVar[bool] = False
    """Whether the model divides a sample's tokens between the ranks of `self.context` (setting context_parallel)."""

    @cached_property
    def context(self) -> Context:
        """The ranks that share each sample; the engine sets it before it calls model(), which passes it to the model.

        All of these ranks get the same batches. On each of them, loss() and evaluate() must return the same sums, over
        whole samples: gather the model's output, or sum over each rank's own tokens and use `self.context.sum()`.
        """
        from unisono.parallel.context import Context

        return Context()

    flash_attention: bool = False
    """Whether the run computes in 16 bit on a GPU with flash attention; the engine sets it before it calls model()."""

    base_precision: str = "auto"
    """The setting base_precision, set before prepare(). The engine quantises the modules of model() and frozen()."""

    has_frozen_weights: bool | None = None
    """Whether there are frozen weights for base_precision to quantise. None: the engine looks at model() and frozen().

    False: the engine rejects base_precision before prepare(). True: the recipe may quantise weights itself, so the
    engine accepts the setting even if it finds no frozen weights."""

    is_estimate: bool = False
    """Whether this object only predicts memory: prepare() is not called, and loss() gets tensors without data."""

    @property
    def predicts_memory(self) -> bool:
        """Whether model(), loss() and a sample show all the memory of a step; by default if nothing is frozen().

        Otherwise `--fit` changes nothing.
        """
        return type(self).frozen is Recipe.frozen

    many_shapes: ClassVar[bool] = False
    """Whether batches have many shapes; attention then avoids cuDNN, which is slow for each new shape."""

    built_by_rank_zero: ClassVar[bool] = True
    """Whether rank 0 may build a large model alone, while the others call model() on the meta device.

    They then receive rank 0's weights. Set it to False if model() must run in full on every rank.
    """

    samples_per_epoch: ClassVar[int | None] = None
    """Number of samples in an epoch, if it is smaller than the dataset because an incomplete last batch is dropped."""

    @dataclass
    class Config:
        """The recipe's own settings; every field becomes a flag and a config-file key."""

    prepared: Path | None = None
    """The folder that prepare() wrote to, for use in model() and dataset(); also set when a run is exported."""

    remarks: Sequence[str] = ()
    """Notes for the user, printed once at the start of the run; dataset() and model() may set them."""

    def __init__(self, config: Any) -> None:
        self.config = config

    @classmethod
    def translate(cls, values: dict[str, Any], where: str) -> Mapping[str, Any]:
        """Translates the contents of the config file `where` to this recipe's settings; called once per file.

        Raise ConfigError, with the reason, for a key that has no equivalent. Unquoted values in the file arrive as
        strings.
        """
        return values

    @classmethod
    def presets(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns defaults that depend on other settings, e.g. on a model's name; the user's values take precedence."""
        return {}

    def check_settings(self, settings: Settings) -> None:
        """Raises ConfigError for engine settings that this recipe does not support; called before prepare().

        `--print_config` calls it too. Check the recipe's own settings here or in the constructor, and load nothing.
        """

    def metric_names(self) -> Collection[str] | None:
        """Returns the names of the scalar metrics of an evaluation; empty without evaluation data, None if unknown.

        The engine uses the names to reject a wrong best_metric before prepare().
        """
        return None

    def prepare(self, work: Work) -> None:
        """Does one-off work before training (caching, downloads), shared by all ranks; it must be resumable."""

    refresh_every: int = 0
    """Number of steps between calls of refresh(); 0: never."""

    def refresh(self, step: int, work: Work) -> None:
        """Does work between steps, shared by all ranks: replaces the training data for the steps after `step`.

        A run that resumes between two refreshes calls it again for the same step; existing results can be reused.
        """

    whole_epochs: ClassVar[bool] = False
    """Whether steps never mix samples of two epochs; the last step of an epoch may then be smaller than the others."""

    def learning_rate(self, step: int) -> float | Sequence[float] | None:
        """Returns the learning rate of step `step`, counted from 0; None for the schedule in the settings.

        A single number is the rate of the optimizer's first parameter group, and the other groups keep their ratio to
        it; a sequence contains one number per group. The rate must depend only on `step` and on what remember() stores.
        In a recipe with groups(), `step` counts the steps of `self.group` only.
        """
        return None

    def remember(self) -> Any:
        """Returns the recipe's own state: a JSON value that every checkpoint stores, for recall() after a resume."""
        return None

    def recall(self, remembered: Any) -> None:
        """Restores the value that remember() returned; it comes from a file, so check it."""

    def model(self) -> nn.Module:
        """Returns the module to train, on the CPU or on the meta device. It may hold several modules.

        With several ranks and a model of more than 64 MiB, only rank 0 builds the model on the CPU; the other ranks
        call model() with meta as torch's default device. If that fails, they call it again and build it on the CPU too.
        """
        raise NotImplementedError

    def groups(self) -> Sequence[Group]:
        """Returns the groups of weights to train in turn, such as a generator and its critic; by default no groups.

        Each step computes loss() for one group, `self.group`, and updates only its weights; gradients still flow
        through the others. Every trainable weight must be in one group. Groups must depend on the settings only.
        """
        return ()

    def weights(self, model: nn.Module) -> Weights | None:
        """Returns the initial weights of a model that is on meta; with None, its modules initialise themselves.

        A sharded strategy reads only the rows of its shards, so no process holds the whole model. Checkpoints then do
        not store weights that are not trained, even if model() has read them from files itself.
        """
        return None

    def full_precision(self, model: nn.Module) -> Sequence[str]:
        """Returns the names of weights that are never cast to 16-bit; they should be few and small."""
        return ()

    def frozen_linears(self, part: str, module: nn.Module) -> Sequence[str] | None:
        """Returns the names of the frozen linear layers that base_precision converts; None: all in repeated blocks.

        `part` is "model" for the module of model(), otherwise a name in frozen().
        """
        return None

    def dataset(self, split: str) -> Dataset[Any] | None:
        """Returns the map-style dataset of the split "train" or "eval"; None for "eval" if there is no evaluation data.

        A dataset with samples of different shapes defines `shape(index)`, which returns any hashable value; each batch
        then has samples of one shape. It may define `cost(index)`, the relative work and memory of a sample; by default
        that is the product of its shape. For "train" it may be a stream instead, an IterableDataset of the samples of
        `self.part`, with state_dict() and load_state_dict(): the run then resumes on the same number of ranks only.
        """
        raise NotImplementedError

    def example(self) -> Any | None:
        """Returns a sample like those of dataset("train"), of the largest shape, made without reading data.

        Its tensors may be on the meta device. `--fit` with `--print_config` predicts memory with it; with None it reads
        a sample of dataset("train"), which then must work without prepare().
        """
        return None

    def collate(self, items: list[Any]) -> Any:
        """Makes a batch from items; by default torch's default_collate."""
        from torch.utils.data import default_collate

        return default_collate(items)

    def loss(self, model: nn.Module, batch: Any, noise: Noise) -> Loss:
        """Returns the loss of a batch, as a sum over items and their count."""
        raise NotImplementedError

    @property
    def coupled(self) -> bool:
        """Whether the loss compares samples with each other: embed() and couple() then replace loss()."""
        return type(self).couple is not Recipe.couple or self.couples_by_rows

    @property
    def couples_by_rows(self) -> bool:
        """Whether the engine calls couple_rows() instead of couple(): the most derived override of either decides."""
        for kind in type(self).__mro__:
            if "couple" in vars(kind) or "couple_rows" in vars(kind):
                return kind is not Recipe and "couple_rows" in vars(kind)
        return False

    def embed(self, model: nn.Module, batch: Any, noise: Noise) -> Mapping[str, Tensor]:
        """Returns the embeddings that couple() compares: tensors with one row per sample of the batch."""
        raise NotImplementedError

    def couple(self, rows: Mapping[str, Tensor]) -> Loss:
        """Returns the loss of a whole global batch, from the rows of all its samples in sample order.

        Every rank computes it. It has no access to the model: weights take effect only through embed().
        """
        return self.couple_rows(rows, 0, len(next(iter(rows.values()))))

    def couple_rows(self, rows: Mapping[str, Tensor], start: int, stop: int) -> Loss:
        """Returns the part of the loss for the rows start to stop, compared with all rows; replaces couple().

        Total, count and metrics of the parts must add up to the values for all rows. Each rank then computes only its
        share of the rows, at most a micro-batch at a time. The matrix of B samples on N ranks has at most B / N x B
        elements, instead of B x B.
        """
        raise NotImplementedError

    def flops(self, batch: Any) -> float | None:
        """Returns the floating-point operations of forward and backward of a batch; None: torch counts them.

        It may depend on the shapes of the batch only. Define it if the model launches kernels of its own or is
        compiled: the engine counts PyTorch's operations only. A multiply-add is two operations; recomputation is none.
        """
        return None

    def optimizer(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> Optimizer | None:
        """Creates the optimizer from (name, parameter) pairs; return None to use the optimizer in the settings.

        In a recipe with groups(), it is called for each group, with the weights of `self.group`.
        """
        return None

    def blocks(self, model: nn.Module) -> Sequence[nn.Module] | None:
        """Returns the repeated blocks, to shard, compile and recompute one by one; None: the engine finds them."""
        return None

    def before_evaluation(self, model: nn.Module) -> None:
        """Called on every rank before the first batch of an evaluation, e.g. to embed all queries."""

    def evaluate(self, model: nn.Module, batch: Any, noise: Noise) -> Mapping[str, Any]:
        """Returns a batch's metrics as (sum, count) pairs or torchmetrics objects; by default the metrics of loss().

        Sum and count may be one-dimensional tensors: the metric is then a curve. A torchmetrics object that computes a
        mapping yields one metric per key. In a recipe with groups(), the default is each group's loss and metrics, as
        `critic/loss`.
        """
        if not (groups := self.groups()):
            return _measured(self.loss(model, batch, noise))
        metrics: dict[str, Any] = {}
        for group in groups:
            self.group = group.name
            of_group = _measured(self.loss(model, batch, noise))
            metrics |= {f"{group.name}/{name}": value for name, value in of_group.items()}
        self.group = groups[0].name
        return metrics

    def frozen(self) -> Mapping[str, nn.Module]:
        """Returns modules that are used but not trained (a teacher, a VAE); the engine moves them to the device."""
        return {}

    def sharded(self) -> Mapping[str, tuple[Weights, Sequence[str]]]:
        """Returns the modules of frozen() that are on the meta device and are to be sharded across ranks.

        Maps a module's name to the source of its weights and the names of weights that every rank holds whole, in
        their own dtype. Each rank holds a shard and gathers each block when it computes with it.
        """
        return {}

    def preview(self, model: nn.Module, step: int) -> Mapping[str, Any] | None:
        """Draws previews of the model during training; returns file name -> image, figure, text or bytes.

        Every rank calls it, because a sharded model needs all ranks; the main rank writes the files to previews/.
        """
        return None

    def over_ranks(self, function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        """Computes [function(item) for item in items] on all ranks, for preview(). Results must be plain objects."""
        return self._over_ranks(function, items)

    _over_ranks: Callable[..., list[Any]] = staticmethod(lambda function, items: [function(item) for item in items])

    export_formats: ClassVar[Sequence[str]] = ()
    """Names of the formats that export() can write, for `unisono export --format`; empty if there is only one."""

    export_format: str | None = None
    """The format to write, one of `export_formats`, set before export() is called; None: the recipe decides."""

    def export(self, model: nn.Module, folder: Path) -> None:
        """Writes the trained weights in the ecosystem's format; by default one safetensors file."""
        from safetensors.torch import save_model

        save_model(model, str(folder / "model.safetensors"))


def _measured(loss: Loss) -> dict[str, Any]:
    """Returns a loss and its metrics as (sum, count) pairs."""
    own = {name: value if isinstance(value, tuple) else (value, loss.count) for name, value in loss.metrics.items()}
    return {"loss": (loss.total, loss.count), **own}
