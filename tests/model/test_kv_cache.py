"""Chunked forward passes with a KV cache equal one forward pass."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paddock.model import AttentionMetadata, AuxRequest, Transformer
from paddock.model.attention.indexer import Indexer
from paddock.model.kv_cache import GrowingCache
from tests.model.networks import build_network, grouped_config, latent_config, tokens

NETWORKS = {
    "sparse": build_network(latent_config()),
    "sparse with shared indexers": build_network(
        latent_config(
            indexer={
                "heads": 2,
                "dim": 8,
                "topk": 8,
                "layers": ("full", "shared", "full", "shared"),
            }
        )
    ),
    "dense latent": build_network(latent_config(attention=("mla",) * 4, indexer=None)),
    "grouped and windowed": build_network(grouped_config("gqa", "swa")),
    # Its output norm amplifies the rounding of small states, so it is compared in float64.
    "gated delta": build_network(grouped_config("gdn", "simple_gdn")).cast(torch.float64),
}


def in_chunks(network: Transformer, token_T: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    cache, pieces, start = GrowingCache(), [], 0
    for size in sizes:
        chunk = token_T[start : start + size]
        pieces.append(network(chunk, cache.next_metadata(len(chunk)), cache).hidden_TD)
        start += size
    return network.head(torch.cat(pieces)).float()


@pytest.mark.parametrize("name", NETWORKS)
@settings(max_examples=25)
@given(sizes=st.lists(st.integers(1, 20), min_size=1, max_size=8), seed=st.integers(0, 99))
@torch.no_grad()
def test_any_chunking_equals_one_forward(name, sizes, seed):
    token_T = tokens(sum(sizes), seed)
    whole = NETWORKS[name].logits(token_T)
    torch.testing.assert_close(
        in_chunks(NETWORKS[name], token_T, sizes), whole, atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("name", NETWORKS)
@torch.no_grad()
def test_token_by_token_equals_one_forward(name):
    token_T = tokens(40)
    stepped = in_chunks(NETWORKS[name], token_T, [1] * 40)
    torch.testing.assert_close(stepped, NETWORKS[name].logits(token_T), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", NETWORKS)
@torch.no_grad()
def test_packed_documents_equal_the_documents_alone(name):
    network, lengths = NETWORKS[name], [30, 1, 7, 31, 29]
    documents = [tokens(length, seed) for seed, length in enumerate(lengths)]
    packed = network.head(
        network(torch.cat(documents), AttentionMetadata.packed(lengths)).hidden_TD
    ).float()
    alone = torch.cat([network.logits(document) for document in documents])
    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_rows_may_be_stored_in_any_slots():
    """Paging relies on this: slots may be in any order."""
    network, token_T = NETWORKS["sparse"], tokens(30)

    class Shuffled:
        """One storage per stream with slots in random order."""

        def __init__(self) -> None:
            self.slots = torch.randperm(64)[:30]
            self.storage: dict[tuple[int, str], torch.Tensor] = {}

        def update(self, layer, stream, rows_T):
            rows = self.storage.setdefault((layer, stream), torch.randn(64, rows_T.shape[1]))
            rows[self.slots] = rows_T
            return rows

        def load_state(self, layer, stream, span):
            return None

        def store_state(self, layer, stream, span, state):
            pass

    cache = Shuffled()
    plain = AttentionMetadata.packed([30])
    layout = AttentionMetadata(plain.position_T, plain.spans, kv_slot_S=cache.slots)
    found = network.head(network(token_T, layout, cache).hidden_TD)
    torch.testing.assert_close(found, network.logits(token_T), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("length", "calls_expected"), [(8, 0), (9, 4)])
@torch.no_grad()
def test_the_indexer_runs_only_if_a_query_sees_more_than_topk_keys(
    length, calls_expected, monkeypatch
):
    calls, queries = [], Indexer.compute_queries
    monkeypatch.setattr(
        Indexer, "compute_queries", lambda self, *given: calls.append(self) or queries(self, *given)
    )
    token_T, layout = tokens(length), AttentionMetadata.packed([length])
    found = NETWORKS["sparse"](token_T, layout)
    assert len(calls) == calls_expected
    with_loss = NETWORKS["sparse"](token_T, layout, aux=AuxRequest(indexer_loss=True))
    assert len(calls) == calls_expected + 4
    assert torch.equal(found.hidden_TD, with_loss.hidden_TD)
