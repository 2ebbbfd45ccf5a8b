"""Normalisation over the last dimension, computed in float32 or better.

    rms_norm(x_TD, weight_D, eps)            -> weight * (x / rms(x))
    layer_norm(x_TD, weight_D, bias_D, eps)  -> weight * (x - mean) / std + bias

rms_norm casts back to x's dtype before it multiplies by the weight, as the released model does;
layer_norm casts last. Half types are widened to float32, float64 stays float64.
"""

from .reference import layer_norm, rms_norm

__all__ = ["layer_norm", "rms_norm"]
