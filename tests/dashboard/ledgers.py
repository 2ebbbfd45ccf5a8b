"""Ledgers for tests: small ones with every group status, and large ones written in bulk."""

import json
import sqlite3
from pathlib import Path

from paddock.journal import TASKS_FILE, GroupRecord, Journal, Ledger, TokenTrainRecord
from paddock.journal.rollout_codec import pack_rollout
from paddock.records import Completion, Failure, Outcome, Segment, Trajectory, Turn, Verdict
from paddock.text import Tokenizer
from paddock.text.tokenizer import train_tokenizer

HOSTILE = "<img src=x onerror=alert(1)>"
PROMPT = f"[gMASK]<sop><|user|>Say {HOSTILE} twice.<|assistant|><think>"
CALL = "<tool_call>look<arg_key>key</arg_key><arg_value>{}</arg_value></tool_call>"
FIRST = f"It wants a look.</think>{CALL}<|observation|>"
BETWEEN = "<tool_response>seen <b>it</b></tool_response><|assistant|><think>"
LAST = "Done.</think>The word is {}.<|user|>"

_COUNTS = {"in_flight": 1, "finished": 0, "trained": 1, "filtered": 1, "failed": {"start": 1}}
_WORDS = {"state": "running", "disabled_reason": "", "ratio": 1.0, "running": 3, "waiting": 2}
TASK_STATES = {
    "time": 1000.0,
    "tasks": {
        "words": _WORDS | _COUNTS,
        HOSTILE: _WORDS | {"state": "disabled", "disabled_reason": f"all {HOSTILE}"},
        "gone": _WORDS | _COUNTS | {"state": "removed", "ratio": 0.0},
    },
    "stragglers": [{"session_id": "words-3-1", "task": "words", "seconds": 95.0, "median_s": 4.0}],
}


def tokenizer() -> Tokenizer:
    return train_tokenizer(["Say the word twice. It wants a look. Done. seen it"], vocab=420)


def trajectory(words: Tokenizer, number: int, member: int, outcome: Outcome, version: int = 0):
    """Two turns: reasoning and a call, the tool result, reasoning and an answer."""

    def ids(text: str) -> tuple[int, ...]:
        return tuple(words.encode(text, specials=True))

    def sampled_turn(text: str) -> Completion:
        tokens = ids(text)
        chances = tuple(-0.125 * (i % 9) for i in range(len(tokens)))
        segments = (Segment(version, len(tokens)),)
        return Completion(token_ids=tokens, logprobs=chances, versions=segments, finish="stop")

    turns = (
        Turn(added_ids=ids(PROMPT), completion=sampled_turn(FIRST.format(HOSTILE))),
        Turn(added_ids=ids(BETWEEN), completion=sampled_turn(LAST.format(f"{HOSTILE}{member}"))),
    )
    return Trajectory(
        task_id=f"words/{number}",
        group_id=f"words-{number}",
        session_id=f"words-{number}-{member}",
        turns=turns,
        outcome=outcome,
    )


def write_rl_run(folder: Path) -> Path:
    """Three groups of four: one trained, one zero-variance, one with environment failures; and the
    other files of a run."""
    folder.mkdir(parents=True)
    words = tokenizer()
    words.save(folder / "tokenizer")
    (folder / "recipe.toml").write_text(
        'stage = "agentic"\nsteps = 2\n[init]\ncheckpoint = "gone"\n'
    )
    with Ledger(folder / "ledger.sqlite") as ledger:
        ledger.issue(
            [GroupRecord(ordinal=i, task="words", number=i, size=4, issued=0) for i in range(4)]
        )
        for number in range(3):
            for member in range(4):
                ledger.record_rollout(number, member, [_rollout_of(words, number, member)])
        ledger.end_group(0, "finished")
        ledger.end_group(1, "filtered", "zero variance")
        ledger.end_group(2, "failed", "4 of 4 attempts: world at start")
        ledger.record_update(0, 1, [0])
        ledger.record_token_stats({(f"words-0-{m}", 0): _token_record(words, m) for m in range(4)})
    ticks = iter(range(1000, 2000))
    with Journal(folder, clock=lambda: float(next(ticks))) as journal:
        journal.log_event("started", step=0, of=2)
        failed, step = {"failures/world": 4}, {"step_time_s": 2.0}
        journal.log_metrics(1, reward=0.5, **failed, **step, tokens=90, expert_imbalance=1.5)
        journal.log_metrics(2, reward=0.75, **step, tokens=95, expert_imbalance=1.25)
        for number in range(3):
            for member in range(4):
                ended = {"failure": "world at start"} if number == 2 else {"reward": member % 2}
                journal.log_row(
                    "rollouts",
                    started=1003.5 + 4 * number + member,
                    task="words",
                    number=number,
                    rollout=member,
                    session=f"words-{number}-{member}",
                    tokens=30,
                    **ended,
                )
        for look in range(3):
            counts = {"generated_tokens": 100 * look, "requests": look}
            counts |= {"prefix_cache_hit_tokens": 40 * look, "evicted_tokens": 0, "preemptions": 0}
            journal.log_row(
                "engine",
                **{"running": look, "waiting": 1, "pages_total": 64, "pages_used": 8 + look},
                **{"pages_cached": 6, "pages_evictable": 2, "page_size": 16, "version": 1},
                **{"prefix_cache_query_tokens": 50 * look},
                **{"draft_tokens": 20, "accepted_draft_tokens": 15, **counts},
            )
        # Queries 2 and 3 of five tokens select keys 0, 2 and 1, 2: the bits 10100 01100.
        journal.log_row(
            "network",
            step=2,
            tokens=["a", "b", "<c>", "d", "e"],
            indexer=[{"layer": 3, "topk": 2, "queries": [2, 3], "selected": "owA="}],
            experts=[{"layer": 3, "expert_load": [4, 0, 2, 2]}],
            acceptance_rate=[0.75, 0.5],
        )
        journal.log_event("finished", step=2)
    (folder / TASKS_FILE).write_text(json.dumps(TASK_STATES))
    return folder


