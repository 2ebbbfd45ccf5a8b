"""The learner: log-probabilities of trainer and engine agree, and updates do what they should."""

import numpy as np
import pytest
import torch

from paddock.checkpoint.weight_sync import weight_digests
from paddock.engine import EngineWeightUpdater
from paddock.rl.learner import LearnerError
from paddock.train.policy import compute_logprobs, pack_samples
from tests.rl.learners import learner, policy_samples
from tests.rl.nets import engine_for, network, prompts, rolled


def max_logprob_diff(made, groups):
    """The largest difference between log-probabilities of the engine and the trainer."""
    every = [
        policy_sample for group in policy_samples(groups, made.settings) for policy_sample in group
    ]
    batch = pack_samples(every)
    found = compute_logprobs(made.trainer.network, batch)
    return np.abs(found - batch.columns["rollout_logprobs"])[batch.loss_mask_T].max(), int(
        batch.num_targets
    )


@pytest.mark.parametrize(("temperature", "updates"), [(1.0, 50), (0.7, 10)])
def test_logprobs_of_trainer_and_engine_agree_after_many_updates(tmp_path, temperature, updates):
    made = learner(tmp_path, network(), sampling={"temperature": temperature})
    ways = {
        "batched": engine_for(network()),
        "alone": engine_for(network(), max_running_requests=1, prefix_caching=False),
        "chunked": engine_for(network(), max_prefill_tokens=5),
        "drafted": engine_for(network(), num_speculative_tokens=2),
    }
    reloads = {name: EngineWeightUpdater(engine) for name, engine in ways.items()}
    before = weight_digests(made.trainer.network)
    try:
        for update in range(updates):
            if update % 10 == 0:
                batch_prompts = prompts(3, seed=update)
                reloads["batched"].weight_publisher()(made.weights())
                groups = rolled(
                    ways["batched"], batch_prompts, temperature=temperature, seed=update
                )
                worst, tokens = max_logprob_diff(made, groups)
                assert tokens > 20 and worst < 1e-5, update
            made.train(policy_samples(groups, made.settings))
        after = weight_digests(made.trainer.network)
        moved = [name for name in after if after[name] != before[name]]
        assert len(moved) > 20
        assert not any("indexer" in name or "e_score_correction_bias" in name for name in moved)
        for name, engine in ways.items():
            reloads[name].weight_publisher()(made.weights())
            assert engine.version == updates
            assert dict(reloads[name].checksums()) == after
            batch_prompts = prompts(6, seed=99)
            groups = rolled(engine, batch_prompts, temperature=temperature, seed=99)
            assert max_logprob_diff(made, groups)[0] < 1e-5, name
        assert ways["batched"].stats().prefix_cache_hit_tokens > 0
    finally:
        for engine in ways.values():
            engine.close()


def batch_of(made, seed=0, count=4, **changes):
    with engine_for(made.trainer.network) as engine:
        return rolled(engine, prompts(count, seed=seed), seed=seed, **changes)


def test_training_raises_the_reward(tmp_path):
    made = learner(tmp_path, network(), credit={"advantage_norm": "std"}, optim={"lr": 1e-2})
    rewards = []
    with engine_for(network()) as engine:
        reload = EngineWeightUpdater(engine)
        for update in range(16):
            groups = rolled(
                engine, prompts(6, seed=update), size=4, turns=1, tokens=10, seed=update
            )
            rewards.append(np.mean([a[0].outcome.reward for g in groups for a in g]))
            made.train(policy_samples(groups, made.settings))
            reload.weight_publisher()(made.weights())
    assert np.mean(rewards[:2]) < 0.65
    assert np.mean(rewards[-2:]) > 0.9


def test_every_trained_token_is_in_the_gradient_exactly_once(tmp_path, monkeypatch):
    made = learner(tmp_path, network(), compute={"micro_batch_tokens": 64})
    shipped = policy_samples(batch_of(made), made.settings)
    made.train(shipped)
    seen = made.objective.token_stats.seen.tolist()
    assert seen == [sum(each.sample.loss_mask) for group in shipped for each in group]

    import paddock.train.trainer as step

    whole = step.iter_micro_batches

    def loses_one(*args):
        yield from list(whole(*args))[1:]

    def repeats_one(*args):
        found = list(whole(*args))
        yield from [*found, found[0]]

    for broken in (loses_one, repeats_one):
        monkeypatch.setattr(step, "iter_micro_batches", broken)
        with pytest.raises(LearnerError, match="trained tokens were in the gradient of update"):
            made.train(shipped)


def test_micro_batches_change_nothing_but_rounding(tmp_path):
    whole = learner(tmp_path / "a", network())
    parts = learner(tmp_path / "b", network(), compute={"micro_batch_tokens": 50})
    groups = batch_of(whole)
    reports = [
        made.train(policy_samples(groups, made.settings)).step_outputs[0] for made in (whole, parts)
    ]
    assert reports[0].losses["policy_loss"] == pytest.approx(
        reports[1].losses["policy_loss"], abs=1e-6
    )
    assert reports[0].grad_norm == pytest.approx(reports[1].grad_norm, rel=1e-4)


def test_on_policy_nothing_is_masked_and_the_logprob_diff_is_rounding(tmp_path):
    for kind in ("icepop", "double_sided", "ppo", "tis"):
        made = learner(tmp_path / kind, network(), loss={"kind": kind})
        parts = made.train(policy_samples(batch_of(made), made.settings)).step_outputs[0].losses
        assert parts["masked"] == 0.0
        assert parts["logprob_diff"] < 1e-6
        assert 1.0 < parts["entropy"] < 4.0


