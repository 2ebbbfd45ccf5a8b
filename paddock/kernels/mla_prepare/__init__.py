"""Fused norm, RoPE and KV cache write of an MLA decode step.

    norm_rope_and_cache(latent, row, key, angles, slot_T) -> latent_TQ

latent_TQ is rms_norm of the query latent. Row t of `row` becomes [rms_norm of the latent | rotated
rope part] and is written to row slot_T[t] of its storage; an index key becomes layer_norm, its
first dims rotated, and goes to its own storage. Storage rows that are not in slot_T are
unchanged; tokens that share a slot must have the same row.

    rotate_queries(queries, angles, index) -> query_THD and weight_TH of the indexer, or None

Rope parts of the queries are rotated into the last columns of queries.absorbed_THC, whose first
ones are left for the absorbed part. Index queries have their first dims rotated; the weight of each
index head is a product with the hidden state in float32, times `scale`.

Both are the operations of the model one after the other, with the same rounding in between, so that
results are identical. Both RoPE layouts are supported (see kernels.rope). `suits` says where the
kernel is faster. Not differentiable.

`reference` is the definition. On a GPU halves use the `fused` kernels: each function is one launch,
where the reference needs eight and ten. A token's numbers do not depend on the others.
"""

from torch import Tensor

from paddock.kernels.mla_prepare import fused, reference

from .fused import suits
from .inputs import (
    IndexKeyInput,
    IndexQueryInput,
    KVLatentInput,
    QueryLatentInput,
    QueryRopeInput,
    RotaryCosSin,
)


def norm_rope_and_cache(
    latent: QueryLatentInput,
    row: KVLatentInput,
    key: IndexKeyInput | None,
    angles: RotaryCosSin,
    slot_T: Tensor,
) -> Tensor:
    implementation = fused if fused.takes(latent.raw_TQ, latent.weight_Q) else reference
    return implementation.norm_rope_and_cache(latent, row, key, angles, slot_T)


def rotate_queries(
    queries: QueryRopeInput, angles: RotaryCosSin, index: IndexQueryInput | None
) -> tuple[Tensor, Tensor] | None:
    implementation = fused if fused.takes(queries.raw_THD, queries.absorbed_THC) else reference
    return implementation.rotate_queries(queries, angles, index)


__all__ = [
    "IndexKeyInput",
    "IndexQueryInput",
    "KVLatentInput",
    "QueryLatentInput",
    "QueryRopeInput",
    "RotaryCosSin",
    "norm_rope_and_cache",
    "rotate_queries",
    "suits",
]
