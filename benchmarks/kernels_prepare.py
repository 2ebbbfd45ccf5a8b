"""What a latent layer does between its products when it decodes: two launches against many.

GLM-5's widths: query latent 2048, rows of 512 + 64, index keys of 128, 32 index heads, 64 heads of
256. Every arm is a graph, so launches cost what they cost on the device alone. `latents` and
`queries` are the two functions against the launches they replace; `layer` is everything of a layer
before it attends, products included, against the same one by one, and once more with the weights
that read the same input lying together.

Bytes: everything read or written once, of a layer its weights, at the rate of a device copy.
"""

import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.kernels import Figure, copy_rate, medians
from benchmarks.kernels_decode import recorded
from paddock.kernels import mla_prepare as prepare
from paddock.kernels.block_table import BlockTable
from paddock.kernels.mla_prepare import reference
from paddock.kernels.spans import Span
from paddock.model import AttentionMetadata, AuxRequest, DecodeBatch, ForwardContext, preset
from paddock.model.attention.dsa import DSA

TOKENS = (1, 8, 64)
LATENT, ROW, ROPE, KEY, HEADS, HEAD, INDEX_HEADS, HIDDEN = 2048, 512, 64, 128, 64, 256, 32, 6144
SLOTS, PAGE, LENGTH = 1 << 16, 64, 4096
REPEATED = 16  # in one graph: device events cannot tell single microseconds
TOLERANCE = 2e-2  # of bfloat16 against bfloat16, by relative norm


