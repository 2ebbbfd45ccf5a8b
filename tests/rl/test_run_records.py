"""Records a run writes for the dashboard: token statistics, rollout times, engine statistics,
indexer selections and expert load. None of it affects training."""

import asyncio
import base64
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from paddock.cli.rl import run_rl
from paddock.engine import EngineStats
from paddock.engine.stats import CumulativeStats
from paddock.journal import LedgerView, follow
from paddock.launch.engine_stats import MAX_ROWS, EngineStatLogger
from paddock.launch.inspect_network import MIN_TOKENS, inspect_network
from paddock.launch.rollouts import LEDGER_FILE, with_timing_row
from paddock.model import AttentionMetadata, AuxRequest
from paddock.records import Failure, Trajectory, Verdict
from paddock.train.policy import compute_logprobs, pack_samples
from tests.dashboard.ledgers import tokenizer
from tests.rl.learners import learner, policy_samples
from tests.rl.nets import engine_for, network, prompts, rolled
from tests.rl.vault_runs import DETERMINISTIC, SYNCHRONOUS, recipe_in


def batch_of(made, **changes):
    with engine_for(made.trainer.network) as engine:
        return rolled(engine, prompts(4), **changes)


@pytest.mark.parametrize("micro_tokens", [None, 50])
def test_recorded_ratios_and_advantages_are_those_of_the_trainer(tmp_path, micro_tokens):
    made = learner(
        tmp_path, network(), compute={"micro_batch_tokens": micro_tokens}, optim={"lr": 3e-2}
    )
    every = policy_samples(batch_of(made), made.settings)
    made.train(every)  # the first update: trainer and engine have the same weights
    flat = [policy_sample for group in every for policy_sample in group]
    batch = pack_samples(flat)
    expected = compute_logprobs(made.trainer.network, batch) - batch.columns["rollout_logprobs"]
    train_stats = made.train(every)
    start = 0
    for policy_sample in flat:
        sample = policy_sample.sample
        session, _, branch = sample.id.rpartition("/")
        row = train_stats.token_records[session, int(branch)]
        here = expected[start : start + len(sample.token_ids)][np.array(sample.loss_mask)]
        np.testing.assert_allclose(row.log_ratio, here, atol=1e-5)
        paid = [a for a, flag in zip(sample.advantages, sample.loss_mask, strict=True) if flag]
        assert row.advantage == pytest.approx(paid)
        assert row.update == 1
        start += len(sample.token_ids)
    assert np.abs(expected).max() > 0.01
    dropped = [not kept for row in train_stats.token_records.values() for kept in row.kept]
    assert np.mean(dropped) == pytest.approx(train_stats.mean("masked"))


def test_tokens_masked_by_the_loss_are_marked(tmp_path):
    made = learner(
        tmp_path, network(), loss={"kind": "double_sided", "clip_low": 1e-9, "clip_high": 1e-9}
    )
    every = policy_samples(batch_of(made), made.settings)
    made.train(every)
    train_stats = made.train(every)
    kept = [kept for row in train_stats.token_records.values() for kept in row.kept]
    assert not all(kept)
    assert 1 - np.mean(kept) == pytest.approx(train_stats.mean("masked"))


@pytest.fixture(scope="module")
def run(start, tmp_path_factory):
    folder = tmp_path_factory.mktemp("written")
    run_rl(recipe_in(folder, start), folder / "run", [*DETERMINISTIC, *SYNCHRONOUS, "steps=2"])
    return folder / "run"


def rows(run, name):
    return [row for row, _ in follow(run / f"{name}.jsonl")]


def test_every_rollout_has_a_timing_row_and_trained_ones_have_token_records(run):
    written = {(row["number"], row["member"]): row for row in rows(run, "rollouts")}
    with LedgerView(run / LEDGER_FILE) as ledger:
        entries = ledger.list_groups(100)
        ended = {
            (e.ordinal, a.member): a for e in entries for a in ledger.rollout_summaries([e.ordinal])
        }
        assert len(written) == len(ended) > 8
        for entry in entries:
            for member in range(entry.size):
                row, rollout = written[entry.number, member], ended[entry.ordinal, member]
                assert row["began"] <= row["time"]
                assert (row.get("reward"), row["tokens"]) == (rollout.reward, rollout.tokens)
                (branch, *_) = ledger.trajectories(entry.ordinal, member)
                record = ledger.token_record(branch.session_id, branch.branch)
                assert (record is not None) == (entry.status == "trained")
                if record is not None:
                    assert record.update == entry.trained
                    assert len(record.kept) == sum(branch.loss_mask)


