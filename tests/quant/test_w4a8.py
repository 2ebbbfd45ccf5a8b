import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paddock.quant.w4a8 import QuantError, QuantizationArgs, pack_words, quantize, unpack_words


def matrix(rows=6, columns=64, seed=0):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "grid",
    [
        QuantizationArgs(),
        QuantizationArgs(bits=8),
        QuantizationArgs(group_size=16),
        QuantizationArgs(group_size=16, bits=8),
    ],
)
def test_the_rounding_error_is_at_most_half_a_step(grid):
    weight = matrix()
    found = quantize(weight, grid)
    assert int(found.integer_XFD.abs().max()) == grid.qmax
    step = found.scale_XFG.repeat_interleave(64 // found.scale_XFG.shape[1], -1)
    assert ((found.dequantized_XFD - weight).abs() <= step / 2 * (1 + 1e-5)).all()


@pytest.mark.parametrize("nothing", [0.0, 1e-45])  # the smallest float32: a seventh of it is zero
@pytest.mark.parametrize("bits", [4, 8])
def test_zeros_stay_zeros(nothing, bits):
    weight = matrix()
    weight[2] = nothing
    found = quantize(weight, QuantizationArgs(bits=bits, ssz_iterations=20))
    assert not found.dequantized_XFD[2].any()
    assert found.scale_XFG.isfinite().all() and (found.scale_XFG > 0).all()


@pytest.mark.parametrize("group", [None, 16])
def test_refining_never_hurts_any_group_and_helps_most(group):
    weight = matrix(rows=64)
    plain = quantize(weight, QuantizationArgs(bits=4, group_size=group))
    refined = quantize(weight, QuantizationArgs(bits=4, group_size=group, ssz_iterations=20))

    def errors(found):
        columns = 64 // found.scale_XFG.shape[1]
        return (found.dequantized_XFD - weight).square().unflatten(-1, (-1, columns)).sum(-1)

    assert (errors(refined) <= errors(plain) * (1 + 1e-6)).all()
    assert (errors(refined) < errors(plain) * 0.99).float().mean() > 0.5


@pytest.mark.parametrize("group", [None, 16])
def test_refining_with_rows_reduces_their_output_error(group):
    """Rows with a nonzero mean, like activations: small weight errors may add up."""
    rng = torch.Generator().manual_seed(0)
    weight, rows = matrix(rows=48), torch.randn(200, 64, generator=rng)
    rows += 4 * weight[0]
    grid = QuantizationArgs(group_size=group, ssz_iterations=20)
    by_rows = quantize(weight, grid, rows)

    def errors(found):
        """The output error of each group."""
        columns = group or 64
        gap = (found.dequantized_XFD - weight).unflatten(-1, (-1, columns))
        seen = rows.unflatten(-1, (-1, columns))
        return torch.einsum("ngc,fgc->fgn", seen, gap).square().sum(-1)

    plain, by_weights = quantize(weight, QuantizationArgs(group_size=group)), quantize(weight, grid)
    assert (errors(by_rows) <= errors(plain) * (1 + 1e-4)).all()
    assert errors(by_rows).sum() < 0.95 * errors(plain).sum()
    assert errors(by_rows).sum() < 0.95 * errors(by_weights).sum()


def test_scaling_a_row_scales_its_scale_alone():
    """So the linear layers before a smoothed one need not be checked."""
    weight, factor = matrix(), 2.0 ** torch.tensor([[1.0], [3.0], [-2.0], [0.0], [5.0], [-4.0]])
    one, other = (
        quantize(w, QuantizationArgs(ssz_iterations=5)) for w in (weight, weight * factor)
    )
    assert torch.equal(one.integer_XFD, other.integer_XFD)
    assert torch.equal(one.scale_XFG * factor, other.scale_XFG)


def test_columns_must_be_whole_groups():
    with pytest.raises(QuantError, match="64 columns do not divide into groups of 48"):
        quantize(matrix(), QuantizationArgs(group_size=48))


@given(st.integers(1, 5), st.integers(1, 40), st.integers(0, 2**16))
def test_packed_words_match_compressed_tensors(rows, columns, seed):
    from compressed_tensors.compressors.pack_quantized import helpers

    rng = torch.Generator().manual_seed(seed)
    integer = torch.randint(-8, 8, (rows, columns), generator=rng).to(torch.int8)
    words = pack_words(integer)
    assert torch.equal(words, helpers.pack_to_int32(integer, 4))
    assert torch.equal(unpack_words(words, columns), integer)
