"""What each kernel is timed on: random tensors of one layer.

T tokens, S keys, H heads, D width, K kept or experts of a token, E experts, F inner, G = 2 F,
V vocabulary, B sequences, Q queries of each, C row width, R rows, P pairs, L a document's tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paddock.bench.latent_prepare_case import latent_prepare

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Call = Callable[[], "Tensor"]
ReferenceAndKernel = tuple[Call, Call]  # the definition, and its quicker form


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """One layer, as wide as a machine of this kind can bear."""

    tokens: int
    hidden: int
    heads: int
    latent: int
    rope: int
    keep: int
    experts: int
    inner: int
    vocab: int
    sequences: int = 8
    page: int = 64
    active: int = 4  # experts of a token

    def __str__(self) -> str:
        return (
            f"{self.tokens:,} tokens, width {self.hidden:,}, {self.heads} heads, rows of "
            f"{self.latent} + {self.rope}, {self.keep:,} keys kept, {self.experts} experts of "
            f"{self.inner}"
        )


SIZES = {
    "accelerator": LayerShape(
        tokens=8192, hidden=2048, heads=16, latent=512, rope=64, keep=1024, experts=64, inner=768,
        vocab=32_768,
    ),
    "cpu": LayerShape(
        tokens=256, hidden=64, heads=4, latent=32, rope=8, keep=64, experts=8, inner=32, vocab=960,
    ),
}  # fmt: skip


def layer_shape(device: "torch.device") -> LayerShape:
    return SIZES["cpu" if device.type == "cpu" else "accelerator"]


@dataclass(frozen=True, slots=True)
class RandomInputs:
    """Random inputs of one layer: bfloat16 on an accelerator, float32 on the CPU."""

    device: "torch.device"
    size: LayerShape

    def random(self, *shape: int, wide: bool = False) -> "Tensor":
        import torch

        half = self.device.type != "cpu" and not wide
        dtype = torch.bfloat16 if half else torch.float32
        return torch.randn(shape, device=self.device, dtype=dtype)

    def randint(self, limit: int, *shape: int) -> "Tensor":
        import torch

        return torch.randint(0, limit, shape, device=self.device)

    def random_routing(self, tokens: int) -> "tuple[Tensor, Tensor]":
        """Different experts for each token, and their weights."""
        import torch

        size = self.size
        score_TE = torch.rand(tokens, size.experts, device=self.device)
        weight_TK, expert_TK = score_TE.topk(size.active)
        return expert_TK.sort().values, weight_TK

    def random_topk_indices(self, queries: int, keys: int) -> "Tensor":
        """Different keys for each query, ascending; -1 where a query sees fewer."""
        import torch

        k = min(self.size.keep, keys)
        position_Q = torch.arange(keys - queries, keys, device=self.device)
        score_QS = torch.rand(queries, keys, device=self.device)
        score_QS.masked_fill_(torch.arange(keys, device=self.device) > position_Q[:, None], -1.0)
        best_QK, index_QK = score_QS.topk(k)
        found_QK = index_QK.masked_fill(best_QK < 0, keys).sort().values
        return found_QK.masked_fill(found_QK == keys, -1).int()


def _adamw(made: RandomInputs) -> Call:
    import torch

    from paddock.optim import AdamW
    from paddock.records import NamedParameter, ParameterRole

    width = made.size.hidden
    weights = [torch.nn.Parameter(made.random(width, width, wide=True)) for _ in range(8)]
    for weight in weights:
        weight.grad = made.random(width, width, wide=True)
    role = ParameterRole(kind="matrix")
    declared = [NamedParameter(f"w{i}", weight, role) for i, weight in enumerate(weights)]
    optimizer = AdamW(declared, lr=1e-6)

    def step() -> "Tensor":
        optimizer.step()
        return weights[0][:0]  # every step changes what the next one sees: nothing to compare

    return step


def _documents(
    made: RandomInputs, heads: int, width: int, *, ragged: bool
) -> "tuple[Tensor, Tensor, Tensor, list[Any]]":
    """Queries, keys and values of eight documents, each as long as the others or none."""
    from itertools import accumulate, pairwise

    from paddock.kernels.spans import Span

    T, length = made.size.tokens, made.size.tokens // 8
    sizes = [length + (i if ragged else 0) for i in range(-4, 3)]
    starts = [0, *accumulate(sizes), T]
    spans = [Span(start, stop - start, start, stop - start) for start, stop in pairwise(starts)]
    query, key, value = (made.random(T, heads, width) for _ in range(3))
    return query, key, value, spans


def _causal_attention(made: RandomInputs) -> Call:
    from paddock.kernels.dense_attention import dense_attention

    query, key, value, spans = _documents(made, made.size.heads, 128, ragged=True)
    return lambda: dense_attention(query, key, value, spans, scale=128**-0.5)


def _index_kl(made: RandomInputs) -> Call:
    from paddock.kernels.index_kl import IndexerInputs, IndexerTarget, index_kl
    from paddock.kernels.spans import Span

    size, width = made.size, made.size.latent + made.size.rope
    weight_TH = made.random(size.tokens, size.heads, wide=True) * (size.heads * 64) ** -0.5
    index = IndexerInputs(
        made.random(size.tokens, size.heads, 64), made.random(size.tokens, 64), weight_TH
    )
    query_THC, row_SC = made.random(size.tokens, size.heads, width), made.random(size.tokens, width)
    attention = IndexerTarget(query_THC, row_SC, width**-0.5)
    return lambda: index_kl(index, attention, (Span(0, size.tokens, 0, size.tokens),))


def _kept_attention(made: RandomInputs) -> Call:
    import torch

    from paddock.kernels.dense_attention import topk_masked_attention

    query, key, value, spans = _documents(made, made.size.heads, 128, ragged=False)
    index_LK = made.random_topk_indices(spans[0].queries, spans[0].keys)
    # Keys are counted over all documents.
    index_TK = torch.cat([torch.where(index_LK < 0, -1, index_LK + span.key) for span in spans])
    return lambda: topk_masked_attention(query, key, value, spans, index_TK.int(), scale=128**-0.5)


def _expert_choice(made: RandomInputs) -> Call:
    from paddock.kernels.expert_topk import expert_topk

    score_TE = made.random(made.size.tokens, made.size.experts, wide=True)
    return lambda: expert_topk(score_TE, made.size.active)


def _few_experts(made: RandomInputs) -> Call:
    from paddock.kernels.fused_experts import fused_experts

    size, few = made.size, 4
    expert_TK, weight_TK = made.random_routing(few)
    x_TD, down_EDF = (
        made.random(few, size.hidden),
        made.random(size.experts, size.hidden, size.inner),
    )
    gate_up_EGD = made.random(size.experts, 2 * size.inner, size.hidden)
    return lambda: fused_experts(x_TD, expert_TK, weight_TK, gate_up_EGD, down_EDF)


def _grouped_gemm(made: RandomInputs) -> Call:
    from paddock.kernels.grouped_gemm import grouped_gemm
    from paddock.kernels.moe_permute import count_tokens_per_expert

    size = made.size
    expert_TK, _ = made.random_routing(size.tokens)
    counts_E = count_tokens_per_expert(expert_TK, size.experts)
    x_RD = made.random(size.tokens * size.active, size.hidden)
    weight_EFD = made.random(size.experts, 2 * size.inner, size.hidden)
    return lambda: grouped_gemm(x_RD, weight_EFD, counts_E)


def _index_topk(made: RandomInputs) -> Call:
    from paddock.kernels.topk import index_topk

    size = made.size
    query_THD, key_SD = made.random(size.tokens, size.heads, 64), made.random(size.tokens, 64)
    weight_TH = made.random(size.tokens, size.heads, wide=True)
    return lambda: index_topk(query_THD, key_SD, weight_TH, 0, size.keep)


def _latent_decode(made: RandomInputs) -> Call:
    import torch

    from paddock.kernels.block_table import BlockTable
    from paddock.kernels.mla_decode import mla_paged_decode

    size = made.size
    slots, width = size.sequences * size.tokens, size.latent + size.rope
    pages = torch.randperm(slots // size.page, device=made.device).int()
    table = BlockTable(pages.view(size.sequences, -1), size.page)
    visible_BQ = torch.full((size.sequences, 1), size.tokens, dtype=torch.int32, device=made.device)
    query_BQHC, row_SC = (
        made.random(size.sequences, 1, size.heads, width),
        made.random(slots, width),
    )
    how = {"scale": width**-0.5, "value": size.latent}
    return lambda: mla_paged_decode(query_BQHC, row_SC, table, visible_BQ, **how)  # type: ignore[arg-type]


def _grouped_decode(made: RandomInputs) -> Call:
    import torch

    from paddock.kernels.block_table import BlockTable
    from paddock.kernels.gqa_decode import gqa_paged_decode

    size = made.size
    slots, groups = size.sequences * size.tokens, size.heads // 4
    pages = torch.randperm(slots // size.page, device=made.device).int()
    table = BlockTable(pages.view(size.sequences, -1), size.page)
    visible_BQ = torch.full((size.sequences, 1), size.tokens, dtype=torch.int32, device=made.device)
    query_BQHD = made.random(size.sequences, 1, size.heads, 128)
    key_SGD, value_SGD = (made.random(slots, groups, 128) for _ in range(2))
    return lambda: gqa_paged_decode(
        query_BQHD, key_SGD, value_SGD, table, visible_BQ, scale=128**-0.5
    )


def _lm_loss(made: RandomInputs) -> Call:
    from paddock.kernels.linear_cross_entropy import linear_cross_entropy

    size = made.size
    hidden_TD, head_VD = (
        made.random(size.tokens, size.hidden),
        made.random(size.vocab, size.hidden),
    )
    target_T = made.randint(size.vocab, size.tokens)
    return lambda: linear_cross_entropy(hidden_TD, head_VD, target_T)


def _moe_permute(made: RandomInputs) -> Call:
    from paddock.kernels.moe_permute import permute, sort_by_expert, unpermute

    size = made.size
    expert_TK, weight_TK = made.random_routing(size.tokens)
    x_TD = made.random(size.tokens, size.hidden)

    def there_and_back() -> "Tensor":
        order = sort_by_expert(expert_TK, size.experts)
        return unpermute(permute(x_TD, order), weight_TK, order)

    return there_and_back


def _newton_schulz(made: RandomInputs) -> Call:
    import torch

    from paddock.kernels.newton_schulz import newton_schulz

    update_EFD = made.random(8, made.size.inner, made.size.hidden, wide=True)
    # Without bfloat16 on a CPU: a virtual one may announce tiles that it does not execute.
    dtype = None if made.device.type == "cpu" else torch.bfloat16
    return lambda: newton_schulz(update_EFD, dtype=dtype)


def _norm(made: RandomInputs) -> Call:
    from paddock.kernels.norm import rms_norm

    x_TD, weight_D = made.random(made.size.tokens, made.size.hidden), made.random(made.size.hidden)
    return lambda: rms_norm(x_TD, weight_D, 1e-5)


def _rope(made: RandomInputs) -> Call:
    from paddock.kernels.rope import rope_interleaved

    size, pairs = made.size, 32
    x_THD = made.random(size.tokens, size.heads, 128)
    angle_TP = made.random(size.tokens, pairs, wide=True)
    cos_TP, sin_TP = angle_TP.cos(), angle_TP.sin()
    return lambda: rope_interleaved(x_THD, cos_TP, sin_TP)


def _sparse_mla(made: RandomInputs) -> Call:
    from paddock.kernels.sparse_mla import sparse_mla

    size = made.size
    width, queries = size.latent + size.rope, max(1, size.tokens // 8)
    query_THC, row_SC = (
        made.random(queries, size.heads, width),
        made.random(size.tokens, width),
    )
    index_TK = made.random_topk_indices(queries, size.tokens)
    return lambda: sparse_mla(query_THC, row_SC, index_TK, scale=width**-0.5, value=size.latent)


def _swiglu(made: RandomInputs) -> Call:
    from paddock.kernels.swiglu import silu_and_mul

    both_RG = made.random(made.size.tokens, 2 * made.size.inner)
    return lambda: silu_and_mul(both_RG)


def _topk(made: RandomInputs) -> Call:
    import torch

    from paddock.kernels.topk import topk

    size = made.size
    score_TS = made.random(max(1, size.tokens // 8), size.tokens, wide=True)
    visible_T = torch.full((len(score_TS),), size.tokens, dtype=torch.int32, device=made.device)
    return lambda: topk(score_TS, visible_T, size.keep)


def _w4a8_gemm(made: RandomInputs) -> Call:
    import torch

    from paddock.kernels.w4a8_gemm import PackedWeight, int_linear, pack_halves, quantize_per_token

    size = made.size
    rows = quantize_per_token(made.random(size.tokens, size.hidden))
    integer_FD = (made.randint(16, size.hidden, size.hidden) - 8).to(torch.int8)
    scale_FG = torch.rand(size.hidden, 1, device=made.device) + 0.1
    weight = PackedWeight(pack_halves(integer_FD), scale_FG, packed=True)
    dtype = torch.float32 if made.device.type == "cpu" else torch.bfloat16
    return lambda: int_linear(rows, weight, dtype)


def _wide_linear(made: RandomInputs) -> Call:
    from paddock.kernels.linear_fp32 import linear_fp32

    size = made.size
    x_TD, weight_ED = (
        made.random(size.tokens, size.hidden),
        made.random(size.experts, size.hidden, wide=True),
    )
    return lambda: linear_fp32(x_TD, weight_ED)


def _gated_delta(made: RandomInputs) -> ReferenceAndKernel:
    """Two plain forms: token by token, and in chunks."""
    from paddock.kernels.gated_delta import chunk_gated_delta_rule, recurrent_gated_delta_rule

    size, length = made.size, min(made.size.tokens, 1024)
    query, key, value = (made.random(length, size.heads, 32) for _ in range(3))
    key = key / key.norm(dim=-1, keepdim=True)
    log_alpha_TH = -made.random(length, size.heads, wide=True).abs()
    beta_TH = made.random(length, size.heads, wide=True).sigmoid()
    operands = (query, key, value, log_alpha_TH, beta_TH)
    return (lambda: recurrent_gated_delta_rule(*operands)[0]), (
        lambda: chunk_gated_delta_rule(*operands)[0]
    )


# Every switch of kernels.twins has a case here.
CASES: dict[str, Callable[[RandomInputs], Call]] = {
    "adamw": _adamw,
    "causal_attention": _causal_attention,
    "expert_topk": _expert_choice,
    "fused_experts": _few_experts,
    "gqa_decode": _grouped_decode,
    "grouped_gemm": _grouped_gemm,
    "index_kl": _index_kl,
    "index_topk": _index_topk,
    "topk_masked_attention": _kept_attention,
    "mla_decode": _latent_decode,
    "mla_prepare": latent_prepare,
    "linear_cross_entropy": _lm_loss,
    "moe_permute": _moe_permute,
    "newton_schulz": _newton_schulz,
    "norm": _norm,
    "rope": _rope,
    "sparse_mla": _sparse_mla,
    "swiglu": _swiglu,
    "topk": _topk,
    "w4a8_gemm": _w4a8_gemm,
    "linear_fp32": _wide_linear,
}
# Kernels whose quicker form runs wherever the plain one does.
PAIRED_CASES: dict[str, tuple[str, Callable[[RandomInputs], ReferenceAndKernel]]] = {
    "gated_delta": ("a recurrence, token by token", _gated_delta),
}
