import pytest
import torch

from paddock.kernels.grouped_gemm import grouped_gemm


@pytest.mark.parametrize("counts", [[3, 0, 4], [0, 0, 7], [7, 0, 0], [0, 0, 0], [40, 1, 33]])
def test_each_row_is_multiplied_by_its_own_expert(counts):
    x, weight = torch.randn(sum(counts), 5), torch.randn(3, 4, 5)
    expert = torch.repeat_interleave(torch.arange(3), torch.tensor(counts))
    expected = torch.einsum("rd,rfd->rf", x, weight[expert])
    torch.testing.assert_close(grouped_gemm(x, weight, counts), expected)
    torch.testing.assert_close(grouped_gemm(x, weight, torch.tensor(counts)), expected)


@pytest.mark.parametrize(("inputs", "outputs"), [(48, 96), (96, 48), (1024, 256), (33, 17)])
def test_a_row_does_not_depend_on_the_number_of_rows(inputs, outputs):
    x, weight = torch.randn(200, inputs), torch.randn(1, outputs, inputs)
    full = grouped_gemm(x, weight, [200])
    for rows in (1, 2, 3, 5, 31, 32, 33, 64, 65, 199):
        assert torch.equal(grouped_gemm(x[:rows], weight, [rows]), full[:rows]), rows


def test_a_row_does_not_depend_on_which_other_experts_have_rows():
    x, weight = torch.randn(200, 48), torch.randn(4, 96, 48)
    alone = grouped_gemm(x[:7], weight, [7, 0, 0, 0])
    for counts in ([7, 60, 0, 3], [7, 1, 1, 1], [7, 193, 0, 0], [7, 0, 0, 1]):
        assert torch.equal(grouped_gemm(x[: sum(counts)], weight, counts)[:7], alone), counts


def test_counts_must_cover_the_rows():
    with pytest.raises(ValueError, match=r"counts \[1, 1\] do not cover 3 rows"):
        grouped_gemm(torch.randn(3, 2), torch.randn(2, 2, 2), [1, 1])


def test_gradients():
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: grouped_gemm(x, w, [2, 0, 3]), (x, weight))
