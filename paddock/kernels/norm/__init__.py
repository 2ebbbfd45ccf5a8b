"""RMSNorm and LayerNorm over the last dimension, computed in float32 or wider.

    rms_norm(x_TD, weight_D, eps)            -> weight * (x / rms(x))
    layer_norm(x_TD, weight_D, bias_D, eps)  -> weight * (x - mean) / std + bias

rms_norm casts back to x's dtype before it multiplies by the weight, as the released model does;
layer_norm casts last. Half types are widened to float32, float64 stays float64.

`reference` is the definition; on a GPU halves go to `fused`, one pass in each direction.
"""

from torch import Tensor

from . import fused, reference


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    if fused.suits(x_TD, weight_D):
        return fused.norm(x_TD, weight_D, None, eps)
    return reference.rms_norm(x_TD, weight_D, eps)


def layer_norm(x_TD: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float) -> Tensor:
    if fused.suits(x_TD, weight_D, bias_D):
        return fused.norm(x_TD, weight_D, bias_D, eps)
    return reference.layer_norm(x_TD, weight_D, bias_D, eps)


__all__ = ["layer_norm", "rms_norm"]