def _rollout_of(words: Tokenizer, number: int, member: int) -> Trajectory:
    outcome: Outcome = Verdict(reward=float(member % 2) if number == 0 else 1.0, note="said twice")
    if number == 2:
        outcome = Failure(kind="world", where="start", what=f"disk full {HOSTILE}")
    return trajectory(words, number, member, outcome)


def _token_record(words: Tokenizer, member: int) -> TokenTrainRecord:
    count = sum(trajectory(words, 0, member, Verdict(reward=0.0)).loss_mask)
    return TokenTrainRecord(
        update=0,
        log_ratio=[0.25 if i % 2 else -0.5 for i in range(count)],
        advantage=[1.0 if member % 2 else -1.0] * count,
        kept=[i != 3 for i in range(count)],
    )


def write_large(folder: Path, rollouts: int, *, group: int = 8, tokens: int = 60) -> Path:
    """A run with that many identical rollouts, written in bulk with the tables and packing of the
    ledger."""
    folder.mkdir(parents=True)
    words = tokenizer()
    words.save(folder / "tokenizer")
    (folder / "recipe.toml").write_text('stage = "reasoning"\n')
    reply = tuple(range(260, 260 + tokens))
    chances = tuple(-0.0625 * (i % 31) for i in range(tokens))
    answer = Completion(
        token_ids=reply, logprobs=chances, versions=(Segment(3, tokens),), finish="stop"
    )
    one = Trajectory(
        task_id="sums/0",
        group_id="sums-0",
        session_id="sums-0-0",
        turns=(Turn(added_ids=(1, 2, 3), completion=answer),),
        outcome=Verdict(reward=0.5),
    )
    packed = pack_rollout([one])
    path, groups = folder / "ledger.sqlite", rollouts // group
    Ledger(path).close()
    base = sqlite3.connect(path, isolation_level=None)
    base.execute("BEGIN")
    base.executemany(
        "INSERT INTO groups VALUES (?, 'sums', ?, ?, 'trained', '', ?, ?, ?)",
        ((i, i, group, i // 16, i, i // 16) for i in range(groups)),
    )
    base.executemany(
        "INSERT INTO attempts VALUES (?, ?, ?, '', '', '', 3, 3, ?, ?)",
        ((i // group, i % group, (i * 7 % 11) / 10, tokens, packed) for i in range(rollouts)),
    )
    updates = range(-(-groups // 16))
    base.executemany("INSERT INTO updates VALUES (?, ?, '')", ((n, n + 1) for n in updates))
    base.execute("COMMIT")
    base.close()
    lines = [json.dumps({"time": 1e9 + n, "step": n + 1, "reward": 0.5}) for n in updates]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    began = 1e9
    with (folder / "rollouts.jsonl").open("w") as file:
        for i in range(rollouts):
            row = {"time": began + i + 5.0, "started": began + i, "task": "sums"}
            row |= {"number": i // group, "rollout": i % group, "tokens": tokens, "reward": 0.5}
            file.write(json.dumps(row) + "\n")
    return folder
