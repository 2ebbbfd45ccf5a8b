"""An attempt as bytes and back: ids in 32 bits, log-probabilities as float32, versions in runs.

What was written reads back equal, provided that log-probabilities are float32 numbers, as those of
every engine are. About five bytes a token, most of them the log-probability.
"""

import json
import struct
import zlib
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np

from paddock.journal.sqlite import LedgerError
from paddock.records import (
    Completion,
    Failure,
    Outcome,
    Segment,
    Trajectory,
    Turn,
    Verdict,
    json_codec,
)

ROLLOUT_FORMAT = 1
_HEAD = struct.Struct("<BI")  # format, bytes of the JSON part


def pack_rollout(branches: Sequence[Trajectory]) -> bytes:
    """The branches of one session, all with one outcome.

    >>> answer = Completion(token_ids=(8, 9), logprobs=(-0.5, 0.0), finish="stop",
    ...                     versions=(Segment(3, 2),))
    >>> attempt = Trajectory(task_id="sums/17", group_id="g", session_id="s",
    ...                      turns=(Turn(added_ids=(1, 7), completion=answer),),
    ...                      outcome=Verdict(reward=1.0))
    >>> unpack_rollout(pack_rollout([attempt])) == (attempt,)
    True
    """
    turns = [turn for branch in branches for turn in branch.turns]
    ids = np.fromiter(
        chain.from_iterable((*turn.added_ids, *turn.completion.token_ids) for turn in turns),
        dtype="<i4",
    )
    logprobs = np.fromiter(
        chain.from_iterable(turn.completion.logprobs for turn in turns), dtype="<f4"
    )
    words = json.dumps([_branch(branch) for branch in branches]).encode()
    body = words + _planes(ids) + _planes(logprobs)
    return _HEAD.pack(ROLLOUT_FORMAT, len(words)) + zlib.compress(body, level=1)


def unpack_rollout(data: bytes, ordinal: int | None = None) -> tuple[Trajectory, ...]:
    """What `pack` wrote. Raises LedgerError if it is damaged (`ordinal` is its group, for the
    message), WireError if it is whole and holds what no record may, such as a reward of 1e308."""
    try:
        return _unpacked(data)
    except (LedgerError, json_codec.RecordDecodeError):
        raise
    except (ValueError, TypeError, LookupError, struct.error, zlib.error) as error:
        group = "" if ordinal is None else f" of group {ordinal}"
        raise LedgerError(f"the tokens of an attempt{group} are damaged: {error}") from None


def _unpacked(data: bytes) -> tuple[Trajectory, ...]:
    form, size = _HEAD.unpack_from(data)
    if form != ROLLOUT_FORMAT:
        raise LedgerError(
            f"an attempt was written in format {form}, this reads format {ROLLOUT_FORMAT}"
        )
    body = zlib.decompress(data[_HEAD.size :])
    branches = json.loads(body[:size])
    turns = [turn for branch in branches for turn in branch["turns"]]
    ids_bytes = 4 * sum(turn["added"] + turn["sampled"] for turn in turns)
    ids = _taker(_unplaned(body[size : size + ids_bytes], "<i4"))
    logprobs = _taker(_unplaned(body[size + ids_bytes :], "<f4"))
    return tuple(_trajectory(branch, ids, logprobs) for branch in branches)


def _branch(branch: Trajectory) -> dict[str, Any]:
    return {
        "task_id": branch.task_id,
        "group_id": branch.group_id,
        "session_id": branch.session_id,
        "branch": branch.branch,
        "outcome": json_codec.encode(branch.outcome),
        "turns": [_turn(turn) for turn in branch.turns],
    }


def _turn(turn: Turn) -> dict[str, Any]:
    completion = turn.completion
    return {
        "added": len(turn.added_ids),
        "sampled": len(completion.token_ids),
        "versions": [(segment.version, segment.tokens) for segment in completion.versions],
        "finish": completion.finish,
        "forced": completion.forced,
        "trained": turn.trained,
    }


def _trajectory(
    said: dict[str, Any], ids: Callable[[int], tuple], logprobs: Callable[[int], tuple]
) -> Trajectory:
    turns = []
    for turn in said["turns"]:
        added_ids = ids(turn["added"])
        completion = Completion(
            token_ids=ids(turn["sampled"]),
            logprobs=logprobs(turn["sampled"]),
            versions=tuple(Segment(version, tokens) for version, tokens in turn["versions"]),
            finish=turn["finish"],
            forced=tuple(turn["forced"]),
        )
        turns.append(Turn(added_ids=added_ids, completion=completion, trained=turn["trained"]))
    return Trajectory(
        task_id=said["task_id"],
        group_id=said["group_id"],
        session_id=said["session_id"],
        branch=said["branch"],
        turns=tuple(turns),
        outcome=_outcome(said["outcome"]),
    )


def _outcome(said: dict[str, Any]) -> Outcome:
    return (
        json_codec.decode(Verdict, said) if "reward" in said else json_codec.decode(Failure, said)
    )


def _planes(column: np.ndarray) -> bytes:
    """First bytes of all numbers, then second bytes, ...: the high ones hardly differ, so that
    they compress to next to nothing."""
    return column.view(np.uint8).reshape(-1, 4).T.tobytes()


def _unplaned(data: bytes, dtype: str) -> list[Any]:
    columns: list[Any] = (
        np.frombuffer(data, np.uint8).reshape(4, -1).T.copy().view(dtype).reshape(-1).tolist()
    )
    return columns


def _taker(column: list[Any]) -> Callable[[int], tuple]:
    """Hands out a column from its beginning, so many items at a time."""
    position = 0

    def take(count: int) -> tuple:
        nonlocal position
        position += count
        return tuple(column[position - count : position])

    return take
