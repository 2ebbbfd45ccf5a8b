"""Replay: every token of a rollout is one that the engine sampled for it, after the same tokens."""

from collections import Counter
from contextlib import aclosing

from paddock.rollout.client import InProcessClient


def log_samples(monkeypatch, log):
    """Log what the engine samples: session, prompt, completion."""
    generate, stream = InProcessClient.generate, InProcessClient.stream

    def add(request, output):
        log.append((request.session_id, tuple(request.token_ids), output.completion))

    async def logged(self, request):
        output = await generate(self, request)
        add(request, output)
        return output

    async def logged_stream(self, request):
        async with aclosing(stream(self, request)) as deltas:
            async for delta in deltas:
                if delta.output is not None:
                    add(request, delta.output)
                yield delta

    monkeypatch.setattr(InProcessClient, "generate", logged)
    monkeypatch.setattr(InProcessClient, "stream", logged_stream)


def check_replay(branches, log):
    """Check the branches of rollouts against the log; returns how many turns they train."""
    sampled, trained = Counter(log), Counter()
    for branch in branches:
        prompt = ()
        for turn in branch.turns:
            prompt += turn.added_ids
            turn_of_log = (branch.session_id, prompt, turn.completion)
            assert turn_of_log in sampled
            trained[turn_of_log] += turn.trained
            prompt += turn.completion.token_ids
    assert trained <= sampled, "a turn is trained more often than it was sampled"
    return trained.total()
