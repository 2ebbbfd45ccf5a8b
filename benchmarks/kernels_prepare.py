"""Fused norms, rotations and cache writes before MLA decode attention: two launches against many.

GLM-5's widths: query latent 2048, latent KV entries of 512 + 64, index keys of 128, 32 index heads,
64 heads of 256. Every arm is a CUDA graph, so launch latency of the host does not count. `latents`
and `queries` are the two kernels against the launches they replace; `layer` is everything of a
layer before attention, matrix products included, against the unfused version, with separate and
with fused weights.

Bytes: everything read or written once, for a layer its weights, at the rate of a device copy.
"""

import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.kernels import Figure, copy_rate, medians
from benchmarks.kernels_decode import captured
from paddock.kernels import mla_prepare as prepare
from paddock.kernels.block_table import BlockTable
from paddock.kernels.mla_prepare import reference
from paddock.kernels.spans import Span
from paddock.model import AttentionMetadata, AuxRequest, DecodeBatch, ForwardContext, preset
from paddock.model.attention.dsa import DSA

TOKENS = (1, 8, 64)
LATENT, ROW, ROPE, KEY, HEADS, HEAD, INDEX_HEADS, HIDDEN = 2048, 512, 64, 128, 64, 256, 32, 6144
SLOTS, PAGE, LENGTH = 1 << 16, 64, 4096
REPEATS = 16  # calls in one graph: device events cannot resolve single microseconds
TOLERANCE = 2e-2  # relative error of bfloat16 against bfloat16


