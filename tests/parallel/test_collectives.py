"""Collectives, sharding and optimizers on several ranks against one process.

Assertions run on the ranks themselves.
"""

from itertools import product

import numpy as np
import pytest
import torch
from torch import nn

from paddock.model import AttentionMetadata
from paddock.optim import AdamW, Muon
from paddock.parallel import ContextShard, ExpertDispatch, MeshDim, ParallelDegrees, init_mesh
from paddock.parallel.collectives import all_gather_rows
from paddock.parallel.fsdp import apply_fsdp, to_local
from paddock.records import NamedParameter, ParameterRole
from paddock.records.parameter import MuonSplit
from paddock.train.objective import LanguageModelObjective
from paddock.train.run import place_model
from paddock.train.settings import AuxLossSettings, ComputeSettings, ParallelSettings
from paddock.train.stages import STAGES
from paddock.train.trainer import Trainer, TrainingError
from tests.model.networks import build_network, grouped_config, latent_config, tokens
from tests.parallel.ranks import all_on_ranks, on_ranks
from tests.train.test_micro_batch import batch_of
from tests.train.tiny import settings

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.05}  # half precision rounds every product


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def check_collectives():
    with init_mesh(ParallelDegrees(data=3), CPU) as mesh:
        check_gathered_rows_sum_gradients_of_all_ranks(mesh.all_ranks)
        check_expert_dispatch_returns_rows_to_their_rank(mesh.all_ranks)
        check_context_parallel_attention(mesh.all_ranks)
        check_a_rank_without_selection_joins_the_collectives(mesh)


def check_gathered_rows_sum_gradients_of_all_ranks(axis: MeshDim):
    x_SC = randn(7, 2)
    shard = ContextShard(axis, 7)
    x_TC = x_SC[shard.local_slice].clone().requires_grad_()
    gathered = shard.all_gather(x_TC)
    assert torch.equal(gathered, x_SC)
    (gathered.sum() * (axis.rank + 1)).backward()
    assert torch.equal(x_TC.grad, torch.full_like(x_TC, 1 + 2 + 3))
    assert all_gather_rows(torch.zeros(0, 2), [0, 0, 0], axis).shape == (0, 2)


def check_expert_dispatch_returns_rows_to_their_rank(axis: MeshDim):
    expert_R = torch.tensor([[0, 0, 5], [], [1, 2, 2]][axis.rank], dtype=torch.int64)
    dispatch = ExpertDispatch(expert_R.bincount(minlength=6), axis)
    assert dispatch.counts_H.tolist() == [[2, 1], [2, 0], [0, 1]][axis.rank]
    x_R1 = (10.0 * axis.rank + torch.arange(len(expert_R))).unsqueeze(1).requires_grad_()
    held = torch.arange(6)[axis.local_slice(6)].repeat_interleave(dispatch.counts_H)
    out_R1 = dispatch.combine(dispatch.dispatch(x_R1) * (held.unsqueeze(1) + 1))
    assert torch.equal(out_R1, x_R1 * (expert_R.unsqueeze(1) + 1))
    out_R1.sum().backward()
    assert torch.equal(x_R1.grad, expert_R.unsqueeze(1) + 1.0)


def check_context_parallel_attention(axis: MeshDim):
    grouped = grouped_config("gqa", "swa")
    # In half precision another rounding may select another key or expert, so it is not compared.
    for config, dtypes in ((latent_config(), [torch.float32]), (grouped, TOLERANCE)):
        for dtype in dtypes:
            network, token_S = build_network(config).cast(dtype), tokens(23)
            layout = AttentionMetadata.packed([4, 15, 1, 3])
            whole = network(token_S, layout).hidden_TD
            shard = ContextShard(axis, 23)
            local = network(token_S[shard.local_slice], layout.shard(shard)).hidden_TD
            near = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
            torch.testing.assert_close(local, whole[shard.local_slice], **near)


