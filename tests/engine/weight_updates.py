"""New weights for an engine, and checks of which weights it serves."""

from functools import cache

import pytest

from paddock.checkpoint.tensor_names import is_mtp
from paddock.checkpoint.weight_sync import (
    WeightUpdate,
    iter_released_tensors,
    serialize_update,
    weight_digests,
)
from tests.engine.networks import assert_greedy, copy_of, engine, greedy, network
from tests.engine.networks import prompts as random_prompts
from tests.engine.test_weight_versions import other

PROMPTS = random_prompts(4, seed=8)
PROMPT = tuple(range(20))
HEAD, NORM = "lm_head.weight", "model.norm.weight"


@cache
def digests(which):
    return weight_digests({"old": network("sparse"), "new": other()}[which])


@cache
def tensors():
    return dict(iter_released_tensors(other()))


def buckets(count=4, *, mtp=True):
    """Tensor names of the new weights in `count` buckets."""
    config = other().config
    names = [name for name in tensors() if mtp or not is_mtp(name, config)]
    return [names[i::count] for i in range(count)]


def packed(names, version=7, **changes):
    return serialize_update(
        WeightUpdate(version, {name: tensors()[name] for name in names} | changes)
    )


def assert_serves_old_weights(serving, reload):
    """The old weights, bitwise, and the prefix cache computed with them."""
    assert reload.checksums() == digests("old")
    assert serving.version == 0
    assert_greedy(network("sparse"), PROMPT, serving.generate_output(greedy(PROMPT)).completion)


@cache
def expected_completions():
    """Completions of an engine that started with the new weights."""
    with engine(copy_of(other())) as found:
        return [answer.completion for answer in found.generate_outputs(map(greedy, PROMPTS))]


def assert_serves_new_weights(serving):
    for answer, expected in zip(
        serving.generate_outputs(map(greedy, PROMPTS)), expected_completions(), strict=True
    ):
        done = answer.completion
        assert done.token_ids == expected.token_ids
        assert done.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
        assert [s.version for s in done.versions] == [7]
