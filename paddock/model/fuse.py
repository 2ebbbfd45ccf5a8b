"""Fused linear layers: layers with the same input run as one product if weights are contiguous.

`fuse_weights` moves the weights once, in place: names and parameters stay, and copying new values
into them keeps the layout. A parameter that is later given other storage is multiplied separately
again.

T tokens, D inputs, F outputs of all maps.
"""

from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ALIGNMENT_BYTES = 16  # alignment of a weight for fast matrix products


@runtime_checkable
class Fusable(Protocol):
    """A linear layer whose weight is not one float matrix, such as a quantized one."""

    def weights_by_output(self) -> tuple[Tensor, ...] | None:
        """Its tensors, outputs first; None if it cannot be fused."""

    def linear_with(self, x_TD: Tensor, *weights: Tensor) -> Tensor:
        """Its forward pass with these tensors instead of its own."""


def fuse_weights(linears: Sequence[nn.Module]) -> None:
    """Move the weights of adjacent layers of one kind into one allocation. Skipped: layers that are
    not fusable, and weights that are views of a larger storage."""
    for run in _fusable_runs(linears):
        for weights in zip(*map(_weights_of, run), strict=True):
            if (
                len(weights) > 1
                and contiguous_stack(weights) is None
                and all(map(_owns_storage, weights))
            ):
                _stack_in_memory(weights)


def fused_linears(x_TD: Tensor, linears: Sequence[nn.Module]) -> list[Tensor]:
    """linear(x) of each layer, computed as one product where weights are contiguous."""
    outputs_T: list[Tensor] = []
    for run in _fusable_runs(linears):
        stacks = list(zip(*map(_weights_of, run), strict=True))
        stacked = [stack for weights in stacks if (stack := contiguous_stack(weights)) is not None]
        if stacks and len(stacked) == len(stacks):
            outputs = [len(weight) for weight in stacks[0]]
            outputs_T += _linear(run[0], x_TD, stacked).split(outputs, dim=-1)
        else:
            outputs_T += [linear(x_TD) for linear in run]
    return outputs_T


def contiguous_stack(weights: Sequence[Tensor]) -> Tensor | None:
    """The weights as one matrix without a copy, if they are contiguous in one storage."""
    if len(weights) < 2:
        return None
    first = weights[0]
    storage = first.untyped_storage().data_ptr()
    for one, other in pairwise(weights):
        adjacent = one.data_ptr() + one.numel() * one.element_size() == other.data_ptr()
        if not (adjacent and other.untyped_storage().data_ptr() == storage):
            return None
    return first.as_strided((sum(map(len, weights)), first.shape[1]), (first.shape[1], 1))


def _fusable_runs(linears: Sequence[nn.Module]) -> list[list[nn.Module]]:
    """Runs of adjacent layers that could be fused; other layers form runs of one."""
    return [list(members) for _, members in groupby(linears, key=_fuse_key)]


def _fuse_key(linear: nn.Module) -> object:
    weights = _weights_of(linear)
    if not weights:
        return id(linear)
    return type(linear), *((x.dtype, x.device, x.shape[1:]) for x in weights)


def _weights_of(linear: nn.Module) -> tuple[Tensor, ...]:
    if isinstance(linear, nn.Linear):
        return (linear.weight,) if linear.bias is None else ()
    return (linear.weights_by_output() or ()) if isinstance(linear, Fusable) else ()


def _linear(linear: nn.Module, x_TD: Tensor, weights: Sequence[Tensor]) -> Tensor:
    if isinstance(linear, Fusable):
        return linear.linear_with(x_TD, *weights)
    return F.linear(x_TD, *weights)


def _stack_in_memory(weights: Sequence[Tensor]) -> None:
    with torch.inference_mode(False), torch.no_grad():  # the parameters may be trained later
        stacked_FD = torch.cat([weight.detach() for weight in weights])
        parts = stacked_FD.split([len(weight) for weight in weights])
        for weight, part in zip(weights, parts, strict=True):
            weight.data = part


def _owns_storage(weight: Tensor) -> bool:
    num_bytes = weight.numel() * weight.element_size()
    return (
        weight.is_contiguous()
        and weight.untyped_storage().nbytes() == num_bytes
        and num_bytes % ALIGNMENT_BYTES == 0
    )
