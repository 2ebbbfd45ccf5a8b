import pytest
import torch

from paddock.kernels.rope import rope_halves, rope_interleaved


def angles(tokens: int, pairs: int) -> tuple[torch.Tensor, torch.Tensor]:
    angle = torch.randn(tokens, pairs, dtype=torch.float64)
    return angle.cos(), angle.sin()


def test_the_layouts_are_permutations_of_each_other():
    x, (cos, sin) = torch.randn(5, 3, 8, dtype=torch.float64), angles(5, 4)
    pairs_together = torch.arange(8).view(2, 4).T.flatten()  # 0 4 1 5 2 6 3 7
    rotated = rope_halves(x, cos, sin)[..., pairs_together]
    torch.testing.assert_close(rotated, rope_interleaved(x[..., pairs_together], cos, sin))


def test_the_layouts_differ():
    x, (cos, sin) = torch.randn(5, 3, 8, dtype=torch.float64), angles(5, 4)
    assert not torch.allclose(rope_halves(x, cos, sin), rope_interleaved(x, cos, sin))


def test_only_the_distance_between_positions_matters():
    frequency = torch.tensor([1.0, 0.1, 0.01], dtype=torch.float64)
    query, key = torch.randn(2, 1, 1, 6, dtype=torch.float64)

    def score(query_at: int, key_at: int) -> torch.Tensor:
        parts = []
        for x, at in ((query, query_at), (key, key_at)):
            angle = at * frequency.unsqueeze(0)
            parts.append(rope_interleaved(x, angle.cos(), angle.sin()))
        return (parts[0] * parts[1]).sum()

    torch.testing.assert_close(score(7, 3), score(1007, 1003))
    assert not torch.allclose(score(7, 3), score(8, 3))


def test_gradients():
    x = torch.randn(3, 2, 4, dtype=torch.float64, requires_grad=True)
    cos, sin = angles(3, 2)
    assert torch.autograd.gradcheck(lambda x: rope_interleaved(x, cos, sin), x)
    assert torch.autograd.gradcheck(lambda x: rope_halves(x, cos, sin), x)


@pytest.mark.parametrize("rotate", [rope_interleaved, rope_halves])
@pytest.mark.parametrize("first", [0, 3, 6])
def test_some_dims_are_rotated_and_the_others_left_alone(rotate, first):
    x, (cos, sin) = torch.randn(5, 3, 14, dtype=torch.float64), angles(5, 4)
    expected = x.clone()
    expected[..., first : first + 8] = rotate(x[..., first : first + 8], cos, sin)
    assert torch.equal(rotate(x, cos, sin, first), expected)


def test_dims_out_of_range_are_rejected():
    x, (cos, sin) = torch.randn(5, 3, 14), angles(5, 4)
    with pytest.raises(ValueError, match="cannot rotate dims 7 to 15 of 14"):
        rope_interleaved(x, cos, sin, 7)


@pytest.mark.parametrize("rotate", [rope_interleaved, rope_halves])
@pytest.mark.parametrize(("dims", "first"), [(8, 0), (14, 6), (13, 5), (12, 0), (15, 4)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_result_is_the_same_without_gradients(rotate, dims, first, dtype):
    cos, sin = angles(5, 4)
    wide = torch.randn(5, 3, dims + 2, dtype=torch.float64)
    x = wide[..., 2:]  # columns of a wider tensor
    expected = rotate(x, cos, sin, first)
    with torch.no_grad():
        found = rotate(x.to(dtype), cos.to(dtype), sin.to(dtype), first)
    assert torch.equal(wide[..., 2:], x)
    torch.testing.assert_close(found, expected.to(dtype))
