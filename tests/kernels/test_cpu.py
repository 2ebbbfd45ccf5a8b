"""The CPU kernels against the references, and against themselves in other batches."""

import pytest
import torch
from torch import nn

from paddock.kernels import cpu
from paddock.kernels.block_table import BlockTable
from paddock.kernels.compile import KernelCompileError
from paddock.kernels.cpu import library
from paddock.kernels.dense_attention import dense_attention, topk_masked_attention
from paddock.kernels.dispatch import disable_kernels
from paddock.kernels.gqa_decode import gqa_chunked_prefill, gqa_paged_decode
from paddock.kernels.index_scores import IndexKeys
from paddock.kernels.linear_fp32 import linear_fp32
from paddock.kernels.mla_decode import mla_decode, mla_paged_decode, mla_sparse_decode
from paddock.kernels.norm import rms_norm
from paddock.kernels.packed_linear import (
    pack,
    packed_gate_up,
    packed_linear,
    unpack,
    unpack_rows,
    write,
)
from paddock.kernels.rope import rope_halves, rope_interleaved
from paddock.kernels.spans import Span
from paddock.kernels.sparse_mla import sparse_mla
from paddock.kernels.topk import index_topk_paged, index_topk_varlen
from paddock.model.config import MoESettings
from paddock.model.moe import GatedMLP, GroupedExperts, Routing
from paddock.model.packed import PackedExperts, PackedKVUp, PackedLinear, PackedMLP

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def kernels():
    if library.library_file() is None:
        pytest.skip("no C++ compiler: references are used")
    assert cpu.load(wait=True)
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


def assert_close(found, expected, dtype):
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found.float(), expected.float(), rtol=tolerance, atol=tolerance)


def both(function, *arguments, **options):
    """The kernel's result and the reference's, in float32 where the inputs are bfloat16."""
    with disable_kernels("cpu"):
        expected = function(*(_wide(x) for x in arguments), **options)
    return function(*arguments, **options), expected


def _wide(x):
    if isinstance(x, IndexKeys):
        return IndexKeys(x.row_SD.float())
    is_half = isinstance(x, torch.Tensor) and x.dtype == torch.bfloat16
    return x.float() if is_half else x


