"""MLA expanded and absorbed, and sparse attention up to topk keys."""

import pytest
import torch

from paddock.kernels.spans import Span
from paddock.model import AttentionMetadata, Transformer
from paddock.model.attention.dsa import split_dense_sparse
from tests.model.networks import build_network, latent_config, tokens

GEOMETRIES = {
    "256": {"heads": 4, "q_rank": 24, "kv_rank": 16, "nope": 12, "rope": 4, "value": 16},
    "192": {"heads": 6, "q_rank": 24, "kv_rank": 16, "nope": 8, "rope": 4, "value": 8},
    "no query latent": {"heads": 2, "kv_rank": 16, "nope": 8, "rope": 4, "value": 6},
}


@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
@torch.no_grad()
def test_absorbed_equals_expanded(geometry):
    network = build_network(
        latent_config(attention=("mla",) * 4, indexer=None, mtp=None, mla=geometry)
    )
    attention = network.layers[0].attention
    step = network.make_context(AttentionMetadata.packed([25]))
    projected = attention.project(torch.randn(25, 32), step)
    for spans in [(Span(0, 25, 0, 25),), (Span(24, 1, 0, 25),), (Span(10, 15, 0, 25),)]:
        query_THD = projected.query_THD
        expanded = attention.attend_expanded(query_THD, projected.row_TC, spans)
        from paddock.kernels.mla_decode import mla_decode

        absorbed = attention.project_values(
            mla_decode(
                attention.absorb(query_THD),
                projected.row_TC,
                spans,
                scale=attention.scale,
                value=attention.mla.kv_rank,
            )
        )
        torch.testing.assert_close(absorbed, expanded, atol=1e-5, rtol=1e-5)


def test_the_cheaper_form_depends_on_how_many_queries_share_the_keys():
    attention = build_network(latent_config()).layers[0].attention
    assert attention.expanding_is_cheaper([Span(0, 512, 0, 512)])
    assert not attention.expanding_is_cheaper([Span(0, 1, 0, 512)])


@torch.no_grad()
def test_sparse_equals_dense_up_to_topk_keys():
    sparse = build_network(
        latent_config(indexer={"heads": 2, "dim": 8, "topk": 40, "layers": ("full",) * 4})
    )
    dense = Transformer(latent_config(attention=("mla",) * 4, indexer=None)).eval()
    dense.load_state_dict({k: v for k, v in sparse.state_dict().items() if ".indexer." not in k})
    assert torch.equal(sparse.logits(tokens(40)), dense.logits(tokens(40)))
    assert not torch.allclose(sparse.logits(tokens(60)), dense.logits(tokens(60)))


@torch.no_grad()
def test_the_sparse_kernel_given_every_key_is_dense_attention():
    attention = build_network(latent_config()).layers[0].attention
    step = build_network(latent_config()).make_context(AttentionMetadata.packed([20]))
    projected = attention.project(torch.randn(20, 32), step)
    everything = torch.tensor([[*range(t + 1)] + [-1] * (19 - t) for t in range(20)]).int()
    sparse = attention.attend_sparse(projected.query_THD, projected.row_TC, everything)
    dense = attention.attend_expanded(projected.query_THD, projected.row_TC, (Span(0, 20, 0, 20),))
    torch.testing.assert_close(sparse, dense, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_a_shared_layer_uses_the_selection_of_the_layer_below():
    from paddock.model import AuxRequest

    kinds = ("full", "shared", "shared", "full")
    network = build_network(
        latent_config(indexer={"heads": 2, "dim": 8, "topk": 8, "layers": kinds})
    )
    notes = network(
        tokens(40), AttentionMetadata.packed([40]), aux=AuxRequest(routing_and_topk=True)
    ).aux
    chosen = [note.selection.index_QK for note in notes]
    assert torch.equal(chosen[0], chosen[1])
    assert torch.equal(chosen[0], chosen[2])
    assert not torch.equal(chosen[0], chosen[3])
    assert network.layers[1].attention.indexer is None


def test_spans_are_split_where_topk_starts_to_select():
    short, long = split_dense_sparse(
        [Span(0, 10, 0, 10), Span(10, 2, 10, 20), Span(12, 3, 30, 5)], 6
    )
    assert short == (Span(0, 6, 0, 6), Span(12, 3, 30, 5))
    assert long == (Span(6, 4, 0, 10), Span(10, 2, 10, 20))


@torch.no_grad()
def test_requesting_dense_attention_ignores_the_indexer():
    from paddock.model import AuxRequest

    sparse = build_network(latent_config())
    dense = Transformer(latent_config(attention=("mla",) * 4, indexer=None)).eval()
    dense.load_state_dict({k: v for k, v in sparse.state_dict().items() if ".indexer." not in k})
    dense_hidden_TD = sparse(
        tokens(60), AttentionMetadata.packed([60]), aux=AuxRequest(dense=True)
    ).hidden_TD
    torch.testing.assert_close(sparse.head(dense_hidden_TD), dense.logits(tokens(60)))


def test_masking_and_gathering_are_the_same_attention(monkeypatch):
    network, token_T = build_network(latent_config()), tokens(60)  # short enough for the mask
    attention = network.layers[0].attention
    query_THD = torch.ones(60, 1, 1)
    assert attention.masking_is_cheaper(query_THD, [Span(0, 60, 0, 60)], [Span(8, 52, 0, 60)])
    assert not attention.masking_is_cheaper(
        query_THD, [Span(0, 60, 4, 64)], [Span(8, 52, 4, 64)]
    )  # with a past
    with torch.no_grad():
        masked = network.logits(token_T)
        monkeypatch.setattr("paddock.model.attention.dsa.MASKED_UP_TO_TOPKS", 0)
        gathered = network.logits(token_T)
    assert not torch.equal(masked, gathered)  # gathering instead of masking
    torch.testing.assert_close(masked, gathered, atol=1e-5, rtol=1e-5)
