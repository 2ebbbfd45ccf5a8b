"""Which fast twins may be used: all of them, unless one is switched off to find a fault or a cost.

A twin is taken where it exists for the tensors at hand; everything else goes to the reference.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

# Every switch, and what it replaces when it is on.
KERNELS = {
    "adamw": "a loop over parameters",
    "causal_attention": "PyTorch's attention over documents of many lengths",
    "expert_topk": "sorting each token's router scores",
    "fused_experts": "sorting few rows by expert for grouped products",
    "gqa_decode": "gathering the keys of every sequence of a batch, and spans one by one",
    "grouped_gemm": "a loop over experts",
    "index_kl": "probabilities of every head and key, held for a chunk of queries",
    "index_topk": "torch's product and top-k of index scores",
    "topk_masked_attention": "PyTorch's attention under a mask of booleans",
    "mla_decode": "gathering the rows of every sequence of a batch and multiplying them",
    "mla_prepare": "norms, rotations and copies between the products of a decoding layer",
    "linear_cross_entropy": "elementwise passes over the logits",
    "moe_permute": "sorting and indexing rows by expert",
    "newton_schulz": "products of whole matrices, three a step",
    "norm": "elementwise passes of the norms",
    "rope": "elementwise passes of the rotation",
    "sparse_mla": "gathering rows and multiplying them",
    "swiglu": "elementwise passes of the gated activation",
    "topk": "torch.topk and a rule for ties",
    "w4a8_gemm": "unpacking integers and multiplying them as floats",
    "linear_fp32": "a product of widened copies",
}
_off: set[str] = set()


def can_use_kernel(name: str, *tensors: Tensor) -> bool:
    """Whether the Triton twin `name` may take these tensors: half types on the current GPU."""
    return (
        tensors[0].is_cuda  # first and cheap: a CPU asks thousands of times a second
        and is_enabled(name)
        and all(x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) for x in tensors)
        and all(x.get_device() == torch.cuda.current_device() for x in tensors)
        and has_triton()
    )


def is_enabled(name: str) -> bool:
    """Whether the switch `name` is on.

    >>> with disable_kernels("norm"):
    ...     is_enabled("norm"), is_enabled("rope")
    (False, True)
    """
    return _known((name,)).isdisjoint(_off)


@contextmanager
def disable_kernels(*names: str) -> Iterator[None]:
    """References alone for these, until the block ends."""
    global _off
    before, _off = _off, _off | _known(names)
    try:
        yield
    finally:
        _off = before


def _known(names: Sequence[str]) -> set[str]:
    for name in names:
        if name not in KERNELS:
            raise ValueError(f"no twin called '{name}'; there are {', '.join(KERNELS)}")
    return set(names)


@cache
def has_triton() -> bool:
    return find_spec("triton") is not None
