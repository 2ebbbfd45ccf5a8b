"""Rotary position embeddings (RoPE) in the two layouts that checkpoints use.

    rope_interleaved(x_THD, cos_TP, sin_TP, first=0) -> x_THD    pairs (0,1), (2,3), ...
    rope_halves(x_THD, cos_TP, sin_TP, first=0)      -> x_THD    pairs (0,P), (1,P+1), ...

Each pair (a, b) becomes (a cos - b sin, a sin + b cos). The layouts are permutations of one
another and equally good, but weights trained with one fail with the other: GLM-5 is interleaved
everywhere, its indexer included; DeepSeek-V3.2's indexer and the llama family use halves.
cos and sin are float32 and take no gradient; the rotation happens in at least that precision and
the result has x's dtype. T tokens, H heads, P pairs; of D dims the 2 P from `first` on are rotated
and the others left alone.

`reference` is the definition; on a GPU halves go to `fused`, a single pass, and
float32 and bfloat16 to the CPU kernels where they are loaded.
"""

from torch import Tensor

from paddock.kernels.cpu import suits_training, training

from . import fused, reference


def rope_interleaved(x_THD: Tensor, cos_TP: Tensor, sin_TP: Tensor, first: int = 0) -> Tensor:
    _check_dims(x_THD, cos_TP, first)
    if fused.suits(x_THD, cos_TP):
        return fused.rotate(x_THD, cos_TP, sin_TP, first, interleaved=True)
    if suits_training(x_THD):
        return training.rope(x_THD, cos_TP, sin_TP, first, interleaved=True)
    return reference.rope_interleaved(x_THD, cos_TP, sin_TP, first)


def rope_halves(x_THD: Tensor, cos_TP: Tensor, sin_TP: Tensor, first: int = 0) -> Tensor:
    _check_dims(x_THD, cos_TP, first)
    if fused.suits(x_THD, cos_TP):
        return fused.rotate(x_THD, cos_TP, sin_TP, first, interleaved=False)
    if suits_training(x_THD):
        return training.rope(x_THD, cos_TP, sin_TP, first, interleaved=False)
    return reference.rope_halves(x_THD, cos_TP, sin_TP, first)


def _check_dims(x_THD: Tensor, cos_TP: Tensor, first: int) -> None:
    D, rotated = x_THD.shape[-1], 2 * cos_TP.shape[-1]
    if not 0 <= first <= D - rotated:
        raise ValueError(f"cannot rotate dims {first} to {first + rotated} of {D}")


__all__ = ["rope_halves", "rope_interleaved"]
