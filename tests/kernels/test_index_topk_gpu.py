"""Index scores and top-k on a GPU: scores against float64, indices against the exact tie rule."""

import threading

import numpy as np
import pytest
import torch

from paddock.kernels.block_table import BlockTable
from paddock.kernels.index_scores import IndexKeys, to_float8
from paddock.kernels.spans import Span
from paddock.kernels.topk import (
    cuda,
    fused,
    index_topk_paged,
    index_topk_varlen,
    reference,
    topk,
)
from tests.kernels.index_scores_cases import CASES, Case, Table, packed, rows_of, scored
from tests.kernels.topk_cases import KINDS

pytestmark = pytest.mark.gpu
GLM5 = {"heads": 32, "dim": 128}
SMALL = {"heads": 16, "dim": 64}
NANO = {"heads": 4, "dim": 16}
ODD = {"heads": 5, "dim": 96}


def by_sort(score_TS: torch.Tensor, visible_T: torch.Tensor, k: int) -> torch.Tensor:
    """Top-k with the tie rule, by a stable sort of every row."""
    score_TS = score_TS.float().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    hidden_TS = torch.arange(score_TS.shape[1], device=score_TS.device) >= visible_T[:, None]
    score_TS = (score_TS + 0.0).masked_fill(hidden_TS, -torch.inf)
    kept_TK = score_TS.sort(dim=-1, descending=True, stable=True).indices[:, :k].sort(-1).values
    kept_TK = kept_TK.masked_fill(kept_TK >= visible_T[:, None], -1).int()
    return torch.nn.functional.pad(kept_TK, (0, k - kept_TK.shape[1]), value=-1)


def rows(kind: str, count: int, length: int) -> torch.Tensor:
    rng = np.random.default_rng(0)
    made = [KINDS[kind](rng, length).astype(np.float32) for _ in range(count)]
    return torch.from_numpy(np.stack(made)).cuda()


def exact(case: Case, dtype: torch.dtype) -> torch.Tensor:
    """Scores of the same inputs in float64; keys that a row does not see are NaN."""
    query, keys, weight = case.inputs(dtype, "cuda")
    widest = max(span.keys for span in case.spans)
    found = torch.full((case.queries, widest), float("nan"), dtype=torch.float64, device="cuda")
    scale = None if keys.scale_S is None else keys.scale_S.double()
    keys = IndexKeys(keys.row_SD.float().double(), keys.slot_S, None)
    for row, (t, start, visible) in enumerate(rows_of(case.spans)):
        key = keys.rows(slice(start, start + visible))
        match = (query[t].float().double() @ key.mT).relu()
        score = weight[t].double() @ match
        if scale is not None:
            at = slice(start, start + visible)
            score = score * (scale[at] if keys.slot_S is None else scale[keys.slot_S[at]])
        found[row, :visible] = score
    return found


def error(case: Case, dtype: torch.dtype) -> float:
    expected = exact(case, dtype)
    found = scored(case, dtype, "cuda")[:, : expected.shape[1]].double()
    needed = torch.tensor(
        [visible > case.k for _, _, visible in rows_of(case.spans)], device="cuda"
    )
    seen = ~expected.isnan() & needed[:, None]
    assert not found[seen].isnan().any()  # every visible entry was written over the poison
    return float((found - expected)[seen].norm() / expected[seen].norm())


STEP = packed((0, 300), (0, 70), (500, 1), (0, 130), (2000, 64), (77, 3))


HALF, FLOAT8 = torch.float16, torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("dtype", "shape", "tolerance"),
    [
        (torch.bfloat16, GLM5, 1e-6),
        (torch.bfloat16, SMALL, 1e-6),
        (torch.bfloat16, NANO, 1e-6),
        (torch.bfloat16, ODD, 1e-6),
        (HALF, GLM5, 1e-6),
        (torch.float32, GLM5, 1e-6),
        (torch.float32, ODD, 1e-6),
        (FLOAT8, GLM5, 5e-4),
        (FLOAT8, NANO, 5e-4),
    ],
)
def test_scores_match_float64(dtype, tolerance, shape):
    assert error(Case(STEP, **shape), dtype) < tolerance


@pytest.mark.parametrize("name", CASES)
def test_scores_of_every_kind_of_step(name):
    assert error(CASES[name], torch.bfloat16) < 1e-6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("length", "k"),
    [
        (70, 64),
        (1500, 512),
        (4000, 1024),
        (8192, 2048),
        (8193, 2048),
        (33001, 2048),
        (131072, 2048),
    ],
)
def test_every_index_follows_the_tie_rule(kind, length, k):
    score = rows(kind, 24, length)
    visible = torch.arange(length - 23, length + 1, device="cuda")
    visible[:4] = torch.tensor([0, 1, k, k + 1])
    assert torch.equal(topk(score, visible, k), by_sort(score, visible, k))


