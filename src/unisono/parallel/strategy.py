"""The interface of a strategy: where weights are stored and how gradients are summed. It knows nothing about losses.

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
from torch.distributed.tensor import DTensor

from unisono.errors import RecipeError
from unisono.parallel.blocks.gradients import HostGradients
from unisono.parallel.blocks.swap import BlockSwap
from unisono.parallel.buffers import BufferSlots
from unisono.parallel.materialize import Weights
from unisono.parallel.row_shards import RowShards
from unisono.parallel.shard_mesh import ShardMesh
from unisono.settings import ParallelSettings


@dataclass(frozen=True)
class Placement:
    """The devices and the rank of this process."""

    device: torch.device
    rank: int
    world: int
    devices: Sequence[torch.device]  # several only for dp
    compute_type: torch.dtype | None  # 16-bit type of mixed precision
    deterministic: bool = False
    nodes: Sequence[int] = ()  # machine of each rank; empty for a single machine
    shard_size: int | None = None  # consecutive ranks that hold one copy of the weights under fsdp; None: all ranks
    context: int = 1  # number of consecutive ranks that share a sample

    @property
    def local_world(self) -> int:
        """The number of ranks on this machine."""
        return self.nodes.count(self.nodes[self.rank]) if self.nodes else self.world

    @property
    def data_rank(self) -> int:
        """The index of the share of the samples that this rank reads; the ranks of a context group read the same."""
        return self.rank // self.context

    @property
    def data_world(self) -> int:
        """The number of shares that a global batch is divided into."""
        return self.world // self.context

    @property
    def counts(self) -> bool:
        """Whether this rank's sums count: all ranks of a context group compute the same sums, so only one may count."""
        return self.rank % self.context == 0


class ForwardWrapper(nn.Module):
    """A module whose forward pass calls any function of the model, so that DDP and FSDP can wrap it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Returns the result of call(model, *arguments)."""
        return call(self.model, *arguments)