def pages_for(lengths, size):
    """A shuffled block table for sequences of these lengths, and its number of slots."""
    pages = max(-(-n // size) for n in lengths)
    page_BP = torch.randperm(len(lengths) * pages).view(len(lengths), pages)
    wide_BP = torch.cat((page_BP, page_BP), dim=1).int()  # neither contiguous nor 64 bits wide
    return BlockTable(wide_BP[:, :pages], size), page_BP.numel() * size


# --- linear layers --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("F", "D"), [(64, 64), (100, 48), (16, 6), (130, 576), (70, 578)])
def test_packed_linear_is_the_linear_layer(dtype, F, D):
    linear = nn.Linear(D, F).to(dtype)
    packed = PackedLinear(linear)
    for T in (1, 2, 5, 6, 13, 200):
        x_TD = torch.randn(T, D).to(dtype)
        assert_close(packed(x_TD), linear.float()(x_TD.float()), dtype)
        wide_TF = packed_linear(x_TD, packed.packed, packed.bias, fp32=True)
        assert wide_TF.dtype == torch.float32
        linear.to(dtype)


@pytest.mark.parametrize("stored", [None, torch.int8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_other_rows(dtype, stored):
    weight = pack(torch.randn(200, 96).to(dtype), stored)
    x_TD = torch.randn(300, 96).to(dtype)
    together = packed_linear(x_TD, weight)
    for rows in (slice(0, 1), slice(3, 5), slice(290, 300)):
        assert torch.equal(packed_linear(x_TD[rows], weight), together[rows])


@pytest.mark.parametrize("dtype", DTYPES)
def test_packing_loses_nothing_and_outputs_can_be_replaced(dtype):
    weight_FD = torch.randn(150, 30).to(dtype)
    packed = pack(weight_FD)
    assert torch.equal(unpack(packed), weight_FD)
    new_FD = torch.randn(97, 30).to(dtype)
    write(packed, new_FD, first=41)
    assert torch.equal(unpack(packed), torch.cat((weight_FD[:41], new_FD, weight_FD[138:])))


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_of_8_bits_are_rounded_by_output_and_can_be_replaced(dtype):
    weight_FD = (torch.randn(150, 30) * torch.logspace(-3, 3, 150)[:, None]).to(dtype)
    weight_FD[7] = 0
    packed = pack(weight_FD, torch.int8)
    write(packed, weight_FD[3:100] * 2, first=3)
    expected_FD = weight_FD.float()
    expected_FD[3:100] *= 2
    found_FD, step_F = unpack(packed), expected_FD.abs().amax(1) / 127
    assert ((found_FD - expected_FD).abs() <= 0.501 * step_F[:, None]).all()
    assert torch.equal(unpack_rows(packed, torch.tensor([7, 149, 64])), found_FD[[7, 149, 64]])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("F", "D"), [(64, 64), (100, 48), (16, 6), (130, 576)])
def test_packed_linear_with_weights_of_8_bits(dtype, F, D):
    weight_FD, bias_F = (torch.randn(F, D) / D**0.5).to(dtype), torch.randn(F).to(dtype)
    packed = pack(weight_FD, torch.int8)
    for T in (1, 2, 5, 6, 13, 200):
        x_TD = torch.randn(T, D).to(dtype)
        expected_TF = x_TD.float() @ unpack(packed).T + bias_F.float()
        assert_close(packed_linear(x_TD, packed, bias_F), expected_TF, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("E", "D"), [(16, 48), (7, 30), (1, 16)])
def test_linear_fp32(dtype, E, D):
    weight_ED = torch.randn(E, D)
    for T in (1, 6, 40):
        x_TD = torch.randn(T, D).to(dtype)
        found_TE = linear_fp32(x_TD, weight_ED)
        assert found_TE.dtype == torch.float32
        assert_close(found_TE, x_TD.float() @ weight_ED.T, torch.float32)


@pytest.mark.parametrize("stored", [None, torch.int8])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inner", [64, 40, 200])
def test_packed_mlp_is_the_gated_mlp(dtype, inner, stored):
    mlp = GatedMLP(48, inner).to(dtype)
    packed, x_TD = PackedMLP(mlp, stored), torch.randn(9, 48).to(dtype)
    mlp.load_state_dict(packed.state_dict())  # rounded
    assert_close(packed(x_TD), mlp.float()(x_TD.float()), dtype)
    with disable_kernels("cpu"):
        expected_TF = packed_gate_up(x_TD, packed.both, inner)
    assert_close(packed_gate_up(x_TD, packed.both, inner), expected_TF, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_up_projection_absorbs_and_expands(dtype):
    H, N, V, L = 4, 12, 10, 24
    linear = nn.Linear(L, H * (N + V), bias=False).to(dtype)
    packed, up_HXL = PackedKVUp(linear, H, N), linear.weight.float().view(H, N + V, L)
    query_THD = torch.randn(5, H, N + 8).to(dtype)
    nope_THN, out_THL = query_THD[..., :N], torch.randn(5, H, L).to(dtype)
    expected_THL = torch.einsum("thn,hnl->thl", nope_THN.float(), up_HXL[:, :N])
    assert_close(packed.absorb(nope_THN), expected_THL, dtype)
    expected_THV = torch.einsum("thl,hvl->thv", out_THL.float(), up_HXL[:, N:])
    assert_close(packed.project_values(out_THL), expected_THV, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("T", [1, 4, 60])
def test_packed_experts_are_the_experts(dtype, T):
    experts = GroupedExperts(48, MoESettings(experts=6, active=2, inner=20, shared=1)).to(dtype)
    for parameter in experts.parameters():
        parameter.normal_(0, 0.2)
    packed = PackedExperts(experts)
    expert_TK = torch.stack([torch.randperm(6)[:2].sort().values for _ in range(T)])
    routing = Routing(expert_TK, torch.rand(T, 2), torch.rand(T, 6))
    x_TD = torch.randn(T, 48).to(dtype)
    assert_close(packed(x_TD, routing), experts.float()(x_TD.float(), routing), dtype)


# --- norm and rope --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D", [16, 70, 576])
def test_rms_norm(dtype, D):
    x_TD, weight_D = torch.randn(7, 2 * D).to(dtype)[:, :D], torch.randn(D).to(dtype)
    with disable_kernels("cpu"):
        expected = rms_norm(x_TD, weight_D, 1e-5)
    assert_close(rms_norm(x_TD, weight_D, 1e-5), expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotate", [rope_halves, rope_interleaved])
def test_rope(dtype, rotate):
    x_THD = torch.randn(5, 3, 40).to(dtype)
    angle_TP = torch.randn(5, 12)
    for first in (0, 16):
        found, expected = both(rotate, x_THD, angle_TP.cos(), angle_TP.sin(), first)
        assert_close(found, expected, dtype)


# --- attention ------------------------------------------------------------------------------------

HEADS = [(9, 3, 64, 64), (4, 4, 32, 16), (64, 1, 48, 32), (20, 1, 96, 64), (5, 1, 20, 7)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize(("H", "G", "D", "V"), HEADS)
def test_gqa_paged_decode(dtype, window, H, G, D, V):
    lengths, Q = [3, 100, 2500], 2
    pages, slots = pages_for(lengths, 16)
    visible_BQ = torch.tensor([[n - 1, n] for n in lengths], dtype=torch.int32)
    query, key = torch.randn(3, Q, H, D).to(dtype), torch.randn(slots, G, D).to(dtype)
    value = torch.randn(slots, G, V).to(dtype)
    found, expected = both(
        gqa_paged_decode, query, key, value, pages, visible_BQ, scale=D**-0.5, window=window
    )
    assert_close(found, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize(("H", "G", "D", "V"), HEADS)
def test_gqa_chunked_prefill(dtype, window, H, G, D, V):
    spans = [Span(0, 70, 0, 70), Span(70, 1, 70, 9), Span(71, 33, 79, 1500)]
    slot_S = torch.randperm(2000)[:1579]
    query, key = torch.randn(104, H, D).to(dtype), torch.randn(2000, G, D).to(dtype)
    value = torch.randn(2000, G, V + 3).to(dtype)[..., 3:]
    options = {"scale": D**-0.5, "window": window}
    found, expected = both(gqa_chunked_prefill, query, key, value, spans, slot_S=slot_S, **options)
    assert_close(found, expected, dtype)
    dense = both(dense_attention, query, key, value, spans[::-1], **options)
    assert_close(*dense, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("H", "G", "D", "V"), HEADS)
def test_topk_masked_attention(dtype, H, G, D, V):
    spans = [Span(0, 150, 0, 150), Span(150, 40, 150, 40)]
    query, key = torch.randn(190, H, D).to(dtype), torch.randn(190, G, D).to(dtype)
    value = torch.randn(190, G, V).to(dtype)
    index_TK = torch.full((190, 8), -1, dtype=torch.int32)
    for span in spans:
        for t in range(8, span.queries):  # those before see at most 8 keys
            chosen = torch.randperm(t + 1)[:8].sort().values
            index_TK[span.query + t] = (chosen + span.key).int()
    found, expected = both(topk_masked_attention, query, key, value, spans, index_TK, scale=D**-0.5)
    assert_close(found, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_query_does_not_depend_on_the_rest_of_the_batch(dtype):
    H, G, D = 6, 2, 32
    lengths = [40, 1100, 2500]
    pages, slots = pages_for(lengths, 16)
    visible_B1 = torch.tensor(lengths, dtype=torch.int32).unsqueeze(1)
    query, key = torch.randn(3, 1, H, D).to(dtype), torch.randn(slots, G, D).to(dtype)
    value = torch.randn(slots, G, D).to(dtype)
    together = gqa_paged_decode(query, key, value, pages, visible_B1, scale=0.2)
    for b in range(3):
        row = BlockTable(pages.page_BP[b : b + 1].clone(), pages.page_size)
        one = slice(b, b + 1)
        alone = gqa_paged_decode(query[one], key, value, row, visible_B1[one], scale=0.2)
        assert torch.equal(alone, together[one])


@pytest.mark.parametrize("dtype", DTYPES)
def test_mla_decode_dense_paged_and_sparse(dtype):
    H, C, value, lengths = 8, 75, 66, [5, 300]
    pages, slots = pages_for(lengths, 4)
    row_SC = torch.randn(slots, C).to(dtype)
    visible_BQ = torch.tensor([[n - 1, n] for n in lengths], dtype=torch.int32)
    query = torch.randn(2, 2, H, C).to(dtype)
    options = {"scale": C**-0.5, "value": value}
    assert_close(*both(mla_paged_decode, query, row_SC, pages, visible_BQ, **options), dtype)
    index_NK = torch.tensor([[0, 2, -1], [1, 3, 4], [7, 200, 299], [-1, -1, -1]]).int()
    flat = query.flatten(0, 1)
    found, expected = both(mla_sparse_decode, flat, row_SC, pages, index_NK, **options)
    assert_close(found, expected, dtype)
    assert not found[3].any()
    scattered = torch.tensor([[-1, 5, 3], [1, -1, 4], [7, 2, -1], [9, 8, 7]]).int()
    assert_close(*both(sparse_mla, flat, row_SC, scattered, **options), dtype)
    spans = [Span(0, 4, 0, 60)]
    assert_close(*both(mla_decode, flat, row_SC, spans, **options), dtype)


# --- index scores ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("H", [2, 32, 60])
def test_index_topk(dtype, H):
    D, k, lengths = 20, 8, [5, 70, 300]
    pages, slots = pages_for(lengths, 4)
    # Small integers: products are exact, so that ties are ties in both.
    key_SD = torch.randint(-2, 3, (slots, D)).to(dtype)
    query_NHD = torch.randint(-2, 3, (6, H, D)).to(dtype)
    weight_NH = torch.randint(-3, 4, (6, H)).float()
    visible_BQ = torch.tensor([[n - 1, n] for n in lengths], dtype=torch.int32)
    found, expected = both(
        index_topk_paged, query_NHD, IndexKeys(key_SD), weight_NH, pages, visible_BQ, k
    )
    assert torch.equal(found, expected)
    spans = [Span(0, 4, 0, 60), Span(4, 2, 60, 5)]
    found, expected = both(index_topk_varlen, query_NHD, IndexKeys(key_SD), weight_NH, spans, k)
    assert torch.equal(found, expected)


# --- compilation ----------------------------------------------------------------------------------


def test_without_a_compiler_references_are_used(monkeypatch):
    monkeypatch.setattr(library, "_compiler", lambda: None)
    monkeypatch.setattr(cpu, "_library", None)
    assert not cpu.load(wait=True)
    assert not cpu.suits(torch.ones(2, 2))
    assert rms_norm(torch.ones(2, 4), torch.ones(4), 1e-5).shape == (2, 4)


def test_a_compiler_that_fails_is_logged_and_references_are_used(monkeypatch, tmp_path, caplog):
    broken = tmp_path / "g++"
    broken.write_text("#!/bin/sh\necho nothing works >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setattr(library, "_compiler", lambda: str(broken))
    monkeypatch.setattr(library, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(cpu, "_library", None)
    assert not cpu.load(wait=False)
    assert not cpu.load(wait=True)
    assert "nothing works" in caplog.text
    assert not list((tmp_path / "cache").iterdir())
    with pytest.raises(KernelCompileError):
        library.compile_library(tmp_path / "cache" / "x.so")


def test_where_amx_is_refused_other_instructions_are_used(monkeypatch, tmp_path):
    weight_FD, x_TD = torch.randn(130, 64).bfloat16(), torch.randn(40, 64).bfloat16()
    monkeypatch.setattr(library, "_amx_works", lambda _: False)
    monkeypatch.setattr(library, "FLAGS", (*library.FLAGS, "-O1"))
    library.compile_library(tmp_path / "x.so")
    monkeypatch.setattr(cpu, "_library", library.Library(tmp_path / "x.so"))
    assert_close(
        packed_linear(x_TD, pack(weight_FD)), x_TD.float() @ weight_FD.float().T, x_TD.dtype
    )


def test_a_processor_whose_amx_dies_is_noticed(monkeypatch, tmp_path):
    (tmp_path / "amx_probe.cpp").write_text("int main() { __builtin_trap(); }")
    monkeypatch.setattr(library, "SOURCES", tmp_path)
    assert not library._amx_works(library._compiler())


def test_gradients_use_references():
    with torch.inference_mode(False), torch.enable_grad():
        weight = torch.ones(16, requires_grad=True)
        rms_norm(torch.randn(2, 16), weight, 1e-5).sum().backward()
        assert weight.grad is not None
