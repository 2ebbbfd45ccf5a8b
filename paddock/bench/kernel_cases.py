"""Benchmark case of each kernel: random tensors of one layer.

T tokens, S keys, H heads, D width, K selected keys or experts, E experts, F inner, G = 2 F,
V vocabulary, B sequences, Q queries of each, C row width, R rows, P pairs, L a document's tokens.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from paddock.bench.kernel_inputs import RandomInputs
from paddock.bench.mla_prepare_case import mla_prepare

if TYPE_CHECKING:
    from torch import Tensor

Call = Callable[[], "Tensor"]
ReferenceAndKernel = tuple[Call, Call]


def _adamw(inputs: RandomInputs) -> Call:
    import torch

    from paddock.optim import AdamW
    from paddock.records import NamedParameter, ParameterRole

    width = inputs.size.hidden
    weights = [torch.nn.Parameter(inputs.random(width, width, wide=True)) for _ in range(8)]
    for weight in weights:
        weight.grad = inputs.random(width, width, wide=True)
    role = ParameterRole(kind="matrix")
    declared = [NamedParameter(f"w{i}", weight, role) for i, weight in enumerate(weights)]
    optimizer = AdamW(declared, lr=1e-6)

    def step() -> "Tensor":
        optimizer.step()
        return weights[0][:0]  # steps change the weights, so results cannot be compared

    return step


def _documents(
    inputs: RandomInputs, heads: int, width: int, *, ragged: bool
) -> "tuple[Tensor, Tensor, Tensor, list[Any]]":
    """Queries, keys and values of eight documents, of equal or of different lengths."""
    from itertools import accumulate, pairwise

    from paddock.kernels.spans import Span

    T, length = inputs.size.tokens, inputs.size.tokens // 8
    sizes = [length + (i if ragged else 0) for i in range(-4, 3)]
    starts = [0, *accumulate(sizes), T]
    spans = [Span(start, stop - start, start, stop - start) for start, stop in pairwise(starts)]
    query, key, value = (inputs.random(T, heads, width) for _ in range(3))
    return query, key, value, spans


def _causal_attention(inputs: RandomInputs) -> Call:
    from paddock.kernels.dense_attention import dense_attention

    query, key, value, spans = _documents(inputs, inputs.size.heads, 128, ragged=True)
    return lambda: dense_attention(query, key, value, spans, scale=128**-0.5)


def _index_kl(inputs: RandomInputs) -> Call:
    from paddock.kernels.index_kl import IndexerInputs, IndexerTarget, index_kl
    from paddock.kernels.spans import Span

    size, width = inputs.size, inputs.size.latent + inputs.size.rope
    weight_TH = inputs.random(size.tokens, size.heads, wide=True) * (size.heads * 64) ** -0.5
    index = IndexerInputs(
        inputs.random(size.tokens, size.heads, 64), inputs.random(size.tokens, 64), weight_TH
    )
    query_THC, row_SC = (
        inputs.random(size.tokens, size.heads, width),
        inputs.random(size.tokens, width),
    )
    attention = IndexerTarget(query_THC, row_SC, width**-0.5)
    return lambda: index_kl(index, attention, (Span(0, size.tokens, 0, size.tokens),))


def _topk_masked_attention(inputs: RandomInputs) -> Call:
    import torch

    from paddock.kernels.dense_attention import topk_masked_attention

    query, key, value, spans = _documents(inputs, inputs.size.heads, 128, ragged=False)
    index_LK = inputs.random_topk_indices(spans[0].queries, spans[0].keys)
    # Indices count keys over all documents.
    index_TK = torch.cat([torch.where(index_LK < 0, -1, index_LK + span.key) for span in spans])
    return lambda: topk_masked_attention(query, key, value, spans, index_TK.int(), scale=128**-0.5)


def _expert_topk(inputs: RandomInputs) -> Call:
    from paddock.kernels.expert_topk import expert_topk

    score_TE = inputs.random(inputs.size.tokens, inputs.size.experts, wide=True)
    return lambda: expert_topk(score_TE, inputs.size.active)


def _fused_experts(inputs: RandomInputs) -> Call:
    from paddock.kernels.fused_experts import fused_experts

    size, few = inputs.size, 4
    expert_TK, weight_TK = inputs.random_routing(few)
    x_TD, down_EDF = (
        inputs.random(few, size.hidden),
        inputs.random(size.experts, size.hidden, size.inner),
    )
    gate_up_EGD = inputs.random(size.experts, 2 * size.inner, size.hidden)
    return lambda: fused_experts(x_TD, expert_TK, weight_TK, gate_up_EGD, down_EDF)


def _grouped_gemm(inputs: RandomInputs) -> Call:
    from paddock.kernels.grouped_gemm import grouped_gemm
    from paddock.kernels.moe_permute import count_tokens_per_expert

    size = inputs.size
    expert_TK, _ = inputs.random_routing(size.tokens)
    counts_E = count_tokens_per_expert(expert_TK, size.experts)
    x_RD = inputs.random(size.tokens * size.active, size.hidden)
    weight_EFD = inputs.random(size.experts, 2 * size.inner, size.hidden)
    return lambda: grouped_gemm(x_RD, weight_EFD, counts_E)


def _index_topk(inputs: RandomInputs) -> Call:
    from paddock.kernels.topk import index_topk

    size = inputs.size
    query_THD, key_SD = inputs.random(size.tokens, size.heads, 64), inputs.random(size.tokens, 64)
    weight_TH = inputs.random(size.tokens, size.heads, wide=True)
    return lambda: index_topk(query_THD, key_SD, weight_TH, 0, size.keep)


def _mla_decode(inputs: RandomInputs) -> Call:
    import torch

    from paddock.kernels.block_table import BlockTable
    from paddock.kernels.mla_decode import mla_paged_decode

    size = inputs.size
    slots, width = size.sequences * size.tokens, size.latent + size.rope
    pages = torch.randperm(slots // size.page, device=inputs.device).int()
    table = BlockTable(pages.view(size.sequences, -1), size.page)
    visible_BQ = torch.full(
        (size.sequences, 1), size.tokens, dtype=torch.int32, device=inputs.device
    )
    query_BQHC, row_SC = (
        inputs.random(size.sequences, 1, size.heads, width),
        inputs.random(slots, width),
    )
    how = {"scale": width**-0.5, "value": size.latent}
    return lambda: mla_paged_decode(query_BQHC, row_SC, table, visible_BQ, **how)  # type: ignore[arg-type]


def _gqa_decode(inputs: RandomInputs) -> Call:
    import torch

    from paddock.kernels.block_table import BlockTable
    from paddock.kernels.gqa_decode import gqa_paged_decode

    size = inputs.size
    slots, groups = size.sequences * size.tokens, size.heads // 4
    pages = torch.randperm(slots // size.page, device=inputs.device).int()
    table = BlockTable(pages.view(size.sequences, -1), size.page)
    visible_BQ = torch.full(
        (size.sequences, 1), size.tokens, dtype=torch.int32, device=inputs.device
    )
    query_BQHD = inputs.random(size.sequences, 1, size.heads, 128)
    key_SGD, value_SGD = (inputs.random(slots, groups, 128) for _ in range(2))
    return lambda: gqa_paged_decode(
        query_BQHD, key_SGD, value_SGD, table, visible_BQ, scale=128**-0.5
    )


def _linear_cross_entropy(inputs: RandomInputs) -> Call:
    from paddock.kernels.linear_cross_entropy import linear_cross_entropy

    size = inputs.size
    hidden_TD, head_VD = (
        inputs.random(size.tokens, size.hidden),
        inputs.random(size.vocab, size.hidden),
    )
    target_T = inputs.randint(size.vocab, size.tokens)
    return lambda: linear_cross_entropy(hidden_TD, head_VD, target_T)


def _moe_permute(inputs: RandomInputs) -> Call:
    from paddock.kernels.moe_permute import permute, sort_by_expert, unpermute

    size = inputs.size
    expert_TK, weight_TK = inputs.random_routing(size.tokens)
    x_TD = inputs.random(size.tokens, size.hidden)

    def permute_and_back() -> "Tensor":
        order = sort_by_expert(expert_TK, size.experts)
        return unpermute(permute(x_TD, order), weight_TK, order)

    return permute_and_back


def _newton_schulz(inputs: RandomInputs) -> Call:
    import torch

    from paddock.kernels.newton_schulz import newton_schulz

    update_EFD = inputs.random(8, inputs.size.inner, inputs.size.hidden, wide=True)
    # No bfloat16 on a CPU: a virtual one may announce AMX tiles that it cannot execute.
    dtype = None if inputs.device.type == "cpu" else torch.bfloat16
    return lambda: newton_schulz(update_EFD, dtype=dtype)


def _norm(inputs: RandomInputs) -> Call:
    from paddock.kernels.norm import rms_norm

    x_TD, weight_D = (
        inputs.random(inputs.size.tokens, inputs.size.hidden),
        inputs.random(inputs.size.hidden),
    )
    return lambda: rms_norm(x_TD, weight_D, 1e-5)


def _rope(inputs: RandomInputs) -> Call:
    from paddock.kernels.rope import rope_interleaved

    size, pairs = inputs.size, 32
    x_THD = inputs.random(size.tokens, size.heads, 128)
    angle_TP = inputs.random(size.tokens, pairs, wide=True)
    cos_TP, sin_TP = angle_TP.cos(), angle_TP.sin()
    return lambda: rope_interleaved(x_THD, cos_TP, sin_TP)


def _sparse_mla(inputs: RandomInputs) -> Call:
    from paddock.kernels.sparse_mla import sparse_mla

    size = inputs.size
    width, queries = size.latent + size.rope, max(1, size.tokens // 8)
    query_THC, row_SC = (
        inputs.random(queries, size.heads, width),
        inputs.random(size.tokens, width),
    )
    index_TK = inputs.random_topk_indices(queries, size.tokens)
    return lambda: sparse_mla(query_THC, row_SC, index_TK, scale=width**-0.5, value=size.latent)


def _swiglu(inputs: RandomInputs) -> Call:
    from paddock.kernels.swiglu import silu_and_mul

    both_RG = inputs.random(inputs.size.tokens, 2 * inputs.size.inner)
    return lambda: silu_and_mul(both_RG)


def _topk(inputs: RandomInputs) -> Call:
    import torch

    from paddock.kernels.topk import topk

    size = inputs.size
    score_TS = inputs.random(max(1, size.tokens // 8), size.tokens, wide=True)
    visible_T = torch.full((len(score_TS),), size.tokens, dtype=torch.int32, device=inputs.device)
    return lambda: topk(score_TS, visible_T, size.keep)


def _w4a8_gemm(inputs: RandomInputs) -> Call:
    import torch

    from paddock.kernels.w4a8_gemm import PackedWeight, int_linear, pack_halves, quantize_per_token

    size = inputs.size
    rows = quantize_per_token(inputs.random(size.tokens, size.hidden))
    integer_FD = (inputs.randint(16, size.hidden, size.hidden) - 8).to(torch.int8)
    scale_FG = torch.rand(size.hidden, 1, device=inputs.device) + 0.1
    weight = PackedWeight(pack_halves(integer_FD), scale_FG, packed=True)
    dtype = torch.float32 if inputs.device.type == "cpu" else torch.bfloat16
    return lambda: int_linear(rows, weight, dtype)


def _linear_fp32(inputs: RandomInputs) -> Call:
    from paddock.kernels.linear_fp32 import linear_fp32

    size = inputs.size
    x_TD, weight_ED = (
        inputs.random(size.tokens, size.hidden),
        inputs.random(size.experts, size.hidden, wide=True),
    )
    return lambda: linear_fp32(x_TD, weight_ED)


def _gated_delta(inputs: RandomInputs) -> ReferenceAndKernel:
    """Two reference forms: recurrent, and chunked."""
    from paddock.kernels.gated_delta import chunk_gated_delta_rule, recurrent_gated_delta_rule

    size, length = inputs.size, min(inputs.size.tokens, 1024)
    query, key, value = (inputs.random(length, size.heads, 32) for _ in range(3))
    key = key / key.norm(dim=-1, keepdim=True)
    log_alpha_TH = -inputs.random(length, size.heads, wide=True).abs()
    beta_TH = inputs.random(length, size.heads, wide=True).sigmoid()
    operands = (query, key, value, log_alpha_TH, beta_TH)
    return (lambda: recurrent_gated_delta_rule(*operands)[0]), (
        lambda: chunk_gated_delta_rule(*operands)[0]
    )


def _cpu(inputs: RandomInputs) -> ReferenceAndKernel:
    """A linear layer for 16 rows in float32 on the CPU, whatever the device of the others is."""
    import torch
    from torch.nn import functional as F

    from paddock.kernels import cpu
    from paddock.kernels.packed_linear import pack, packed_linear

    cpu.load(wait=True)
    hidden = inputs.size.hidden
    x_TD, weight_FD = torch.randn(16, hidden), torch.randn(4 * hidden, hidden) / hidden**0.5
    packed = pack(weight_FD)
    return (lambda: F.linear(x_TD, weight_FD)), (lambda: packed_linear(x_TD, packed))


# Every switch of kernels.dispatch has a case here.
CASES: dict[str, Callable[[RandomInputs], Call]] = {
    "adamw": _adamw,
    "causal_attention": _causal_attention,
    "expert_topk": _expert_topk,
    "fused_experts": _fused_experts,
    "gqa_decode": _gqa_decode,
    "grouped_gemm": _grouped_gemm,
    "index_kl": _index_kl,
    "index_topk": _index_topk,
    "topk_masked_attention": _topk_masked_attention,
    "mla_decode": _mla_decode,
    "mla_prepare": mla_prepare,
    "linear_cross_entropy": _linear_cross_entropy,
    "moe_permute": _moe_permute,
    "newton_schulz": _newton_schulz,
    "norm": _norm,
    "rope": _rope,
    "sparse_mla": _sparse_mla,
    "swiglu": _swiglu,
    "topk": _topk,
    "w4a8_gemm": _w4a8_gemm,
    "linear_fp32": _linear_fp32,
}
# Kernels that run wherever their reference does.
PAIRED_CASES: dict[str, tuple[str, Callable[[RandomInputs], ReferenceAndKernel]]] = {
    "cpu": ("a product with an unpacked weight", _cpu),
    "gated_delta": ("a recurrence, token by token", _gated_delta),
}
