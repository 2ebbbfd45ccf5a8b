"""RMSNorm and LayerNorm over the last dimension, computed in float32 or wider.

    rms_norm(x_TD, weight_D, eps)            -> weight * (x / rms(x))
    layer_norm(x_TD, weight_D, bias_D, eps)  -> weight * (x - mean) / std + bias

rms_norm casts back to x's dtype before it multiplies by the weight, as the released model does;
layer_norm casts last. Half types are widened to float32, float64 stays float64.

`reference` is the definition; on a GPU halves go to `fused`, one pass in each direction, and where
the CPU kernels are loaded, RMSNorm and without gradients LayerNorm go to them.
"""

from torch import Tensor

from paddock.kernels import cpu
from paddock.kernels.cpu import training

from . import fused, reference


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    if fused.suits(x_TD, weight_D):
        return fused.norm(x_TD, weight_D, None, eps)
    if cpu.suits_training(x_TD, weight_D):
        return training.rms_norm(x_TD.flatten(0, -2), weight_D, eps).view(x_TD.shape)
    return reference.rms_norm(x_TD, weight_D, eps)


def layer_norm(x_TD: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float) -> Tensor:
    if fused.suits(x_TD, weight_D, bias_D):
        return fused.norm(x_TD, weight_D, bias_D, eps)
    if x_TD.ndim == 2 and cpu.suits(x_TD, weight_D, bias_D):
        return _cpu_layer_norm(x_TD, weight_D, bias_D, eps)
    return reference.layer_norm(x_TD, weight_D, bias_D, eps)


def _cpu_layer_norm(x_TD: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float) -> Tensor:
    T, D = x_TD.shape
    out_TD = x_TD.new_empty(T, D)
    cpu.function("layer_norm", x_TD.dtype)(
        *(T, D, x_TD.data_ptr(), x_TD.stride(0), weight_D.data_ptr(), bias_D.data_ptr(), eps),
        *(out_TD.data_ptr(), D),
    )
    return out_TD


__all__ = ["layer_norm", "rms_norm"]
