"""Triton kernels against their references, run by Triton's interpreter in float32.

    TRITON_INTERPRET=1 python -m tests.kernels.interpreter_cases FILE

Triton decides when it is imported whether it compiles or interprets, so interpreting needs a
separate process. FILE receives, as JSON, the distance of every case from its float64 reference:
of the result and of each gradient, by relative norm.
"""

import json
import sys
from pathlib import Path

import torch

from paddock.kernels.spans import Span

CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def error(found, exact):
    exact = exact.detach().double()
    return float((found.detach().double() - exact).norm() / exact.norm().clamp_min(1e-30))


def distances(kernel, reference, *leaves):
    """Relative errors of the result and of the gradients of all leaves, for one random upstream
    gradient."""
    leaves = [x.detach().requires_grad_() for x in leaves]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    found, expected = kernel(*leaves), reference(*exact)
    above = torch.randn_like(found)
    grads = torch.autograd.grad(found, leaves, above)
    exact_grads = torch.autograd.grad(expected, exact, above.double())
    pairs = [(found, expected), *zip(grads, exact_grads, strict=True)]
    return [error(a, b) for a, b in pairs]


def documents(*lengths):
    spans, start = [], 0
    for length in lengths:
        spans.append(Span(start, length, start, length))
        start += length
    return tuple(spans)


def chosen(spans, k):
    """Ascending top-k indices of queries that see more than k keys; some keep fewer, padded with
    -1."""
    index = torch.full((spans[-1].query + spans[-1].queries, k), -1, dtype=torch.int32)
    for span in spans:
        for i in range(k, span.queries):
            count = k if i % 3 else max(1, k - 2)
            kept = torch.randperm(i + 1)[:count].sort().values + span.key
            index[span.query + i, :count] = kept.int()
    return index


def attention(spans, index, heads=(2, 2), dim=16, value=16):
    from paddock.kernels.dense_attention import packed, reference

    T = sum(span.keys for span in spans)
    # Column slices of a wider tensor, like values in the output of the up-projection.
    leaves = (
        torch.randn(T, heads[0], dim),
        torch.randn(T, heads[1], dim + 8)[..., 8:],
        torch.randn(T, heads[1], value + 8)[..., :value],
    )
    if index is None:
        return distances(
            lambda q, k, v: packed.attention(q, k, v, spans, None, scale=0.3),
            lambda q, k, v: reference.dense_attention(q, k, v, spans, scale=0.3),
            *leaves,
        )
    return distances(
        lambda q, k, v: packed.attention(q, k, v, spans, index, scale=0.3),
        lambda q, k, v: reference.topk_masked_attention(q, k, v, spans, index, scale=0.3),
        *leaves,
    )


@case
def topk_attention_with_documents_ending_within_a_tile():
    spans = documents(130, 1, 20)
    return attention(spans, chosen(spans, 4))


@case
def topk_attention_with_wide_grouped_heads():
    spans = documents(70, 33)
    return attention(spans, chosen(spans, 7), heads=(2, 1), dim=72, value=80)


@case
def topk_attention_with_heads_wider_than_128():
    spans = documents(40)
    return attention(spans, chosen(spans, 3), heads=(1, 1), dim=136, value=20)


@case
def topk_attention_with_skipped_tiles():
    """Queries from 128 on keep only near keys and skip the first tile of keys."""
    from paddock.kernels.dense_attention.packed import KeyBlockMask

    spans = documents(270)
    near_T1 = torch.arange(270).view(-1, 1) // 128 * 128
    index = (near_T1 + torch.tensor([[0, 5]])).int()
    index[(index > torch.arange(270).view(-1, 1)).any(1)] = -1
    index[128:133], index[256:261] = torch.tensor([128, -1]), torch.tensor([256, -1])
    kept = KeyBlockMask.of(index, spans)
    assert kept.flags.tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
    assert kept.counts.tolist() == [1, 1, 1]
    assert kept.turned(spans).lists[:, 0].tolist() == [0, 1, 2]
    return attention(spans, index, heads=(1, 1))


@case
def causal_attention():
    return attention(documents(130, 1, 40), None, dim=24)


@case
def causal_attention_with_wide_heads():
    return attention(documents(200, 70), None, heads=(1, 1), dim=72, value=16)


