"""Binary encoding of a rollout: int32 token ids, float32 log-probabilities, run-length versions.

Decoding returns equal trajectories, provided that log-probabilities are float32 numbers, as those
of every engine are. About five bytes per token, most of them the log-probability.
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
_HEADER = struct.Struct("<BI")  # format, length of the JSON part


def pack_rollout(branches: Sequence[Trajectory]) -> bytes:
    """Encode the branches of one session, which share one outcome.

    >>> completion = Completion(token_ids=(8, 9), logprobs=(-0.5, 0.0), finish="stop",
    ...                         versions=(Segment(3, 2),))
    >>> branch = Trajectory(task_id="sums/17", group_id="g", session_id="s",
    ...                     turns=(Turn(added_ids=(1, 7), completion=completion),),
    ...                     outcome=Verdict(reward=1.0))
    >>> unpack_rollout(pack_rollout([branch])) == (branch,)
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
    header = json.dumps([_branch_json(branch) for branch in branches]).encode()
    body = header + _byte_planes(ids) + _byte_planes(logprobs)
    return _HEADER.pack(ROLLOUT_FORMAT, len(header)) + zlib.compress(body, level=1)


def unpack_rollout(data: bytes, ordinal: int | None = None) -> tuple[Trajectory, ...]:
    """Decode what `pack_rollout` wrote.

    Raises LedgerError if the data are damaged (`ordinal`, the group, is for the message), and
    RecordDecodeError if they hold an invalid record, such as a reward of 1e308.
    """
    try:
        return _unpack(data)
    except (LedgerError, json_codec.RecordDecodeError):
        raise
    except (ValueError, TypeError, LookupError, struct.error, zlib.error) as error:
        group = "" if ordinal is None else f" of group {ordinal}"
        raise LedgerError(f"the tokens of a rollout{group} are damaged: {error}") from None


def _unpack(data: bytes) -> tuple[Trajectory, ...]:
    version, size = _HEADER.unpack_from(data)
    if version != ROLLOUT_FORMAT:
        raise LedgerError(f"rollout format {version} is not supported, expected {ROLLOUT_FORMAT}")
    body = zlib.decompress(data[_HEADER.size :])
    branches = json.loads(body[:size])
    turns = [turn for branch in branches for turn in branch["turns"]]
    ids_bytes = 4 * sum(turn["added"] + turn["sampled"] for turn in turns)
    ids = _reader(_merge_planes(body[size : size + ids_bytes], "<i4"))
    logprobs = _reader(_merge_planes(body[size + ids_bytes :], "<f4"))
    return tuple(_trajectory(branch, ids, logprobs) for branch in branches)


def _branch_json(branch: Trajectory) -> dict[str, Any]:
    return {
        "task_id": branch.task_id,
        "group_id": branch.group_id,
        "session_id": branch.session_id,
        "branch": branch.branch,
        "outcome": json_codec.encode(branch.outcome),
        "turns": [_turn_json(turn) for turn in branch.turns],
    }


def _turn_json(turn: Turn) -> dict[str, Any]:
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
    data: dict[str, Any], ids: Callable[[int], tuple], logprobs: Callable[[int], tuple]
) -> Trajectory:
    turns = []
    for turn in data["turns"]:
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
        task_id=data["task_id"],
        group_id=data["group_id"],
        session_id=data["session_id"],
        branch=data["branch"],
        turns=tuple(turns),
        outcome=_outcome(data["outcome"]),
    )


def _outcome(data: dict[str, Any]) -> Outcome:
    return (
        json_codec.decode(Verdict, data) if "reward" in data else json_codec.decode(Failure, data)
    )


def _byte_planes(column: np.ndarray) -> bytes:
    """The first bytes of all numbers, then the second bytes, ...: high bytes hardly differ, so
    they compress to almost nothing."""
    return column.view(np.uint8).reshape(-1, 4).T.tobytes()


def _merge_planes(data: bytes, dtype: str) -> list[Any]:
    columns: list[Any] = (
        np.frombuffer(data, np.uint8).reshape(4, -1).T.copy().view(dtype).reshape(-1).tolist()
    )
    return columns


def _reader(column: list[Any]) -> Callable[[int], tuple]:
    """A function that returns the next `count` items of the column."""
    position = 0

    def take(count: int) -> tuple:
        nonlocal position
        position += count
        return tuple(column[position - count : position])

    return take
