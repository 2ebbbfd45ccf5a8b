"""CUDA graph batches: padding to fixed shapes does not change replies.

On a CPU nothing is captured: the function runs again on the same static inputs. So these tests
cover the inputs; capture and replay are tested on a GPU (test_cuda_graphs_gpu).
"""

from itertools import pairwise
from queue import SimpleQueue

import numpy as np
import pytest
import torch

from paddock.engine import Engine, EngineSettings, resolve_kv_cache_config
from paddock.engine.cuda_graphs import (
    CudaGraphKey,
    CudaGraphRunner,
    UniformDecodeBatch,
    copy_padded,
)
from paddock.engine.kv_cache import PagedKVCache
from paddock.engine.settings import cached_layers
from paddock.records import SamplingParams
from tests.engine.networks import (
    VOCAB,
    assert_greedy,
    copy_of,
    engine,
    generate_as_one_batch,
    greedy,
    network,
    prompts,
)

PROMPTS = prompts(12)
COUNT = 12


def graphs_of(serving):
    return serving._loop.runner.graphs


def check(kind, serving):
    answers = generate_as_one_batch(serving, [greedy(prompt, COUNT) for prompt in PROMPTS])
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert_greedy(network(kind), prompt, answer.completion)


@pytest.mark.parametrize("kind", ["sparse", "shared", "dense", "grouped"])
def test_replies_are_the_same(kind):
    with engine(network(kind), cuda_graphs=True) as serving:
        check(kind, serving)
        assert_greedy(
            network(kind), PROMPTS[0], serving.generate_output(greedy(PROMPTS[0], COUNT)).completion
        )
        assert graphs_of(serving).count >= 2
        assert serving.audit() == []


@pytest.mark.parametrize(("kind", "steps"), [("counting", 1), ("counting", 4), ("sparse", 3)])
def test_replies_are_the_same_with_drafts(kind, steps):
    with engine(network(kind), cuda_graphs=True, num_speculative_tokens=steps) as serving:
        check(kind, serving)
        check(kind, serving)
        names = {name for x in graphs_of(serving)._inputs.values() for name in x.captured}
        assert names == (
            {"decode", "mtp_extend", "draft"} if steps > 1 else {"decode", "mtp_extend"}
        )
        if kind == "counting":
            assert serving.stats().accept_length > 1.15
        assert serving.audit() == []


def test_replies_are_the_same_with_a_full_kv_cache():
    with engine(
        network("counting"),
        cuda_graphs=True,
        num_speculative_tokens=2,
        num_pages=40,
        context_length=64,
    ) as serving:
        check("counting", serving)
        assert serving.stats().preemptions > 0
        assert serving.audit() == []


def test_sampled_replies_are_the_same_without_graphs():
    sampling = SamplingParams(max_new_tokens=COUNT, seed=3, temperature=0.8, top_p=0.9)
    replies = []
    for graphs in (False, True):
        with engine(network("counting"), cuda_graphs=graphs) as serving:
            replies.append([serving.generate(prompt, sampling).token_ids for prompt in PROMPTS[:4]])
    assert replies[0] == replies[1]


def test_in_place_weight_updates_keep_the_graphs():
    own = copy_of(network("counting"))
    with engine(own, cuda_graphs=True) as serving:
        serving.generate_output(greedy(PROMPTS[0], COUNT))
        before = graphs_of(serving).count
        serving.update_weights(lambda net: net.load_state_dict(network("sparse").state_dict()), 1)
        assert_greedy(
            network("sparse"),
            PROMPTS[0],
            serving.generate_output(greedy(PROMPTS[0], COUNT)).completion,
        )
        assert graphs_of(serving).count == before > 0


def test_weights_at_new_addresses_drop_the_graphs():
    def move(net):
        for parameter in net.parameters():
            parameter.data = parameter.data.clone()

    with engine(copy_of(network("counting")), cuda_graphs=True) as serving:
        serving.generate_output(greedy(PROMPTS[0], COUNT))
        old = dict(graphs_of(serving)._inputs)
        serving.update_weights(move, 1)
        assert_greedy(
            network("counting"),
            PROMPTS[0],
            serving.generate_output(greedy(PROMPTS[0], COUNT)).completion,
        )
        assert not set(map(id, old.values())) & set(map(id, graphs_of(serving)._inputs.values()))


