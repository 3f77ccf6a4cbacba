"""Weights, gradients and optimizer state sharded over the ranks (FSDP2, `fully_shard`).

The optimizer and the moving average work on the local shards as plain tensors: no communication, no DTensor dispatch,
and the fused optimizers' `found_inf` keeps working. DTensors appear again only where a checkpoint needs to know which
part of the whole weight a shard is.

Blocks are gathered in 16 bit. The few small weights that must not be (a recipe's `full_precision`) are left whole on
every rank, and their gradients are summed when the step asks for them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from unisono.errors import RecipeError
from unisono.parallel.materialize import fill_shard, is_on_meta
from unisono.parallel.row_shards import RowShards
from unisono.parallel.strategy import ForwardWrapper, Strategy, local_norm


class FSDP(Strategy):
    """A part of every weight on every rank; blocks are gathered when they are needed."""

    name = "fsdp"
    sharded = collective = True
    guardable = False  # every forward pass gathers weights from all ranks

    _on_every_rank: Sequence[Tensor] = ()  # gradients of the weights that are not sharded

    def _set_up(self, wrapper: ForwardWrapper, blocks: Sequence[nn.Module]) -> nn.Module:
        placement, settings = self.placement, self.settings
        for name, parameter in wrapper.model.named_parameters():
            if parameter.dim() == 0:
                raise RecipeError(f"fsdp cannot shard the scalar weight {name}; give it the shape (1,), or use ddp")
        mesh = init_device_mesh(placement.device.type, (placement.world,))
        self._host_mesh = mesh if placement.device.type == "cpu" else init_device_mesh("cpu", (placement.world,))
        # cast_forward_inputs is off because autocast decides about types, as under the other strategies; gathered
        # weights are 16 bit, gradients are summed in 32 bit. Not on the CPU, whose layer norm refuses 16-bit weights
        # with 32-bit inputs where CUDA's autocast helps out: there autocast alone makes 16 bit of them.
        gathered = placement.compute_type if placement.device.type == "cuda" else None
        precision = MixedPrecisionPolicy(
            param_dtype=gathered,
            reduce_dtype=torch.float32 if gathered else None,
            cast_forward_inputs=False,
        )
        offload = CPUOffloadPolicy() if settings.fsdp_cpu_offload else OffloadPolicy()
        whole = {parameter for name, parameter in wrapper.model.named_parameters() if name in self._exact}
        for module in [*blocks, wrapper]:
            fully_shard(
                module,
                mesh=mesh,
                mp_policy=precision,
                offload_policy=offload,
                reshard_after_forward=settings.fsdp_reshard_after_forward,
                ignored_params=whole,
            )
        for module in wrapper.modules():
            if isinstance(module, FSDPModule):
                # A plain sum, which gloo has too; the engine divides by the true count.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        home = torch.device("cpu") if settings.fsdp_cpu_offload else placement.device
        if is_on_meta(wrapper):
            self._make_shards(wrapper, home)
        if settings.fsdp_cpu_offload:
            _move_buffers(wrapper, placement.device)
            # Asked for again: weights that were on meta are new ones by now.
            for name, parameter in wrapper.model.named_parameters():
                if name in self._exact:
                    parameter.data = parameter.data.to(placement.device)
            return wrapper
        return wrapper.to(placement.device)

    def _make_shards(self, wrapper: ForwardWrapper, device: torch.device) -> None:
        """Gives a model on meta its weights, each rank those of its own shards."""
        assert self._weights is not None
        # What is real already (buffers, a LoRA) is kept.
        named = [*wrapper.named_buffers(), *((name, _local(it.detach())) for name, it in wrapper.named_parameters())]
        kept = {name: tensor.clone() for name, tensor in named if not tensor.is_meta}
        wrapper.to_empty(device=device)
        with torch.no_grad():
            for name, buffer in wrapper.named_buffers():
                buffer.copy_(kept[name])
            for name, parameter in wrapper.model.named_parameters():
                if f"model.{name}" in kept:
                    _local(parameter).copy_(kept[f"model.{name}"])
                elif isinstance(parameter, DTensor):
                    placement, rows = self.placement, parameter.shape[0]
                    fill_shard(name, parameter.to_local(), placement.rank, placement.world, rows, self._weights)
                else:
                    parameter.copy_(self._weights.rows(name, 0, len(parameter)))

    def _local_parameters(self) -> list[tuple[str, nn.Parameter]]:
        # torch 2.9 gives uneven shards other memory in its first forward pass: what is taken before would be left
        # behind, and those weights never learn.
        self.infer(lambda model: None)
        self.weights_changed()
        self._whole = {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        with torch.no_grad():
            return [(name, nn.Parameter(_local(parameter.detach()))) for name, parameter in self._whole.items()]

    def gradients(self) -> list[Tensor]:
        """The gradients of this rank's shards, and of the weights that every rank has."""
        found = []
        for name, local in self.parameters:
            gradient = self._whole[name].grad
            local.grad = None if gradient is None else _local(gradient)
            if local.grad is not None:
                found.append(local.grad)
        self._on_every_rank = [
            local.grad for name, local in self.parameters if name in self._exact and local.grad is not None
        ]
        if self._on_every_rank and self.placement.world > 1:
            together = torch.cat([gradient.flatten() for gradient in self._on_every_rank])
            dist.all_reduce(together)
            parts = torch.split(together, [gradient.numel() for gradient in self._on_every_rank])
            for gradient, part in zip(self._on_every_rank, parts, strict=True):
                gradient.copy_(part.view_as(gradient))
        return found

    def without_gradient(self) -> list[str]:
        """Names of trained weights that took no part in the step."""
        return [name for name, parameter in self._whole.items() if parameter.grad is None]

    def clear_gradients(self) -> None:
        """Frees the gradients."""
        super().clear_gradients()
        self._on_every_rank = []
        for _, local in self.parameters:
            local.grad = None

    def norm(self, tensors: list[Tensor]) -> Tensor:
        """Every element lies in exactly one shard, so the squares add up over the ranks; what all have counts once."""
        known = {id(gradient) for gradient in self._on_every_rank}
        shards = [tensor for tensor in tensors if id(tensor) not in known]
        whole = [tensor for tensor in tensors if id(tensor) in known]
        square = local_norm(shards, self.placement.device).square()
        if whole:
            square = square + local_norm(whole, self.placement.device).square() / self.placement.world
        if self.placement.world > 1:
            dist.all_reduce(square)
        return square.sqrt()

    def whole_shape(self, name: str) -> torch.Size:
        """The shape of weight `name` before it was cut into shards."""
        return self._whole[name].shape

    def row_shards(self) -> RowShards:
        """Every weight is cut by rows, except those in full precision."""
        whole = {id(local): self._whole[name] for name, local in self.parameters}
        shapes = {key: weight.shape for key, weight in whole.items() if isinstance(weight, DTensor)}
        return RowShards(shapes, self.placement.rank, self.placement.world, self.placement.device)

    def as_stored(self, name: str, local: Tensor) -> Tensor:
        """A tensor with this rank's rows of a weight, as a DTensor that knows its place in the whole."""
        whole = self._whole[name]
        if not isinstance(whole, DTensor):
            return local
        # from_local would copy a shard to the mesh's device (offloaded shards are on the CPU, and the copy would be
        # loaded in their place), and would take shape and stride from the shard, which is wrong for an uneven one.
        mesh = self._host_mesh if local.device.type == "cpu" else whole.device_mesh
        shape, stride = whole.shape, whole.stride()
        if local.shape[1:] != shape[1:]:  # an optimizer's state with rows of another length
            shape = torch.Size((shape[0], *local.shape[1:]))
            stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(local, mesh, whole.placements, run_check=False, shape=shape, stride=stride)

    def weights_changed(self) -> None:
        """Drops gathered weights: after a forward pass without backward the root's stay gathered, and go stale."""
        for module in self.wrapped.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _move_buffers(module: nn.Module, device: torch.device) -> None:
    for owner in module.modules():
        for name, buffer in owner.named_buffers(recurse=False):
            setattr(owner, name, buffer.to(device))
