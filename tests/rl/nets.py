"""Tiny networks, engines that run them, and rollouts the engines sampled."""

import copy

import numpy as np

from paddock.engine import Engine, EngineSettings, Request
from paddock.records import SamplingParams, Trajectory, Turn, Verdict
from tests.model.networks import VOCAB, build_network, latent_config


def network(seed=0, **changes):
    """Two sparse layers with top-8 selection, one of them MoE, and an MTP layer."""
    two = {
        "attention": ("dsa",) * 2,
        "mlp": ("dense", "moe"),
        "indexer": {"heads": 2, "dim": 8, "topk": 8, "layers": ("full",) * 2},
        "init": {"std": 0.1},
    }
    return build_network(latent_config(**(two | changes)), seed)


def engine_for(net, version=0, **settings):
    defaults = {
        "kv_cache_bytes": 1 << 21,
        "stop_token_ids": (0,),
        "max_running_requests": 16,
        "max_prefill_tokens": 24,
    }
    return Engine(
        copy.deepcopy(net), None, EngineSettings(**(defaults | settings)), version=version
    )


def prompts(count, seed=0, shared=6):
    """Prompts with a shared prefix, so that the prefix cache is used."""
    rng = np.random.default_rng(seed)
    begin = tuple(rng.integers(1, VOCAB, shared).tolist())
    return [begin + tuple(rng.integers(1, VOCAB, 1 + i % 5).tolist()) for i in range(count)]


def rolled(engine, prompt_ids, *, size=2, temperature=1.0, tokens=20, turns=2, seed=0):
    """Rollouts of every prompt in groups of `size`, two turns each, batched; the reward is the
    fraction of even tokens."""
    rollouts = [[] for _ in range(len(prompt_ids) * size)]
    context = [list(p) for p in prompt_ids for _ in range(size)]
    added = [tuple(c) for c in context]
    for turn in range(turns):
        answers = engine.generate_outputs(
            Request(
                token_ids=tuple(c),
                sampling_params=SamplingParams(
                    temperature=temperature, max_new_tokens=tokens, seed=seed * 7919 + 31 * turn + i
                ),
            )
            for i, c in enumerate(context)
        )
        for i, answer in enumerate(answers):
            reply = answer.completion
            rollouts[i].append(Turn(added_ids=added[i], completion=reply))
            added[i] = (1, 2 + i % 3)
            context[i] += [*reply.token_ids, *added[i]]
    return [
        [_rollout(rollouts[g * size + m], f"g{seed}-{g}", m) for m in range(size)]
        for g in range(len(prompt_ids))
    ]


def _rollout(turns, group, member):
    ids = [token for turn in turns for token in turn.completion.token_ids]
    reward = sum(token % 2 == 0 for token in ids) / max(1, len(ids))
    return (
        Trajectory(
            task_id="even/0",
            group_id=group,
            session_id=f"{group}-{member}",
            turns=tuple(turns),
            outcome=Verdict(reward=reward),
        ),
    )
