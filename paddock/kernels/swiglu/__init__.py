"""SwiGLU, the gated activation of an MLP.

    swiglu(gate_RF, up_RF)    -> silu(gate) * up
    silu_and_mul(both_RG)     -> the same of one tensor whose first half of columns is the gate

R rows, F inner dim, G = 2 F. The second form takes the output of a fused gate-and-up product,
and its gradient is one tensor. `reference` is the definition; on a GPU halves go to `fused`, which
computes in float32 and rounds once, and so do the CPU kernels where they are loaded.
"""

from torch import Tensor

from paddock.kernels.cpu import suits_training, training

from . import fused, reference


def swiglu(gate_RF: Tensor, up_RF: Tensor) -> Tensor:
    if fused.suits(gate_RF, up_RF):
        return fused.swiglu(gate_RF, up_RF)
    if suits_training(gate_RF, up_RF):
        return training.swiglu(gate_RF, up_RF)
    return reference.swiglu(gate_RF, up_RF)


def silu_and_mul(both_RG: Tensor) -> Tensor:
    if fused.suits(both_RG):
        return fused.silu_and_mul(both_RG)
    return swiglu(*both_RG.chunk(2, dim=-1))


__all__ = ["silu_and_mul", "swiglu"]