@pytest.mark.parametrize("k", [1, 2, 63, 64, 1000, 2047, 2049, 4096])
def test_every_k(k):
    score = rows("random", 8, 20000)
    visible = torch.tensor([20000, 19999, 8192, 8193, k, k + 1, 1, 0], device="cuda")
    assert torch.equal(topk(score, visible, k), by_sort(score, visible, k))


def test_rows_may_start_at_any_alignment():
    memory = torch.randn(40 * 20011 + 3, device="cuda")
    for offset in range(4):
        score = memory[offset : offset + 40 * 20011].view(40, 20011)
        visible = torch.full((40,), 20011, device="cuda")
        assert torch.equal(topk(score, visible, 2048), by_sort(score, visible, 2048))


def test_half_precision_and_transposed_scores():
    score = torch.randn(300, 40, device="cuda", dtype=torch.bfloat16)
    visible = torch.full((40,), 300, device="cuda")
    assert torch.equal(topk(score.mT, visible, 32), by_sort(score.mT, visible, 32))


def test_poisoned_output_is_all_overwritten_and_hidden_scores_are_not_read():
    score = rows("random", 16, 12000)
    visible = torch.randint(0, 12001, (16,), device="cuda", dtype=torch.int32)
    hidden = torch.arange(12000, device="cuda") >= visible[:, None]
    out = torch.full((16, 2048), -12345, device="cuda", dtype=torch.int32)
    poisoned = score.masked_fill(hidden, torch.inf)
    cuda.topk(poisoned, visible, 2048, start_T=None, out_TK=out)
    assert torch.equal(out, by_sort(score, visible, 2048))


def test_many_random_rows_are_deterministic():
    score = torch.randn(4096, 32768, device="cuda")
    visible = torch.arange(32768 - 4095, 32769, device="cuda")
    first = topk(score, visible, 2048)
    assert torch.equal(first, topk(score, visible, 2048))
    for part in range(0, 4096, 512):
        at = slice(part, part + 512)
        assert torch.equal(first[at], by_sort(score[at], visible[at], 2048))


def test_scores_beyond_two_gigabyte_offsets():
    """The last rows of a rectangle of more than 2^31 entries."""
    rows_, columns = 2200, 1 << 20
    score = torch.empty(rows_, columns, device="cuda")
    score[-8:] = torch.randn(8, columns, device="cuda")
    visible = torch.zeros(rows_, dtype=torch.int32, device="cuda")
    visible[-8:] = columns
    found = topk(score, visible, 2048)
    assert torch.equal(found[-8:], by_sort(score[-8:], visible[-8:], 2048))
    assert bool((found[:-8] == -1).all())


def whole_numbers(case: Case) -> tuple[torch.Tensor, IndexKeys, torch.Tensor]:
    """Inputs whose scores are exact in any order of summation, and full of ties."""
    query, keys, weight = case.inputs(torch.float32, "cuda")
    rounded = IndexKeys(keys.row_SD.round().bfloat16(), keys.slot_S, keys.scale_S)
    return query.round().bfloat16(), rounded, (weight * case.heads).round()


@pytest.mark.parametrize(
    "case",
    [
        Case(STEP, k=64, **SMALL),
        Case(STEP, k=64, scattered=True, **SMALL),
        Case(packed(*[(0, 4096)] * 3), k=512, **SMALL),
        Case(packed((0, 3000), (9000, 1), (9000, 4), (100, 1)), k=2048, **GLM5),
        Case(packed((20000, 70), (0, 30)), k=2048, scattered=True, **GLM5),
        Case(packed((0, 700)), k=64, **NANO),
    ],
    ids=["packed", "slots", "training", "serving", "long", "nano"],
)
def test_a_packed_step_matches_the_reference(case):
    inputs = whole_numbers(case)
    assert fused.suits(inputs[0], inputs[1], 1, case.k)
    found = index_topk_varlen(*inputs, case.spans, case.k)
    assert torch.equal(found, reference.index_topk_varlen(*inputs, case.spans, case.k))


