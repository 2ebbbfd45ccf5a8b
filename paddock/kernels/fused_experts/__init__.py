"""Fused routed experts for few tokens, as in a decode step.

    y[t] = sum_k weight[t, k] * down[e] (silu(gate[e] x[t]) * up[e] x[t]),   e = expert[t, k]

x_TD, expert_TK and weight_TK of a routing, gate_up_EGD (gate rows first) and down_EDF -> y_TD in
x's dtype. The same function as permuting rows by expert, two grouped GEMMs and an unpermute; for
few tokens, where nearly every row has a different expert, this form is faster. `is_supported` says
where. Not differentiable.

`reference` is the definition, and runs on a CPU: the weights of every row's expert are gathered. On
a GPU halves use the Triton kernel: an expert's weights are read once for all its rows, without a
host sync, and a row's result does not depend on the others.
"""

from torch import Tensor

from paddock.kernels.fused_experts import fused, reference

from .fused import is_supported


def fused_experts(
    x_TD: Tensor, expert_TK: Tensor, weight_TK: Tensor, gate_up_EGD: Tensor, down_EDF: Tensor
) -> Tensor:
    implementation = (
        fused if fused.can_use_kernel("fused_experts", x_TD, gate_up_EGD, down_EDF) else reference
    )
    return implementation.fused_experts(x_TD, expert_TK, weight_TK, gate_up_EGD, down_EDF)


__all__ = ["fused_experts", "is_supported"]
