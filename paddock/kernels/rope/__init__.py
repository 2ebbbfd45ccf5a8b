"""Rotary positions, in the two layouts checkpoints use.

    rope_interleaved(x_THR, cos_TP, sin_TP) -> x_THR    pairs (0,1), (2,3), ...
    rope_halves(x_THR, cos_TP, sin_TP)      -> x_THR    pairs (0,P), (1,P+1), ...

Each pair (a, b) becomes (a cos - b sin, a sin + b cos). The layouts are permutations of one
another and equally good, but weights trained with one are noise to the other: GLM-5 is interleaved
everywhere, its indexer included; DeepSeek-V3.2's indexer and the llama family use halves.
cos and sin are float32; the rotation happens in at least that precision and the result has x's
dtype. T tokens, H heads, R rotated dims, P = R / 2 pairs.
"""

from .reference import rope_halves, rope_interleaved

__all__ = ["rope_halves", "rope_interleaved"]