@case
def rms_norm():
    from paddock.kernels.norm import fused, reference

    return distances(
        lambda x, w: fused.norm(x[:, :24], w, None, 1e-5),
        lambda x, w: reference.rms_norm(x[:, :24], w, 1e-5),
        torch.randn(700, 30),
        torch.randn(24),
    )


@case
def layer_norm():
    from paddock.kernels.norm import fused, reference

    return distances(
        lambda x, w, b: fused.norm(x, w, b, 1e-6),
        lambda x, w, b: reference.layer_norm(x, w, b, 1e-6),
        3 + torch.randn(5, 4, 24),
        torch.randn(24),
        torch.randn(24),
    )


def rotation(layout, dims, first):
    from paddock.kernels.rope import fused, reference

    cos, sin = torch.randn(7, 4), torch.randn(7, 4)
    rotate = getattr(reference, f"rope_{layout}")
    return distances(
        lambda x: fused.rotate(x, cos, sin, first, interleaved=layout == "interleaved"),
        lambda x: rotate(x, cos.double(), sin.double(), first),
        torch.randn(7, 3, dims),
    )


@case
def rope_interleaved():
    return rotation("interleaved", 8, 0)


@case
def rope_interleaved_on_some_dims():
    return rotation("interleaved", 16, 5)


@case
def rope_halves():
    return rotation("halves", 8, 0)


@case
def rope_halves_on_last_dims():
    return rotation("halves", 20, 12)


@case
def swiglu_of_two_tensors():
    from paddock.kernels.swiglu import fused, reference

    return distances(fused.swiglu, reference.swiglu, torch.randn(9, 20), torch.randn(9, 20))


@case
def silu_and_mul_of_one_tensor():
    from paddock.kernels.swiglu import fused, reference

    return distances(
        fused.silu_and_mul, lambda x: reference.swiglu(*x.chunk(2, -1)), torch.randn(9, 40)
    )


@case
def expert_topk_follows_the_tie_rule():
    from paddock.kernels.expert_topk import fused
    from paddock.kernels.topk import topk_indices

    score = torch.randn(500, 12)
    score[0], score[1], score[2, 3] = 0.0, -torch.inf, torch.nan
    score[3, ::2], score[3, 1::2] = -0.0, 0.0
    score[4:200] = score[4:200].round()
    score[200, 7] = torch.inf
    return [
        float((fused.expert_topk(score, k) != topk_indices(score, k)).sum()) for k in (1, 4, 11)
    ]


def order_of(tokens, experts, k):
    from paddock.kernels.topk import topk_indices

    return topk_indices(torch.randn(tokens, experts), k)


@case
def rows_are_sorted_by_expert_then_token():
    from paddock.kernels.moe_permute import fused, reference

    expert = order_of(300, 10, 3)
    expert[:, 0], expert[:, 1:] = 0, expert[:, 1:].clamp(min=1)
    expert[:, 2] = torch.where(expert[:, 1] == expert[:, 2], 9, expert[:, 2])
    expert[expert[:, 1] == 9, 1] = 1
    found, expected = fused.sort_by_expert(expert, 12), reference.sort_by_expert(expert, 12)
    names = ("token_R", "slot_TK", "counts_E")
    return [float((getattr(found, n) != getattr(expected, n)).sum()) for n in names]


@case
def few_rows_are_sorted_in_one_block():
    from paddock.kernels.moe_permute import fused, reference

    expert = order_of(40, 10, 3)
    found, expected = fused.sort_by_expert(expert, 12), reference.sort_by_expert(expert, 12)
    names = ("token_R", "slot_TK", "counts_E")
    return [float((getattr(found, n) != getattr(expected, n)).sum()) for n in names]


@case
def permute():
    from paddock.kernels.moe_permute import fused, reference

    order = reference.sort_by_expert(order_of(40, 5, 3), 5)
    return distances(
        lambda x: fused.permute(x[:, 2:], order),
        lambda x: reference.permute(x[:, 2:], order),
        torch.randn(40, 14),
    )


@case
def unpermute():
    from paddock.kernels.moe_permute import fused, reference

    order = reference.sort_by_expert(order_of(40, 5, 3), 5)
    return distances(
        lambda a, w: fused.unpermute(a, w, order),
        lambda a, w: reference.unpermute(a, w, order),
        torch.randn(120, 12),
        torch.rand(40, 3),
    )


