"""Rotary position embeddings (RoPE): frequencies, context scaling and pair layout.

P = R / 2 pairs of R rotated dims, T tokens.
"""

import math
from functools import cache

import torch
from torch import Tensor

from paddock.kernels.rope import rope_halves, rope_interleaved
from paddock.model.config import RopeScaling, RopeSettings

APPLY_ROPE = {"interleaved": rope_interleaved, "halves": rope_halves}


def rotary_cos_sin(position_T: Tensor, rope: RopeSettings, dim: int) -> tuple[Tensor, Tensor]:
    """cos_TP and sin_TP in float32, yarn's attention scaling included."""
    frequency_P = _frequencies_on(position_T.device, rope, dim)
    angle_TP = position_T.float().unsqueeze(1) * frequency_P
    factor = attention_scaling(rope.scaling)
    return angle_TP.cos() * factor, angle_TP.sin() * factor


@cache  # one copy per device: CUDA graph capture allows no copies from the host
def _frequencies_on(device: torch.device, rope: RopeSettings, dim: int) -> Tensor:
    with torch.inference_mode(False):  # cached: later calls may need gradients
        return inv_freq(rope, dim).to(device)


def inv_freq(rope: RopeSettings, dim: int) -> Tensor:
    """Inverse frequencies: radians per position of each pair, float32."""
    exponent_P = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    plain_P = 1.0 / rope.theta**exponent_P
    if rope.scaling is None:
        return plain_P
    return ROPE_SCALING[rope.scaling.kind](plain_P, rope, rope.scaling, dim)


def attention_scaling(scaling: RopeScaling | None) -> float:
    """Factor on cos and sin under yarn; 1 for other kinds of scaling."""
    if scaling is None or scaling.kind != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return _mscale(scaling.factor, scaling.mscale) / _mscale(
            scaling.factor, scaling.mscale_all_dim
        )
    return _mscale(scaling.factor, 1.0)


def softmax_scale(rope: RopeSettings, dim: int) -> float:
    """dim^-0.5, corrected for latent attention under yarn (DeepSeek-V3's mscale_all_dim)."""
    scaling = rope.scaling
    if scaling is None or scaling.kind == "linear" or not scaling.mscale_all_dim:
        return dim**-0.5
    return float(dim**-0.5 * _mscale(scaling.factor, scaling.mscale_all_dim) ** 2)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _linear(plain_P: Tensor, rope: RopeSettings, scaling: RopeScaling, dim: int) -> Tensor:  # noqa: ARG001
    return plain_P / scaling.factor


def _llama3(plain_P: Tensor, rope: RopeSettings, scaling: RopeScaling, dim: int) -> Tensor:  # noqa: ARG001
    """Divide low frequencies by the factor, keep high ones, interpolate in between."""
    assert scaling.original_context is not None
    rotations_P = scaling.original_context * plain_P / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep_P = ((rotations_P - low) / (high - low)).clamp(0.0, 1.0)
    return keep_P * plain_P + (1 - keep_P) * plain_P / scaling.factor


def _yarn(plain_P: Tensor, rope: RopeSettings, scaling: RopeScaling, dim: int) -> Tensor:
    """Keep the frequency of fast pairs, divide that of slow ones, with a ramp in between."""
    assert scaling.original_context is not None
    context = scaling.original_context

    def pair_with_rotations(rotations: float) -> float:
        return dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_with_rotations(scaling.beta_fast), pair_with_rotations(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp_P = (torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    stretch_P = ramp_P.clamp(0.0, 1.0)
    return plain_P / scaling.factor * stretch_P + plain_P * (1 - stretch_P)


ROPE_SCALING = {"linear": _linear, "llama3": _llama3, "yarn": _yarn}