class Strategy(ABC):
    """One way to distribute a model across devices."""

    name: ClassVar[str]
    collective: ClassVar[bool] = False  # backward passes (and forward passes of sharded models) contain collectives
    guardable = True
    """Whether a step that failed on a rank can be repeated: no collective runs before all ranks have agreed."""
    sharded: ClassVar[bool] = False  # each rank holds a shard of every weight, and forward passes need all ranks

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[nn.Module],
        placement: Placement,
        settings: ParallelSettings,
        exact: Sequence[str] = (),
        weights: Weights | None = None,
        *,
        source: Weights | None = None,
        groups: Sequence[Sequence[str]] = (),
        gathers: bool = False,
    ) -> None:
        """`exact` names weights that are never cast to 16-bit; `weights` fills a model on the meta device.

        `source` fills it instead, if only rank 0 has the initial weights.
        `groups`: the names of weights that are trained in turn (`train_only`); by default all are trained in each step.
        `gathers`: forward passes contain collectives under any strategy, because a frozen module is sharded or ranks
        share a sample.
        """
        self.model, self.placement, self.settings, self._gathers = model, placement, settings, gathers
        self._exact, self._weights, self._source = frozenset(exact), weights, source or weights
        self._groups = groups
        self.shard_mesh = ShardMesh(
            placement.rank, placement.world, placement.shard_size or placement.world, placement.device.type
        )
        """The ranks that hold shards of the same weights: for fsdp, and for frozen modules under any strategy."""
        self.wrapped = self._set_up(ForwardWrapper(model), blocks)
        self.buffers = BufferSlots(model)
        """The model's buffers."""
        self._all_parameters = list(self.model.parameters())  # cached, because traversing the modules is slow
        self.parameters = self._local_parameters()
        """(name, parameter) pairs for the optimizer: whole weights, or this rank's shards."""
        self._on_host: HostGradients | None = None
        self._turn: int | None = None  # the only group that is trained at present; None: all weights

    def add_swapped(self, swap: BlockSwap) -> None:
        """Adds the weights of swapped blocks, which the model lacked until now."""
        if swap.gradients is not None:
            self._on_host = swap.gradients
            self._all_parameters = list(self.model.parameters())
            self.parameters = self._local_parameters()

    @abstractmethod
    def _set_up(self, wrapper: ForwardWrapper, blocks: Sequence[nn.Module]) -> nn.Module:
        """Places and wraps the model."""

    @property
    def gradient_divisor(self) -> float:
        """The number by which the strategy has divided the summed gradients."""
        return 1.0

    def train_only(self, group: int) -> None:
        """Makes the next passes train one of the groups, until the next call.

        The other weights then need no gradients, but gradients flow through them.
        """
        if group != self._turn:
            trained, weights = set(self._groups[group]), self._whole_weights()
            for name, parameter in weights.items():
                parameter.requires_grad_(name in trained)
            self._turn = group

    def _whole_weights(self) -> Mapping[str, nn.Parameter]:
        """Returns the trained parameters of the model by name: the whole weights, where `parameters` holds shards."""
        return dict(self.parameters)

    def _trained_now(self) -> Mapping[str, nn.Parameter]:
        """Returns the model's parameters that the current step trains."""
        weights = self._whole_weights()
        return weights if self._turn is None else {name: weights[name] for name in self._groups[self._turn]}

    def train(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Returns call(model, *arguments); the backward pass sums the gradients across ranks."""
        return self.wrapped(call, *arguments)

    def rows(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Like `train`, for a function that returns one row per sample instead of sums."""
        return self.train(call, *arguments)

    def infer(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Returns call(model, *arguments), computed without gradients."""
        with torch.no_grad():
            return self.wrapped(call, *arguments)

    @property
    def can_try_out(self) -> bool:
        """Whether passes inside `trying_out` communicate nothing, so that one rank without memory blocks no other."""
        return self.guardable

    def trying_out(self) -> AbstractContextManager[None]:
        """A context for passes that only show whether they fit into memory."""
        return nullcontext()

    def begin_step(self, *, guarded: bool) -> None:  # noqa: B027 (most strategies have nothing to do)
        """Called on every rank before the first micro-batch of a step."""

    def accumulating(self, *, last: bool) -> AbstractContextManager[None]:
        """A context for a forward pass; only the last micro-batch of a step needs to reduce gradients."""
        return nullcontext()

    def reduce_in_backward(self) -> None:  # noqa: B027
        """Called after the last forward pass of a step that is not guarded: its backward pass reduces gradients."""

    def reduce(self) -> None:  # noqa: B027
        """Reduces the gradients of a guarded step across ranks, once all ranks know that none failed."""

    def gradients(self) -> list[Tensor]:
        """Returns this rank's gradients of `parameters`; also attaches them to the parameters for the optimizer."""
        return [parameter.grad for _, parameter in self.parameters if parameter.grad is not None]

    def without_gradient(self) -> list[str]:
        """Returns the names of trained weights that the step did not use."""
        return [name for name, parameter in self._trained_now().items() if parameter.grad is None]

    def check_dense(self) -> None:
        """Rejects sparse gradients, which cannot be summed across ranks."""
        for name, parameter in self.parameters:
            if parameter.grad is not None and parameter.grad.layout != torch.strided:
                raise sparse_gradient(name)

    def fix_gradient_addresses(self) -> bool:
        """Keeps gradients at fixed addresses after the first steps; returns False if the strategy cannot."""
        return False

    @property
    def has_fixed_gradients(self) -> bool:
        """Whether gradients are at the same addresses in every step from now on."""
        return False

    def clear_gradients(self) -> None:
        """Frees the gradients, or zeroes those at fixed addresses."""
        for parameter in self._all_parameters:
            parameter.grad = None
        if self._on_host is not None:
            self._on_host.forget()

    def norm(self, tensors: list[Tensor]) -> Tensor:
        """Returns the norm over the whole model of tensors that are shaped like `parameters`; equal on every rank."""
        return local_norm(tensors, self.placement.device, self._on_host)

    def _local_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, parameter) for name, parameter in self.model.named_parameters() if parameter.requires_grad]

    def row_shards(self) -> RowShards:
        """Returns the sharding of `parameters` across ranks, for optimizers whose updates are not elementwise."""
        return RowShards()

    def tensors(self) -> dict[str, Tensor]:
        """Returns the model's weights and persistent buffers by name, as a checkpoint stores them."""
        persistent = self.model.state_dict().keys()
        buffers = {name: buffer for name, buffer in self.model.named_buffers() if name in persistent}
        trained = self._whole_weights()
        weights = {
            name: parameter.detach()
            for name, parameter in self.model.named_parameters()
            # A resumed run reads frozen weights from their files again, so a LoRA's checkpoint is small.
            if name in trained or self._weights is None
        }
        return {**weights, **buffers}

    def whole_shape(self, name: str) -> torch.Size:
        """Returns the shape of weight `name` before sharding."""
        return dict(self.parameters)[name].shape

    def as_stored(self, name: str, local: Tensor, *, by_rows: bool | None = None) -> Tensor:
        """Returns a tensor that belongs to weight `name`, as a checkpoint stores it.

        `by_rows`: whether the tensor has a row for each of this rank's rows of the weight; by default, it does if the
        shapes are equal.
        """
        return local

    def weights_changed(self) -> None:  # noqa: B027 (most strategies have nothing to do)
        """Refreshes copies of the weights; call it after loading or swapping weights, not after an optimizer step."""

    def share_buffers(self) -> None:
        """Broadcasts rank 0's buffers (batch norm statistics), so that all ranks evaluate and save the same model."""
        if self.placement.world > 1:
            for buffer in self.buffers.tensors():
                dist.broadcast(buffer, src=0)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """A context with the model in evaluation mode."""
        was_training = [module for module in self.model.modules() if module.training]
        self.model.eval()
        try:
            yield
        finally:
            for module in was_training:
                module.training = True


