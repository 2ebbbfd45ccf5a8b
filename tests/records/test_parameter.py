import pytest

from paddock.records import ParameterRole
from paddock.records.parameter import MuonSplit


def test_an_unknown_kind_is_rejected_by_name():
    with pytest.raises(ValueError, match=r"kind: must be one of matrix, .* got 'bias'"):
        ParameterRole("bias")


def test_only_a_matrix_can_be_split():
    with pytest.raises(ValueError, match="split: only allowed for kind 'matrix', got 'vector'"):
        ParameterRole("vector", MuonSplit(rows=(2,)))


@pytest.mark.parametrize("split", [{"rows": ()}, {"rows": (0,)}, {"rows": (2,), "heads": 0}])
def test_a_split_has_rows(split):
    with pytest.raises(ValueError, match="at least one head and one row"):
        MuonSplit(**split)
