import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from paddock.kernels.linear_cross_entropy import linear_cross_entropy, token_logprobs

T, D, V = 11, 6, 17


class LargestTensor(TorchDispatchMode):
    """Records the size of the largest floating-point tensor that an operation returned."""

    max_elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
                self.max_elements = max(self.max_elements, leaf.numel())
        return result


@pytest.fixture
def operands():
    torch.manual_seed(0)
    hidden = torch.randn(T, D, dtype=torch.float64, requires_grad=True)
    head = torch.randn(V, D, dtype=torch.float64, requires_grad=True)
    target = torch.randint(V, (T,))
    target[[0, 4, 5]] = -100
    return hidden, head, target


def rows(count):
    return count * V * 8  # bytes of logits in float64


@pytest.mark.parametrize("chunk_bytes", [1, rows(1), rows(3), rows(100)])
def test_losses_and_gradients_are_those_of_full_cross_entropy(operands, chunk_bytes):
    hidden, head, target = operands
    above = torch.randn(T, dtype=torch.float64)
    ours = linear_cross_entropy(hidden, head, target, chunk_bytes=chunk_bytes)
    theirs = F.cross_entropy(hidden @ head.T, target, reduction="none")
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(
        torch.autograd.grad(ours, operands[:2], above),
        torch.autograd.grad(theirs, operands[:2], above),
    )


def test_gradients_are_right(operands):
    hidden, head, target = operands
    weight = torch.rand(T, dtype=torch.float64)

    def both(hidden, head):
        loss = linear_cross_entropy(hidden, head, target, weight_T=weight, chunk_bytes=rows(3))
        return loss, token_logprobs(hidden, head, target, temperature=0.7, chunk_bytes=rows(2))

    assert torch.autograd.gradcheck(both, (hidden, head))


def test_weights_scale_the_loss_of_their_token(operands):
    weight = torch.arange(T, dtype=torch.float64)
    weighted = linear_cross_entropy(*operands, weight_T=weight)
    torch.testing.assert_close(weighted, weight * linear_cross_entropy(*operands))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_logprobs_are_those_of_the_tempered_softmax(operands, temperature):
    hidden, head, target = operands
    full = (hidden @ head.T / temperature).log_softmax(-1)
    picked = full.gather(1, target.clamp(min=0)[:, None]).squeeze(1)
    expected = torch.where(target < 0, 0.0, picked)
    ours = token_logprobs(hidden, head, target, temperature=temperature)
    torch.testing.assert_close(ours, expected)


def test_an_ignored_token_has_no_loss_and_no_gradient(operands):
    hidden, head, target = operands
    loss = linear_cross_entropy(hidden, head, target)
    loss.sum().backward()
    ignored = target < 0
    assert loss[ignored].count_nonzero() == hidden.grad[ignored].count_nonzero() == 0
    assert hidden.grad[~ignored].abs().sum(-1).min() > 0


def test_a_batch_of_ignored_tokens_has_zero_gradients(operands):
    hidden, head, _ = operands
    linear_cross_entropy(hidden, head, torch.full((T,), -100)).sum().backward()
    assert hidden.grad.count_nonzero() == head.grad.count_nonzero() == 0


@pytest.mark.parametrize("frozen", ["hidden", "head"])
def test_a_frozen_side_gets_no_gradient_and_the_other_the_same(operands, frozen):
    hidden, head, target = operands
    names = {"hidden": hidden, "head": head}
    moving = next(tensor for name, tensor in names.items() if name != frozen)
    (expected,) = torch.autograd.grad(linear_cross_entropy(hidden, head, target).sum(), moving)
    names[frozen].requires_grad_(False)
    linear_cross_entropy(hidden, head, target).sum().backward()
    torch.testing.assert_close(moving.grad, expected)
    assert names[frozen].grad is None


def test_no_tensor_is_larger_than_a_chunk_in_forward_or_backward():
    tokens, dim, vocabulary, chunk_rows = 96, 8, 400, 16
    hidden = torch.randn(tokens, dim, requires_grad=True)
    head = torch.randn(vocabulary, dim, requires_grad=True)
    target = torch.randint(vocabulary, (tokens,))
    with LargestTensor() as largest:
        loss = linear_cross_entropy(hidden, head, target, chunk_bytes=chunk_rows * vocabulary * 4)
        loss.sum().backward()
    assert largest.max_elements == chunk_rows * vocabulary < tokens * vocabulary


def test_half_inputs_are_multiplied_in_float32():
    torch.manual_seed(0)
    hidden, head = torch.randn(T, D).bfloat16(), torch.randn(V, D).bfloat16()
    target = torch.randint(V, (T,))
    loss = linear_cross_entropy(hidden, head, target)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, linear_cross_entropy(hidden.float(), head.float(), target))


def test_half_gradients_are_rounded_once():
    torch.manual_seed(0)
    hidden, head = torch.randn(64, D).bfloat16(), torch.randn(V, D).bfloat16()
    target = torch.randint(V, (64,))
    grads = {}
    for dtype in (torch.bfloat16, torch.float32):
        operands = [x.to(dtype).requires_grad_() for x in (hidden, head)]
        loss = linear_cross_entropy(
            *operands, target, chunk_bytes=V * 4
        )  # a row at a time: 64 sums
        grads[dtype] = torch.autograd.grad(loss.sum(), operands)
    for half, full in zip(grads[torch.bfloat16], grads[torch.float32], strict=True):
        torch.testing.assert_close(half, full.bfloat16(), atol=0, rtol=0)


def test_huge_logits_do_not_overflow():
    hidden, head = torch.full((1, 1), 1e4), torch.tensor([[1.0], [0.0]])
    assert linear_cross_entropy(hidden, head, torch.tensor([0])).item() == 0.0
    assert linear_cross_entropy(hidden, head, torch.tensor([1])).item() == 1e4
