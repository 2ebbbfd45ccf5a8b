"""Engines on packed networks: the same replies, whatever the batch, and new weights reach them."""

from functools import cache

import pytest
import torch

from paddock.checkpoint import CheckpointError, iter_released_tensors, weight_destinations
from paddock.checkpoint.weight_sync import WeightUpdate, weight_digests
from paddock.engine import EngineWeightUpdater
from paddock.kernels import cpu
from paddock.kernels.cpu import library
from paddock.model import Transformer, packed
from paddock.model.config import GQASettings
from paddock.model.packed_layer import PackedDecoderLayer
from tests.engine import networks
from tests.engine.networks import (
    assert_greedy,
    copy_of,
    engine,
    generate_as_one_batch,
    greedy,
    prompts,
)
from tests.model.networks import build_network, grouped_config

KINDS = ["sparse", "shared", "dense", "grouped", "fused"]
PROMPTS = prompts(8, longest=60, seed=5)


@pytest.fixture(autouse=True)
def kernels():
    if library.library_file() is None:
        pytest.skip("no C++ compiler: references are used")
    assert cpu.load(wait=True)


@cache
def network(kind: str) -> Transformer:
    """As in other tests, and one whose q, k and v fill whole panels and have biases."""
    if kind != "fused":
        return networks.network(kind)
    gqa = GQASettings(heads=4, kv_heads=2, dim=32, window=6, bias="qkv")
    return build_network(grouped_config("gqa", "swa", gqa=gqa)).eval()


def packed_copy(kind: str, *, int8: bool = False) -> Transformer:
    found = copy_of(network(kind))
    packed.pack_weights(found, int8=int8)
    return found


def rounded_copy(kind: str) -> Transformer:
    """A plain network with the weights that one of 8 bits stands for."""
    found = copy_of(network(kind))
    found.load_state_dict(packed_copy(kind, int8=True).state_dict())
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_packed_networks_give_the_replies_of_plain_ones(kind):
    with engine(packed_copy(kind), max_prefill_tokens=16) as serving:
        for prompt, output in zip(
            PROMPTS,
            generate_as_one_batch(serving, [greedy(prompt) for prompt in PROMPTS]),
            strict=True,
        ):
            assert_greedy(network(kind), prompt, output.completion)
        assert serving.audit() == []


@pytest.mark.parametrize("kind", KINDS)
def test_networks_of_8_bits_give_the_replies_of_their_rounded_weights(kind):
    with engine(packed_copy(kind, int8=True), max_prefill_tokens=16) as serving:
        outputs = generate_as_one_batch(serving, [greedy(prompt) for prompt in PROMPTS])
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert_greedy(rounded_copy(kind), prompt, output.completion)


def test_a_weight_update_reaches_a_network_of_8_bits():
    new = other_weights("sparse")
    tensors = dict(iter_released_tensors(new))
    with engine(packed_copy("sparse", int8=True)) as serving:
        EngineWeightUpdater(serving).weight_publisher("abort")([WeightUpdate(3, tensors)])
        found = EngineWeightUpdater(serving).checksums()
    packed.pack_weights(new, int8=True)
    assert found == weight_digests(new)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("kind", ["fused", "dense", "sparse"])
def test_a_layer_in_one_call_is_bitwise_its_modules(kind, int8, monkeypatch):
    whole = packed_copy(kind, int8=int8)
    assert all(type(layer) is PackedDecoderLayer for layer in whole.layers)
    monkeypatch.setattr(packed, "fuse_layers", list)
    replies = []
    for each in (whole, packed_copy(kind, int8=int8)):
        with engine(each, prefix_caching=False) as serving:
            replies.append(generate_as_one_batch(serving, [greedy(p) for p in PROMPTS]))
    one, other = ([reply.completion for reply in each] for each in replies)
    assert [each.token_ids for each in one] == [each.token_ids for each in other]
    for a, b in zip(one, other, strict=True):
        # Of latent attention, a step with many prompt tokens takes another form.
        assert a.logprobs == pytest.approx(b.logprobs, abs=0 if kind == "fused" else 1e-5)


def test_log_probabilities_are_bitwise_independent_of_the_batch():
    """Latent attention chooses between its two forms by the whole step, so it is not among them."""
    with engine(packed_copy("fused"), prefix_caching=False) as serving:
        alone = [serving.generate_output(greedy(prompt)).completion for prompt in PROMPTS]
        batch = generate_as_one_batch(serving, [greedy(prompt) for prompt in PROMPTS])
    assert [each.logprobs for each in alone] == [each.completion.logprobs for each in batch]


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_dict_is_that_of_the_plain_network(kind):
    plain, found = network(kind).state_dict(), packed_copy(kind)
    assert plain.keys() == found.state_dict().keys()
    assert all(torch.equal(plain[name], tensor) for name, tensor in found.state_dict().items())
    other = {name: tensor * 2 for name, tensor in plain.items()}
    found.load_state_dict(other)
    assert all(torch.equal(other[name], tensor) for name, tensor in found.state_dict().items())


def other_weights(kind: str) -> Transformer:
    other = copy_of(network(kind))
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    return other


@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_update_reaches_a_packed_network(kind):
    new = other_weights(kind)
    tensors = dict(iter_released_tensors(new))
    with engine(packed_copy(kind)) as serving:
        updater = EngineWeightUpdater(serving)
        assert updater.checksums() == weight_digests(network(kind))
        updater.weight_publisher("abort")([WeightUpdate(3, tensors)])
        assert updater.checksums() == weight_digests(new)
        updater.verify([WeightUpdate(3, tensors)])
        assert serving.version == 3
        for prompt in PROMPTS[:3]:
            assert_greedy(new, prompt, serving.generate_output(greedy(prompt)).completion)
        name = next(name for name in tensors if tensors[name].ndim == 2)
        expected = tensors[name].flatten()[:5].double().tolist()
        assert updater.get_weights_by_name(name, 5) == expected


def test_part_of_the_weights_can_be_replaced():
    """Only what changed is packed again; the rest keeps its storage."""
    new = other_weights("sparse")
    changed = {n: t for n, t in iter_released_tensors(new) if ".experts." in n or "kv_b" in n}
    with engine(packed_copy("sparse")) as serving:
        updater = EngineWeightUpdater(serving)
        before = updater.checksums()
        panels = serving.run_between_steps(_panel_addresses).result()
        serving.update_weights(lambda n: _write(n, changed), 2, "abort")
        assert serving.run_between_steps(_panel_addresses).result() == panels
        after = updater.checksums()
    assert {name for name in after if after[name] != before[name]} == changed.keys()


def _write(net: Transformer, tensors: dict[str, torch.Tensor]) -> None:
    places = weight_destinations(net)
    for name, tensor in tensors.items():
        places[name].copy_(tensor)


def _panel_addresses(net: Transformer) -> list[int]:
    return [
        weight.panels.data_ptr()
        for _, tensor in packed.packed_tensors(net)
        for weights in tensor.parts
        for weight in weights
    ]


def test_a_wrong_shape_is_rejected_before_anything_is_written():
    with engine(packed_copy("sparse")) as serving:
        updater = EngineWeightUpdater(serving)
        before = updater.checksums()
        tensors = dict(iter_released_tensors(network("sparse")))
        name = next(name for name in tensors if "o_proj" in name)
        with pytest.raises(CheckpointError, match="shape"):
            updater.weight_publisher("abort")([WeightUpdate(4, tensors | {name: torch.ones(3, 3)})])
        assert updater.checksums() == before
