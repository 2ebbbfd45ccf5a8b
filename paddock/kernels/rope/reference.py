"""Reference of both RoPE layouts.

T tokens, H heads, D dims, R = 2 P of them rotated, N before those, P pairs.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def rope_interleaved(x_THD: Tensor, cos_TP: Tensor, sin_TP: Tensor, first: int = 0) -> Tensor:
    """Rotate the pairs (0,1), (2,3), ...: each is a complex number, multiplied by e^(i angle)."""
    if _can_rotate_in_place(x_THD, cos_TP, first):
        return _rotate_in_place(x_THD, cos_TP, sin_TP, first)
    if x_THD.shape[-1] != 2 * cos_TP.shape[-1]:
        return _part(rope_interleaved, x_THD, cos_TP, sin_TP, first)
    dtype = torch.promote_types(x_THD.dtype, cos_TP.dtype)
    pair_THP = torch.view_as_complex(x_THD.to(dtype).unflatten(-1, (-1, 2)).contiguous())
    rotation_T1P = torch.complex(cos_TP.to(dtype), sin_TP.to(dtype)).unsqueeze(1)
    return torch.view_as_real(pair_THP * rotation_T1P).flatten(-2).to(x_THD.dtype)


def _can_rotate_in_place(x_THD: Tensor, cos_TP: Tensor, first: int) -> bool:
    """Whether a copy of x can be read as complex numbers, and no gradients are needed."""
    even = first % 2 == 0 and x_THD.shape[-1] % 2 == 0
    return even and x_THD.dtype == cos_TP.dtype and not torch.is_grad_enabled()


def _rotate_in_place(x_THD: Tensor, cos_TP: Tensor, sin_TP: Tensor, first: int) -> Tensor:
    """The same with half as many calls, which dominate a decode step."""
    out_THD = x_THD.clone(memory_format=torch.contiguous_format)
    pair_THP = torch.view_as_complex(out_THD.view(*out_THD.shape[:-1], -1, 2))
    pair_THP.narrow(-1, first // 2, cos_TP.shape[-1]).mul_(
        torch.complex(cos_TP, sin_TP).unsqueeze(1)
    )
    return out_THD


def rope_halves(x_THD: Tensor, cos_TP: Tensor, sin_TP: Tensor, first: int = 0) -> Tensor:
    """Rotate the pairs (0,P), (1,P+1), ..."""
    if x_THD.shape[-1] != 2 * cos_TP.shape[-1]:
        return _part(rope_halves, x_THD, cos_TP, sin_TP, first)
    low, high = x_THD.chunk(2, dim=-1)
    cos_T1P, sin_T1P = cos_TP.unsqueeze(1), sin_TP.unsqueeze(1)
    rotated = (low * cos_T1P - high * sin_T1P, low * sin_T1P + high * cos_T1P)
    return torch.cat(rotated, dim=-1).to(x_THD.dtype)


def _part(
    rotate: Callable[..., Tensor], x_THD: Tensor, cos_TP: Tensor, sin_TP: Tensor, first: int
) -> Tensor:
    """Rotate some dims and leave the others alone."""
    rotated = 2 * cos_TP.shape[-1]
    after_dims = x_THD.shape[-1] - first - rotated
    before_THN, x_THR, after = x_THD.split((first, rotated, after_dims), dim=-1)
    return torch.cat((before_THN, rotate(x_THR, cos_TP, sin_TP), after), dim=-1)
