import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paddock.kernels.index_scores import IndexKeys, to_float8
from paddock.kernels.index_scores.blocks import MANY, blocks
from paddock.kernels.spans import Span
from paddock.kernels.topk import index_topk, index_topk_paged, index_topk_varlen
from tests.kernels.index_scores_cases import CASES, TABLES, packed, rows_of

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", CASES)
def test_a_packed_step_selects_what_each_document_selects_alone(name):
    case = CASES[name]
    query, keys, weight = case.inputs()
    found = index_topk_varlen(query, keys, weight, case.spans, case.k)
    assert found.dtype == torch.int32
    row = 0
    for span in case.spans:
        alone = index_topk(
            query[span.query_slice],
            keys.rows(span.key_slice),
            weight[span.query_slice],
            past=span.past,
            k=case.k,
        )
        mine = found[row : row + span.queries]
        assert torch.equal(mine, torch.where(alone < 0, alone, alone + span.key))
        row += span.queries
    assert row == len(found)


@pytest.mark.parametrize("name", TABLES)
def test_a_block_table_selects_what_each_sequence_selects_alone(name):
    table = TABLES[name]
    query, keys, weight, pages, visible = table.inputs()
    found = index_topk_paged(query, keys, weight, pages, visible, table.k)
    strewn, spans = table.as_spans(keys, pages)
    alone = index_topk_varlen(query, strewn, weight, spans, table.k)
    start = torch.tensor([span.key for span in spans]).unsqueeze(1)
    assert torch.equal(found, torch.where(alone < 0, alone, alone - start).int())


def test_no_spans_no_rows():
    query, keys, weight = CASES["decoding"].inputs()
    assert index_topk_varlen(query, keys, weight, [], 7).shape == (0, 7)


def test_queries_between_the_spans_are_left_out():
    query, keys, weight = CASES["one document"].inputs()
    spans = [Span(10, 2, 0, 50), Span(100, 1, 30, 60)]
    found = index_topk_varlen(query, keys, weight, spans, 5)
    assert found.shape == (3, 5)
    assert found[2].min() >= 30
    alone = index_topk(query[100:101], keys.row_SD[30:90], weight[100:101], past=59, k=5)
    assert torch.equal(found[2:], alone + 30)


def test_keys_in_slots_are_the_keys_in_order():
    query, keys, weight = CASES["slots"].inputs()
    spans = CASES["slots"].spans
    in_order = IndexKeys(keys.row_SD[keys.slot_S])
    expected = index_topk_varlen(query, in_order, weight, spans, 9)
    assert torch.equal(index_topk_varlen(query, keys, weight, spans, 9), expected)


def test_float8_rows_are_scored_as_their_dequantized_values():
    query, keys, weight = CASES["one document"].inputs()
    spans = CASES["one document"].spans
    query8, query_scale = to_float8(query)
    key8, key_scale = to_float8(keys.row_SD)
    exact_query = query8.float() * query_scale[..., None]
    exact_key = key8.float() * key_scale[..., None]
    torch.testing.assert_close(exact_key, keys.row_SD, rtol=0.07, atol=0.01)
    found = index_topk_varlen(
        query8, IndexKeys(key8, scale_S=key_scale), weight * query_scale, spans, 12
    )
    expected = index_topk_varlen(exact_query, IndexKeys(exact_key), weight, spans, 12)
    assert (found == expected).float().mean() > 0.99  # scaled before or after: last bits differ


def test_a_row_of_zeros_can_be_quantized_to_float8():
    value, scale = to_float8(torch.zeros(2, 3, 8))
    assert not value.float().any()
    assert scale.isfinite().all()


documents = st.lists(st.tuples(st.integers(0, 300), st.integers(1, 200)), min_size=1, max_size=6)


@given(documents, st.integers(1, 400), st.integers(0, 1 << 20))
def test_blocks_cover_every_query_once_within_the_scratch_budget(lengths, k, budget):
    spans = packed(*lengths)
    plan = blocks(spans, k, CPU, budget)
    assert [block.rows.start for block in plan] == [0, *(block.rows.stop for block in plan[:-1])]
    seen = [
        (start, visible)
        for block in plan
        for start, visible in zip(block.start_R.tolist(), block.visible_R.tolist(), strict=True)
    ]
    assert seen == [(start, visible) for _, start, visible in rows_of(spans)]
    queries = []
    for block in plan:
        rows, width = block.shape
        assert 4 * rows * width <= budget or len(block.tile_N8) == 1
        for query, count, key, keys, row in block.tile_N8[:, :5].tolist():
            assert 1 <= count <= (1 if block.few else MANY)
            assert block.start_R[row : row + count].eq(key).all()
            last = int(block.visible_R[row + count - 1])
            assert keys == (last if last > k else 0)
            assert last <= width
            queries += range(query, query + count)
    assert queries == [t for t, _, _ in rows_of(spans)]