@torch.inference_mode()
def figures() -> Iterator[Figure]:
    torch.manual_seed(0)
    moved = copy_rate()
    apart, joined = _attentions()
    for tokens in TOKENS:
        rows = (_latents, _queries, partial(_layer, apart=apart, joined=joined))
        for row in rows:
            try:
                yield from row(tokens, moved)
            except Exception:
                print(f"a row of {tokens} tokens broke off:", flush=True)
                traceback.print_exc(file=sys.stdout)


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def _angles(tokens: int) -> prepare.RotaryCosSin:
    angle_TP = torch.randn(tokens, ROPE // 2, device="cuda")
    return prepare.RotaryCosSin(angle_TP.cos(), angle_TP.sin())


def _latents(tokens: int, moved: float) -> Iterator[Figure]:
    angles, slot_T = _angles(tokens), torch.randperm(SLOTS, device="cuda")[:tokens]
    raw_TF = _random(tokens, LATENT + ROW + ROPE + KEY)
    raw_TQ, raw_TC, raw_TD = raw_TF.split((LATENT, ROW + ROPE, KEY), 1)
    weight_Q, weight_L, weight_D, bias_D = map(_random, (LATENT, ROW, KEY, KEY))

    def arm(how: Callable[..., Tensor]) -> tuple[Callable[[], Tensor], list[Tensor]]:
        stored = [
            torch.zeros(SLOTS, width, device="cuda").bfloat16() for width in (ROW + ROPE, KEY)
        ]
        latent = prepare.QueryLatentInput(raw_TQ, weight_Q, 1e-5)
        row = prepare.KVLatentInput(raw_TC, weight_L, 1e-5, True, stored[0])
        key = prepare.IndexKeyInput(raw_TD, weight_D, bias_D, 1e-6, True, stored[1])
        return (lambda: how(latent, row, key, angles, slot_T)), stored

    (ours, mine), (plain, theirs) = (
        arm(prepare.norm_rope_and_cache),
        arm(reference.norm_rope_and_cache),
    )
    _agree([ours(), *mine], [plain(), *theirs])
    needed = 2 * raw_TF.nbytes + 2 * (weight_Q.nbytes + weight_L.nbytes)
    yield _figure(f"latents, {tokens} tokens", ours, plain, needed, moved)


def _queries(tokens: int, moved: float) -> Iterator[Figure]:
    angles, x_TE = _angles(tokens), _random(tokens, HIDDEN)
    weight_HE = torch.randn(INDEX_HEADS, HIDDEN, device="cuda") * HIDDEN**-0.5
    raw_THD, index_THD = _random(tokens, HEADS, HEAD), _random(tokens, INDEX_HEADS, KEY)
    index = prepare.IndexQueryInput(index_THD, True, x_TE, weight_HE, 0.1)

    def arm(how: Callable[..., object]) -> tuple[Callable[[], object], Tensor]:
        absorbed_THC = torch.zeros(tokens, HEADS, ROW + ROPE, device="cuda").bfloat16()
        queries = prepare.QueryRopeInput(raw_THD, True, absorbed_THC)
        return (lambda: how(queries, angles, index)), absorbed_THC

    (ours, mine), (plain, theirs) = arm(prepare.rotate_queries), arm(reference.rotate_queries)
    _agree([*ours(), mine], [*plain(), theirs])  # type: ignore[misc]
    needed = 4 * tokens * HEADS * ROPE + 2 * index_THD.nbytes + x_TE.nbytes + weight_HE.nbytes
    yield _figure(f"queries, {tokens} tokens", ours, plain, needed, moved)


class _Storage:
    """The memory of one layer (see model.memory.Memory)."""

    def __init__(self, slot_T: Tensor) -> None:
        widths = {"row": ROW + ROPE, "index": KEY}
        self.stored = {name: _random(SLOTS, width) for name, width in widths.items()}
        self.slot_T = slot_T

    def places(self, _: int, stream: str) -> tuple[Tensor, Tensor]:
        return self.stored[stream], self.slot_T

    def extend(self, layer: int, stream: str, rows_T: Tensor) -> Tensor:
        stored, slot_T = self.places(layer, stream)
        return stored.index_copy_(0, slot_T, rows_T)


@torch.inference_mode(False)
def _attentions() -> tuple[DSA, DSA]:
    """The same layer twice, once with the weights of one input together."""
    found = []
    for _ in range(2):
        with torch.device("cuda"):
            attention = DSA(preset("glm5"), 0).bfloat16()
        assert attention.indexer is not None
        attention.indexer.weights.float()  # as Network.cast leaves it
        found.append(attention)
    apart, joined = found
    joined.load_state_dict(apart.state_dict())
    joined.fuse_weights()
    return apart, joined


def _layer(tokens: int, moved: float, *, apart: DSA, joined: DSA) -> Iterator[Figure]:
    pages = BlockTable(torch.arange(tokens * LENGTH // PAGE, device="cuda").view(tokens, -1), PAGE)
    visible_BQ = torch.full((tokens, 1), LENGTH, dtype=torch.int32, device="cuda")
    spans = tuple(Span(t, 1, 0, LENGTH) for t in range(tokens))
    layout = AttentionMetadata(
        visible_BQ.view(-1).long() - 1, spans, decode_batch=DecodeBatch(pages, visible_BQ)
    )
    angles, slot_T = _angles(tokens), torch.randperm(SLOTS, device="cuda")[:tokens]
    storage = _Storage(slot_T)
    step = ForwardContext(layout, storage, angles.cos_TP, angles.sin_TP, AuxRequest())
    x_TD = _random(tokens, HIDDEN)

    def plain() -> list[Tensor]:
        projected = apart.project(x_TD, step)
        step.kv_cache.update(0, "row", projected.row_TC)
        index = apart.index_new_tokens(x_TD, projected, step)
        assert index is not None
        return [apart.absorb(projected.query_THD), index.query_THD, index.weight_TH]

    def ours(attention: DSA) -> list[Tensor]:
        assert attention.can_fuse_decode(x_TD, step)
        ready = attention.prepare_decode(x_TD, step, need_scores=True)
        assert ready.index is not None
        return [ready.absorbed_THC, ready.index.query_THD, ready.index.weight_TH]

    def left(arm: Callable[[], list[Tensor]]) -> list[Tensor]:
        return [*arm(), *(stored[slot_T].clone() for stored in storage.stored.values())]

    expected = left(plain)
    for attention, name in ((apart, "weights apart"), (joined, "weights together")):
        arm = partial(ours, attention)
        _agree(left(arm), expected)
        needed = _weight_bytes(attention)
        label = f"layer, {tokens} tokens, {name}"
        yield _figure(label, arm, plain, needed, moved)


def _weight_bytes(attention: DSA) -> int:
    """Of the products before attention; of kv_b the part that makes keys."""
    assert attention.indexer is not None
    indexer, mla = attention.indexer, attention.mla
    whole = (attention.q_a, attention.kv_a, attention.q_b, indexer.key, indexer.query)
    weights = sum(linear.weight.nbytes for linear in (*whole, indexer.weights))
    return weights + attention.kv_b.weight.nbytes * mla.nope // (mla.nope + mla.value)


def _agree(found: list[Tensor], expected: list[Tensor]) -> None:
    """A figure counts only if the answer is right."""
    for one, other in zip(found, expected, strict=True):
        error = (one.double() - other.double()).norm() / other.double().norm()
        assert float(error) < TOLERANCE, f"{float(error):.3g} apart"


def _figure(
    name: str,
    ours: Callable[[], object],
    plain: Callable[[], object],
    needed: int,
    moved: float,
) -> Figure:
    mine, theirs = medians([_many(ours), _many(plain)], repeats=15)
    return Figure(
        section="prepare",
        name=name,
        ms=mine / REPEATED,
        rate=needed * REPEATED / mine / 1e9,
        unit="TB/s",
        floor_ms=needed / moved * 1e3,
        peer="launches one by one",
        peer_ms=theirs / REPEATED,
    )


def _many(work: Callable[[], object]) -> Callable[[], None]:
    def again() -> None:
        for _ in range(REPEATED):
            work()

    return recorded(again)
