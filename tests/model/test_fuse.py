"""Fused linear layers: one product, the same network."""

import copy

import torch
from torch import nn

from paddock.model import AttentionMetadata
from paddock.model.fuse import contiguous_stack, fuse_weights, fused_linears
from paddock.quant.quantized_layers import QuantizedLinear
from paddock.quant.w4a8 import QuantizationArgs, quantize
from tests.model.networks import build_network, latent_config, tokens


def linears_of(*outputs, inputs=16, **how):
    return [nn.Linear(inputs, out, bias=False, **how) for out in outputs]


def weights(linears):
    return [linear.weight for linear in linears]


def allocated_bytes(parameters):
    """Bytes of storage, each storage counted once."""
    pieces = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in parameters}
    return sum(pieces.values())


@torch.no_grad()
def test_one_fused_product_equals_three():
    linears, x = linears_of(6, 3, 9), torch.randn(5, 16)
    separate = fused_linears(x, linears)
    held = allocated_bytes(weights(linears))
    fuse_weights(linears)
    whole = contiguous_stack(weights(linears))
    assert whole.shape == (18, 16) and allocated_bytes(weights(linears)) == held
    found = fused_linears(x, linears)
    assert found[0].untyped_storage().data_ptr() == found[2].untyped_storage().data_ptr()
    for one, other, linear in zip(found, separate, linears, strict=True):
        torch.testing.assert_close(one, other)
        torch.testing.assert_close(linear(x), other)


@torch.no_grad()
def test_a_fused_network_keeps_names_values_and_outputs():
    config = latent_config()
    network, plain = build_network(config), build_network(config)
    network.fuse_weights()
    for block in (*network.layers, network.mtp.block):
        own = block.attention
        assert (
            contiguous_stack([own.q_a.weight, own.kv_a.weight, own.indexer.key.weight]) is not None
        )
        assert contiguous_stack([own.q_b.weight, own.indexer.query.weight]) is not None
        dense = block.mlp if hasattr(block.mlp, "gate") else block.mlp.shared
        assert contiguous_stack([dense.gate.weight, dense.up.weight]) is not None
    assert allocated_bytes(network.parameters()) == allocated_bytes(plain.parameters())
    state = plain.state_dict()
    assert network.state_dict().keys() == state.keys()
    assert all(torch.equal(x, state[name]) for name, x in network.state_dict().items())
    token_T, layout = tokens(20), AttentionMetadata.packed([20])
    assert torch.equal(network(token_T, layout).hidden_TD, plain(token_T, layout).hidden_TD)


def test_loading_keeps_weights_fused_and_copying_or_casting_does_not():
    network = build_network(latent_config())
    network.fuse_weights()
    readers = [network.layers[0].attention.q_a.weight, network.layers[0].attention.kv_a.weight]
    network.load_state_dict(build_network(latent_config(), seed=3).state_dict())
    assert contiguous_stack(readers) is not None
    clone = copy.deepcopy(network).layers[0].attention
    assert contiguous_stack([clone.q_a.weight, clone.kv_a.weight]) is None
    network.cast(torch.bfloat16)
    assert contiguous_stack(readers) is None
    network.fuse_weights()
    assert contiguous_stack(readers) is not None


def test_weights_that_cannot_be_fused_are_left_alone():
    held = torch.randn(12, 16)
    shared = linears_of(6, 6)
    shared[0].weight.data = held[:6]  # a view of another tensor
    for linears in (
        linears_of(6),
        [*linears_of(6), nn.Linear(16, 3)],
        [*linears_of(6), *linears_of(6, inputs=8)],
        [*linears_of(6), *linears_of(6, dtype=torch.bfloat16)],
        [*linears_of(6), nn.Identity()],
        shared,
        linears_of(3, 3, inputs=5),  # weights would be misaligned
    ):
        before = [x.data_ptr() for linear in linears for x in linear.parameters()]
        fuse_weights(linears)
        assert before == [x.data_ptr() for linear in linears for x in linear.parameters()]


@torch.no_grad()
def test_quantized_linears_are_fused_bitwise_and_others_stay_separate():
    integers = [
        QuantizedLinear(quantize(linear.weight, QuantizationArgs(bits=8)))
        for linear in linears_of(32, 64, inputs=64)
    ]
    linears, x = [*integers, *linears_of(6, inputs=64)], torch.randn(5, 64)
    separate = fused_linears(x, linears)
    fuse_weights(linears)
    assert contiguous_stack([linear.integer for linear in integers]) is not None
    found = fused_linears(x, linears)
    assert found[0].untyped_storage().data_ptr() == found[1].untyped_storage().data_ptr()
    for one, other, linear in zip(found, separate, linears, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(linear(x), other)


def test_fused_weights_stay_fused_in_training():
    linears = linears_of(6, 3)
    fuse_weights(linears)
    optimizer = torch.optim.SGD(weights(linears), lr=0.1)
    before = linears[1].weight.detach().clone()
    sum(linear(torch.ones(2, 16)).sum() for linear in linears).backward()
    optimizer.step()
    torch.testing.assert_close(linears[1].weight, before - 0.2)
    assert contiguous_stack(weights(linears)) is not None
