"""Decode kernels on a GPU: against float64, at real shapes, and inside CUDA graphs."""

import pytest
import torch

from paddock.kernels import fused_experts
from paddock.kernels.block_table import BlockTable
from paddock.kernels.mla_decode import (
    fused,
    mla_decode,
    mla_paged_decode,
    mla_sparse_decode,
    reference,
)
from paddock.kernels.spans import Span
from paddock.kernels.topk import topk_indices
from tests.kernels.mla_decode_cases import CASES, Decode, exact

pytestmark = pytest.mark.gpu

GLM5 = {"heads": 64, "width": 576, "value": 512, "scale": 1 / 16}
REAL = {
    "batch of one": Decode(((5000,),), size=64, **GLM5),
    "ragged batch": Decode(tuple((n,) for n in (1, 64, 65, 300, 4096, 9000, 2, 777)), **GLM5),
    "drafts": Decode(tuple((n, n + 1, n + 2, n + 3) for n in (1, 300, 4096)), size=16, **GLM5),
    "many sequences": Decode(tuple((17 * n + 1,) for n in range(64)), size=16, **GLM5),
    "selected": Decode(((9000,), (1,), (2049,), (100,)), kept=2048, size=64, **GLM5),
    "selected by drafts": Decode(((4000, 4001, 4002), (30, 31, 32)), kept=2048, size=16, **GLM5),
    "sixteen heads": Decode(((3000,), (70,)), heads=16, width=320, value=256, size=64),
    "twenty heads": Decode(((3000,), (70,)), heads=20, width=576, value=512, kept=100),
}


def error(found, expected):
    assert found.isfinite().all()
    return float((found.double().cpu() - expected).norm() / expected.norm())


@pytest.mark.parametrize("name", [*CASES, *REAL])
def test_mla_decode_matches_float64_and_is_deterministic(name):
    case = (CASES | REAL)[name]
    inputs = case.inputs(torch.bfloat16, "cuda")
    assert fused.suits(inputs[0], inputs[1], case.value)
    found = case.attended(fused, inputs)
    assert error(found, case.attended(reference, exact(inputs))) < 6e-3
    assert torch.equal(found, case.attended(fused, inputs))


def test_offsets_beyond_32_bits():
    """576 columns and 4 million rows: offsets no longer fit 32 bits."""
    rows, far = 4_000_000, 3_999_000
    stored = torch.zeros(rows, 576, dtype=torch.bfloat16, device="cuda")
    stored[far : far + 500] = torch.randn(500, 576, device="cuda").bfloat16()
    query = torch.randn(1, 1, 64, 576, device="cuda").bfloat16()
    pages = BlockTable(torch.arange(far, far + 500, device="cuda").view(1, -1).int(), 1)
    near = BlockTable(torch.arange(500, device="cuda").view(1, -1).int(), 1)
    visible = torch.tensor([[500]], device="cuda", dtype=torch.int32)
    index = torch.arange(0, 500, 2, device="cuda", dtype=torch.int32).view(1, -1)
    how = {"scale": 0.06, "value": 512}
    found = mla_paged_decode(query, stored, pages, visible, **how)
    expected = mla_paged_decode(query, stored[far : far + 500], near, visible, **how)
    assert found.any() and torch.equal(found, expected)
    found = mla_sparse_decode(query[0], stored, pages, index, **how)
    assert torch.equal(found, mla_sparse_decode(query[0], stored[far:], near, index, **how))


@pytest.mark.parametrize("selected", [False, True])
def test_graph_replay_reads_current_lengths_pages_and_indices(selected):
    case = Decode(((700,), (300,)), kept=64 if selected else None, size=16, **GLM5)
    query, row, pages, shown = case.inputs(torch.bfloat16, "cuda")
    pages = BlockTable(pages.page_BP.int(), pages.page_size)
    row = row.nan_to_num(nan=1.0)  # every page will be read

    def attend():
        return case.attended(fused, (query, row, pages, shown))

    attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = attend()
    for turn in range(3):
        pages.page_BP.copy_(pages.page_BP.flip(1).clone())
        if selected:
            shown.copy_(shown.flip(0) if turn else shown.clamp(max=200))
        else:
            shown.copy_(torch.tensor([[1 + turn], [699 - turn]]))
        expected = attend()
        found.fill_(7)
        graph.replay()
        assert torch.equal(found, expected)


@pytest.mark.parametrize(("tokens", "experts", "k"), [(1, 256, 8), (7, 32, 4), (64, 16, 8)])
def test_fused_experts_match_float64(tokens, experts, k):
    torch.manual_seed(0)
    x = torch.randn(tokens, 1024, device="cuda").bfloat16()
    gate_up = (torch.randn(experts, 512, 1024, device="cuda") / 32).bfloat16()
    down = (torch.randn(experts, 1024, 256, device="cuda") / 16).bfloat16()
    expert = topk_indices(torch.randn(tokens, experts), k).cuda()
    weight = torch.rand(tokens, k, device="cuda")
    with torch.no_grad():
        assert fused_experts.is_supported(x, expert, gate_up, down)
        found = fused_experts.fused_experts(x, expert, weight, gate_up, down)
    exact_inputs = (x.double(), expert, weight.double(), gate_up.double(), down.double())
    expected = fused_experts.reference.fused_experts(*(y.cpu() for y in exact_inputs))
    assert error(found, expected) < 6e-3
    with torch.no_grad():
        alone = fused_experts.fused_experts(x[:1], expert[:1], weight[:1], gate_up, down)
    assert torch.equal(alone, found[:1])  # independent of the other tokens


def test_few_queries_with_a_long_past_match_float64():
    spans = (Span(0, 5, 0, 900), Span(5, 1, 900, 1), Span(6, 40, 901, 3000))
    query = torch.randn(46, 64, 576, device="cuda").bfloat16()
    row = torch.randn(3901, 576, device="cuda").bfloat16()
    how = {"scale": 1 / 16, "value": 512}
    found = mla_decode(query, row, spans, **how)
    expected = reference.mla_decode(query.double().cpu(), row.double().cpu(), spans, **how)
    assert error(found, expected) < 6e-3
