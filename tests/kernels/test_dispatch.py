import pytest

from paddock.kernels import dispatch


def test_a_kernel_is_disabled_only_inside_the_block():
    with dispatch.disable_kernels("rope"):
        with dispatch.disable_kernels("norm"):
            assert not dispatch.is_enabled("rope") and not dispatch.is_enabled("norm")
        assert dispatch.is_enabled("norm")
    assert dispatch.is_enabled("rope")


def test_a_kernel_is_enabled_again_after_an_error():
    with pytest.raises(RuntimeError), dispatch.disable_kernels("rope"):
        raise RuntimeError
    assert dispatch.is_enabled("rope")


def test_an_unknown_kernel_is_rejected_by_name():
    with pytest.raises(ValueError, match="kernel 'rop' not found"), dispatch.disable_kernels("rop"):
        pass
