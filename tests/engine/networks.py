"""Networks to serve, and checks against one uncached forward pass."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from queue import SimpleQueue

import torch
from torch.nn import functional as F

from paddock.engine import Engine, EngineSettings, Request, RequestOutput
from paddock.model import AttentionMetadata, Transformer
from paddock.model.config import WeightInitSettings
from paddock.records import Completion, SamplingParams
from tests.model.networks import VOCAB, build_network, grouped_config, latent_config, tokens

SHARED = {"heads": 2, "dim": 8, "topk": 8, "layers": ("full", "shared", "full", "shared")}


@cache
def network(name: str) -> Transformer:
    match name:
        case "sparse":
            return build_network(latent_config())
        case "shared":
            return build_network(latent_config(indexer=SHARED))
        case "dense":
            return build_network(latent_config(attention=("mla",) * 4, indexer=None))
        case "grouped":
            return build_network(grouped_config("gqa", "swa"))
        case "recurrent":  # its output norm amplifies rounding, so it is served in float64
            return build_network(grouped_config("gdn", "gqa", "simple_gdn")).cast(torch.float64)
        case "counting":
            return counting()
    raise KeyError(name)


def copy_of(network: Transformer) -> Transformer:
    """A copy for an engine whose weights will be updated."""
    clone = Transformer(network.config)
    clone.load_state_dict(network.state_dict())
    return clone.eval()


def counting() -> Transformer:
    """A network and MTP layer trained to continue counting: nearly every draft is accepted, except
    right after a prompt that does not count."""
    torch.manual_seed(0)
    network = Transformer.from_config(latent_config(init=WeightInitSettings(std=0.06)), 0)
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-2)
    for _ in range(30):
        start = torch.randint(0, VOCAB, (8, 1))
        token_T = ((start + torch.arange(24)) % VOCAB).flatten()
        layout = AttentionMetadata.packed([24] * 8)
        hidden_TD = network(token_T, layout).hidden_TD
        ahead = network.mtp_forward(hidden_TD, token_T, network.make_context(layout), 2)
        loss = torch.zeros(())
        for depth, state_TD in enumerate((hidden_TD, *(state for state, _ in ahead)), start=1):
            logits = network.head(state_TD).view(8, 24, -1)[:, :-depth]
            target = token_T.view(8, 24)[:, depth:]
            loss = loss + F.cross_entropy(logits.flatten(0, 1), target.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return network.eval()


def prompts(count: int, longest: int = 40, seed: int = 0) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    return [tuple(tokens(length, seed * 1000 + i).tolist()) for i, length in enumerate(lengths)]


@torch.no_grad()
def assert_scores(
    network: Transformer, prompt: tuple[int, ...], got: Completion, temperature: float = 1.0
) -> torch.Tensor:
    """The reply's log-probabilities match one forward pass over prompt and reply. Returns the
    logits that its tokens were sampled from."""
    logits_TV = network.logits(prompt + got.token_ids)[len(prompt) - 1 : -1]
    token_T1 = torch.tensor(got.token_ids).unsqueeze(1)
    wanted_T = (logits_TV / temperature).log_softmax(-1).gather(1, token_T1).squeeze(1)
    torch.testing.assert_close(torch.tensor(got.logprobs), wanted_T, atol=1e-5, rtol=0)
    return logits_TV


def assert_greedy(network: Transformer, prompt: tuple[int, ...], got: Completion) -> None:
    """Each token is the argmax in one forward pass over prompt and reply, as in greedy decoding
    without a cache."""
    logits_TV = assert_scores(network, prompt, got)
    assert got.token_ids == tuple(logits_TV.argmax(-1).tolist())


def engine(network: Transformer, tokenizer=None, **settings) -> Engine:
    defaults = {
        "page_size": 4,
        "kv_cache_bytes": 1 << 22,
        "context_length": 128,
        "stop_token_ids": (),
    }
    return Engine(network, tokenizer, EngineSettings(**(defaults | settings)))


def greedy(prompt: tuple[int, ...], count: int = 12, **changes) -> Request:
    return Request(
        token_ids=prompt,
        sampling_params=SamplingParams(temperature=0.0, max_new_tokens=count),
        **changes,
    )


def generate_as_one_batch(serving: Engine, requests: list[Request]) -> list[RequestOutput]:
    """Outputs of requests that are all queued before the first step, so that competition for pages
    and slots does not depend on timing."""
    serving.pause("in_place")
    inboxes: list[SimpleQueue] = [SimpleQueue() for _ in requests]
    for request, inbox in zip(requests, inboxes, strict=True):
        serving.submit(request, inbox.put)
    serving.resume()
    return [inbox.get().output for inbox in inboxes]


@contextmanager
def paused_once_started(serving: Engine, count: int = 1) -> Iterator[None]:
    """Pause the engine once `count` of the requests submitted inside the block have a token, so
    that none finishes before the test acts on it. Resumes afterwards."""
    submit, started = serving.submit, set()

    def watched(request, deliver, *, streamed=False, **more):
        def freeze(delta):  # on the engine's thread, between two steps
            if len(started) < count:
                started.add(id(deliver))
                serving._loop.paused = len(started) == count
            if streamed or isinstance(delta, Exception) or delta.output is not None:
                deliver(delta)

        return submit(request, freeze, streamed=True, **more)

    serving.submit = watched
    try:
        yield
    finally:
        del serving.submit
        serving.resume()
