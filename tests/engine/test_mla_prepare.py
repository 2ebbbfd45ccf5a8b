"""Decode steps prepared in two fused calls give the replies of the separate operations.

On a GPU the kernel decides when it applies (see tests/kernels/test_mla_prepare_gpu); here it is
always enabled, and the reference computes.
"""

import pytest
import torch

from paddock.engine import EngineWeightUpdater
from paddock.kernels import mla_prepare
from paddock.kernels.block_table import BlockTable
from paddock.kernels.spans import Span
from paddock.model import AttentionMetadata, DecodeBatch
from paddock.model.attention.mla import MLA
from paddock.model.config import RopeSettings
from tests.engine.networks import assert_greedy, copy_of, engine, greedy, network, prompts
from tests.engine.test_weight_versions import other
from tests.engine.weight_updates import assert_serves_new_weights
from tests.model.networks import build_network, latent_config

PROMPTS = prompts(6)
COUNT = 10
HALVES = {
    "rope": RopeSettings(theta=100.0, layout="halves"),
    "indexer": {"heads": 2, "dim": 8, "topk": 8, "layers": ("full",) * 4, "rope_layout": "halves"},
}


def network_of(kind):
    return build_network(latent_config(**HALVES)) if kind == "halves" else copy_of(network(kind))


@pytest.fixture
def prepared(monkeypatch):
    """Counts the layers that were prepared by the fused calls."""
    monkeypatch.setattr(mla_prepare, "suits", lambda *_: True)
    count, plain = [], MLA.prepare_decode

    def counted(self, *args, **kwargs):
        count.append(self.layer)
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(MLA, "prepare_decode", counted)
    return count


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("kind", ["sparse", "shared", "dense", "halves"])
def test_replies_are_those_of_greedy_decoding(kind, joined, prepared):
    own = network_of(kind)
    if joined:
        own.fuse_weights()
    with engine(own) as serving:
        answers = serving.generate_outputs([greedy(prompt, COUNT) for prompt in PROMPTS])
        assert serving.audit() == []
    assert set(prepared) == set(range(4))
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert_greedy(network_of(kind), prompt, answer.completion)


def test_weight_updates_reach_fused_weights(prepared):
    own = copy_of(network("sparse"))
    own.fuse_weights()
    with engine(own) as serving:
        serving.generate_outputs(map(greedy, PROMPTS))
        EngineWeightUpdater(serving).update_from_model(other(), version=7, mode="retract")
        assert_serves_new_weights(serving)
    assert set(prepared) == set(range(4))
    assert own.layers[0].attention.q_a.weight.untyped_storage().data_ptr() == (
        own.layers[0].attention.kv_a.weight.untyped_storage().data_ptr()
    )


def test_drafts_are_prepared_too(prepared):
    with engine(copy_of(network("counting")), num_speculative_tokens=3) as serving:
        reply = serving.generate_output(greedy(PROMPTS[0], COUNT)).completion
    assert 4 in prepared  # the MTP layer
    assert_greedy(network("counting"), PROMPTS[0], reply)


def test_the_cpu_runs_separate_operations(monkeypatch):
    monkeypatch.setattr(MLA, "prepare_decode", None)
    with engine(network("sparse")) as serving:
        assert len(serving.generate_output(greedy(PROMPTS[0], COUNT)).completion.token_ids) == COUNT


class Storage:
    """KV cache of one layer with the minimum that a decode step needs."""

    def __init__(self, kv_slot_T, **widths):
        self.stored = {name: torch.full((40, width), 7.0) for name, width in widths.items()}
        self.kv_slot_T = kv_slot_T

    def storage_and_slots(self, _, stream):
        return self.stored[stream], self.kv_slot_T

    def update(self, layer, stream, rows_T):
        stored, kv_slot_T = self.storage_and_slots(layer, stream)
        return stored.index_copy_(0, kv_slot_T, rows_T)


@pytest.mark.parametrize("kind", ["sparse", "halves"])
@torch.no_grad()
def test_prepared_inputs_equal_the_projections_bitwise(kind):
    own = network_of(kind)
    attention = own.layers[0].attention
    position_T = torch.tensor([9, 30, 4])
    batch = DecodeBatch(
        BlockTable(torch.arange(30).view(3, 10), 4), (position_T + 1).view(3, 1).int()
    )
    spans = tuple(Span(b, 1, 0, int(p) + 1) for b, p in enumerate(position_T))
    layout, x_TD = AttentionMetadata(position_T, spans, decode_batch=batch), torch.randn(3, 32)
    one, other = (Storage(torch.tensor([5, 0, 39]), row=20, index=8) for _ in range(2))
    step = own.make_context(layout, one)
    projected = attention.project(x_TD, step)
    one.update(0, "row", projected.row_TC)
    index = attention.index_new_tokens(x_TD, projected, step)
    found = attention.prepare_decode(x_TD, own.make_context(layout, other), need_scores=True)
    for stream in ("row", "index"):
        assert torch.equal(one.stored[stream], other.stored[stream])
    assert torch.equal(found.index.query_THD, index.query_THD)
    assert torch.equal(found.index.weight_TH, index.weight_TH)
    absorbed_THC = attention.absorb(projected.query_THD)
    assert torch.equal(found.absorbed_THC[..., -4:], absorbed_THC[..., -4:])
    torch.testing.assert_close(found.absorbed_THC, absorbed_THC)