def test_engine_and_network_rows_are_written(run):
    *_, last = rows(run, "engine")
    assert last["requests"] > 0 and last["generated_tokens"] > 0
    assert 0 < last["prefix_cache_hit_tokens"] <= last["prefix_cache_query_tokens"]
    pages = [last[f"pages_{name}"] for name in ("evictable", "cached", "used", "total")]
    assert pages == sorted(pages)
    (look,) = rows(run, "network")
    assert look["step"] == 2
    assert len(look["pieces"]) > 8


def test_a_failed_or_cancelled_rollout_has_a_row_too():
    written = []
    spec = SimpleNamespace(task="t", number=3, member=1, session_id="t-3-1")

    def failing(outcome):
        async def rollout(_):
            if outcome is None:
                await asyncio.sleep(60)
            return (
                Trajectory(task_id="t", group_id="g", session_id="s", turns=(), outcome=outcome),
            )

        return with_timing_row(
            rollout, lambda name, **row: written.append((name, row)), lambda: 5.0
        )

    async def all_three():
        await failing(Verdict(reward=0.5))(spec)
        await failing(Failure(kind="world", where="start", what="gone"))(spec)
        task = asyncio.ensure_future(failing(None)(spec))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(all_three())
    same = {"began": 5.0, "task": "t", "number": 3, "member": 1, "session": "t-3-1"}
    assert written == [
        ("rollouts", {**same, "tokens": 0, "reward": 0.5}),
        ("rollouts", {**same, "tokens": 0, "failed": "world at start"}),
        ("rollouts", {**same, "failed": "cancelled"}),
    ]


def stats(**changes):
    names = set(EngineStats.__dataclass_fields__) - {"counters"}
    return EngineStats(
        counters=CumulativeStats(requests=2, busy_s=1.5), **(dict.fromkeys(names, 1) | changes)
    )


def test_stats_of_several_engines_are_summed():
    written = []
    gauge = EngineStatLogger(lambda name, **row: written.append((name, row)), lambda: 0.0)
    gauge.log_stats([stats(version=4, running=3), stats(version=3, running=5)])
    ((name, row),) = written
    assert name == "engine"
    assert (row["running"], row["requests"], row["busy_s"], row["version"]) == (8, 4, 3.0, 3)


def test_a_week_of_engine_stats_is_a_small_file():
    now, written = [0.0], []
    gauge = EngineStatLogger(lambda *_, **__: written.append(now[0]), lambda: now[0])
    for second in (*range(3600), *range(3600, 7 * 86400, 15)):
        now[0] = float(second)
        gauge.log_stats([stats()])
    assert len([moment for moment in written if moment < 600]) == 600
    assert len(written) < 8 * MAX_ROWS


def test_inspect_network_records_the_selections_of_the_layers():
    net, words = network(), tokenizer()
    net = network(vocab=words.vocab_size + 5)
    ids = words.encode("Say the word twice. It wants a look. Done. seen it " * 4, specials=False)
    row = inspect_network(net, ids, words)
    token_T = torch.tensor(ids[:MIN_TOKENS])
    notes = net(
        token_T, AttentionMetadata.packed([len(token_T)]), aux=AuxRequest(routing_and_topk=True)
    ).aux
    assert "".join(row["pieces"]) == words.decode(token_T.tolist())
    assert [look["layer"] for look in row["indexer"]] == [0, 1]
    for look in row["indexer"]:
        selection = notes[look["layer"]].selection
        bits = np.unpackbits(np.frombuffer(base64.b64decode(look["picks"]), np.uint8))
        shape = (len(look["queries"]), len(token_T))
        kept_QT = bits[: shape[0] * shape[1]].reshape(shape)
        of_query = dict(zip(selection.query_Q.tolist(), selection.index_QK.tolist(), strict=True))
        assert look["topk"] == 8 and len(look["queries"]) > 20
        for query, kept_T in zip(look["queries"], kept_QT, strict=True):
            assert np.flatnonzero(kept_T).tolist() == sorted(k for k in of_query[query] if k >= 0)
    (experts,) = row["experts"]
    assert experts["layer"] == 1
    assert experts["load"] == notes[1].expert_load_E.tolist()
    assert len(row["acceptance"]) == 3
