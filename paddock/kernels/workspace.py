"""Scratch memory budget and chunking of reference implementations.

References process their rows in chunks, so that a full [queries, heads, keys] tensor never exists.
On a CPU the budget is small on purpose: a chunk that fits in cache is faster.
"""

from collections.abc import Iterator

import torch

SCRATCH_BYTES = 8 << 20
# An accelerator needs enough rows to be busy, and has the memory.
ACCELERATOR_SCRATCH_BYTES = 1 << 30


def scratch_bytes(device: torch.device) -> int:
    """Scratch memory budget on this device."""
    return SCRATCH_BYTES if device.type == "cpu" else ACCELERATOR_SCRATCH_BYTES


def chunks(rows: int, row_bytes: int, budget: int = SCRATCH_BYTES) -> Iterator[slice]:
    """Cover range(rows) with slices whose rows fit the budget, at least one row each.

    >>> list(chunks(5, row_bytes=4, budget=8))
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    size = max(1, budget // max(1, row_bytes))
    for start in range(0, rows, size):
        yield slice(start, min(start + size, rows))
