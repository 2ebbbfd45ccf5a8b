import torch

from paddock.kernels.swiglu import silu_and_mul, swiglu


def test_the_gate_is_the_first_half():
    both = torch.randn(5, 8, dtype=torch.float64)
    gate, up = both[:, :4], both[:, 4:]
    torch.testing.assert_close(silu_and_mul(both), gate / (1 + (-gate).exp()) * up)
    assert torch.equal(silu_and_mul(both), swiglu(gate, up))


def test_gradients():
    gate, up = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(swiglu, (gate, up))