def experts_of(tokens, experts, k, hidden=20, inner=24):
    from paddock.kernels.fused_experts import fused, reference

    stacks = torch.randn(experts, 2 * inner, hidden), torch.randn(experts, hidden, inner)
    x, weight = torch.randn(tokens, hidden), torch.rand(tokens, k)
    expert = order_of(tokens, experts, k)
    found = fused.fused_experts(x, expert, weight, *stacks)
    wide = (y.double() for y in (weight, *stacks))
    return [error(found, reference.fused_experts(x.double(), expert, *wide))]


@case
def fused_experts_of_one_token():
    return experts_of(1, 8, 3)


@case
def fused_experts_of_few_tokens():
    """An expert has at most one row of a token: 40 rows of two experts are three blocks each."""
    return experts_of(40, 2, 2) + experts_of(37, 9, 4, hidden=130, inner=40)


@case
def fused_experts_plan_covers_every_row_once():
    from paddock.kernels.fused_experts.triton import BM, plan

    expert = torch.cat((torch.randint(0, 7, (60,)), torch.full((40,), 3)))
    work = plan(expert, 7)
    kept = work.expert_N >= 0
    rows, experts = work.row_NM[kept], work.expert_N[kept]
    blocks = sum(-(-int((expert == e).sum()) // BM) for e in range(7))
    wrong = int(kept.sum()) - blocks
    wrong += int((expert[rows.clamp(min=0).long()] != experts.unsqueeze(1))[rows >= 0].sum())
    missing = set(range(100)) ^ {int(r) for r in rows.flatten() if r >= 0}
    return [float(wrong), float(len(missing)), float((rows >= 0).sum() - 100)]


def cross_entropy_distances(target, temperature):
    from paddock.kernels.linear_cross_entropy import fused, reference

    chunk = 4 * 50 * 6  # bytes: six rows at a time
    return distances(
        lambda h, w: fused.nll(h, w, target, temperature, chunk),
        lambda h, w: reference.nll(h, w, target, temperature, 2 * chunk),
        torch.randn(23, 8),
        torch.randn(50, 8),
    )


@case
def cross_entropy_of_every_token():
    return cross_entropy_distances(torch.randint(50, (23,)), 1.0)


@case
def cross_entropy_with_ignored_tokens_and_temperature():
    target = torch.randint(50, (23,))
    target[3:9] = -100
    return cross_entropy_distances(target, 0.7)


@case
def transformer_with_all_kernels():
    """Every kernel inside a network: each op is made to choose its kernel."""
    from paddock.kernels import (
        dense_attention,
        expert_topk,
        linear_cross_entropy,
        linear_fp32,
        moe_permute,
        norm,
        rope,
        swiglu,
    )
    from paddock.model import AttentionMetadata
    from paddock.model.config import IndexerSettings
    from tests.model.networks import build_network, latent_config, tokens

    used = set()

    def always(name):
        return lambda *_: used.add(name) is None

    dense_attention.packed.suits = always("attention")
    moe_permute.fused.sorts, moe_permute.fused.moves = always("sort"), always("move")
    for op in (expert_topk, linear_cross_entropy, norm, rope, swiglu, linear_fp32):
        op.fused.suits = always(op.__name__)
    indexer = IndexerSettings(heads=2, dim=8, topk=8, layers=("full",) * 2)
    config = latent_config(attention=("dsa",) * 2, mlp=("dense", "moe"), indexer=indexer, mtp=None)
    token_T, layout = tokens(30), AttentionMetadata.packed([18, 12])

    def gradients(network):
        hidden_TD = network(token_T, layout).hidden_TD
        found = linear_cross_entropy.linear_cross_entropy(hidden_TD, network.head.weight, token_T)
        found.sum().backward()
        grads = {name: p.grad for name, p in network.named_parameters() if p.grad is not None}
        return found, grads

    found, grads = gradients(build_network(config))
    assert len(used) == 9, used
    dense_attention.packed.suits = lambda *_: False
    moe_permute.fused.sorts = moe_permute.fused.moves = lambda *_: False
    for op in (expert_topk, linear_cross_entropy, norm, rope, swiglu, linear_fp32):
        op.fused.suits = lambda *_: False
    exact, exact_grads = gradients(build_network(config).double())
    assert grads.keys() == exact_grads.keys()
    # float32 errors add up over many layers.
    return [0.2 * error(found, exact)] + [0.2 * error(grads[n], exact_grads[n]) for n in grads]


def main():
    found = {}
    for name, run in CASES.items():
        torch.manual_seed(0)
        found[name] = run()
    Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
