"""What a ledger holds, for a page: rewards, groups, attempts side by side, one attempt by token."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paddock.dashboard.messages import TokenText, parse_messages
from paddock.journal import GroupRecord, LedgerError, LedgerView, RolloutSummary
from paddock.records import Trajectory, Verdict

WINDOW = 512  # groups that a page looks at
MAX_GROUPS_SHOWN = 60  # groups listed at once
SIDE_BY_SIDE = 64  # attempts of a group
BINS = 20
MAX_TOKENS_SHOWN = 40_000  # of an attempt on a page


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutQuery:
    """Which groups to look at."""

    task: str = ""
    status: str = ""
    update: int | None = None
    before: int | None = None  # ordinal
    low: float | None = None  # at least one attempt's reward lies in [low, high]
    high: float | None = None


def rollout_overview(ledger: LedgerView, wish: RolloutQuery) -> Mapping[str, Any]:
    """The newest groups of a wish, with the histogram of their rewards and what went wrong."""
    entries = ledger.list_groups(
        WINDOW, before=wish.before, task=wish.task, status=wish.status, update=wish.update
    )
    ended = ledger.rollout_summaries([entry.ordinal for entry in entries])
    of_group: dict[int, list[RolloutSummary]] = {entry.ordinal: [] for entry in entries}
    for attempt in ended:
        of_group[attempt.ordinal].append(attempt)
    chosen = [entry for entry in entries if _wanted(of_group[entry.ordinal], wish)]
    task_of = {entry.ordinal: entry.task for entry in entries}
    return {
        "balance": asdict(ledger.group_counts()),
        "tasks": ledger.tasks(),
        "updates": ledger.updates(),
        "attempts": len(ended),
        "looked_at": len(entries),
        "more": len(entries) == WINDOW,
        "histogram": reward_histogram(ended, task_of),
        "groups": [_group(entry, of_group[entry.ordinal]) for entry in chosen[:MAX_GROUPS_SHOWN]],
        "chosen": len(chosen),
    }


def _wanted(attempts: Sequence[RolloutSummary], wish: RolloutQuery) -> bool:
    if wish.low is None or wish.high is None:
        return True
    rewards = [a.reward for a in attempts if a.reward is not None]
    return any(wish.low <= reward <= wish.high for reward in rewards)


def reward_histogram(
    ended: Sequence[RolloutSummary], task_of: Mapping[int, str]
) -> Mapping[str, Any]:
    """Rewards in bins of one width, by task; a single value has a bin of its own."""
    rewards = [(task_of[a.ordinal], a.reward) for a in ended if a.reward is not None]
    if not rewards:
        return {"edges": [], "counts": {}}
    low, high = min(r for _, r in rewards), max(r for _, r in rewards)
    low, high = min(0.0, low), max(1.0, high)  # most rewards are shares
    width = (high - low) / BINS
    counts: dict[str, list[int]] = {}
    for task, reward in rewards:
        place = min(BINS - 1, int((reward - low) / width))
        counts.setdefault(task, [0] * BINS)[place] += 1
    return {"edges": [low + i * width for i in range(BINS + 1)], "counts": counts}


def _group(entry: GroupRecord, attempts: Sequence[RolloutSummary]) -> Mapping[str, Any]:
    return {
        "ordinal": entry.ordinal,
        "task": entry.task,
        "number": entry.number,
        "size": entry.size,
        "status": entry.status,
        "reason": entry.reason,
        "update": entry.trained if entry.trained is not None else entry.issued,
        "rewards": [a.reward for a in attempts],
        "failed": [a.kind for a in attempts],
        "tokens": sum(a.tokens for a in attempts) / max(1, len(attempts)),
    }


def failure_summary(ledger: LedgerView, wish: RolloutQuery) -> Mapping[str, Any]:
    """Groups that were not trained, of the whole run; attempts without a verdict, of the newest."""
    entries = ledger.list_groups(WINDOW, before=wish.before, task=wish.task, update=wish.update)
    task_of = {entry.ordinal: entry.task for entry in entries}
    lost = [a for a in ledger.rollout_summaries(list(task_of)) if a.kind]
    reasons = Counter((task_of[a.ordinal], a.kind, a.place, a.what) for a in lost)
    last = {(task_of[a.ordinal], a.kind, a.place, a.what): a for a in lost}
    return {
        "groups": [
            {"task": task, "status": status, "reason": reason, "count": count}
            for (task, status, reason), count in sorted(ledger.counts_by_reason().items())
        ],
        "looked_at": len(entries),
        "attempts": [
            {
                "task": task,
                "kind": kind,
                "place": place,
                "what": what,
                "count": count,
                "ordinal": last[task, kind, place, what].ordinal,
                "member": last[task, kind, place, what].member,
            }
            for (task, kind, place, what), count in reasons.most_common(MAX_GROUPS_SHOWN)
        ],
    }


def group_detail(ledger: LedgerView, ordinal: int, words: TokenText) -> Mapping[str, Any]:
    """The attempts of a group side by side."""
    entry = ledger.get_group(ordinal)
    ended = ledger.rollout_summaries([ordinal])
    attempts = [
        _attempt(found, ledger.trajectories(ordinal, found.member), words)
        for found in ended[:SIDE_BY_SIDE]
    ]
    return {**_group(entry, ended), "attempts": attempts, "left_out": len(ended) - len(attempts)}


def _attempt(
    ended: RolloutSummary, branches: Sequence[Trajectory], words: TokenText
) -> Mapping[str, Any]:
    found: dict[str, Any] = {
        "member": ended.member,
        "reward": ended.reward,
        "failed": f"{ended.kind} at {ended.place}" if ended.kind else "",
        "note": ended.what,
        "parts": {},
        "tokens": ended.tokens,
        "turns": 0,
        "finish": "",
        "oldest": ended.oldest,
        "newest": ended.newest,
        "branches": len(branches),
        "messages": [],
    }
    for branch in branches[:1]:
        outcome = branch.outcome
        if isinstance(outcome, Verdict):
            found |= {"parts": dict(outcome.parts), "note": outcome.note}
        found["turns"] = len(branch.turns)
        found["finish"] = branch.turns[-1].completion.finish if branch.turns else ""
        found["messages"] = tokenized_messages(branch, words)
    return found


def tokenized_messages(branch: Trajectory, words: TokenText) -> list[Mapping[str, Any]]:
    ids = branch.token_ids[:MAX_TOKENS_SHOWN]
    pieces, added = words.pieces(ids), [words.is_special(token) for token in ids]
    return [asdict(said) for said in parse_messages(pieces, added, _sampled(branch))]


def _sampled(branch: Trajectory) -> list[bool]:
    flags: list[bool] = []
    for turn in branch.turns:
        flags += [False] * len(turn.added_ids) + list(turn.completion.sampled)
    return flags[:MAX_TOKENS_SHOWN]


def rollout_detail(
    ledger: LedgerView, ordinal: int, member: int, branch: int, words: TokenText
) -> Mapping[str, Any]:
    """One branch of an attempt, token by token: columns of one length. `ratio`, `advantage` and
    `kept` have a value where the trainer wrote one down."""
    branches = ledger.trajectories(ordinal, member)
    if not branches:
        raise LedgerError(f"the tokens of group {ordinal} were dropped after it was trained")
    chosen = branches[max(0, min(branch, len(branches) - 1))]
    entry = ledger.get_group(ordinal)
    (ended,) = [found for found in ledger.rollout_summaries([ordinal]) if found.member == member]
    ids = chosen.token_ids[:MAX_TOKENS_SHOWN]
    sampled, trained = _sampled(chosen), list(chosen.loss_mask[:MAX_TOKENS_SHOWN])
    versions: list[int | None] = []
    turns: list[int] = []
    for number, turn in enumerate(chosen.turns):
        versions += [None] * len(turn.added_ids) + list(turn.completion.token_versions)
        turns += [number] * (len(turn.added_ids) + len(turn.completion.token_ids))
    taught = ledger.token_record(chosen.session_id, chosen.branch)
    places = [place for place, flag in enumerate(chosen.loss_mask) if flag]
    columns: dict[str, list[Any]] = {
        name: [None] * len(chosen.token_ids) for name in ("log_ratio", "advantage", "kept")
    }
    if taught is not None and len(taught.kept) == len(places):
        for name, column in columns.items():
            for place, value in zip(places, getattr(taught, name), strict=True):
                column[place] = value
    return {
        "task": entry.task,
        "number": entry.number,
        "ordinal": ordinal,
        "session": chosen.session_id,
        "member": member,
        "size": entry.size,
        "branch": chosen.branch,
        "branches": len(branches),
        "status": entry.status,
        "reason": entry.reason,
        "update": entry.trained,
        "reward": ended.reward,
        "failed": f"{ended.kind} at {ended.place}: {ended.what}" if ended.kind else "",
        "cut": max(0, len(chosen.token_ids) - MAX_TOKENS_SHOWN),
        "ids": list(ids),
        "pieces": words.pieces(ids),
        "added": [words.is_special(token) for token in ids],
        "sampled": sampled,
        "trained": trained,
        "logprob": [
            value if flag else None for value, flag in zip(chosen.logprobs, sampled, strict=False)
        ],
        "version": versions[:MAX_TOKENS_SHOWN],
        "turn": turns[:MAX_TOKENS_SHOWN],
        **{name: column[:MAX_TOKENS_SHOWN] for name, column in columns.items()},
    }
