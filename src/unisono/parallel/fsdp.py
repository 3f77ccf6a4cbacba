"""Shards weights, gradients and optimizer state across ranks (FSDP2, `fully_shard`).

The optimizer and the moving average use the local shards as plain tensors: no communication, no DTensor dispatch, and
the fused optimizers' `found_inf` works. Only checkpoints see DTensors, which know the position of a shard.

Blocks are gathered in 16-bit. The few small weights that need more (a recipe's `full_precision`) are replicated, and
`gradients` sums their gradients across ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from unisono.errors import RecipeError
from unisono.parallel import fsdp_alone
from unisono.parallel.blocks.prefetch import ForwardPrefetch
from unisono.parallel.integer_weights import not_shardable
from unisono.parallel.materialize import fill_shard, is_on_meta, read_into
from unisono.parallel.row_shards import RowShards
from unisono.parallel.strategy import ForwardWrapper, Strategy, local_norm, local_part


class FSDP(Strategy):
    """Each rank holds a shard of every weight; each block is gathered before it computes."""

    name = "fsdp"
    sharded = collective = True
    guardable = False  # every forward pass gathers weights from all ranks

    _replicated_gradients: Sequence[Tensor] = ()  # gradients of the weights that are not sharded
    _sums_in_backward = True  # the next backward pass sums gradients across ranks

    def _set_up(self, wrapper: ForwardWrapper, blocks: Sequence[nn.Module]) -> nn.Module:
        placement, settings = self.placement, self.settings
        for name, parameter in wrapper.model.named_parameters():
            if parameter.dim() == 0:
                raise RecipeError(f"fsdp cannot shard the scalar weight {name}; give it the shape (1,), or use ddp")
            if parameter.numel() == 0:
                raise RecipeError(f"fsdp cannot shard the weight {name}, which has no elements; remove it, or use ddp")
        # Do not use cast_forward_inputs, because autocast chooses the types, as in other strategies. Gathered
        # weights are 16-bit, and gradients are summed in float32. On the CPU weights are gathered in float32, because
        # layer norm on the CPU rejects 16-bit weights with 32-bit inputs.
        gathered = placement.compute_type if placement.device.type == "cuda" else None
        precision = MixedPrecisionPolicy(
            param_dtype=gathered,
            reduce_dtype=torch.float32 if gathered else None,
            cast_forward_inputs=False,
        )
        offload = CPUOffloadPolicy() if settings.fsdp_cpu_offload else OffloadPolicy()
        replicated = {parameter for name, parameter in wrapper.model.named_parameters() if name in self._exact}
        replicated |= not_shardable(wrapper)
        for module in [*blocks, wrapper]:
            fully_shard(
                module,
                mesh=self.shard_mesh.devices,
                mp_policy=precision,
                offload_policy=offload,
                # Keep the weights outside of blocks (the head) gathered, because the backward pass begins with them.
                reshard_after_forward=settings.fsdp_reshard_after_forward and module is not wrapper,
                ignored_params=replicated,
            )
        self._prefetch = ForwardPrefetch(wrapper, blocks)
        for module in wrapper.modules():
            if isinstance(module, FSDPModule):
                # Use a plain sum, which gloo also supports; the engine divides by the true count.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        home = torch.device("cpu") if settings.fsdp_cpu_offload else placement.device
        if is_on_meta(wrapper):
            self._make_shards(wrapper, home)
        if settings.fsdp_cpu_offload:
            _move_buffers(wrapper, placement.device)
            # Call named_parameters() again, because weights that were on meta have been replaced.
            for parameter in wrapper.model.parameters():
                if not isinstance(parameter, DTensor):  # a replicated weight
                    parameter.data = parameter.data.to(placement.device)
            return wrapper
        return wrapper.to(placement.device)

    def _make_shards(self, wrapper: ForwardWrapper, device: torch.device) -> None:
        """Fills the shards of a model on the meta device; each rank reads only its own rows."""
        assert self._source is not None
        shards = ((name, local_part(parameter.detach())) for name, parameter in wrapper.named_parameters())
        # Preserve tensors that are already real, such as buffers and a LoRA's weights.
        real = {name: tensor.clone() for name, tensor in (*wrapper.named_buffers(), *shards) if not tensor.is_meta}
        wrapper.to_empty(device=device)
        with torch.no_grad():
            for name, buffer in wrapper.named_buffers():
                buffer.copy_(real[name])
            for name, parameter in wrapper.model.named_parameters():
                if f"model.{name}" in real:
                    local_part(parameter).copy_(real[f"model.{name}"])
                elif isinstance(parameter, DTensor):
                    mesh, rows = self.shard_mesh, parameter.shape[0]
                    fill_shard(name, parameter.to_local(), mesh.shard, mesh.size, rows, self._source)
                else:
                    read_into(parameter, name, self._source)

    def _local_parameters(self) -> list[tuple[str, nn.Parameter]]:
        # torch 2.9 moves uneven shards to other memory in the first forward pass: references from before it would be
        # stale, and those weights would never be trained.
        self.infer(lambda model: None)
        self.weights_changed()
        self._whole = {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        with torch.no_grad():
            return [(name, nn.Parameter(local_part(parameter.detach()))) for name, parameter in self._whole.items()]

    def train(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Returns call(model, *arguments); the backward pass sums the gradients across ranks."""
        self._prefetch.enable(torch.is_grad_enabled())
        return super().train(call, *arguments)

    def infer(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Returns call(model, *arguments), computed without gradients."""
        self._prefetch.enable(False)
        return super().infer(call, *arguments)

    @property
    def can_try_out(self) -> bool:
        """Whether this version of torch can compute a pass without the other ranks."""
        return fsdp_alone.is_possible(self.wrapped) and not self._gathers

    @contextmanager
    def trying_out(self) -> Iterator[None]:
        """A context for passes that only show whether they fit into memory; they communicate nothing."""
        assert isinstance(self.wrapped, FSDPModule)
        self._sum_in_backward(self.settings.fsdp_sync == "every")
        with fsdp_alone.alone(self.wrapped):
            yield

    def begin_step(self, *, guarded: bool) -> None:
        """Called on every rank before the first micro-batch of a step."""
        self._sum_in_backward(self.settings.fsdp_sync == "every")

    def reduce_in_backward(self) -> None:
        """Called before the last backward pass of a step."""
        self._sum_in_backward(True)

    def _sum_in_backward(self, enabled: bool) -> None:
        """Sets whether the next backward passes sum gradients across ranks; FSDP adds them up on each rank otherwise.

        This covers the sums within a group of shards and those between replicas. torch can also skip only the latter
        (`set_requires_all_reduce`), but then loses the gradients of a block that the last micro-batch does not use.
        """
        if enabled != self._sums_in_backward:
            self._sums_in_backward = enabled
            assert isinstance(self.wrapped, FSDPModule)
            self.wrapped.set_requires_gradient_sync(enabled)

    def gradients(self) -> list[Tensor]:
        """Returns the gradients of this rank's shards, and of replicated weights, which it sums across ranks."""
        gradients = []
        for name, local in self.parameters:
            gradient = self._whole[name].grad
            local.grad = None if gradient is None else local_part(gradient)
            if local.grad is not None:
                gradients.append(local.grad)
        self._replicated_gradients = [
            local.grad for name, local in self.parameters if name in self._exact and local.grad is not None
        ]
        if self._replicated_gradients and self.placement.world > 1:
            flat = torch.cat([gradient.flatten() for gradient in self._replicated_gradients])
            dist.all_reduce(flat)
            parts = torch.split(flat, [gradient.numel() for gradient in self._replicated_gradients])
            for gradient, part in zip(self._replicated_gradients, parts, strict=True):
                gradient.copy_(part.view_as(gradient))
        return gradients

    def _whole_weights(self) -> Mapping[str, nn.Parameter]:
        """Returns the sharded parameters; the gathered parameters that modules see have the same requires_grad."""
        return self._whole

    def clear_gradients(self) -> None:
        """Frees the gradients."""
        super().clear_gradients()
        self._replicated_gradients = []
        for _, local in self.parameters:
            local.grad = None

    def norm(self, tensors: list[Tensor]) -> Tensor:
        """Returns the norm across all ranks: sums the squares of shards, and counts replicated tensors once.

        All ranks take part, even if each replica could compute the norm itself: only a sum over all ranks has the same
        bits on every rank, and replicas that clip by different factors would drift apart.
        """
        replicated_ids = {id(gradient) for gradient in self._replicated_gradients}
        shards = [tensor for tensor in tensors if id(tensor) not in replicated_ids]
        replicated = [tensor for tensor in tensors if id(tensor) in replicated_ids]
        square = local_norm(shards, self.placement.device).square() / self.shard_mesh.num_replicas
        if replicated:
            square = square + local_norm(replicated, self.placement.device).square() / self.placement.world
        if self.placement.world > 1:
            dist.all_reduce(square)
        return square.sqrt()

    def whole_shape(self, name: str) -> torch.Size:
        """Returns the shape of weight `name` before sharding."""
        return self._whole[name].shape

    def row_shards(self) -> RowShards:
        """Returns the sharding of the weights: by rows, except those in full precision."""
        whole = {id(local): self._whole[name] for name, local in self.parameters}
        shapes = {key: weight.shape for key, weight in whole.items() if isinstance(weight, DTensor)}
        mesh = self.shard_mesh
        return RowShards(
            shapes, mesh.shard, mesh.size, self.placement.device, mesh.group, has_replicas=mesh.num_replicas > 1
        )

    def as_stored(self, name: str, local: Tensor, *, by_rows: bool | None = None) -> Tensor:
        """Returns the shard as a DTensor, which knows its position in the whole weight."""
        whole = self._whole[name]
        if by_rows is None:
            by_rows = isinstance(whole, DTensor) and local.shape == whole.to_local().shape
        if not by_rows or not isinstance(whole, DTensor):
            return local
        # from_local would copy an offloaded shard to the mesh's device, and loading would fill the copy. It would also
        # infer shape and stride from the shard, which is wrong for uneven shards.
        mesh = self.shard_mesh.hosts if local.device.type == "cpu" else whole.device_mesh
        shape, stride = whole.shape, whole.stride()
        if local.shape[1:] != shape[1:]:  # optimizer state with rows of another length
            shape = torch.Size((shape[0], *local.shape[1:]))
            stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(local, mesh, whole.placements, run_check=False, shape=shape, stride=stride)

    def weights_changed(self) -> None:
        """Frees gathered weights; those outside blocks would stay gathered until a backward pass and become stale."""
        for module in self.wrapped.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def _move_buffers(module: nn.Module, device: torch.device) -> None:
    for owner in module.modules():
        for name, buffer in owner.named_buffers(recurse=False):
            setattr(owner, name, buffer.to(device))
