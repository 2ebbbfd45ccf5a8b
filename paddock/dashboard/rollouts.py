"""Groups, rollouts and tokens of a ledger as JSON for the dashboard pages."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paddock.dashboard.messages import TokenText, parse_messages
from paddock.dashboard.old_names import REASONS
from paddock.journal import GroupRecord, LedgerError, LedgerView, RolloutSummary
from paddock.records import Failure, Trajectory, Verdict

WINDOW = 512  # newest groups that a page covers
MAX_GROUPS_SHOWN = 60  # listed on a page
MAX_ROLLOUTS_SHOWN = 64  # of a group
BINS = 20  # of the histogram
MAX_TOKENS_SHOWN = 40_000  # of a rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutQuery:
    """Filter of groups. Empty or None: any."""

    task: str = ""
    status: str = ""
    step: int | None = None  # that trained the group
    before: int | None = None  # ordinal
    low: float | None = None  # at least one reward of the group is in [low, high]
    high: float | None = None


def rollout_overview(ledger: LedgerView, query: RolloutQuery) -> Mapping[str, Any]:
    """The newest groups that match, with the histogram of their rewards."""
    entries = ledger.list_groups(
        WINDOW, before=query.before, task=query.task, status=query.status, update=query.step
    )
    finished = ledger.rollout_summaries([entry.ordinal for entry in entries])
    of_group: dict[int, list[RolloutSummary]] = {entry.ordinal: [] for entry in entries}
    for rollout in finished:
        of_group[rollout.ordinal].append(rollout)
    matching = [entry for entry in entries if _matches(of_group[entry.ordinal], query)]
    task_of = {entry.ordinal: entry.task for entry in entries}
    return {
        "counts": asdict(ledger.group_counts()),
        "tasks": ledger.tasks(),
        "steps": ledger.updates(),
        "rollouts": len(finished),
        "window": len(entries),
        "more": len(entries) == WINDOW,
        "histogram": reward_histogram(finished, task_of),
        "groups": [_group(entry, of_group[entry.ordinal]) for entry in matching[:MAX_GROUPS_SHOWN]],
        "matching": len(matching),
    }


def _matches(rollouts: Sequence[RolloutSummary], query: RolloutQuery) -> bool:
    if query.low is None or query.high is None:
        return True
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    return any(query.low <= reward <= query.high for reward in rewards)


def reward_histogram(
    finished: Sequence[RolloutSummary], task_of: Mapping[int, str]
) -> Mapping[str, Any]:
    """Histogram of the rewards by task, from at most 0 to at least 1."""
    rewards = [(task_of[a.ordinal], a.reward) for a in finished if a.reward is not None]
    if not rewards:
        return {"edges": [], "counts": {}}
    low, high = min(r for _, r in rewards), max(r for _, r in rewards)
    low, high = min(0.0, low), max(1.0, high)  # most rewards are between 0 and 1
    width = (high - low) / BINS
    counts: dict[str, list[int]] = {}
    for task, reward in rewards:
        index = min(BINS - 1, int((reward - low) / width))
        counts.setdefault(task, [0] * BINS)[index] += 1
    return {"edges": [low + i * width for i in range(BINS + 1)], "counts": counts}


def _group(entry: GroupRecord, rollouts: Sequence[RolloutSummary]) -> Mapping[str, Any]:
    return {
        "ordinal": entry.ordinal,
        "task": entry.task,
        "number": entry.number,
        "size": entry.size,
        "status": entry.status,
        "reason": REASONS.get(entry.reason, entry.reason),
        "step": entry.trained if entry.trained is not None else entry.issued,
        "rewards": [rollout.reward for rollout in rollouts],
        "failures": [Failure.kind_label(rollout.kind) for rollout in rollouts],
        "mean_tokens": sum(rollout.tokens for rollout in rollouts) / max(1, len(rollouts)),
    }


def failure_summary(ledger: LedgerView, query: RolloutQuery) -> Mapping[str, Any]:
    """Groups of the whole run by status and reason; failed rollouts of the newest groups."""
    entries = ledger.list_groups(WINDOW, before=query.before, task=query.task, update=query.step)
    task_of = {entry.ordinal: entry.task for entry in entries}
    failed = [a for a in ledger.rollout_summaries(list(task_of)) if a.kind]
    reasons = Counter((task_of[a.ordinal], a.kind, a.place, a.what) for a in failed)
    last = {(task_of[a.ordinal], a.kind, a.place, a.what): a for a in failed}
    return {
        "groups": [
            {"task": task, "status": status, "reason": REASONS.get(reason, reason), "count": count}
            for (task, status, reason), count in sorted(ledger.counts_by_reason().items())
        ],
        "window": len(entries),
        "rollouts": [
            {
                "task": task,
                "kind": Failure.kind_label(kind),
                "where": place,
                "message": what,
                "count": count,
                "ordinal": last[task, kind, place, what].ordinal,
                "rollout": last[task, kind, place, what].member,
            }
            for (task, kind, place, what), count in reasons.most_common(MAX_GROUPS_SHOWN)
        ],
    }


def group_detail(ledger: LedgerView, ordinal: int, token_text: TokenText) -> Mapping[str, Any]:
    """A group with the messages of its rollouts."""
    entry = ledger.get_group(ordinal)
    finished = ledger.rollout_summaries([ordinal])
    rollouts = [
        _rollout(summary, ledger.trajectories(ordinal, summary.member), token_text)
        for summary in finished[:MAX_ROLLOUTS_SHOWN]
    ]
    return {
        **_group(entry, finished),
        "rollouts": rollouts,
        "not_shown": len(finished) - len(rollouts),
    }


def _rollout(
    summary: RolloutSummary, branches: Sequence[Trajectory], token_text: TokenText
) -> Mapping[str, Any]:
    found: dict[str, Any] = {
        "rollout": summary.member,
        "reward": summary.reward,
        "failure": f"{Failure.kind_label(summary.kind)} at {summary.place}" if summary.kind else "",
        "note": summary.what,
        "parts": {},
        "tokens": summary.tokens,
        "turns": 0,
        "finish": "",
        "oldest": summary.oldest,
        "newest": summary.newest,
        "branches": len(branches),
        "messages": [],
    }
    for branch in branches[:1]:
        outcome = branch.outcome
        if isinstance(outcome, Verdict):
            found |= {"parts": dict(outcome.parts), "note": outcome.note}
        found["turns"] = len(branch.turns)
        found["finish"] = branch.turns[-1].completion.finish if branch.turns else ""
        found["messages"] = tokenized_messages(branch, token_text)
    return found


def tokenized_messages(branch: Trajectory, token_text: TokenText) -> list[Mapping[str, Any]]:
    """The tokens of a branch as chat messages."""
    ids = branch.token_ids[:MAX_TOKENS_SHOWN]
    pieces, special = token_text.pieces(ids), [token_text.is_special(token) for token in ids]
    return [asdict(message) for message in parse_messages(pieces, special, _sampled(branch))]


def _sampled(branch: Trajectory) -> list[bool]:
    """Whether each token was sampled by the policy."""
    flags: list[bool] = []
    for turn in branch.turns:
        flags += [False] * len(turn.added_ids) + list(turn.completion.sampled)
    return flags[:MAX_TOKENS_SHOWN]


def rollout_detail(
    ledger: LedgerView, ordinal: int, member: int, branch: int, token_text: TokenText
) -> Mapping[str, Any]:
    """One branch of a rollout as columns of one value per token.

    `log_ratio`, `advantage` and `kept` are None where the trainer recorded nothing. Raises
    LedgerError if the tokens were deleted.
    """
    branches = ledger.trajectories(ordinal, member)
    if not branches:
        raise LedgerError(f"the tokens of group {ordinal} were deleted after training")
    chosen = branches[max(0, min(branch, len(branches) - 1))]
    entry = ledger.get_group(ordinal)
    (summary,) = [each for each in ledger.rollout_summaries([ordinal]) if each.member == member]
    ids = chosen.token_ids[:MAX_TOKENS_SHOWN]
    sampled, trained = _sampled(chosen), list(chosen.loss_mask[:MAX_TOKENS_SHOWN])
    versions: list[int | None] = []
    turns: list[int] = []
    for number, turn in enumerate(chosen.turns):
        versions += [None] * len(turn.added_ids) + list(turn.completion.token_versions)
        turns += [number] * (len(turn.added_ids) + len(turn.completion.token_ids))
    record = ledger.token_record(chosen.session_id, chosen.branch)
    positions = [position for position, flag in enumerate(chosen.loss_mask) if flag]
    columns: dict[str, list[Any]] = {
        name: [None] * len(chosen.token_ids) for name in ("log_ratio", "advantage", "kept")
    }
    if record is not None and len(record.kept) == len(positions):
        for name, column in columns.items():
            for position, value in zip(positions, getattr(record, name), strict=True):
                column[position] = value
    return {
        "task": entry.task,
        "number": entry.number,
        "ordinal": ordinal,
        "session": chosen.session_id,
        "rollout": member,
        "size": entry.size,
        "branch": chosen.branch,
        "branches": len(branches),
        "status": entry.status,
        "reason": REASONS.get(entry.reason, entry.reason),
        "step": entry.trained,
        "reward": summary.reward,
        "failure": f"{Failure.kind_label(summary.kind)} at {summary.place}: {summary.what}"
        if summary.kind
        else "",
        "not_shown": max(0, len(chosen.token_ids) - MAX_TOKENS_SHOWN),
        "ids": list(ids),
        "pieces": token_text.pieces(ids),
        "special": [token_text.is_special(token) for token in ids],
        "sampled": sampled,
        "trained": trained,
        "logprob": [
            value if flag else None for value, flag in zip(chosen.logprobs, sampled, strict=False)
        ],
        "version": versions[:MAX_TOKENS_SHOWN],
        "turn": turns[:MAX_TOKENS_SHOWN],
        **{name: column[:MAX_TOKENS_SHOWN] for name, column in columns.items()},
    }
