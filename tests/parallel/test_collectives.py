"""What ranks do together, against the same done alone. Assertions run on the ranks themselves."""

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
from tests.model.networks import born, grouped_config, latent_config, tokens
from tests.parallel.ranks import all_on_ranks, on_ranks
from tests.train.test_micro_batch import batch_of
from tests.train.tiny import settings

CPU = torch.device("cpu")
APART = {torch.float32: 1e-5, torch.bfloat16: 0.05}  # half precision rounds every product


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def gathers_and_trips():
    with init_mesh(ParallelDegrees(data=3), CPU) as mesh:
        a_row_gathered_has_the_gradients_of_all(mesh.all_ranks)
        an_answer_comes_back_to_who_asked(mesh.all_ranks)
        attention_sees_what_other_ranks_hold(mesh.all_ranks)
        a_rank_that_chooses_no_keys_gathers_with_the_others(mesh)


def a_row_gathered_has_the_gradients_of_all(axis: MeshDim):
    x_SC = drawn(7, 2)
    cut = ContextShard(axis, 7)
    x_TC = x_SC[cut.local_slice].clone().requires_grad_()
    gathered = cut.all_gather(x_TC)
    assert torch.equal(gathered, x_SC)
    (gathered.sum() * (axis.rank + 1)).backward()
    assert torch.equal(x_TC.grad, torch.full_like(x_TC, 1 + 2 + 3))
    assert all_gather_rows(torch.zeros(0, 2), [0, 0, 0], axis).shape == (0, 2)


def an_answer_comes_back_to_who_asked(axis: MeshDim):
    expert_R = torch.tensor([[0, 0, 5], [], [1, 2, 2]][axis.rank], dtype=torch.int64)
    trip = ExpertDispatch(expert_R.bincount(minlength=6), axis)
    assert trip.counts_H.tolist() == [[2, 1], [2, 0], [0, 1]][axis.rank]
    x_R1 = (10.0 * axis.rank + torch.arange(len(expert_R))).unsqueeze(1).requires_grad_()
    held = torch.arange(6)[axis.local_slice(6)].repeat_interleave(trip.counts_H)
    answer_R1 = trip.combine(trip.dispatch(x_R1) * (held.unsqueeze(1) + 1))
    assert torch.equal(answer_R1, x_R1 * (expert_R.unsqueeze(1) + 1))
    answer_R1.sum().backward()
    assert torch.equal(x_R1.grad, expert_R.unsqueeze(1) + 1.0)


def attention_sees_what_other_ranks_hold(axis: MeshDim):
    grouped = grouped_config("gqa", "swa")
    # In half precision another rounding may choose another key or expert, which proves nothing.
    for config, dtypes in ((latent_config(), [torch.float32]), (grouped, APART)):
        for dtype in dtypes:
            network, token_S = born(config).cast(dtype), tokens(23)
            layout = AttentionMetadata.packed([4, 15, 1, 3])
            whole = network(token_S, layout).hidden_TD
            cut = ContextShard(axis, 23)
            mine = network(token_S[cut.local_slice], layout.shard(cut)).hidden_TD
            near = {"atol": APART[dtype], "rtol": APART[dtype]}
            torch.testing.assert_close(mine, whole[cut.local_slice], **near)


def a_rank_that_chooses_no_keys_gathers_with_the_others(mesh):
    """Of these documents only the second rank's is longer than the eight keys that are kept."""
    config = latent_config()
    alone = born(config).cast(torch.bfloat16)
    shared = place_model(born(config), ComputeSettings(dtype="bfloat16"), mesh)
    length = (5, 20, 3)[mesh.all_ranks.rank]
    token_T, layout = tokens(length), AttentionMetadata.packed([length])
    with torch.no_grad():
        mine, expected = (net(token_T, layout).hidden_TD for net in (shared, alone))
    torch.testing.assert_close(mine, expected, atol=1e-2, rtol=1e-2)


class Weights(nn.Module):
    """Fewer rows and fewer matrices than ranks among them, so that some ranks hold nothing."""

    def __init__(self):
        super().__init__()
        self.heads = nn.Parameter(drawn(24, 8, seed=1))
        self.wide = nn.Parameter(drawn(2, 9, seed=2))
        self.stack = nn.Parameter(drawn(2, 6, 4, seed=3))
        self.gain = nn.Parameter(drawn(5, seed=4))

    def roles(self):
        matrix = ParameterRole("matrix")
        split = {"heads": ParameterRole("matrix", MuonSplit(heads=4, rows=(2, 4)))}
        kinds = split | {"wide": matrix, "stack": matrix, "gain": ParameterRole("vector")}
        return [NamedParameter(name, p, kinds[name]) for name, p in self.named_parameters()]

    def forward(self, target):
        return sum(((p - t) ** 2).sum() for p, t in zip(self.parameters(), target, strict=True))


def optimizers_step_alike():
    target = [parameter.detach() for parameter in Weights().to(CPU).apply(_elsewhere).parameters()]
    with init_mesh(ParallelDegrees(data=3), CPU) as mesh:
        for kind, (dtype, apart) in product((Muon, AdamW), APART.items()):
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
                torch.testing.assert_close(whole, one.detach(), atol=apart, rtol=apart)


@torch.no_grad()
def _elsewhere(module):
    for parameter in module.parameters():
        parameter.mul_(0.5).add_(0.1)


def one_broken_rank_stops_all(folder, dtype):
    """A number that only the second rank holds goes wrong."""
    with init_mesh(ParallelDegrees(data=2), CPU) as mesh:
        machine = ComputeSettings(dtype=dtype)
        chosen = settings(folder, compute=machine, parallel=ParallelSettings(data=2))
        network = place_model(born(latent_config()), machine, mesh)
        objective = LanguageModelObjective(STAGES["pretrain"], AuxLossSettings())
        trainer = Trainer(network, objective, chosen, folder / "batch.npz", mesh)
        if mesh.all_ranks.rank == 1:
            with torch.no_grad():
                to_local(trainer.weights.master["norm.weight"])[0] = float("nan")
        batch = batch_of(9 + mesh.data_ranks.rank)
        with pytest.raises(TrainingError, match=f"batch-{mesh.data_ranks.rank}"):
            trainer.step(batch, lr=1e-3, bias_rate=0.0, progress=0.0)


def test_rows_travel_and_come_back():
    on_ranks(3, gathers_and_trips)


def test_sharded_parameters_step_as_whole_ones_do():
    on_ranks(3, optimizers_step_alike)


def test_a_number_that_is_not_finite_stops_every_rank(tmp_path):
    folders = {dtype: tmp_path / dtype for dtype in ("float32", "bfloat16")}
    all_on_ranks(2, [(one_broken_rank_stops_all, at, dtype) for dtype, at in folders.items()])
    for folder in folders.values():
        batches = [np.load(folder / f"batch-{share}.npz")["token_T"] for share in (0, 1)]
        assert [len(batch) for batch in batches] == [9, 10]
