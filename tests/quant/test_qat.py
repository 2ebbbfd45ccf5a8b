import torch

from paddock.checkpoint import load_pretrained, save_pretrained
from paddock.kernels.w4a8_gemm import unpack_halves
from paddock.quant import RECIPES, quantize_folder
from paddock.quant.qat import fake_quantize, int4, int4_group32
from paddock.quant.w4a8 import QuantizationArgs, quantize
from paddock.train.master_weights import MasterWeights
from tests.quant.tiny import network


def test_only_experts_outside_mtp_are_fake_quantized():
    for name, parameter in network().named_parameters():
        rounded = int4(name, parameter) is not parameter
        assert rounded == (".mlp.experts." in name and name.startswith("layers.")), name


def test_the_gradient_is_straight_through():
    weight = torch.randn(5, 32, requires_grad=True)
    above = torch.randn(5, 32)
    found = fake_quantize(weight, QuantizationArgs(bits=4, group_size=32))
    found.backward(above)
    assert torch.equal(weight.grad, above)
    assert torch.equal(
        found.detach(), quantize(weight, QuantizationArgs(group_size=32)).dequantized_XFD
    )
    assert torch.equal(int4_group32("layers.0.mlp.experts.down", weight), found)


def test_exported_integers_equal_the_trained_ones(tmp_path):
    """Train with fake quantization, save, quantize and load; compare with the weights that the last
    step computed with."""
    trained = network()
    weights = MasterWeights(trained, fake_quant=int4)
    optimizer = torch.optim.SGD(list(weights.master.values()), lr=0.05)
    for step in range(3):
        trained.logits(torch.arange(20) + step).logsumexp(-1).sum().backward()
        weights.accumulate_gradients()
        optimizer.step()
        weights.copy_to_model()
        optimizer.zero_grad()
    save_pretrained(weights.master_model(), tmp_path / "trained")
    quantize_folder(tmp_path / "trained", tmp_path / "exported", RECIPES["qat"])
    exported = load_pretrained(tmp_path / "exported")
    before = network()
    for layer, plain, initial in zip(exported.layers, trained.layers, before.layers, strict=True):
        experts = getattr(layer.mlp, "experts", None)
        if experts is None:
            continue
        for name in ("gate_up", "down"):
            integer = unpack_halves(getattr(experts, name))
            served = integer.float() * getattr(experts, f"{name}_scale")
            assert torch.equal(served, getattr(plain.mlp.experts, name))
            untrained = quantize(getattr(initial.mlp.experts, name), QuantizationArgs())
            assert not torch.equal(integer, untrained.integer_XFD)  # it was trained
