import pytest
import torch

from paddock.parallel import SINGLE_RANK, ContextShard, ParallelDegrees, init_mesh
from paddock.parallel.mesh import MeshError
from paddock.train.run import check_parallel
from paddock.train.settings import ParallelSettings
from paddock.train.trainer import TrainingError
from tests.model.networks import grouped_config, latent_config

CPU = torch.device("cpu")


def test_without_torchrun_there_is_one_rank_and_no_process_group():
    with init_mesh(ParallelDegrees(), CPU) as mesh:
        assert mesh.is_rank_zero
        assert {mesh.all_ranks.size, mesh.data_ranks.size, mesh.expert.size, mesh.context.size} == {
            1
        }
        assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("started", "sizes"), [("1", ParallelDegrees(data=2)), ("6", ParallelDegrees())]
)
def test_degrees_that_do_not_match_the_world_size_are_rejected(monkeypatch, started, sizes):
    monkeypatch.setenv("WORLD_SIZE", started)
    message = rf"is {sizes.ranks} ranks, but {started} were started"
    with pytest.raises(MeshError, match=message), init_mesh(sizes, CPU):
        pass


def test_indivisible_experts_are_rejected():
    with pytest.raises(TrainingError, match=r"'parallel\.expert' 4: 6 experts"):
        check_parallel(latent_config(), ParallelSettings(expert=4))
    with pytest.raises(TrainingError, match="0 experts"):
        check_parallel(grouped_config("gqa"), ParallelSettings(expert=2))


def test_recurrent_layers_reject_context_parallelism():
    with pytest.raises(TrainingError, match="linear attention"):
        check_parallel(grouped_config("gqa", "gdn"), ParallelSettings(context=2))


def test_a_row_shorter_than_the_context_ranks_is_rejected():
    with pytest.raises(MeshError, match="0 tokens cannot be sharded over 1"):
        ContextShard(SINGLE_RANK, 0)
