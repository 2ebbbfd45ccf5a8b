"""Gradient-norm clipping that leaves non-finite gradients visible."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from paddock.kernels.precision import opmath_dtype
from paddock.parallel import to_local


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[Tensor],
    max_norm: float,
    reduce_norm: Callable[[Tensor], Tensor] = lambda norm: norm,
) -> Tensor:
    """Scale all gradients by one factor so that their global norm is at most `max_norm`.

    Each rank sees only its shards of sharded parameters; `reduce_norm` combines the ranks' norms.

    Returns the norm before clipping, float32 or wider. If it is not finite, gradients are left
    unchanged for the caller to reject: scaling by max_norm / inf would zero most of them.
    """
    grads = [to_local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if not grads:
        return torch.zeros(())
    uniform = len({(grad.device, grad.dtype) for grad in grads}) == 1
    foreach = uniform and grads[0].device.type != "cpu"  # a few launches instead of one per tensor
    if foreach:
        norms = list(torch._foreach_norm(grads, 2, dtype=opmath_dtype(grads[0].dtype)))
    else:
        norms = [torch.linalg.vector_norm(grad, dtype=opmath_dtype(grad.dtype)) for grad in grads]
    norm = torch.linalg.vector_norm(torch.stack([each.to(norms[0].device) for each in norms]))
    norm = reduce_norm(norm)
    factor = torch.where(norm.isfinite(), (max_norm / norm).clamp(max=1.0), 1.0)
    if foreach:
        torch._foreach_mul_(grads, factor.to(grads[0].dtype))
    else:
        for grad in grads:
            grad.mul_(factor.to(grad.device))
    return norm