def test_only_decode_steps_are_captured():
    """Prefilling the rest of a prompt is a batch too, of any of sixteen sizes."""
    with engine(network("sparse"), cuda_graphs=True, page_size=4) as serving:
        for length in (5, 9, 14):
            for _ in range(2):  # the second time from the prefix cache
                serving.generate_output(greedy(tuple(range(length)), 4))
        assert {size.query_len for size in graphs_of(serving)._inputs} == {1}


class StepClock:
    """A simulated clock: a prefill step takes 30 ms, a decode step 1 ms."""

    def __init__(self):
        self.now, self.reading = 0.0, []

    def __call__(self):
        return self.now

    def around(self, runner):
        read = runner.read_step

        def timed(launched, *rest):
            reads = launched.step.has_prefill
            self.reading.append(reads)
            self.now += 0.030 if reads else 0.001
            return read(launched, *rest)

        runner.read_step = timed


@pytest.mark.parametrize(("gather_s", "reads"), [(0.05, 2), (0.01, 4), (0.0, 7)])
def test_prefills_are_delayed_to_share_a_step(gather_s, reads):
    clock, answers = StepClock(), SimpleQueue()
    later = [tuple((5 * i + j) % VOCAB for j in range(9)) for i in range(6)]
    settings = {
        "page_size": 4,
        "context_length": 128,
        "stop_token_ids": (),
        "max_prefill_delay_s": gather_s,
    }
    chosen = EngineSettings(kv_cache_bytes=1 << 22, cuda_graphs=True, **settings)
    with Engine(network("dense"), None, chosen, clock=clock) as serving:
        clock.around(serving._loop.runner)

        def deliver(delta):
            """On the engine thread: submits another prompt at every fifth token of the first."""
            step = len(clock.reading)
            if step % 5 == 0 and step <= 5 * len(later):
                serving.submit(greedy(later[step // 5 - 1], 2), answers.put)
            if delta.output is not None:
                answers.put(delta)

        serving.submit(greedy(PROMPTS[0], 60), deliver, streamed=True)
        found = [answers.get(timeout=60).output.completion for _ in range(7)]
        assert serving.audit() == []
    lengths = sorted(len(done.token_ids) for done in found)
    assert lengths == [2] * 6 + [60]
    (whole,) = (done for done in found if len(done.token_ids) == 60)
    assert_greedy(network("dense"), PROMPTS[0], whole)
    at = [step for step, read in enumerate(clock.reading) if read]
    assert len(at) == reads
    assert all(b - a > 1000 * min(gather_s, 0.03) for a, b in pairwise(at))


def test_unsupported_engines_have_no_graphs():
    with engine(network("sparse")) as serving:
        assert graphs_of(serving) is None
    with engine(network("sparse"), cuda_graphs=True, capture_routing=True) as serving:
        assert graphs_of(serving) is None
    with engine(network("recurrent"), cuda_graphs=True, prefix_caching=False) as serving:
        assert graphs_of(serving) is None


def graphs(**settings):
    config = network("sparse").config  # topk 8
    chosen = EngineSettings(
        page_size=4, num_pages=64, context_length=100, cuda_graphs=True, **settings
    )
    found = resolve_kv_cache_config(chosen, config, 4)
    like = torch.zeros(1)
    cache = PagedKVCache(
        config, cached_layers(chosen, config), found, chosen.max_running_requests, like=like
    )
    return CudaGraphRunner(network("sparse"), cache, chosen)


@pytest.mark.parametrize(
    ("sequences", "longest", "size"),
    [
        (1, 8, CudaGraphKey(1, 1, 2)),  # no more keys than topk
        (3, 9, CudaGraphKey(4, 1, 4)),
        (4, 17, CudaGraphKey(4, 1, 8)),
        (5, 100, CudaGraphKey(6, 1, 25)),  # never more than the maximum
    ],
)
def test_batches_are_padded_to_few_sizes(sequences, longest, size):
    past_B = np.full(sequences, longest - 1)
    assert (
        graphs(max_running_requests=6).key_for(UniformDecodeBatch(np.arange(sequences), past_B, 1))
        == size
    )


def test_padding_repeats_the_first_row():
    buffer = torch.full((4, 2), 9.0)
    copy_padded(buffer, torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert buffer.tolist() == [[1, 2], [3, 4], [1, 2], [1, 2]]
    padded = UniformDecodeBatch(np.array([5, 3]), np.array([7, 8]), 2).padded_to(4)
    assert padded.slot_B.tolist() == [5, 3, 5, 5]
    assert padded.past_len_B.tolist() == [7, 8, 7, 7]
    assert (padded.tokens, padded.max_len) == (8, 10)
