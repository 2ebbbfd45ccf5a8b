import pytest

from paddock.kernels import dispatch


def test_a_switch_is_off_only_while_asked():
    with dispatch.disable_kernels("rope"):
        with dispatch.disable_kernels("norm"):
            assert not dispatch.is_enabled("rope") and not dispatch.is_enabled("norm")
        assert dispatch.is_enabled("norm")
    assert dispatch.is_enabled("rope")


def test_a_switch_comes_back_after_an_error():
    with pytest.raises(RuntimeError), dispatch.disable_kernels("rope"):
        raise RuntimeError
    assert dispatch.is_enabled("rope")


def test_a_twin_there_is_none_of_is_refused_by_name():
    with pytest.raises(ValueError, match="kernel 'rop' not found"), dispatch.disable_kernels("rop"):
        pass
