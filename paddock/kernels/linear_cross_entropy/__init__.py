"""Fused output projection and cross-entropy, without the logits of all tokens at once.

    linear_cross_entropy[t] = weight[t] * (logsumexp(z[t]) - z[t, target[t]]), z[t] = head hidden[t]
    token_logprobs[t]       = log softmax(z[t] / temperature)[target[t]]

hidden_TD, head_VD, target_T int64 -> [T] in float32 (float64 for float64 inputs). A token with a
negative target is ignored: its result is 0, and no logits are made for it. Nothing is averaged: the
caller owns the denominator.

Half inputs give float32 logits: a logit of 20 rounded to bfloat16 is off by up to 0.06,
too much for policy ratios. Logits live in chunks of rows of at most `chunk_bytes`, one chunk at a
time (by default CHUNK_BYTES, four times that on a GPU); backward recomputes them, since each
token's loss may get any upstream gradient. Differentiable once, in hidden and head.

`reference` is the definition; on a GPU `fused` reads a chunk once in each direction. With the CPU
kernels logits are made once: linear_cross_entropy without weights expects one upstream gradient for
all tokens, and only another one costs a second time.
"""

from torch import Tensor

from paddock.kernels.linear_cross_entropy import cpu, fused, reference

from .reference import CHUNK_BYTES


def linear_cross_entropy(
    hidden_TD: Tensor,
    head_VD: Tensor,
    target_T: Tensor,
    *,
    weight_T: Tensor | None = None,
    chunk_bytes: int | None = None,
) -> Tensor:
    nll_T = _nll(hidden_TD, head_VD, target_T, 1.0, chunk_bytes, same_upstream=weight_T is None)
    return nll_T if weight_T is None else nll_T * weight_T.to(nll_T.dtype)


def token_logprobs(
    hidden_TD: Tensor,
    head_VD: Tensor,
    target_T: Tensor,
    *,
    temperature: float = 1.0,
    chunk_bytes: int | None = None,
) -> Tensor:
    return -_nll(hidden_TD, head_VD, target_T, temperature, chunk_bytes, same_upstream=False)


def _nll(
    hidden_TD: Tensor,
    head_VD: Tensor,
    target_T: Tensor,
    temperature: float,
    chunk_bytes: int | None,
    *,
    same_upstream: bool,
) -> Tensor:
    if fused.suits(hidden_TD, head_VD):
        return fused.nll(hidden_TD, head_VD, target_T, temperature, chunk_bytes)
    if cpu.suits(hidden_TD, head_VD):
        return cpu.nll(
            hidden_TD, head_VD, target_T, temperature, chunk_bytes, same_upstream=same_upstream
        )
    return reference.nll(hidden_TD, head_VD, target_T, temperature, chunk_bytes or CHUNK_BYTES)


__all__ = ["CHUNK_BYTES", "linear_cross_entropy", "token_logprobs"]
