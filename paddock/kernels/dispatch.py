"""Kernel dispatch: which kernels are enabled. All are, unless disabled to debug or benchmark.

A kernel is used where it supports the tensors at hand; everything else uses the reference.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

# Every kernel, and what it replaces.
KERNELS = {
    "adamw": "a loop over parameters",
    "causal_attention": "PyTorch's attention over documents of many lengths",
    "cpu": "every kernel in C++ for the CPU",
    "expert_topk": "sorting each token's router scores",
    "fused_experts": "sorting few rows by expert for grouped products",
    "gqa_decode": "gathering the keys of every sequence of a batch, and a loop over spans",
    "grouped_gemm": "a loop over experts",
    "index_kl": "probabilities of every head and key, held for a chunk of queries",
    "index_topk": "torch's product and top-k of index scores",
    "topk_masked_attention": "PyTorch's attention under a boolean mask",
    "mla_decode": "gathering the latent KV entries of every sequence of a batch",
    "mla_prepare": "norms, rotations and copies between the matrix products of a decode layer",
    "linear_cross_entropy": "elementwise passes over the logits",
    "moe_permute": "sorting and indexing rows by expert",
    "newton_schulz": "products of whole matrices, three per step",
    "norm": "elementwise passes of the norms",
    "rope": "elementwise passes of the rotation",
    "sparse_mla": "gathering latent KV entries and multiplying them",
    "swiglu": "elementwise passes of the gated activation",
    "topk": "torch.topk with a tie rule",
    "w4a8_gemm": "unpacking integers and multiplying them as floats",
    "linear_fp32": "a product of float32 copies",
}
_disabled: set[str] = set()


def can_use_kernel(name: str, *tensors: Tensor) -> bool:
    """Whether the Triton kernel `name` supports these tensors: half types on the current GPU."""
    return (
        tensors[0].is_cuda  # first because it is cheap: called thousands of times a second on a CPU
        and is_enabled(name)
        and all(x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) for x in tensors)
        and all(x.get_device() == torch.cuda.current_device() for x in tensors)
        and has_triton()
    )


def is_enabled(name: str) -> bool:
    """Whether the kernel `name` is enabled.

    >>> with disable_kernels("norm"):
    ...     is_enabled("norm"), is_enabled("rope")
    (False, True)
    """
    return _check_names((name,)).isdisjoint(_disabled)


@contextmanager
def disable_kernels(*names: str) -> Iterator[None]:
    """Use the references instead of these kernels until the block ends."""
    global _disabled
    previous, _disabled = _disabled, _disabled | _check_names(names)
    try:
        yield
    finally:
        _disabled = previous


def _check_names(names: Sequence[str]) -> set[str]:
    for name in names:
        if name not in KERNELS:
            raise ValueError(f"kernel '{name}' not found; kernels: {', '.join(KERNELS)}")
    return set(names)


@cache
def has_triton() -> bool:
    return find_spec("triton") is not None