def test_a_small_scratch_does_not_change_the_result(monkeypatch):
    case = Case(STEP, k=64, **SMALL)
    inputs = whole_numbers(case)
    expected = index_topk_varlen(*inputs, case.spans, case.k)
    monkeypatch.setattr(fused, "scratch_bytes", lambda device: 1 << 18)
    assert torch.equal(index_topk_varlen(*inputs, case.spans, case.k), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_two_runs_are_bit_identical(dtype):
    case = Case(packed((0, 3000), (6000, 500), (9000, 1)), k=1024, **GLM5)
    inputs = case.inputs(dtype, "cuda")
    first = index_topk_varlen(*inputs, case.spans, case.k)
    for _ in range(3):
        assert torch.equal(index_topk_varlen(*inputs, case.spans, case.k), first)


def test_float8_selects_mostly_the_same_keys():
    case = Case(packed((6000, 200)), k=2048, **GLM5)
    query, keys, weight = case.inputs(torch.bfloat16, "cuda")
    query8, query_scale = to_float8(query)
    key8, key_scale = to_float8(keys.row_SD)
    exact_ones = index_topk_varlen(query, keys, weight, case.spans, case.k)
    found = index_topk_varlen(
        query8, IndexKeys(key8, None, key_scale), weight * query_scale, case.spans, case.k
    )
    shared = [len(np.intersect1d(a, b)) for a, b in zip(found.cpu(), exact_ones.cpu(), strict=True)]
    assert np.mean(shared) > 0.95 * case.k


def test_queries_and_keys_beyond_two_gigabyte_offsets():
    T, S = 600_000, 17_000_000  # 32 x 128 x T and 128 x S are more than 2^31
    query = torch.empty(T, 32, 128, device="cuda", dtype=torch.bfloat16)
    key = torch.empty(S, 128, device="cuda", dtype=torch.bfloat16)
    weight = torch.empty(T, 32, device="cuda")
    case = Case(packed((4000, 70)), k=64, **GLM5)
    near, keys, near_weight = whole_numbers(case)
    query[-70:], key[-4070:], weight[-70:] = near, keys.row_SD, near_weight
    far = [Span(T - 70, 70, S - 4070, 4070)]
    found = index_topk_varlen(query, IndexKeys(key), weight, far, 64)
    expected = reference.index_topk_varlen(near, keys, near_weight, case.spans, 64)
    assert torch.equal(found, expected + (S - 4070))


def test_another_thread_and_another_stream():
    """A thread that never called CUDA has no context of its own."""
    score = torch.randn(4, 10000, device="cuda")
    visible = torch.full((4,), 10000, device="cuda")
    expected, found = by_sort(score, visible, 100), []

    def work():
        with torch.cuda.stream(torch.cuda.Stream()):
            found.append(topk(score, visible, 100))
            torch.cuda.current_stream().synchronize()

    torch.cuda.synchronize()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert torch.equal(found[0], expected)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(("queries", "size"), [(1, 1), (4, 1), (1, 64), (6, 16)])
def test_a_block_table_matches_the_reference(queries, size, scaled):
    ends = [9000, 64, 3000, 1, 513, 4, 2048, 8999]
    visible = tuple(tuple(max(1, end - queries + 1 + q) for q in range(queries)) for end in ends)
    table = Table(visible, columns=9000, k=64, scaled=scaled, size=size, **SMALL)
    query, keys, weight, pages, visible_BQ = table.inputs(torch.float32, "cuda")
    scale = None if keys.scale_S is None else keys.scale_S.mul(4).round()
    keys = IndexKeys(keys.row_SD.round().bfloat16(), None, scale)
    inputs = (query.round().bfloat16(), keys, (weight * 16).round(), pages, visible_BQ, 64)
    found = index_topk_paged(*inputs)
    on_cpu = [x.cpu() if isinstance(x, torch.Tensor) else x for x in inputs]
    on_cpu[1] = IndexKeys(keys.row_SD.cpu(), None, None if scale is None else scale.cpu())
    on_cpu[3] = BlockTable(pages.page_BP.cpu(), pages.page_size)
    assert torch.equal(found.cpu(), reference.index_topk_paged(*on_cpu))


def test_graph_replay_reads_current_lengths():
    table = Table(((900,), (100,)), columns=1000, k=64, **SMALL)
    query, keys, weight, pages, visible = table.inputs(torch.bfloat16, "cuda")
    pages = BlockTable(pages.page_BP.clamp(max=1999), 1)
    visible = visible.int()

    def select():
        return index_topk_paged(query, keys, weight, pages, visible, 64)

    select()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = select()
    for ends in ((900, 100), (64, 1000), (3, 65)):
        visible.copy_(torch.tensor(ends).view(2, 1))
        expected = select()
        found.fill_(-7)
        graph.replay()
        assert torch.equal(found, expected)


def test_a_graph_replays_both_kernels():
    case = Case(packed((3000, 1), (5000, 1)), k=256, **SMALL)
    query, keys, weight = whole_numbers(case)
    expected = index_topk_varlen(query, keys, weight, case.spans, case.k)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = index_topk_varlen(query, keys, weight, case.spans, case.k)
    found.fill_(-7)
    graph.replay()
    assert torch.equal(found, expected)


def test_no_scratch_beyond_the_budget():
    case = Case(packed((0, 20000)), k=64, **SMALL)
    inputs = case.inputs(torch.bfloat16, "cuda")
    index_topk_varlen(*inputs, case.spans, case.k)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = index_topk_varlen(*inputs, case.spans, case.k)
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < fused.scratch_bytes(found.device) + found.numel() * 4 + (32 << 20)
