"""Estimated training FLOPs match torch's counter, forward and backward.

Torch's counter is adjusted in two ways: a masked product counts only the unmasked pairs, and the
backward pass of attention does not count recomputed scores.
"""

from math import prod

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from paddock.data import PackedBatch
from paddock.kernels import workspace
from paddock.kernels.grouped_gemm import reference as grouped
from paddock.model import Transformer
from paddock.model.cost import TrainingWorkload, training_flops
from paddock.train.micro_batch import count_tokens, iter_micro_batches
from paddock.train.objective import LanguageModelObjective
from paddock.train.settings import AuxLossSettings
from paddock.train.stages import StageSpec
from tests.model.networks import grouped_config, latent_config

LENGTH = 512
WIDE = {
    "vocab": 96,
    "hidden": 64,
    "context": LENGTH,
    "dense_inner": 128,
    # Values as wide as queries, as in every preset: torch's attention needs one width.
    "mla": {"heads": 4, "q_rank": 32, "kv_rank": 24, "nope": 12, "rope": 4, "value": 16},
    "mtp": None,
}
INDEXER = {"heads": 4, "dim": 64, "topk": 128}
FULL = INDEXER | {"layers": ("full",) * 4}
SHARED = INDEXER | {"layers": ("full", "shared", "full", "shared")}
DENSE, SPARSE, RESTS = TrainingWorkload(dense=True), TrainingWorkload(), ".indexer."
CASES = {
    "latent attention": (latent_config(**WIDE, attention=("mla",) * 4, indexer=None), DENSE),
    "sparse layers that attend to everything, and MTP": (
        latent_config(**WIDE | {"mtp": {"depths": 2}}, indexer=FULL),
        TrainingWorkload(dense=True, mtp_depths=2),
    ),
    "sparse, the indexer resting": (latent_config(**WIDE, indexer=FULL), SPARSE),
    "sparse, shared indexers": (latent_config(**WIDE, indexer=SHARED), SPARSE),
    "documents shorter than top-k": (
        latent_config(**WIDE, indexer=FULL | {"topk": LENGTH}),
        SPARSE,
    ),
    "grouped, and through a window": (
        grouped_config(
            "gqa",
            "swa",
            vocab=96,
            hidden=64,
            context=LENGTH,
            gqa={"heads": 4, "kv_heads": 2, "dim": 16, "window": 100},
        ),
        TrainingWorkload(),
    ),
}


def pairs(query, mask, causal):
    """Attended query-key pairs over all heads."""
    *many, length, _ = query.shape
    if mask is not None:
        shown = mask if mask.dtype == torch.bool else mask == 0  # torch passes it as 0 or -inf
        return int(shown.expand(*many, *mask.shape[-2:]).sum())
    assert causal
    return prod(many) * length * (length + 1) // 2


def forward(query, key, value, dropout=0.0, causal=False, *, attn_mask=None, **_):
    return 2 * pairs(query, attn_mask, causal) * (query.shape[-1] + value.shape[-1])


def backward(grad, query, key, value, out, lse, dropout, causal, *, attn_mask=None, **_):
    return 2 * forward(query, key, value, causal=causal, attn_mask=attn_mask)


forward._get_raw = backward._get_raw = True  # tensors, not their shapes
aten = torch.ops.aten
ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu: forward,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: backward,
}


def counted(config, learning):
    """FLOPs per token of one step, counted by torch."""
    network = Transformer.from_config(config, 0)
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(RESTS not in name)
    batch = PackedBatch(
        token_T=np.random.default_rng(0).integers(0, config.vocab, LENGTH, dtype=np.int32),
        loss_mask_T=np.ones(LENGTH, np.bool_),
        lengths=(LENGTH,),
        sources=("random",),
        num_targets=LENGTH - 1,
    )
    depths = learning.mtp_depths
    loss = AuxLossSettings(mtp_coef=0.3 if depths else 0.0, mtp_depths=depths or 1)
    stage = StageSpec(language=True, indexer=False, dense=learning.dense)
    (micro,) = iter_micro_batches(batch, torch.device("cpu"))
    with FlopCounterMode(display=False, custom_mapping=ATTENTION) as counter:
        objective = LanguageModelObjective(stage, loss)
        objective(network, micro, count_tokens(batch, loss.mtp_depths), 0.0).total.backward()
    return counter.get_total_flops() / LENGTH


@pytest.mark.parametrize("name", CASES)
def test_training_flops_match_torchs_counter(name, monkeypatch):
    # References without padded rows and with almost no masked scores.
    monkeypatch.setattr(grouped, "BLOCK", 1)
    monkeypatch.setattr(workspace, "SCRATCH_BYTES", 1 << 16)
    config, learning = CASES[name]
    assert training_flops(config, LENGTH, learning) == pytest.approx(
        counted(config, learning), rel=0.01
    )