def unused_weights(names: Sequence[str], *, sharded: bool = False) -> RecipeError:
    """Returns the error for trained weights without a gradient, the same on any number of ranks."""
    remedy = "use ddp with find_unused_parameters" if sharded else "pass find_unused_parameters"
    return RecipeError(
        f"the loss does not use {len(names)} of the trained weights, for instance {names[0]}; use them, freeze them "
        f"(requires_grad_(False)), or {remedy}"
    )


def sparse_gradient(name: str = "a weight") -> RecipeError:
    """Returns the error for a gradient that is not dense, the same on any number of ranks."""
    return RecipeError(f"the gradient of {name} is sparse, and ranks sum dense gradients; use a dense operation")


def local_part(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a sharded tensor, or a plain tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_norm(tensors: list[Tensor], device: torch.device, on_host: HostGradients | None = None) -> Tensor:
    """Returns the norm of all tensors together, as a tensor on the device, without a host sync."""
    if not tensors:
        return torch.zeros((), device=device)
    of_each = torch._foreach_norm(tensors) if on_host is None else on_host.norms(tensors)
    norms = torch.stack([norm.to(device) for norm in of_each])
    return torch.linalg.vector_norm(norms)  # type: ignore[no-any-return]


def place_frozen(modules: Mapping[str, nn.Module], device: torch.device) -> None:
    """Moves modules that are used but not trained to the device, in evaluation mode."""
    for module in modules.values():
        module.to(device).eval().requires_grad_(False)


def cast_weights(
    model: nn.Module, dtype: torch.dtype, frozen: torch.dtype | None = None, exact: Sequence[str] = ()
) -> None:
    """Casts floating-point weights to `dtype`; buffers (which may be complex) are cast only to float64.

    Frozen weights are cast to `frozen` instead, if it is given, unless `exact` names them: they need no higher
    precision than the computation.
    """
    for prefix, module in model.named_modules():
        for short, parameter in module.named_parameters(recurse=False):
            if parameter.is_floating_point():
                name = f"{prefix}.{short}" if prefix else short
                is_reduced = frozen is not None and not parameter.requires_grad and name not in exact
                parameter.data = parameter.data.to(frozen if is_reduced else dtype)
        for name, buffer in module.named_buffers(recurse=False):
            if dtype == torch.float64 and (buffer.is_floating_point() or buffer.is_complex()):
                setattr(module, name, buffer.to(torch.complex128 if buffer.is_complex() else dtype))
