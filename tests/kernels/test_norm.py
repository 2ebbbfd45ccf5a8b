import torch

from paddock.kernels.norm import layer_norm, rms_norm


def test_rms_norm_divides_by_the_root_mean_square():
    x, weight = torch.randn(4, 8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    expected = weight * x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), expected)


def test_half_precision_is_normed_in_float32():
    # Squares of 300 overflow float16 when summed there.
    x = torch.full((1, 64), 300.0, dtype=torch.float16)
    assert torch.equal(rms_norm(x, torch.ones(64, dtype=torch.float16), 1e-5), torch.ones_like(x))


def test_layer_norm_is_torchs():
    x, weight, bias = torch.randn(4, 8), torch.randn(8), torch.randn(8)
    expected = torch.nn.functional.layer_norm(x, (8,), weight, bias, 1e-6)
    torch.testing.assert_close(layer_norm(x, weight, bias, 1e-6), expected)


def test_gradients():
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    weight, bias = (torch.randn(6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-5), (x, weight))
    assert torch.autograd.gradcheck(lambda x, w, b: layer_norm(x, w, b, 1e-6), (x, weight, bias))
