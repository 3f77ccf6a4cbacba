"""The contract between a recipe and the engine.

A recipe says what is trained: a model, data, a loss. It never sees a rank, a device count, a wrapper or a micro-batch
size; how the work is spread out is the engine's business, and must not change the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:  # `unisono --help` must not wait for torch
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.utils.data import Dataset

    from unisono.data.noise import Noise
    from unisono.parallel.materialize import Weights
    from unisono.settings import Settings


@dataclass(frozen=True)
class Loss:
    """The loss of a micro-batch as a sum over items and the number of items summed.

    Never a mean: the engine divides by the count of the whole global batch (all micro-batches, all ranks), which is the
    only way that accumulation and many ranks equal one big batch. `metrics` holds further sums over the same items.
    """

    total: Tensor
    count: Tensor | int | float
    metrics: Mapping[str, Tensor | float] = field(default_factory=dict)


@dataclass(frozen=True)
class Work:
    """What `prepare` gets: a folder to work in and its part of the work."""

    folder: Path
    _part: int = 0
    _parts: int = 1
    _asked_to_stop: Callable[[], bool] = bool
    device: str = "cpu"
    """Where to compute what is prepared."""
    _say: Callable[[str], None] = lambda text: None
    seed: int = 0
    """The run's seed, for what is drawn at random."""
    _gather: Callable[[Any], list[Any]] = lambda value: [value]

    def meet(self) -> bool:
        """Waits until all processes have come here; True when somebody asked to stop: return, then."""
        return any(self.gather(self.stopping))

    def gather(self, value: Any) -> list[Any]:
        """What every process says, the main one first; all of them must ask. Plain objects only."""
        return self._gather(value)

    def message(self, text: str) -> None:
        """A line for the user, once over all processes."""
        self._say(text)

    @property
    def stopping(self) -> bool:
        """Whether somebody asked the run to stop: finish the item at hand and return; the next start goes on."""
        return self._asked_to_stop()

    def share(self, items: Sequence[Any]) -> Sequence[Any]:
        """The items to prepare here; over all processes each item is prepared once."""
        return items[self._part :: self._parts]

    def largest_share(self, items: Sequence[Any]) -> int:
        """How many items the process with most of them gets: for work that all must do equally often."""
        return -(-len(items) // self._parts)


class Recipe:
    """What to train. Subclass it, write `model`, `dataset` and `loss`, and give it to `unisono train`."""

    defaults: ClassVar[Mapping[str, Any]] = {}
    """Engine settings for which this recipe wants another default, e.g. {"batch_size": 512}."""

    aliases: ClassVar[Mapping[str, str]] = {}
    """Other names of settings that people know, in files and as flags, e.g. {"lr": "learning_rate"}."""

    fixed: ClassVar[Sequence[str]] = ()
    """Settings of its own that cannot change when a run goes on, e.g. a factor that weights are used with."""

    verify_precision: ClassVar[str] = "float64"
    """What `unisono verify` computes in unless told: another one for a model that casts to float32 by itself."""

    headline: ClassVar[Sequence[str]] = ()
    """Which numbers of an evaluation are shown while it trains, e.g. "eval/mAP"; all, unless some are named."""

    evaluations: list[dict[str, Any]]
    """What the run's evaluations have found so far, each with its step; the engine fills it, for `preview` to draw."""

    global_batch: int = 0
    """Samples of one optimizer step over all ranks; the engine fills it before it asks for model()."""

    flash_attention: bool = False
    """Whether the run computes in 16 bit on a GPU that has it; the engine fills it before it asks for model()."""

    many_shapes: ClassVar[bool] = False
    """Whether batches come in ever new shapes: attention then leaves out cuDNN, which gets ready for each of them."""

    @dataclass
    class Config:
        """The recipe's own settings; every field becomes a flag and a config-file key."""

    prepared: Path | None = None
    """The folder in which prepare() has worked, for what model() needs to know of it; also when a run is exported."""

    remarks: Sequence[str] = ()
    """What the user should be told once, when the run begins; for dataset() and model() to set."""

    def __init__(self, config: Any) -> None:
        self.config = config

    @classmethod
    def translate(cls, values: dict[str, Any], where: str) -> Mapping[str, Any]:
        """What the config file `where` says, in this recipe's words; called once for each file, with its includes.

        Raise ConfigError for a key that cannot be honoured, with the reason. Unquoted words of a file are still text.
        """
        return values

    @classmethod
    def presets(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Defaults that follow from other settings, e.g. of a small model by name; what the user has said wins."""
        return {}

    def check_settings(self, settings: Settings) -> None:
        """Refuses (ConfigError) settings of the engine that this recipe cannot be trained with; before prepare()."""

    def prepare(self, work: Work) -> None:
        """One-off work shared over the ranks before training (cache, collect, download); must be resumable."""

    refresh_every: int = 0
    """So many steps apart refresh() is called; 0: never."""

    def refresh(self, step: int, work: Work) -> None:
        """Work between steps, shared over the ranks: replacing what is trained on, for the steps after `step`.

        A run that goes on in between calls it again for the same step: what is there need not be made anew.
        """

    whole_epochs: ClassVar[bool] = False
    """Whether each epoch ends with a step of its own, smaller than the others; else steps read on into the next."""

    def learning_rate(self, step: int) -> float | None:
        """The rate that the recipe itself has set for the next step (a scheduler's); None: as the settings say."""
        return None

    def remember(self) -> Any:
        """What the recipe itself must know again when a run goes on: a JSON value, kept in every checkpoint."""
        return None

    def recall(self, remembered: Any) -> None:
        """Takes up what remember() gave when the checkpoint was saved; it comes from a file and may be anything."""

    def model(self) -> nn.Module:
        """The module to train, on the CPU or on meta. It may hold several modules."""
        raise NotImplementedError

    def weights(self, model: nn.Module) -> Weights | None:
        """The initial weights of a model that model() left on meta; None lets its modules initialise themselves.

        A sharded strategy asks for the rows of its shards only: no process ever holds the whole model. Weights that are
        not trained are then not written into checkpoints either, also where model() has read them from files itself.
        """
        return None

    def full_precision(self, model: nn.Module) -> Sequence[str]:
        """Names of weights that must not be rounded to 16 bit for computing; few and small ones."""
        return ()

    def dataset(self, split: str) -> Dataset[Any] | None:
        """Map-style data ("train" or "eval"); None for "eval" means there is nothing to evaluate on.

        A data set of mixed sizes has `shape(index)`, anything hashable, and gets batches of one shape each. It may have
        `cost(index)`, how much work and memory a sample takes beside others; else that is the product of its shape.
        """
        raise NotImplementedError

    def collate(self, items: list[Any]) -> Any:
        """Turns items into a batch; torch's default_collate unless overridden."""
        from torch.utils.data import default_collate

        return default_collate(items)

    def loss(self, model: nn.Module, batch: Any, noise: Noise) -> Loss:
        """The loss of a batch, as a sum and a count."""
        raise NotImplementedError

    @property
    def coupled(self) -> bool:
        """Whether the loss compares samples with each other: embed() and couple() then take the place of loss()."""
        return type(self).couple is not Recipe.couple

    def embed(self, model: nn.Module, batch: Any, noise: Noise) -> Mapping[str, Tensor]:
        """What a coupled loss needs of each sample of a batch: tensors of one row per sample."""
        raise NotImplementedError

    def couple(self, rows: Mapping[str, Tensor]) -> Loss:
        """The loss of a whole global batch, from the rows of all its samples in the order of the stream.

        It sees no model: what is trained acts through embed(). Every rank computes it.
        """
        raise NotImplementedError

    def optimizer(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> Optimizer | None:
        """The optimizer over (name, parameter) pairs; None takes the one from the settings."""
        return None

    def blocks(self, model: nn.Module) -> Sequence[nn.Module] | None:
        """The repeated blocks that are sharded, compiled and recomputed one by one; None lets the engine find them."""
        return None

    def before_evaluation(self, model: nn.Module) -> None:
        """What an evaluation needs before its first batch, e.g. the embeddings of all queries; on every rank."""

    def evaluate(self, model: nn.Module, batch: Any, noise: Noise) -> Mapping[str, Any]:
        """Metrics of an evaluation batch as (sum, count) pairs or torchmetrics objects; the loss unless overridden.

        Sum and count may be tensors of one dimension: a curve. A metric object that computes a mapping names its
        numbers itself.
        """
        loss = self.loss(model, batch, noise)
        return {"loss": (loss.total, loss.count), **{name: (value, loss.count) for name, value in loss.metrics.items()}}

    def frozen(self) -> Mapping[str, nn.Module]:
        """Modules that are used but not trained (a teacher, a VAE); the engine places them."""
        return {}

    def sharded(self) -> Mapping[str, tuple[Weights, Sequence[str]]]:
        """Those of frozen() that are on meta and shared out: each rank holds a part, and gathers blocks to compute.

        Name -> where its weights come from, and which of them stay whole on every rank, in a type of their own.
        """
        return {}

    def preview(self, model: nn.Module, step: int) -> Mapping[str, Any] | None:
        """What a person wants to look at while it trains: file name -> image, figure, text or bytes.

        Every rank runs it (a sharded model needs all of them); the engine writes the files once, under previews/.
        """
        return None

    def over_ranks(self, function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        """[function(item) for item in items], shared over all processes; for preview(). Results are plain objects."""
        return self._over_ranks(function, items)

    _over_ranks: Callable[..., list[Any]] = staticmethod(lambda function, items: [function(item) for item in items])

    def export(self, model: nn.Module, folder: Path) -> None:
        """Writes the trained weights in the format the ecosystem loads; one safetensors file unless overridden."""
        from safetensors.torch import save_model

        save_model(model, str(folder / "model.safetensors"))
