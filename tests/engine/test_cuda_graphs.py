"""Steps of fixed shape: the same replies, whatever a batch is filled up with.

On a CPU nothing is recorded: the work is done again from the same inputs. So these tests see what
the inputs say; that a device repeats what it recorded is seen on a GPU (test_cuda_graphs_gpu).
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
    answers_at_once,
    assert_greedy,
    copy_of,
    engine,
    greedy,
    network,
    prompts,
)

PROMPTS = prompts(12)
COUNT = 12


def graphs_of(serving):
    return serving._loop.runner.graphs


def check(kind, serving):
    answers = answers_at_once(serving, [greedy(prompt, COUNT) for prompt in PROMPTS])
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
def test_drafts_too(kind, steps):
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


def test_under_pressure():
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


def test_sampled_replies_are_those_without():
    sampling = SamplingParams(max_new_tokens=COUNT, seed=3, temperature=0.8, top_p=0.9)
    replies = []
    for graphs in (False, True):
        with engine(network("counting"), cuda_graphs=graphs) as serving:
            replies.append([serving.generate(prompt, sampling).token_ids for prompt in PROMPTS[:4]])
    assert replies[0] == replies[1]


def test_new_weights_in_the_old_place_keep_the_recordings():
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


def test_weights_in_another_place_do_not():
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


def test_only_decoding_is_recorded():
    """Reading what is left of a prompt is a batch as well, of any of sixteen sizes."""
    with engine(network("sparse"), cuda_graphs=True, page_size=4) as serving:
        for length in (5, 9, 14):
            for _ in range(2):  # the second time behind what was kept of the first
                serving.generate_output(greedy(tuple(range(length)), 4))
        assert {size.query_len for size in graphs_of(serving)._inputs} == {1}


class Ticking:
    """A clock of steps: one that reads takes 30 ms, one that decodes 1."""

    def __init__(self):
        self.now, self.reading = 0.0, []

    def __call__(self):
        return self.now

    def around(self, runner):
        run = runner.execute_step

        def timed(plan, *rest):
            reads = plan.has_prefill
            self.reading.append(reads)
            self.now += 0.030 if reads else 0.001
            return run(plan, *rest)

        runner.execute_step = timed


@pytest.mark.parametrize(("gather_s", "reads"), [(0.05, 2), (0.01, 4), (0.0, 7)])
def test_prompts_wait_to_be_read_together_while_others_decode(gather_s, reads):
    clock, answers = Ticking(), SimpleQueue()
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
            """Called on the engine's thread: every fifth token of the first another prompt."""
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


def test_where_they_are_not_wanted_there_are_none():
    with engine(network("sparse")) as serving:
        assert graphs_of(serving) is None
    with engine(network("sparse"), cuda_graphs=True, capture_routing=True) as serving:
        assert graphs_of(serving) is None
    with engine(network("recurrent"), cuda_graphs=True, prefix_caching=False) as serving:
        assert graphs_of(serving) is None


def graphs(**settings):
    config = network("sparse").config  # chooses 8 keys
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
        (1, 8, CudaGraphKey(1, 1, 2)),  # as many keys as need no choice
        (3, 9, CudaGraphKey(4, 1, 4)),
        (4, 17, CudaGraphKey(4, 1, 8)),
        (5, 100, CudaGraphKey(6, 1, 25)),  # never more than there can be
    ],
)
def test_sizes_are_few(sequences, longest, size):
    past_B = np.full(sequences, longest - 1)
    assert (
        graphs(max_running_requests=6).key_for(UniformDecodeBatch(np.arange(sequences), past_B, 1))
        == size
    )


def test_what_is_missing_is_the_first_again():
    place = torch.full((4, 2), 9.0)
    copy_padded(place, torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert place.tolist() == [[1, 2], [3, 4], [1, 2], [1, 2]]
    asked = UniformDecodeBatch(np.array([5, 3]), np.array([7, 8]), 2).padded_to(4)
    assert asked.slot_B.tolist() == [5, 3, 5, 5]
    assert asked.past_len_B.tolist() == [7, 8, 7, 7]
    assert (asked.tokens, asked.max_len) == (8, 10)
