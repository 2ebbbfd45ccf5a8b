"""Files written before names changed in the code still decode, and new ones are identical."""

import sqlite3
from hashlib import sha256

import pytest

from paddock.journal import Ledger, unpack_rollout
from paddock.journal.rollout_codec import pack_rollout
from paddock.records import (
    Completion,
    Failure,
    Message,
    Segment,
    ToolCall,
    Trajectory,
    Turn,
    Verdict,
    json_codec,
)

COMPLETION_JSON = {
    "token_ids": [8, 9, 10],
    "logprobs": [-0.5, -0.25, -1.0],
    "versions": [{"version": 3, "tokens": 2}, {"version": 4, "tokens": 1}],
    "finish": "stop",
    "forced": [1],
}
VERDICT_JSON = {"reward": 0.5, "parts": {"tests": 1.0}, "note": "ok"}
FAILURE_JSON = {"kind": "world", "where": "sandbox.start", "what": "disk full"}
MESSAGE_JSON = {
    "role": "assistant",
    "content": "Hi",
    "reasoning": "Hm.",
    "tool_calls": [{"id": "c1", "name": "look", "arguments": {"far": 2}}],
    "tool_call_id": None,
}
PACKED_VERDICT = bytes.fromhex(
    "01070200007801d550c14ec3300c1d27185f51f95c6dcdd834895f892a14da74445b93ca76e0504dea97b15fc3"
    "8ee0ce810b5114f93dbfe758cfcec08ece2fa187e70a288fb43547a82b3861cad3377d52823c5148f147a9d42b"
    "bad8bd89b11190327769f4826640ffe15027369b83b426874ca5c19e4a6536cd551a31b11a209d4121678caab3"
    "33b8bef73a602734b971ba14f424e8dda3ee517456885d5b57765f57a69502861003e94a409c265d7248d815b3"
    "352a60742116cc98fdb5957fff240223b3ff5d0483bb9066d0dedd3fac1fcbb3fafd5996d5b2dc3e6f72bf00c3"
    "0aa089"
)
PACKED_FAILURE = bytes.fromhex(
    "010d01000078016d8e4d4ec4300c8561c5cf2922af2ba003121257892a9469d299a86d52d90e8354559a933157"
    "c30eb0c32bbfef3dffd815d8d1f81e3dbc19a032d363fb0a8d8103e6b2fce283020a4431a7bfa4a23dbad41f65"
    "f049442edce739885a618ca9ee3b659cbc264fc7806a01b9e4f7f9f381d821ff388ed5f09146339469824df25c"
    "309160bb82f33ee8b29d6072f33255f52cea23a07e547356c0ae6b8c7d694cdb4903434c91f43920ce8b9e1a32"
    "f675d8b61a60743155cd58c2d66dddf5cdedddfdd5bf753e5fbe2edf628b5519"
)
SCHEMA_DIGESTS = {
    "attempts": "2e4203deb7a63353",
    "groups": "44e54f34a16cf8e1",
    "groups_by_end": "faca0bd1223f6774",
    "groups_by_status": "5ae35e40ac83d64d",
    "lessons": "f7b1d1e0ff28e8be",
    "run": "2a04a954b0da902f",
    "shares": "6a0afe488aea662d",
    "rollout_seconds": "798eca2c6d932c1d",  # with "skipped", later than the others
    "skipped": "57c0ce5fe4aee5ba",
    "updates": "27aed4825e1fa46f",
}


def trajectory(outcome, branch):
    completion = Completion(
        token_ids=(8, 9, 10),
        logprobs=(-0.5, -0.25, -1.0),
        finish="stop",
        versions=(Segment(3, 2), Segment(4, 1)),
        forced=(1,),
    )
    return Trajectory(
        task_id="sums/17",
        group_id="g",
        session_id="s",
        branch=branch,
        turns=(Turn(added_ids=(1, 7), completion=completion, trained=branch == 0),),
        outcome=outcome,
    )


VERDICT = Verdict(reward=0.5, parts={"tests": 1.0}, note="ok")
FAILURE = Failure(kind="world", where="sandbox.start", what="disk full")


@pytest.mark.parametrize(
    ("outcome", "outcome_json", "branch"), [(VERDICT, VERDICT_JSON, 1), (FAILURE, FAILURE_JSON, 0)]
)
def test_an_exported_trajectory_keeps_its_json_keys(outcome, outcome_json, branch):
    old = {
        "task_id": "sums/17",
        "group_id": "g",
        "session_id": "s",
        "branch": branch,
        "turns": [{"added_ids": [1, 7], "completion": COMPLETION_JSON, "trained": branch == 0}],
        "outcome": outcome_json,
    }
    record = trajectory(outcome, branch)
    assert json_codec.decode(Trajectory, old) == record and json_codec.encode(record) == old


def test_an_exported_message_keeps_its_json_keys():
    call = ToolCall(id="c1", name="look", arguments={"far": 2})
    record = Message(role="assistant", content="Hi", reasoning="Hm.", tool_calls=(call,))
    assert json_codec.decode(Message, MESSAGE_JSON) == record
    assert json_codec.encode(record) == MESSAGE_JSON


@pytest.mark.parametrize(
    ("packed", "branches"),
    [
        (PACKED_VERDICT, [trajectory(VERDICT, 0), trajectory(VERDICT, 1)]),
        (PACKED_FAILURE, [trajectory(FAILURE, 0)]),
    ],
)
def test_a_packed_rollout_of_format_1_decodes_and_is_written_alike(packed, branches):
    assert unpack_rollout(packed) == tuple(branches)
    assert pack_rollout(branches) == packed


def test_the_tables_of_a_ledger_are_those_of_format_1(tmp_path):
    Ledger(tmp_path / "ledger.sqlite").close()
    with sqlite3.connect(tmp_path / "ledger.sqlite") as base:
        rows = base.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall()
    assert {name: sha256(sql.encode()).hexdigest()[:16] for name, sql in rows} == SCHEMA_DIGESTS
