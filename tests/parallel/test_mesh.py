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
def test_sizes_that_are_not_the_number_of_processes_are_refused(monkeypatch, started, sizes):
    monkeypatch.setenv("WORLD_SIZE", started)
    said = rf"is {sizes.ranks} ranks, but {started} were started"
    with pytest.raises(MeshError, match=said), init_mesh(sizes, CPU):
        pass


def test_experts_that_cannot_be_dealt_are_refused():
    with pytest.raises(TrainingError, match=r"'parallel\.expert' 4: 6 experts"):
        check_parallel(latent_config(), ParallelSettings(expert=4))
    with pytest.raises(TrainingError, match="0 experts"):
        check_parallel(grouped_config("gqa"), ParallelSettings(expert=2))


def test_a_recurrent_layer_cannot_be_cut():
    with pytest.raises(TrainingError, match="linear attention"):
        check_parallel(grouped_config("gqa", "gdn"), ParallelSettings(context=2))


def test_a_row_shorter_than_its_ranks_is_refused():
    with pytest.raises(MeshError, match="0 tokens cannot be sharded over 1"):
        ContextShard(SINGLE_RANK, 0)