def test_the_loss_of_a_batch_is_equation_1(tmp_path):
    """One group, against the formula in plain Python."""
    from tests.rl import reference_losses

    made = learner(tmp_path, network(), loss={"kind": "icepop", "aggregate": "sequence"})
    (group,) = policy_samples(batch_of(made, count=1, size=3), made.settings)
    with torch.no_grad():
        for parameter in made.trainer.network.parameters():
            parameter.mul_(1.1)  # as if the engine were another network
    batch = pack_samples(group)
    logp = compute_logprobs(made.trainer.network, batch)
    rows, start = [], 0
    for policy_sample in group:
        here = slice(start, start + len(policy_sample.sample.token_ids))
        start = here.stop
        rows.append(
            [
                (float(p), float(p), r, a)
                for p, r, a, t in zip(
                    logp[here],
                    policy_sample.sample.logprobs,
                    policy_sample.sample.advantages,
                    policy_sample.sample.loss_mask,
                    strict=True,
                )
                if t
            ]
        )
    expected = reference_losses.equation_1(rows, beta=2.0, below=0.2, above=0.28)
    report = made.train([group]).step_outputs[0]
    assert report.losses["masked"] > 0
    assert report.losses["policy_loss"] == pytest.approx(expected, abs=1e-6)


def test_later_updates_of_a_batch_use_the_logprobs_from_before_the_first(tmp_path):
    """With two updates per batch the second is off-policy: its old log-probabilities are those
    from before the first."""
    settings = {"updates_per_batch": 2, "max_staleness": 1}
    made = learner(tmp_path, network(), rollout=settings, optim={"lr": 3e-2}, loss={"kind": "ppo"})
    stats = made.train(policy_samples(batch_of(made, count=4, size=4), made.settings))
    assert stats.updates == 2 and len(stats.step_outputs) == 2
    first, second = (report.losses for report in stats.step_outputs)
    assert first["masked"] == 0.0 and first["logprob_diff"] < 1e-6
    assert second["logprob_diff"] > 1e-3 and second["masked"] > 0


def test_a_restored_learner_continues_bitwise_identically(tmp_path):
    batches = None
    hashes = {}
    for name, cut in (("through", None), ("cut", 2)):
        made = learner(tmp_path / name, network(), reset_optimizer=True)
        if batches is None:
            batches = [batch_of(made, seed=i) for i in range(4)]
        found = []
        for number, groups in enumerate(batches):
            made.train(policy_samples(groups, made.settings))
            if number % 2:
                made.reset_optimizer()
            found.append(weight_digests(made.trainer.network))
            made.save(tmp_path / name / "checkpoints", extra_files={})
            if number == cut:
                made = learner(tmp_path / name / "again", network())
                assert made.restore(tmp_path / name / "checkpoints")
                assert made.updates == number + 1
        hashes[name] = found
    assert hashes["through"] == hashes["cut"]


def test_experts_are_replayed_or_compared(tmp_path):
    from dataclasses import replace

    from paddock.engine import Request
    from paddock.records import SamplingParams

    other = network(seed=5)
    with engine_for(network(), capture_routing=True) as engine:
        answer = engine.generate_output(
            Request(
                token_ids=prompts(1)[0],
                sampling_params=SamplingParams(max_new_tokens=24, seed=1, ignore_eos=True),
                return_routing=True,
            )
        )
    for mode in ("compare", "replay"):
        made = learner(tmp_path / mode, network(), routing_replay=mode)
        groups = policy_samples(batch_of(made, count=1, size=2), made.settings)
        sample = groups[0][0].sample
        ids = (*prompts(1)[0], *answer.completion.token_ids)
        sample = replace(
            sample,
            token_ids=ids,
            logprobs=(0.0,) * len(prompts(1)[0]) + answer.completion.logprobs,
            loss_mask=(False,) * len(prompts(1)[0]) + (True,) * len(answer.completion.token_ids),
            advantages=(1.0,) * len(ids),
        )
        policy_sample = replace(
            groups[0][0], sample=sample, routed_experts_SLK=answer.routing.expert_TLK
        )
        assert made.train([[policy_sample]]).step_outputs[0].losses["routing_mismatch"] == 0.0
        with torch.no_grad():
            for name, parameter in made.trainer.network.named_parameters():
                if "router" in name:
                    parameter.copy_(dict(other.named_parameters())[name])
        found = pack_samples([replace(policy_sample, weight=1.0)])
        free = compute_logprobs(made.trainer.network, found, replay=False)
        forced = compute_logprobs(made.trainer.network, found, replay=True)
        assert np.abs(free - forced).max() > 1e-3
        assert made.train([[policy_sample]]).step_outputs[0].losses["routing_mismatch"] > 0.2


@pytest.mark.parametrize("freeze_indexer", [True, False])
def test_mtp_is_frozen_and_the_indexer_if_configured(tmp_path, freeze_indexer):
    made = learner(tmp_path, network(), freeze_indexer=freeze_indexer)
    frozen = {n for n, p in made.trainer.network.named_parameters() if not p.requires_grad}
    names = [name for name, _ in made.trainer.network.named_parameters()]
    indexer = {name for name in names if ".indexer." in name and freeze_indexer}
    assert frozen == indexer | {name for name in names if name.startswith("mtp.")}
    assert len(frozen) < len(names)