@torch.inference_mode()
def figures() -> Iterator[Figure]:
    torch.manual_seed(0)
    bytes_s = copy_rate()
    separate, fused = _attentions()
    for tokens in TOKENS:
        rows = (_latents, _queries, partial(_layer, separate=separate, fused=fused))
        for row in rows:
            try:
                yield from row(tokens, bytes_s)
            except Exception:
                print(f"a row of {tokens} tokens failed:", flush=True)
                traceback.print_exc(file=sys.stdout)


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def _angles(tokens: int) -> prepare.RotaryCosSin:
    angle_TP = torch.randn(tokens, ROPE // 2, device="cuda")
    return prepare.RotaryCosSin(angle_TP.cos(), angle_TP.sin())


def _latents(tokens: int, bytes_s: float) -> Iterator[Figure]:
    angles, slot_T = _angles(tokens), torch.randperm(SLOTS, device="cuda")[:tokens]
    raw_TF = _random(tokens, LATENT + ROW + ROPE + KEY)
    raw_TQ, raw_TC, raw_TD = raw_TF.split((LATENT, ROW + ROPE, KEY), 1)
    weight_Q, weight_L, weight_D, bias_D = map(_random, (LATENT, ROW, KEY, KEY))

    def arm(function: Callable[..., Tensor]) -> tuple[Callable[[], Tensor], list[Tensor]]:
        stored = [
            torch.zeros(SLOTS, width, device="cuda").bfloat16() for width in (ROW + ROPE, KEY)
        ]
        latent = prepare.QueryLatentInput(raw_TQ, weight_Q, 1e-5)
        row = prepare.KVLatentInput(raw_TC, weight_L, 1e-5, True, stored[0])
        key = prepare.IndexKeyInput(raw_TD, weight_D, bias_D, 1e-6, True, stored[1])
        return (lambda: function(latent, row, key, angles, slot_T)), stored

    (ours, ours_out), (plain, plain_out) = (
        arm(prepare.norm_rope_and_cache),
        arm(reference.norm_rope_and_cache),
    )
    _check([ours(), *ours_out], [plain(), *plain_out])
    needed = 2 * raw_TF.nbytes + 2 * (weight_Q.nbytes + weight_L.nbytes)
    yield _figure(f"latents, {tokens} tokens", ours, plain, needed, bytes_s)


def _queries(tokens: int, bytes_s: float) -> Iterator[Figure]:
    angles, x_TE = _angles(tokens), _random(tokens, HIDDEN)
    weight_HE = torch.randn(INDEX_HEADS, HIDDEN, device="cuda") * HIDDEN**-0.5
    raw_THD, index_THD = _random(tokens, HEADS, HEAD), _random(tokens, INDEX_HEADS, KEY)
    index = prepare.IndexQueryInput(index_THD, True, x_TE, weight_HE, 0.1)

    def arm(function: Callable[..., object]) -> tuple[Callable[[], object], Tensor]:
        absorbed_THC = torch.zeros(tokens, HEADS, ROW + ROPE, device="cuda").bfloat16()
        queries = prepare.QueryRopeInput(raw_THD, True, absorbed_THC)
        return (lambda: function(queries, angles, index)), absorbed_THC

    (ours, ours_out), (plain, plain_out) = (
        arm(prepare.rotate_queries),
        arm(reference.rotate_queries),
    )
    _check([*ours(), ours_out], [*plain(), plain_out])  # type: ignore[misc]
    needed = 4 * tokens * HEADS * ROPE + 2 * index_THD.nbytes + x_TE.nbytes + weight_HE.nbytes
    yield _figure(f"queries, {tokens} tokens", ours, plain, needed, bytes_s)


class _LayerCache:
    """KV cache of one layer, with given slots."""

    def __init__(self, slot_T: Tensor) -> None:
        widths = {"row": ROW + ROPE, "index": KEY}
        self.stored = {name: _random(SLOTS, width) for name, width in widths.items()}
        self.slot_T = slot_T

    def storage_and_slots(self, layer: int, stream: str) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        return self.stored[stream], self.slot_T

    def update(self, layer: int, stream: str, rows_T: Tensor) -> Tensor:
        stored, slot_T = self.storage_and_slots(layer, stream)
        return stored.index_copy_(0, slot_T, rows_T)

    def load_state(self, layer: int, stream: str, span: int) -> Tensor | None:
        raise NotImplementedError

    def store_state(self, layer: int, stream: str, span: int, state: Tensor) -> None:
        raise NotImplementedError


@torch.inference_mode(False)
def _attentions() -> tuple[DSA, DSA]:
    """The same layer twice, the second with fused weights."""
    found = []
    for _ in range(2):
        with torch.device("cuda"):
            attention = DSA(preset("glm5"), 0).bfloat16()
        assert attention.indexer is not None
        attention.indexer.weights.float()  # as after Transformer.cast
        found.append(attention)
    separate, fused = found
    fused.load_state_dict(separate.state_dict())
    fused.fuse_weights()
    return separate, fused


def _layer(tokens: int, bytes_s: float, *, separate: DSA, fused: DSA) -> Iterator[Figure]:
    pages = BlockTable(torch.arange(tokens * LENGTH // PAGE, device="cuda").view(tokens, -1), PAGE)
    visible_BQ = torch.full((tokens, 1), LENGTH, dtype=torch.int32, device="cuda")
    spans = tuple(Span(t, 1, 0, LENGTH) for t in range(tokens))
    metadata = AttentionMetadata(
        visible_BQ.view(-1).long() - 1, spans, decode_batch=DecodeBatch(pages, visible_BQ)
    )
    angles, slot_T = _angles(tokens), torch.randperm(SLOTS, device="cuda")[:tokens]
    cache = _LayerCache(slot_T)
    context = ForwardContext(metadata, cache, angles.cos_TP, angles.sin_TP, AuxRequest())
    x_TD = _random(tokens, HIDDEN)

    def plain() -> list[Tensor]:
        projected = separate.project(x_TD, context)
        context.kv_cache.update(0, "row", projected.row_TC)
        index = separate.index_new_tokens(x_TD, projected, context)
        assert index is not None
        return [separate.absorb(projected.query_THD), index.query_THD, index.weight_TH]

    def ours(attention: DSA) -> list[Tensor]:
        assert attention.can_fuse_decode(x_TD, context)
        ready = attention.prepare_decode(x_TD, context, need_scores=True)
        assert ready.index is not None
        return [ready.absorbed_THC, ready.index.query_THD, ready.index.weight_TH]

    def outputs(arm: Callable[[], list[Tensor]]) -> list[Tensor]:
        return [*arm(), *(stored[slot_T].clone() for stored in cache.stored.values())]

    expected = outputs(plain)
    for attention, name in ((separate, "separate weights"), (fused, "fused weights")):
        arm = partial(ours, attention)
        _check(outputs(arm), expected)
        needed = _weight_bytes(attention)
        label = f"layer, {tokens} tokens, {name}"
        yield _figure(label, arm, plain, needed, bytes_s)


def _weight_bytes(attention: DSA) -> int:
    """Of the matrix products before attention; of kv_b the key part."""
    assert attention.indexer is not None
    indexer, mla = attention.indexer, attention.mla
    whole = (attention.q_a, attention.kv_a, attention.q_b, indexer.key, indexer.query)
    weights = sum(linear.weight.nbytes for linear in (*whole, indexer.weights))
    return weights + attention.kv_b.weight.nbytes * mla.nope // (mla.nope + mla.value)


def _check(found: list[Tensor], expected: list[Tensor]) -> None:
    """Raises if the outputs differ."""
    for one, other in zip(found, expected, strict=True):
        error = (one.double() - other.double()).norm() / other.double().norm()
        assert float(error) < TOLERANCE, f"relative error {float(error):.3g}"


def _figure(
    name: str,
    ours: Callable[[], object],
    plain: Callable[[], object],
    needed: int,
    bytes_s: float,
) -> Figure:
    ours_ms, plain_ms = medians([_repeated(ours), _repeated(plain)], repeats=15)
    return Figure(
        section="prepare",
        name=name,
        ms=ours_ms / REPEATS,
        rate=needed * REPEATS / ours_ms / 1e9,
        unit="TB/s",
        floor_ms=needed / bytes_s * 1e3,
        peer="separate launches",
        peer_ms=plain_ms / REPEATS,
    )


def _repeated(work: Callable[[], object]) -> Callable[[], None]:
    def again() -> None:
        for _ in range(REPEATS):
            work()

    return captured(again)
