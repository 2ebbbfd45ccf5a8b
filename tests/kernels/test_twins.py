import pytest

from paddock.kernels import twins


def test_a_switch_is_off_only_while_asked():
    with twins.without("rope"):
        with twins.without("norm"):
            assert not twins.allowed("rope") and not twins.allowed("norm")
        assert twins.allowed("norm")
    assert twins.allowed("rope")


def test_a_switch_comes_back_after_an_error():
    with pytest.raises(RuntimeError), twins.without("rope"):
        raise RuntimeError
    assert twins.allowed("rope")


def test_a_twin_there_is_none_of_is_refused_by_name():
    with pytest.raises(ValueError, match="no twin called 'rop'"), twins.without("rop"):
        pass
