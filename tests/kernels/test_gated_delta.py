import pytest
import torch
import torch.nn.functional as F

from paddock.kernels.gated_delta import (
    chunk_gated_delta_rule,
    gated_delta_rule,
    recurrent_gated_delta_rule,
)

H, K, V = 2, 5, 3


def operands(tokens, dtype=torch.float64):
    torch.manual_seed(tokens)
    query, key = torch.randn(2, tokens, H, K, dtype=torch.float64)
    return (
        query.to(dtype),
        F.normalize(key, dim=-1).to(dtype),
        torch.randn(tokens, H, V, dtype=torch.float64).to(dtype),
        F.logsigmoid(torch.randn(tokens, H, dtype=torch.float64) + 2).to(dtype),
        torch.rand(tokens, H, dtype=torch.float64).to(dtype),
    )


def start():
    return torch.randn(H, K, V, dtype=torch.float64)


def explicit_recurrence(query, key, value, log_alpha, beta, state):
    """The formula of the contract with explicit matrices, one head at a time."""
    out, final = torch.empty_like(value), torch.empty_like(state)
    for h in range(H):
        S = state[h]
        for t in range(len(key)):
            k, v = key[t, h, :, None], value[t, h, :, None]
            erase = torch.eye(K, dtype=S.dtype) - beta[t, h] * k @ k.T
            S = log_alpha[t, h].exp() * erase @ S + beta[t, h] * k @ v.T
            out[t, h] = S.T @ query[t, h]
        final[h] = S
    return out, final


def test_the_recurrence_matches_the_formula():
    inputs, state = operands(9), start()
    torch.testing.assert_close(
        recurrent_gated_delta_rule(*inputs, state), explicit_recurrence(*inputs, state)
    )


@pytest.mark.parametrize("tokens", [1, 3, 16, 17, 50])
@pytest.mark.parametrize("chunk", [1, 4, 16, 64])
def test_the_chunked_form_matches_the_recurrence(tokens, chunk):
    inputs, state = operands(tokens), start()
    torch.testing.assert_close(
        chunk_gated_delta_rule(*inputs, state, chunk=chunk),
        recurrent_gated_delta_rule(*inputs, state),
        atol=1e-10,
        rtol=1e-10,
    )


@pytest.mark.parametrize("function", [recurrent_gated_delta_rule, chunk_gated_delta_rule])
def test_a_missing_state_is_a_state_of_zeros(function):
    inputs = operands(7)
    zeros = torch.zeros(H, K, V, dtype=torch.float64)
    torch.testing.assert_close(function(*inputs), function(*inputs, zeros))


@pytest.mark.parametrize("function", [recurrent_gated_delta_rule, chunk_gated_delta_rule])
def test_continuing_from_a_state_equals_one_pass(function):
    inputs = operands(150)
    out, final = function(*inputs)
    first, state = function(*(x[:70] for x in inputs))
    second, end = function(*(x[70:] for x in inputs), state)
    torch.testing.assert_close((torch.cat((first, second)), end), (out, final))


def test_the_chunked_form_is_the_default():
    assert gated_delta_rule is chunk_gated_delta_rule


def test_the_chunked_form_is_accurate_in_float32_with_equal_keys():
    query, key, value, log_alpha, beta = operands(64, torch.float32)
    hard = (
        query,
        key[:1].expand_as(key),
        value,
        torch.zeros_like(log_alpha),
        torch.ones_like(beta),
    )
    torch.testing.assert_close(
        chunk_gated_delta_rule(*hard), recurrent_gated_delta_rule(*hard), atol=1e-5, rtol=1e-5
    )


def test_strong_decay_neither_overflows_nor_spoils_gradients():
    inputs = [x.requires_grad_() for x in operands(40, torch.float32)]
    with torch.no_grad():
        inputs[3].fill_(-30.0)
    out, final = chunk_gated_delta_rule(*inputs)
    torch.testing.assert_close((out, final), recurrent_gated_delta_rule(*inputs))
    grads = torch.autograd.grad(out.sum() + final.sum(), inputs)
    assert all(grad.isfinite().all() for grad in grads)


def test_with_unit_keys_and_full_strength_the_last_value_of_a_key_is_recalled():
    key = F.one_hot(torch.tensor([0, 1, 0]), K).double()[:, None].expand(3, H, K)
    value = torch.randn(3, H, V, dtype=torch.float64)
    open_gates = torch.zeros(3, H, dtype=torch.float64)
    _, state = gated_delta_rule(key, key, value, open_gates, open_gates + 1)
    torch.testing.assert_close(state[:, 0], value[2])
    torch.testing.assert_close(state[:, 1], value[1])


@pytest.mark.parametrize("function", [recurrent_gated_delta_rule, chunk_gated_delta_rule])
def test_half_inputs_keep_their_state_in_float32(function):
    inputs = operands(20, torch.bfloat16)
    out, final = function(*inputs)
    wide_out, wide_final = function(*(x.float() for x in inputs))
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(final, wide_final, atol=0, rtol=0)
    torch.testing.assert_close(out, wide_out.bfloat16(), atol=0, rtol=0)


@pytest.mark.parametrize(
    "function",
    [recurrent_gated_delta_rule, lambda *inputs: chunk_gated_delta_rule(*inputs, chunk=3)],
    ids=["recurrent", "chunked"],
)
def test_gradients_are_right(function):
    inputs = [x.requires_grad_() for x in (*operands(7), start())]
    assert torch.autograd.gradcheck(function, inputs)
