"""The interface of a strategy: where weights live and how gradients are summed. It knows nothing about losses.

A strategy puts the model into a `ForwardWrapper` and wraps that with DDP or FSDP. Callers pass a function of the model,
and the wrapper's forward pass runs it: DDP's and FSDP's hooks fire, while the function sees the plain model. So recipes
can call any method of their model and never see a wrapper.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unisono.errors import RecipeError
from unisono.parallel.buffers import BufferSlots
from unisono.parallel.materialize import Weights
from unisono.parallel.row_shards import RowShards
from unisono.settings import ParallelSettings


@dataclass(frozen=True)
class Placement:
    """Where this process computes."""

    device: torch.device
    rank: int
    world: int
    devices: Sequence[torch.device]  # more than one only for dp
    compute_type: torch.dtype | None  # 16-bit type of mixed precision
    deterministic: bool = False


class ForwardWrapper(nn.Module):
    """A module whose forward pass calls any function of the model, so that DDP and FSDP can wrap it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """The result of call(model, *arguments)."""
        return call(self.model, *arguments)


class Strategy(ABC):
    """One way to spread a model over devices."""

    name: ClassVar[str]
    collective: ClassVar[bool] = False  # backward passes (and those of sharded models forward) wait for all ranks
    guardable = True
    """Whether a step that failed on some rank can be repeated in place: no collective before all have agreed."""
    sharded: ClassVar[bool] = False  # each rank holds a part of every weight, and every forward pass needs all ranks

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[nn.Module],
        placement: Placement,
        settings: ParallelSettings,
        exact: Sequence[str] = (),
        weights: Weights | None = None,
        *,
        gathers: bool = False,
    ) -> None:
        """`exact` names weights that are never used in 16 bit; `weights` fills a model that is on meta.

        `gathers`: a forward pass needs all ranks, whatever the strategy: of something frozen each has only a part.
        """
        self.model, self.placement, self.settings, self._gathers = model, placement, settings, gathers
        self._exact, self._weights = frozenset(exact), weights
        self.wrapped = self._set_up(ForwardWrapper(model), blocks)
        self.buffers = BufferSlots(model)
        """The model's buffers, as they are at any time."""
        self._all_parameters = list(self.model.parameters())  # walking through the modules takes a while
        self.parameters = self._local_parameters()
        """(name, parameter) as the optimizer sees them: whole weights, or this rank's shards of them."""

    @abstractmethod
    def _set_up(self, wrapper: ForwardWrapper, blocks: Sequence[nn.Module]) -> nn.Module:
        """Places and wraps the model."""

    @property
    def gradient_divisor(self) -> float:
        """The summed gradients arrive divided by this."""
        return 1.0

    def train(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """call(model, *arguments) with gradients that are summed over the ranks in backward."""
        return self.wrapped(call, *arguments)

    def rows(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """As `train`, of a function that gives a row for each sample instead of sums."""
        return self.train(call, *arguments)

    def infer(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """call(model, *arguments) without gradients."""
        with torch.no_grad():
            return self.wrapped(call, *arguments)

    def begin_step(self, *, guarded: bool) -> None:  # noqa: B027 (most strategies have nothing to do)
        """Before the first micro-batch of every step, on every rank."""

    def accumulating(self, *, last: bool) -> AbstractContextManager[None]:
        """Around a forward pass: its gradients need to be summed over the ranks only after the last micro-batch."""
        return nullcontext()

    def arm(self) -> None:  # noqa: B027
        """After the last forward pass of a step that is not guarded: its backward pass sums over the ranks."""

    def reduce(self) -> None:  # noqa: B027
        """Sums the gradients of a guarded step over the ranks, when all know that everybody has them."""

    def gradients(self) -> list[Tensor]:
        """This rank's gradients of `parameters`, where there are any; also attaches them for the optimizer."""
        return [parameter.grad for _, parameter in self.parameters if parameter.grad is not None]

    def without_gradient(self) -> list[str]:
        """Names of trained weights that took no part in the step."""
        return [name for name, parameter in self.parameters if parameter.grad is None]

    def keep_gradients(self) -> bool:
        """From now on gradients stay where they are, after the first steps; False where they cannot."""
        return False

    @property
    def gradients_stay(self) -> bool:
        """Whether backward passes find their gradients in the same places of memory in every step."""
        return False

    def clear_gradients(self) -> None:
        """Frees the gradients, or zeroes them."""
        for parameter in self._all_parameters:
            parameter.grad = None

    def norm(self, tensors: list[Tensor]) -> Tensor:
        """The norm over all weights of the model of tensors shaped like `parameters`, equal on every rank."""
        return local_norm(tensors, self.placement.device)

    def _local_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, parameter) for name, parameter in self.model.named_parameters() if parameter.requires_grad]

    def row_shards(self) -> RowShards:
        """How `parameters` are cut over the ranks, for optimizers that look at more than single elements."""
        return RowShards()

    def tensors(self) -> dict[str, Tensor]:
        """The model's weights and persistent buffers by name, as a checkpoint stores them."""
        persistent = self.model.state_dict().keys()
        buffers = {name: buffer for name, buffer in self.model.named_buffers() if name in persistent}
        kept = {
            name: parameter.detach()
            for name, parameter in self.model.named_parameters()
            # A frozen weight that came from a file comes from there again: a LoRA's checkpoint is small.
            if parameter.requires_grad or self._weights is None
        }
        return {**kept, **buffers}

    def whole_shape(self, name: str) -> torch.Size:
        """The shape of weight `name` over all ranks."""
        return dict(self.parameters)[name].shape

    def as_stored(self, name: str, local: Tensor) -> Tensor:
        """A tensor shaped like this rank's part of weight `name`, as a checkpoint stores it."""
        return local

    def weights_changed(self) -> None:  # noqa: B027 (most strategies have nothing to do)
        """Must be called after weights were changed other than by the optimizer (loaded, swapped with the average)."""

    def share_buffers(self) -> None:
        """Makes the first rank's buffers (batch norm's statistics) everybody's: one model is evaluated and saved."""
        if self.placement.world > 1:
            for buffer in self.buffers.tensors():
                dist.broadcast(buffer, src=0)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """The model in evaluation mode."""
        was_training = [module for module in self.model.modules() if module.training]
        self.model.eval()
        try:
            yield
        finally:
            for module in was_training:
                module.training = True


def unused_weights(names: Sequence[str], *, sharded: bool = False) -> RecipeError:
    """The error, on any number of ranks, for trained weights that a step gave no gradient."""
    last = "use ddp with find_unused_parameters" if sharded else "pass find_unused_parameters"
    return RecipeError(
        f"{len(names)} weights took no part in the loss, {names[0]} for instance; use them, freeze them "
        f"(requires_grad_(False)), or {last}"
    )


def local_norm(tensors: list[Tensor], device: torch.device) -> Tensor:
    """The norm of all tensors together, as a tensor on the device: no host sync."""
    if not tensors:
        return torch.zeros((), device=device)
    norms = torch.stack([norm.to(device) for norm in torch._foreach_norm(tensors)])
    return torch.linalg.vector_norm(norms)  # type: ignore[no-any-return]


def place_frozen(modules: Mapping[str, nn.Module], device: torch.device) -> None:
    """Puts modules that are used but not trained on the device, in evaluation mode."""
    for module in modules.values():
        module.to(device).eval().requires_grad_(False)


def cast_weights(
    model: nn.Module, dtype: torch.dtype, frozen: torch.dtype | None = None, exact: Sequence[str] = ()
) -> None:
    """Gives the weights another floating type; buffers keep theirs (they may be complex), except for float64.

    Weights that are not trained need no more bits than they are used with: they get the type `frozen`, where one is
    given, unless they are `exact`.
    """
    for prefix, module in model.named_modules():
        for short, parameter in module.named_parameters(recurse=False):
            if parameter.is_floating_point():
                name = f"{prefix}.{short}" if prefix else short
                less = frozen is not None and not parameter.requires_grad and name not in exact
                parameter.data = parameter.data.to(frozen if less else dtype)
        for name, buffer in module.named_buffers(recurse=False):
            if dtype == torch.float64 and (buffer.is_floating_point() or buffer.is_complex()):
                setattr(module, name, buffer.to(torch.complex128 if buffer.is_complex() else dtype))
