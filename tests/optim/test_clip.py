import pytest
import torch
from torch import nn

from paddock.optim import clip_grad_norm_


def parameters(*grads):
    result = [nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    for parameter, grad in zip(result, grads, strict=True):
        parameter.grad = grad
    return [*result, nn.Parameter(torch.zeros(3))]  # one without a gradient


def test_gradients_keep_their_direction_and_get_the_max_norm():
    clipped = parameters(torch.tensor([3.0]), torch.tensor([[0.0, 4.0]]))
    assert clip_grad_norm_(clipped, max_norm=1.0) == 5.0
    torch.testing.assert_close(clipped[0].grad, torch.tensor([0.6]))
    torch.testing.assert_close(clipped[1].grad, torch.tensor([[0.0, 0.8]]))


@pytest.mark.parametrize("size", [0.0, 0.5, 1.0])
def test_gradients_within_the_norm_are_left_alone(size):
    (parameter, _) = parameters(torch.tensor([size]))
    assert clip_grad_norm_([parameter], max_norm=1.0) == size
    assert parameter.grad.item() == size


@pytest.mark.parametrize("broken", [torch.inf, torch.nan])
def test_a_non_finite_gradient_is_reported_and_not_scaled(broken):
    good, bad, _ = parameters(torch.ones(2), torch.tensor([1.0, broken]))
    assert not clip_grad_norm_([good, bad], max_norm=0.1).isfinite()
    assert good.grad.tolist() == [1.0, 1.0]


def test_the_norm_of_half_gradients_is_taken_in_float32():
    halves = parameters(*torch.ones(300, 1).bfloat16())  # sqrt(300): bfloat16 would give 17.375
    norm = clip_grad_norm_(halves, max_norm=1e9)
    assert norm.dtype == torch.float32
    torch.testing.assert_close(norm, torch.tensor(300.0).sqrt())


def test_no_gradients_have_zero_norm():
    assert clip_grad_norm_([nn.Parameter(torch.zeros(2))], max_norm=1.0) == 0.0


def test_float64_stays_float64():
    mixed = parameters(torch.ones(1), torch.full((1,), 1e-9, dtype=torch.float64))
    assert clip_grad_norm_(mixed, max_norm=1.0).dtype == torch.float64
