import pytest
import torch
from torch.optim._muon import _zeropower_via_newtonschulz as torch_zeropower

from paddock.kernels.newton_schulz import JORDAN, XTUNER, newton_schulz

BANDS = {"jordan": (JORDAN, 0.68, 1.21), "tight": (XTUNER, 0.97, 1.15)}


def with_singular_values(values, rows, columns):
    left = torch.linalg.qr(torch.randn(rows, len(values), dtype=torch.float64)).Q
    right = torch.linalg.qr(torch.randn(columns, len(values), dtype=torch.float64)).Q
    return left @ torch.diag(values) @ right.T


@pytest.fixture(autouse=True)
def _fixed_seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (32, 32)])
def test_singular_values_end_in_the_band_and_singular_vectors_are_kept(band, shape):
    coefficients, low, high = BANDS[band]
    values = torch.logspace(-2, 0, min(shape), dtype=torch.float64)
    matrix = with_singular_values(values, *shape)
    result = newton_schulz(matrix, coefficients=coefficients)
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    rotated = left.mT @ result @ right.mT
    diagonal = rotated.diagonal()
    assert low < diagonal.min() and diagonal.max() < high
    torch.testing.assert_close(rotated, torch.diag(diagonal), atol=1e-9, rtol=0)


@pytest.mark.filterwarnings("ignore:TF32")
@pytest.mark.parametrize(("shape", "steps"), [((24, 40), 5), ((40, 24), 3), ((33, 33), 1)])
def test_in_bfloat16_one_matrix_matches_torchs_zeropower(shape, steps):
    matrix = torch.randn(shape)
    # Without oneDNN: a virtual CPU may report AMX bfloat16 that it does not execute.
    with torch.backends.mkldnn.flags(enabled=False):
        theirs = torch_zeropower(matrix, JORDAN[0], steps, 1e-7)
        ours = newton_schulz(matrix, steps=steps, dtype=torch.bfloat16)
    # Equal where gemm and batched gemm sum in the same order, else within a last bit or two.
    torch.testing.assert_close(ours, theirs.float(), atol=4e-3, rtol=0)


@pytest.mark.parametrize("lead", [(5,), (2, 3)])
def test_a_stack_matches_its_matrices_alone(lead):
    stack = torch.randn(*lead, 12, 7, dtype=torch.float64)
    alone = [newton_schulz(matrix) for matrix in stack.reshape(-1, 12, 7)]
    torch.testing.assert_close(newton_schulz(stack), torch.stack(alone).view(stack.shape))


def test_a_tall_matrix_is_the_transpose_of_a_wide_one():
    matrix = torch.randn(9, 20, dtype=torch.float64)
    torch.testing.assert_close(newton_schulz(matrix.T), newton_schulz(matrix).T)


def test_the_scale_of_the_input_does_not_matter():
    matrix = torch.randn(6, 8, dtype=torch.float64)
    torch.testing.assert_close(newton_schulz(1e-3 * matrix), newton_schulz(1e3 * matrix))


def test_zeros_stay_zeros():
    assert newton_schulz(torch.zeros(3, 4, 5)).count_nonzero() == 0


def test_further_steps_repeat_the_last_triple():
    matrix = torch.randn(4, 6, dtype=torch.float64)
    longer = (*XTUNER, XTUNER[-1], XTUNER[-1])
    ours = newton_schulz(matrix, coefficients=XTUNER, steps=7)
    torch.testing.assert_close(ours, newton_schulz(matrix, coefficients=longer, steps=7))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_result_has_the_dtype_of_the_input(dtype):
    assert newton_schulz(torch.randn(4, 6).to(dtype), dtype=torch.float32).dtype == dtype


def test_gradients_are_right():
    stack = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(newton_schulz, stack)
