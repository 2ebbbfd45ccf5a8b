"""CUDA graph replay gives the replies of eager steps on a GPU."""

import pytest
import torch

from paddock.engine import Engine, EngineSettings, Request
from paddock.model import Transformer, preset
from paddock.records import SamplingParams
from tests.engine.networks import assert_greedy, copy_of, engine, greedy, network, prompts

pytestmark = pytest.mark.gpu

PROMPTS = prompts(9)
COUNT = 16


@pytest.mark.parametrize("kind", ["sparse", "shared", "dense", "grouped", "counting"])
def test_float32_replies_match_the_cpu(kind):
    """References only: no kernel supports float32, and nothing is captured."""
    there = copy_of(network(kind)).cuda()
    with engine(there, cuda_graphs=False) as serving:
        for prompt in PROMPTS[:3]:
            reply = serving.generate_output(greedy(prompt, COUNT)).completion
            assert_greedy(network(kind), prompt, reply)


def small(layers=3):
    config = preset("small")
    return Transformer.from_config(
        config.model_copy(
            update={
                "attention": config.attention[:layers],
                "mlp": config.mlp[:layers],
                "indexer": config.indexer.model_copy(
                    update={"topk": 64, "layers": config.indexer.layers[:layers]}
                ),
                "context": 2048,
            }
        ),
        seed=0,
    )


@pytest.fixture(scope="module")
def halves():
    return small().cuda().cast(torch.bfloat16)


def replies(network, prompts_, **settings):
    chosen = EngineSettings(kv_cache_bytes=1 << 28, stop_token_ids=(), page_size=64, **settings)
    sampling = SamplingParams(temperature=0.0, max_new_tokens=24)
    with Engine(network, None, chosen) as serving:
        requests = [Request(token_ids=prompt, sampling_params=sampling) for prompt in prompts_]
        found = [answer.completion for answer in serving.generate_outputs(requests)]
        graphs = serving._loop.runner.graphs
        assert serving.audit() == []
    return found, graphs


@pytest.mark.parametrize("count", [1, 2, 4])
def test_replayed_steps_match_eager_steps(halves, count):
    """Batches without padding: the same kernels on the same inputs."""
    prompts_ = [tuple(torch.randint(0, 32_000, (50 + 30 * i,)).tolist()) for i in range(count)]
    plain, none = replies(halves, prompts_, cuda_graphs=False)
    found, graphs = replies(halves, prompts_)
    assert none is None and graphs.count > 0
    same = sum(a.token_ids == b.token_ids for a, b in zip(plain, found, strict=True))
    assert same == count
    for a, b in zip(plain, found, strict=True):
        torch.testing.assert_close(
            torch.tensor(a.logprobs), torch.tensor(b.logprobs), atol=2e-2, rtol=0
        )


@pytest.mark.parametrize("steps", [1, 3])
def test_replayed_steps_match_with_drafts_and_padding(halves, steps):
    prompts_ = [tuple(torch.randint(0, 32_000, (40 + 17 * i,)).tolist()) for i in range(5)]
    plain, _ = replies(halves, prompts_, cuda_graphs=False, num_speculative_tokens=steps)
    found, graphs = replies(halves, prompts_, num_speculative_tokens=steps)
    names = {name for inputs in graphs._inputs.values() for name in inputs.captured}
    assert {"decode", "mtp_extend"} <= names
    for a, b in zip(plain, found, strict=True):  # rounding may make them diverge, but not at once
        assert a.token_ids[:2] == b.token_ids[:2]
        torch.testing.assert_close(
            torch.tensor(a.logprobs[:2]), torch.tensor(b.logprobs[:2]), atol=5e-2, rtol=0
        )


def test_weight_updates_reach_captured_graphs(halves):
    other = small()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.05)
    other = other.cuda().cast(torch.bfloat16)
    prompt, sampling = tuple(range(100)), SamplingParams(temperature=0.0, max_new_tokens=8)
    chosen = EngineSettings(kv_cache_bytes=1 << 28, stop_token_ids=(), page_size=64)
    own = small().cuda().cast(torch.bfloat16)
    with Engine(own, None, chosen) as serving:
        serving.generate(prompt, sampling)
        serving.update_weights(lambda net: net.load_state_dict(other.state_dict()), 1)
        found = serving.generate(prompt, sampling)
    with Engine(other, None, chosen) as serving:
        expected = serving.generate(prompt, sampling)
    assert found.token_ids == expected.token_ids
    assert found.logprobs == expected.logprobs
