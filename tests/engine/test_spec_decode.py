"""Drafts come from an MTP layer that has processed every token at its position."""

import pytest
import torch

from paddock.engine.spec_decode import Drafter
from paddock.model import AttentionMetadata
from tests.engine.networks import engine, greedy, network, prompts
from tests.model.networks import VOCAB


@pytest.fixture
def first_drafts(monkeypatch):
    """Every context that was drafted for, with its first draft."""
    seen = {}
    guess = Drafter.propose

    def record(self, state_ND, sequences):
        guess(self, state_ND, sequences)
        for sequence in sequences:
            seen[tuple(sequence.tokens)] = sequence.drafts[0]

    monkeypatch.setattr(Drafter, "propose", record)
    return seen


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("counting", {}),
        ("sparse", {"max_prefill_tokens": 5}),
        ("dense", {}),
        ("sparse", {"num_pages": 40, "context_length": 64}),
    ],
)
def test_a_first_draft_matches_the_mtp_forward_pass(kind, settings, first_drafts):
    """No gap or shift after accepted, rejected, cached, chunked or preempted tokens."""
    net, prompts_ = network(kind), prompts(6, seed=6)
    with engine(net, num_speculative_tokens=3, **settings) as serving:
        for _ in range(2):  # the second time from the prefix cache
            serving.generate_outputs([greedy(prompt, 10) for prompt in prompts_])
    assert len(first_drafts) > 15
    wrong = 0
    for text, draft in first_drafts.items():
        token_T, layout = torch.tensor(text), AttentionMetadata.packed([len(text)])
        with torch.no_grad():
            hidden_TD = net(token_T, layout).hidden_TD
            ahead = net.mtp_forward(hidden_TD, token_T, net.make_context(layout), 1)
            (state_TD, _), *_ = ahead
            wrong += draft != int(net.head(state_TD[-2]).argmax())
    # A row at the end of a cached page was made with the token that followed there, which may not
    # be the one that follows here: such a draft may differ, and costs nothing but a rejection.
    assert wrong <= 0.02 * len(first_drafts)


def test_predictable_text_has_a_high_acceptance_rate():
    """Counting is fully predictable: nearly every draft is accepted."""
    counts = [tuple((start + i) % VOCAB for i in range(30)) for start in range(0, 40, 5)]
    with engine(network("counting"), num_speculative_tokens=2) as serving:
        serving.generate_outputs([greedy(count, 20) for count in counts])
        counters = serving.stats().counters
    assert counters.accepted_draft_tokens / counters.draft_tokens > 0.8
