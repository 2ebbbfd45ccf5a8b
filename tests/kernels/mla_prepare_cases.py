"""Inputs of MLA decode preparation, and the kernel's results in Triton's interpreter.

    TRITON_INTERPRET=1 python -m tests.kernels.mla_prepare_cases FILE

FILE receives the result of every case.
"""

import sys
from dataclasses import dataclass, fields, is_dataclass, replace

import torch

from paddock.kernels.mla_prepare import (
    IndexKeyInput,
    IndexQueryInput,
    KVLatentInput,
    QueryLatentInput,
    QueryRopeInput,
    RotaryCosSin,
)


@dataclass(frozen=True)
class Prepare:
    """`wide`: raw products are column slices of a wider tensor, as with fused projections."""

    tokens: int = 3
    latent: int = 24
    row: int = 16
    pairs: int = 4
    key: int | None = 12
    heads: int = 4
    head: int = 13
    index_heads: int = 2
    hidden: int = 40
    interleaved: bool = True
    index_interleaved: bool = True
    wide: bool = False
    slots: int = 70

    def inputs(self, dtype=torch.float32, device="cpu"):
        rng = torch.Generator().manual_seed(self.tokens)

        def random(*shape):
            if len(shape) == 2 and self.wide:
                return random(shape[0], shape[1] + 16, 1)[:, 8:-8, 0]
            drawn = torch.randn(shape, generator=rng, dtype=torch.float64)
            return drawn.to(device=device, dtype=dtype)

        T, P, IH = self.tokens, self.pairs, self.index_heads
        width = self.row + 2 * P
        angle = torch.randn(T, P, generator=rng, dtype=torch.float64).to(device)
        kind = torch.float64 if dtype == torch.float64 else torch.float32
        angles = RotaryCosSin(angle.cos().to(kind), angle.sin().to(kind))
        slot = torch.randperm(self.slots, generator=rng)[:T].to(device)
        latent = QueryLatentInput(
            random(T, self.latent), random(1, self.latent)[0].contiguous(), 1e-5
        )
        row = KVLatentInput(
            random(T, width),
            random(1, self.row)[0].contiguous(),
            1e-6,
            self.interleaved,
            poisoned(self.slots, width, like=latent.raw_TQ),
        )
        raw = random(T, self.heads * self.head).unflatten(1, (self.heads, self.head))
        queries = QueryRopeInput(
            raw, self.interleaved, poisoned(T, self.heads, width, like=latent.raw_TQ)
        )
        key = index = None
        if self.key is not None:
            key = IndexKeyInput(
                3 + random(T, self.key),
                *(random(1, self.key)[0].contiguous() for _ in range(2)),
                1e-6,
                self.index_interleaved,
                poisoned(self.slots, self.key, like=latent.raw_TQ),
            )
            raw_index_query = random(T, IH * self.key).unflatten(1, (IH, self.key))
            drawn = torch.randn(IH, self.hidden, generator=rng, dtype=torch.float64)
            drawn = drawn * self.hidden**-0.5
            index = IndexQueryInput(
                raw_index_query,
                self.index_interleaved,
                random(T, self.hidden),
                drawn.to(device=device, dtype=kind),
                0.3,
            )
        return latent, row, key, angles, slot, queries, index

    def prepared(self, kernel, inputs):
        """Results of the module `kernel` by name; optional results are missing if not computed."""
        latent, row, key, angles, slot, queries, index = inputs
        with torch.no_grad():
            found = {"latent": kernel.norm_rope_and_cache(latent, row, key, angles, slot)}
            index_query = kernel.rotate_queries(queries, angles, index)
        found |= {"rows": row.stored_SC, "absorbed": queries.absorbed_THC}
        if key is not None:
            found |= {"keys": key.stored_SD, "index": index_query[0], "weights": index_query[1]}
        return found


def changed(thing, name, change):
    """A copy of an input with `change(name, tensor)` applied to its tensors."""
    if isinstance(thing, torch.Tensor):
        return change(name, thing)
    if not is_dataclass(thing):
        return thing
    parts = {f.name: changed(getattr(thing, f.name), f.name, change) for f in fields(thing)}
    return replace(thing, **parts)


def exact(inputs):
    """The same numbers in float64 on the CPU; the cache is copied."""

    def widened(_, x):
        return x.to("cpu", torch.float64 if x.is_floating_point() else x.dtype, copy=True)

    return tuple(changed(thing, "slot_T", widened) for thing in inputs)


def first_token(inputs):
    """The inputs of the first token alone; names show which tensors have a row per token."""

    def cut(name, x):
        return x[:1] if name.split("_")[1].startswith("T") else x

    return tuple(changed(thing, "slot_T", cut) for thing in inputs)


def poisoned(*shape, like):
    return torch.full(shape, torch.nan, dtype=like.dtype, device=like.device)


CASES = {
    "one token": Prepare(tokens=1),
    "three tokens": Prepare(wide=True),
    "sixty-four tokens": Prepare(tokens=64, head=8, key=8),
    "tokens that fill no block": Prepare(tokens=5, hidden=5000, wide=True),
    "halves": Prepare(interleaved=False, index_interleaved=False),
    "halves for the indexer alone": Prepare(index_interleaved=False, wide=True),
    "odd widths": Prepare(latent=23, row=17, pairs=3, key=11, heads=3, head=9, index_heads=5),
    "no indexer": Prepare(key=None, interleaved=False),
    "wide latents": Prepare(tokens=2, latent=5000, row=512, pairs=32, key=128, head=256),
}


def main():
    from paddock.kernels.mla_prepare import fused

    # Uninitialised memory then holds NaN.
    torch.use_deterministic_algorithms(True)
    found = {}
    for name, case in CASES.items():
        for dtype in (torch.float32, torch.float16):
            found[name, dtype] = case.prepared(fused, case.inputs(dtype))
    case = CASES["tokens that fill no block"]
    found["first token"] = case.prepared(fused, first_token(case.inputs()))
    torch.save(found, sys.argv[1])


if __name__ == "__main__":
    main()
