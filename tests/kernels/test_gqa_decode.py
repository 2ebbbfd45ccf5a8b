"""Grouped-query attention over a KV cache: the reference against a loop, the kernel against the
reference (interpreted or on a GPU), and the kernel compiled for Hopper."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from paddock.kernels import gqa_decode
from paddock.kernels.block_table import BlockTable
from paddock.kernels.gqa_decode import fused, reference, tiles
from paddock.kernels.spans import Span
from tests.kernels.compiled import compiled
from tests.kernels.gqa_decode_cases import LONG, SPANS, TABLES, Continued, Decode

ROOT = Path(__file__).parents[2]
CASES = {("tables", name): case for name, case in TABLES.items()}
CASES |= {("spans", name): case for name, case in SPANS.items()}
named = pytest.mark.parametrize("name", CASES, ids=" ".join)


@named
def test_on_a_cpu_it_matches_a_loop_over_queries_and_heads(name):
    case = CASES[name]
    inputs = case.inputs(torch.float64)
    torch.testing.assert_close(case.attended(gqa_decode, inputs), case.exact(inputs))


def test_paged_decode_matches_chunked_prefill():
    """Decode and prefill agree about which keys a query sees."""
    case = Decode(visible=((20, 21, 22), (298, 299, 300)), window=40)
    query, key, value, pages, visible = case.inputs(torch.float64)
    found = reference.gqa_paged_decode(query, key, value, pages, visible, **case.how)
    for b, seen in enumerate((22, 300)):
        slot = pages.slot_BM[b, :seen].long()
        alone = gqa_decode.gqa_chunked_prefill(
            query[b], key[slot], value[slot], [Span(0, 3, 0, seen)], **case.how
        )
        torch.testing.assert_close(found[b], alone)


# --- tiles of spans -------------------------------------------------------------------------------


def test_every_query_is_in_one_tile():
    spans = (Span(9, 40, 100, 60), Span(0, 9, 3, 9), Span(49, 1, 160, 700))
    plan = tiles.plan(spans, 3, 2, None, torch.device("cpu"))
    assert plan.rows == tiles.MIDDLE and plan.whole == ()
    found = set()
    for query, out, key, queries, seen in plan.table.tolist():
        assert 0 < queries * 3 <= plan.rows
        found |= {(query + i, out + i, key, seen + i) for i in range(queries)}
    expected, out = set(), 0
    for span in spans:
        expected |= {
            (span.query + i, out + i, span.key, span.past + i + 1) for i in range(span.queries)
        }
        out += span.queries
    assert found == expected
    looked_at = [seen + queries for *_, queries, seen in plan.table.tolist()]
    assert looked_at == sorted(looked_at, reverse=True)


def test_tiles_are_small_for_few_queries_and_large_for_many():
    def rows(*queries, group=4, groups=8):
        spans = tuple(Span(0, q, 0, q + 50) for q in queries)
        return tiles.plan(spans, group, groups, None, torch.device("cpu")).rows

    assert rows(4, 1, 2) == tiles.SMALL
    assert rows(5, 1) == tiles.MIDDLE
    assert rows(512) == tiles.LARGE  # 16 for every key head
    assert rows(512, groups=1) == tiles.MIDDLE
    assert rows(*[17] * 40) == tiles.MIDDLE


def test_a_long_past_is_split_unless_there_are_too_many_partial_sums():
    def parts(*runs, window=None):
        spans = tuple(Span(0, queries, 0, keys) for queries, keys in runs)
        return tiles.plan(spans, 3, 3, window, torch.device("cpu")).parts

    assert parts((1, 8000)) == 64
    assert parts((1, 8000), window=200) == 1
    assert parts(*[(20, 900)] * 60) == 1
    assert parts((1, 8000), *[(20, 500)] * 60) == 8
    assert parts((1, 8000), *[(40, 500)] * 60) == 1


def test_long_whole_documents_go_to_dense_attention():
    spans = (Span(0, 2000, 0, 2000), Span(2000, 5, 2000, 3000), Span(2005, 50, 5000, 50))
    plan = tiles.plan(spans, 1, 1, None, torch.device("cpu"))
    assert plan.whole == ((0, spans[0]),)
    assert set(plan.table[:, 1].tolist()) == {2000, 2005}
    assert tiles.plan(spans, 1, 1, 1500, torch.device("cpu")).whole == ()
    assert tiles.plan(spans[:1], 1, 1, None, torch.device("cpu")).table is None


def test_the_kernel_is_used_only_for_steps_with_a_past():
    assert not fused.continues((Span(0, 3, 0, 3), Span(3, 1, 3, 1)), None)
    assert not fused.continues((Span(0, 3, 0, 3),), 3)
    assert fused.continues((Span(0, 3, 0, 3),), 2)
    assert fused.continues((Span(0, 3, 0, 3), Span(3, 1, 3, 2)), None)


# --- the kernel without a GPU ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    file = tmp_path_factory.mktemp("grouped") / "found.pt"
    command = [sys.executable, "-m", "tests.kernels.gqa_decode_cases", str(file)]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": "1"}, check=True)
    return torch.load(file)


@named
def test_the_kernel_matches_the_reference(name, interpreted):
    case, (kind, key) = CASES[name], name
    expected = case.attended(gqa_decode, case.inputs(torch.float64))
    torch.testing.assert_close(interpreted[kind][key].double(), expected, atol=4e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["long", "large tiles", "parts"])
def test_documents_sent_to_dense_attention_keep_their_order(name, interpreted):
    expected = LONG.attended(gqa_decode, LONG.inputs(torch.float64))
    torch.testing.assert_close(interpreted[name].double(), expected, atol=4e-6, rtol=1e-5)


def compiled_kernel(rows, dim, group, folder, *, paged, parts=8, window=None):
    from paddock.kernels.gqa_decode import triton as kernels

    width = kernels.padded(dim)
    blocks = kernels.Blocks.of(rows, width, paged=paged, shared_bytes=232_448)
    held = dict.fromkeys(["QUERY", "KEY", "VALUE", "OUT"], "*bf16")
    held |= dict.fromkeys(["SUM", "TOP", "TOTAL"], "*fp32") | {"COUNT": "*i32", "scale": "fp32"}
    numbers = ["groups", "queries", "pages", "q_row", "q_head", "k_row", "k_head", "v_row"]
    held |= dict.fromkeys([*numbers, "v_head"], "i32")
    constants = {"GROUP": group, "D": dim, "V": dim, "DP": width, "VP": width, "WINDOW": window}
    constants |= {"XB": rows, "BK": blocks.keys, "SIZE": 16, "PARTS": parts, "LEAST": 256}
    if paged:
        held |= {"PAGE": "*i32", "VISIBLE": "*i32"}
        constants |= {"TABLE": None}
    else:
        held |= {"TABLE": "*i32"}
        constants |= {"PAGE": None, "VISIBLE": None}
    options = {"num_warps": blocks.warps, "num_stages": blocks.stages}
    return compiled(kernels.part_kernel, held, constants, folder, **options)


@pytest.mark.parametrize(
    ("rows", "dim", "group", "paged"),
    [
        (16, 64, 3, True),
        (16, 128, 4, True),
        (16, 80, 4, True),
        (64, 128, 16, True),
        (64, 256, 16, True),
        (16, 64, 3, False),
        (64, 64, 3, False),
        (64, 128, 4, False),
        (128, 128, 4, False),
        (128, 256, 4, False),
    ],
)
def test_compiled_for_hopper_it_uses_tensor_cores_without_spills(rows, dim, group, paged, tmp_path):
    pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    made = compiled_kernel(rows, dim, group, tmp_path, paged=paged, parts=1 if rows == 128 else 8)
    assert made.spilled == 0
    assert (made.products if rows >= 64 else made.small_products) > 0


# --- the kernel on a GPU --------------------------------------------------------------------------

SMOL = {"heads": 9, "groups": 3, "dim": 64, "value": 64, "scale": 1 / 8, "size": 16}
QWEN = {"heads": 32, "groups": 8, "dim": 128, "value": 128, "scale": 128**-0.5}
REAL = {
    "batch of one": Decode(visible=((5000,),), **SMOL),
    "ragged batch": Decode(visible=tuple((n,) for n in (1, 64, 65, 300, 4096, 9000, 2)), **SMOL),
    "many sequences": Decode(visible=tuple((17 * n + 1,) for n in range(100)), **SMOL),
    "drafts": Decode(visible=tuple((n, n + 1, n + 2) for n in (1, 300, 4096)), size=16, **QWEN),
    "a window": Decode(visible=((5000,), (100,), (513,)), window=512, size=16, **QWEN),
    "sixteen share": Decode(heads=32, groups=2, dim=96, value=96, visible=((900, 901), (3, 4))),
    "widest": Decode(heads=8, groups=4, dim=256, value=256, visible=((900,), (33,)), size=64),
    "spans": Continued(runs=((1, 8000), (30, 700), (5, 5), (200, 900), (1, 2), (40, 40)), **QWEN),
    "many short spans": Continued(
        heads=9, groups=3, dim=64, value=64, runs=tuple((3 + n % 9, 400 + 7 * n) for n in range(60))
    ),
    "a chunk": Continued(runs=((512, 2048),), **QWEN),
    "long documents between": Continued(
        runs=((3, 200), (1500, 1500), (64, 90), (1024, 1024), (1, 1)), **QWEN
    ),
    "spans and a window": Continued(runs=((300, 900), (2000, 2000), (2, 5000)), window=256, **QWEN),
}


def wide(inputs):
    """The same numbers in float64 on the CPU."""
    query, key, value, *where = inputs
    if isinstance(where[0], BlockTable):
        where = [BlockTable(where[0].page_BP.cpu(), where[0].page_size), where[1].cpu()]
    return *(x.double().cpu() for x in (query, key, value)), *where


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [*CASES, *REAL], ids=str)
def test_on_a_gpu_the_kernel_matches_float64(name, dtype):
    case = (CASES | REAL)[name]
    inputs = case.inputs(dtype, "cuda")
    assert fused.suits(*inputs[:3])
    found = case.attended(fused, inputs)
    assert found.isfinite().all()
    expected = case.attended(gqa_decode, wide(inputs))
    assert float((found.double().cpu() - expected).norm() / expected.norm()) < 6e-3
    assert torch.equal(found, case.attended(fused, inputs))


@pytest.mark.gpu
def test_on_a_gpu_offsets_exceed_32_bits():
    keys, far = 4_500_000, 4_499_000
    stored = torch.zeros(keys, 8, 64, dtype=torch.bfloat16, device="cuda")
    stored[far : far + 500] = torch.randn(500, 8, 64, device="cuda").bfloat16()
    query = torch.randn(1, 1, 32, 64, device="cuda").bfloat16()
    slot = torch.arange(500, device="cuda").view(1, -1).int()
    visible = torch.tensor([[500]], device="cuda", dtype=torch.int32)
    near = stored[far : far + 500]

    def table(rows, pages):
        return fused.gqa_paged_decode(query, rows, rows, pages, visible, scale=0.1)

    found = table(stored, BlockTable(slot + far, 1))
    assert found.any() and torch.equal(found, table(near, BlockTable(slot, 1)))
    span = fused.gqa_chunked_prefill(query[0], stored, stored, [Span(0, 1, far, 500)], scale=0.1)
    expected = fused.gqa_chunked_prefill(query[0], near, near, [Span(0, 1, 0, 500)], scale=0.1)
    assert torch.equal(span, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 100])
def test_on_a_gpu_graph_replay_reads_current_lengths_and_pages(window):
    case = Decode(visible=((1700,), (300,), (4,)), window=window, **SMOL)
    query, key, value, pages, visible = case.inputs(torch.bfloat16, "cuda")
    key[-16:], value[-16:] = 0, 0  # every page will be read

    def attend():
        return case.attended(gqa_decode, (query, key, value, pages, visible))

    attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = attend()
    for turn in range(3):
        pages.page_BP.copy_(pages.page_BP.flip(1).clone())
        visible.copy_(torch.tensor([[1 + turn], [1699 - turn], [600 * turn + 1]]))
        expected = attend()
        found.fill_(7)
        graph.replay()
        assert torch.equal(found, expected)


@pytest.mark.gpu
def test_on_a_gpu_unsupported_inputs_go_to_the_reference():
    query, key = (torch.randn(1, 1, 4, 64, device="cuda") for _ in range(2))
    half = query.bfloat16()
    assert fused.suits(half, half[0], half[0])
    assert not fused.suits(query, key[0], key[0])
    assert not fused.suits(half, half[0].float(), half[0])
    assert not fused.suits(half.requires_grad_(), half[0], half[0])
    with torch.no_grad():
        assert fused.suits(half, half[0], half[0])
    many = torch.randn(1, 1, 17, 64, device="cuda").bfloat16()
    assert not fused.suits(many, many[0, :, :1], many[0, :, :1])