def check_a_rank_without_selection_joins_the_collectives(mesh):
    """Only the second rank's document is longer than topk, 8."""
    config = latent_config()
    alone = build_network(config).cast(torch.bfloat16)
    shared = place_model(build_network(config), ComputeSettings(dtype="bfloat16"), mesh)
    length = (5, 20, 3)[mesh.all_ranks.rank]
    token_T, layout = tokens(length), AttentionMetadata.packed([length])
    with torch.no_grad():
        local, expected = (net(token_T, layout).hidden_TD for net in (shared, alone))
    torch.testing.assert_close(local, expected, atol=1e-2, rtol=1e-2)


class Weights(nn.Module):
    """Some have fewer rows or matrices than there are ranks, so that some ranks hold nothing."""

    def __init__(self):
        super().__init__()
        self.heads = nn.Parameter(randn(24, 8, seed=1))
        self.wide = nn.Parameter(randn(2, 9, seed=2))
        self.stack = nn.Parameter(randn(2, 6, 4, seed=3))
        self.gain = nn.Parameter(randn(5, seed=4))

    def roles(self):
        matrix = ParameterRole("matrix")
        split = {"heads": ParameterRole("matrix", MuonSplit(heads=4, rows=(2, 4)))}
        kinds = split | {"wide": matrix, "stack": matrix, "gain": ParameterRole("vector")}
        return [NamedParameter(name, p, kinds[name]) for name, p in self.named_parameters()]

    def forward(self, target):
        return sum(((p - t) ** 2).sum() for p, t in zip(self.parameters(), target, strict=True))


def check_sharded_optimizers():
    target = [parameter.detach() for parameter in Weights().to(CPU).apply(_shifted).parameters()]
    with init_mesh(ParallelDegrees(data=3), CPU) as mesh:
        for kind, (dtype, tolerance) in product((Muon, AdamW), TOLERANCE.items()):
            alone, shared = Weights(), Weights()
            apply_fsdp(shared, mesh, dtype, blocks=[])
            optimizers = [kind(module.roles(), lr=0.1) for module in (alone, shared)]
            for _ in range(3):
                for module, weight in ((alone, 1.0), (shared, 1 / 3)):
                    (module(target) * weight).backward()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            for one, many in zip(alone.parameters(), shared.parameters(), strict=True):
                whole = many.full_tensor()
                torch.testing.assert_close(whole, one.detach(), atol=tolerance, rtol=tolerance)


@torch.no_grad()
def _shifted(module):
    for parameter in module.parameters():
        parameter.mul_(0.5).add_(0.1)


def check_one_broken_rank_stops_all(folder, dtype):
    """A value that only the second rank holds becomes NaN."""
    with init_mesh(ParallelDegrees(data=2), CPU) as mesh:
        compute = ComputeSettings(dtype=dtype)
        chosen = settings(folder, compute=compute, parallel=ParallelSettings(data=2))
        network = place_model(build_network(latent_config()), compute, mesh)
        objective = LanguageModelObjective(STAGES["pretrain"], AuxLossSettings())
        trainer = Trainer(network, objective, chosen, folder / "batch.npz", mesh)
        if mesh.all_ranks.rank == 1:
            with torch.no_grad():
                to_local(trainer.weights.master["norm.weight"])[0] = float("nan")
        batch = batch_of(9 + mesh.data_ranks.rank)
        with pytest.raises(TrainingError, match=f"batch-{mesh.data_ranks.rank}"):
            trainer.step(batch, lr=1e-3, bias_rate=0.0, progress=0.0)


def test_collectives_match_a_single_process():
    on_ranks(3, check_collectives)


def test_sharded_parameters_step_like_unsharded_ones():
    on_ranks(3, check_sharded_optimizers)


def test_a_non_finite_weight_stops_every_rank(tmp_path):
    folders = {dtype: tmp_path / dtype for dtype in ("float32", "bfloat16")}
    all_on_ranks(2, [(check_one_broken_rank_stops_all, at, dtype) for dtype, at in folders.items()])
    for folder in folders.values():
        batches = [np.load(folder / f"batch-{share}.npz")["token_T"] for share in (0, 1)]
        assert [len(batch) for batch in batches] == [9, 10]
