"""Linear maps of one input as one product, where their weights lie one behind the other.

Weights are laid so once, in place: names, parameters and memory stay what they are, and whoever
copies new values over them changes nothing of it. Whoever gives a parameter other memory parts it
from its neighbours, and it is multiplied alone again.

T tokens, D inputs, F outputs of all maps.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ALIGNED = 16  # bytes: where matrix products like a weight to begin


def lay_together(linears: Sequence[nn.Module]) -> None:
    """Move the weights into one piece of memory. Left alone: what is no plain linear map, differs
    from the others in type, or is a view of something that others hold."""
    weights = _weights(linears)
    if len(weights) < 2 or together(weights) is not None or not all(map(_may_move, weights)):
        return
    with torch.inference_mode(False), torch.no_grad():  # they may be trained later
        whole_FD = torch.cat([weight.detach() for weight in weights])
        parts = whole_FD.split([len(weight) for weight in weights])
        for weight, part in zip(weights, parts, strict=True):
            weight.data = part


def products(x_TD: Tensor, linears: Sequence[nn.Module]) -> list[Tensor]:
    """linear(x) of each, as columns of one product where that is possible."""
    weights = _weights(linears)
    whole_FD = together(weights)
    if whole_FD is None:
        return [linear(x_TD) for linear in linears]
    return list(F.linear(x_TD, whole_FD).split([len(weight) for weight in weights], dim=-1))


def together(weights: Sequence[Tensor]) -> Tensor | None:
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


def _weights(linears: Sequence[nn.Module]) -> list[Tensor]:
    """Of plain linear maps alike; nothing if one of them is something else."""
    plain = [linear for linear in linears if isinstance(linear, nn.Linear)]
    weights = [linear.weight for linear in plain if linear.bias is None]
    kinds = {(weight.dtype, weight.device, weight.shape[1]) for weight in weights}
    return weights if len(weights) == len(linears) and len(kinds) == 1 else []


def _may_move(weight: Tensor) -> bool:
    own_bytes = weight.numel() * weight.element_size()
    return (
        weight.is_contiguous()
        and weight.untyped_storage().nbytes() == own_bytes
        and own_bytes % ALIGNED == 0
    )
