"""What a latent layer makes of its raw products when it decodes: norms, rotation and storage.

    store_latents(latent, row, key, angles, slot_T) -> latent_TQ

latent_TQ is rms_norm of the query latent. Row t of `row` becomes [rms_norm of the latent | rotated
rope part] and is written to row slot_T[t] of its storage; an index key becomes layer_norm, its
first dims rotated, and goes to its own storage. Rows of storage that no slot names stay as they
are; tokens that share a slot must bring the same row.

    turn_queries(queries, angles, index) -> query_THD and weight_TH of the indexer, or None

Rope parts of the queries are rotated into the last columns of queries.absorbed_THC, whose first
ones are left for the absorbed part. Index queries have their first dims rotated; what each index
head's opinion weighs is a product with the hidden state in float32, times `scale`.

Both are the operations of the model one after the other, with the roundings in between, so that
nobody can tell from a row how it was made. Rotation knows both layouts (see kernels.rope). `suits`
says where the twin is quicker; gradients are nobody's wish here.

`reference` is the definition. On a GPU halves go to `fused`: each function is one launch, where the
reference needs eight and ten. A token's numbers do not depend on the others.
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
    twin = fused if fused.takes(latent.raw_TQ, latent.weight_Q) else reference
    return twin.norm_rope_and_cache(latent, row, key, angles, slot_T)


def rotate_queries(
    queries: QueryRopeInput, angles: RotaryCosSin, index: IndexQueryInput | None
) -> tuple[Tensor, Tensor] | None:
    twin = fused if fused.takes(queries.raw_THD, queries.absorbed_THC) else reference
    return twin.rotate_queries(queries, angles, index)


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
