"""Linear maps of one input as one product, where their weights lie one behind the other.

Weights are laid so once, in place: names, parameters and memory stay what they are, and whoever
copies new values over them changes nothing of it. Whoever gives a parameter other memory parts it
from its neighbours, and it is multiplied alone again.

T tokens, D inputs, F outputs of all maps.
"""

from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ALIGNMENT_BYTES = 16  # bytes: where matrix products like a weight to begin


@runtime_checkable
class Fusable(Protocol):
    """A linear map whose weights are not one matrix of numbers."""

    def weights_by_output(self) -> tuple[Tensor, ...] | None:
        """What it holds, outputs first; None if it must stay alone."""

    def linear_with(self, x_TD: Tensor, *held: Tensor) -> Tensor:
        """As if it held these."""


def fuse_weights(linears: Sequence[nn.Module]) -> None:
    """Move the weights of neighbours of one kind into one piece of memory. Left alone: what is no
    plain linear map, or is a view of something that others hold."""
    for alike in _alike(linears):
        for weights in zip(*map(_held, alike), strict=True):
            if (
                len(weights) > 1
                and contiguous_stack(weights) is None
                and all(map(_may_move, weights))
            ):
                _move(weights)


def fused_linears(x_TD: Tensor, linears: Sequence[nn.Module]) -> list[Tensor]:
    """linear(x) of each, as columns of one product where that is possible."""
    found: list[Tensor] = []
    for alike in _alike(linears):
        stacks = list(zip(*map(_held, alike), strict=True))
        whole = [stack for weights in stacks if (stack := contiguous_stack(weights)) is not None]
        if stacks and len(whole) == len(stacks):
            outputs = [len(weight) for weight in stacks[0]]
            found += _product(alike[0], x_TD, whole).split(outputs, dim=-1)
        else:
            found += [linear(x_TD) for linear in alike]
    return found


def contiguous_stack(weights: Sequence[Tensor]) -> Tensor | None:
    """The matrix of all their rows, if they lie one behind the other in one piece of memory."""
    if len(weights) < 2:
        return None
    first = weights[0]
    memory = first.untyped_storage().data_ptr()
    for one, other in pairwise(weights):
        behind = one.data_ptr() + one.numel() * one.element_size() == other.data_ptr()
        if not (behind and other.untyped_storage().data_ptr() == memory):
            return None
    return first.as_strided((sum(map(len, weights)), first.shape[1]), (first.shape[1], 1))


def _alike(linears: Sequence[nn.Module]) -> list[list[nn.Module]]:
    """Runs of neighbours that could be one map; each of the others by itself."""
    return [list(run) for _, run in groupby(linears, key=_kind)]


def _kind(linear: nn.Module) -> object:
    held = _held(linear)
    if not held:
        return id(linear)
    return type(linear), *((x.dtype, x.device, x.shape[1:]) for x in held)


def _held(linear: nn.Module) -> tuple[Tensor, ...]:
    if isinstance(linear, nn.Linear):
        return (linear.weight,) if linear.bias is None else ()
    return (linear.weights_by_output() or ()) if isinstance(linear, Fusable) else ()


def _product(linear: nn.Module, x_TD: Tensor, held: Sequence[Tensor]) -> Tensor:
    if isinstance(linear, Fusable):
        return linear.linear_with(x_TD, *held)
    return F.linear(x_TD, *held)


def _move(weights: Sequence[Tensor]) -> None:
    with torch.inference_mode(False), torch.no_grad():  # they may be trained later
        whole_FD = torch.cat([weight.detach() for weight in weights])
        parts = whole_FD.split([len(weight) for weight in weights])
        for weight, part in zip(weights, parts, strict=True):
            weight.data = part


def _may_move(weight: Tensor) -> bool:
    own_bytes = weight.numel() * weight.element_size()
    return (
        weight.is_contiguous()
        and weight.untyped_storage().nbytes() == own_bytes
        and own_bytes % ALIGNMENT_BYTES == 0
    )
