import pytest
import torch

from paddock.kernels.hadamard import hadamard, hadamard_inverse, hadamard_matrix

SIZES = [1, 2, 8, 12, 20, 48, 64, 80, 96]


@pytest.fixture(autouse=True)
def _fixed_seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("n", [*SIZES, 512])
def test_the_matrix_is_orthonormal_with_entries_of_equal_magnitude(n):
    matrix = hadamard_matrix(n, torch.float64)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(n, dtype=torch.float64))
    torch.testing.assert_close(matrix.abs(), torch.full_like(matrix, n**-0.5))


@pytest.mark.parametrize("n", SIZES)
def test_the_transform_is_a_product_with_the_matrix_and_its_inverse_with_the_transpose(n):
    x, matrix = torch.randn(2, 3, n, dtype=torch.float64), hadamard_matrix(n, torch.float64)
    torch.testing.assert_close(hadamard(x), x @ matrix.T)
    torch.testing.assert_close(hadamard_inverse(x), x @ matrix)


@pytest.mark.parametrize("n", [6144, 12288, 16384])
def test_the_model_sizes_round_trip_and_keep_their_norm(n):
    x = torch.randn(2, n, dtype=torch.float64)
    torch.testing.assert_close(hadamard_inverse(hadamard(x)), x)
    torch.testing.assert_close(hadamard(x).norm(dim=-1), x.norm(dim=-1))


def test_rotating_both_sides_keeps_a_linear_map():
    weight, x = torch.randn(5, 48, dtype=torch.float64), torch.randn(48, dtype=torch.float64)
    torch.testing.assert_close(hadamard(weight) @ hadamard(x), weight @ x)


def test_one_outlier_is_spread_evenly():
    spike = torch.zeros(6144)
    spike[4000] = 100.0
    torch.testing.assert_close(hadamard(spike).abs(), torch.full((6144,), 100 * 6144**-0.5))


@pytest.mark.parametrize("n", [3, 6, 10, 28, 36, 60, 6143])
def test_other_sizes_are_rejected(n):
    with pytest.raises(ValueError, match=f"size {n}:"):
        hadamard(torch.zeros(n))


def test_half_inputs_are_summed_in_float32():
    x = torch.randn(4, 6144).bfloat16()
    torch.testing.assert_close(hadamard(x), hadamard(x.float()).bfloat16(), atol=0, rtol=0)


@pytest.mark.parametrize("function", [hadamard, hadamard_inverse])
def test_gradients_are_right(function):
    assert torch.autograd.gradcheck(
        function, torch.randn(2, 24, dtype=torch.float64, requires_grad=True)
    )
