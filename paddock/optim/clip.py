"""Gradient clipping that does not hide a broken gradient."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from paddock.kernels.precision import opmath_dtype
from paddock.parallel import to_local


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[Tensor],
    max_norm: float,
    joint: Callable[[Tensor], Tensor] = lambda norm: norm,
) -> Tensor:
    """Scale all gradients by one factor so that their joint norm is at most `max_norm`.

    Of sharded parameters this rank sees its own shards; `joint` makes all ranks' norms one.

    Returns the norm before clipping, float32 or wider. If it is not finite, the gradients are left
    as they are for the caller to refuse: scaling by max_norm / inf would make zeros of most.
    """
    grads = [to_local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if not grads:
        return torch.zeros(())
    alike = len({(grad.device, grad.dtype) for grad in grads}) == 1
    together = alike and grads[0].device.type != "cpu"  # a few launches instead of one a tensor
    if together:
        norms = list(torch._foreach_norm(grads, 2, dtype=opmath_dtype(grads[0].dtype)))
    else:
        norms = [torch.linalg.vector_norm(grad, dtype=opmath_dtype(grad.dtype)) for grad in grads]
    norm = torch.linalg.vector_norm(torch.stack([each.to(norms[0].device) for each in norms]))
    norm = joint(norm)
    factor = torch.where(norm.isfinite(), (max_norm / norm).clamp(max=1.0), 1.0)
    if together:
        torch._foreach_mul_(grads, factor.to(grads[0].dtype))
    else:
        for grad in grads:
            grad.mul_(factor.to(grad.device))
    return norm
