import json
import pickle
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddock.records import (
    Budget,
    Completion,
    Failure,
    Message,
    Segment,
    Task,
    ToolCall,
    TrainSample,
    Trajectory,
    Turn,
    Verdict,
)
from paddock.records.json_codec import RecordDecodeError, decode, encode

names = st.text(min_size=1)
finite = st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | finite | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
calls = st.builds(ToolCall, id=names, name=names, arguments=st.dictionaries(st.text(), json_values))
messages = (
    st.builds(Message, role=st.sampled_from(["system", "user"]), content=st.text())
    | st.builds(Message, role=st.just("tool"), content=st.text(), tool_call_id=names)
    | st.builds(
        Message,
        role=st.just("assistant"),
        content=st.text(),
        reasoning=st.none() | st.text(),
        tool_calls=st.lists(calls, max_size=2, unique_by=lambda call: call.id).map(tuple),
    )
)
positive = st.integers(min_value=1)
budgets = st.builds(
    Budget,
    turns=positive,
    seconds=st.floats(min_value=0, exclude_min=True, allow_infinity=False),
    output_bytes=positive,
)
tasks = st.builds(
    Task,
    id=names,
    env=names,
    messages=st.lists(messages, min_size=1, max_size=3).map(tuple),
    budget=budgets,
)
outcomes = st.builds(
    Verdict, reward=st.floats(-1e6, 1e6), parts=st.dictionaries(st.text(), finite), note=st.text()
) | st.builds(Failure, kind=st.sampled_from(["policy", "time"]), where=st.text(), what=st.text())
token_ids = st.lists(st.integers(0, 200_000), max_size=6).map(tuple)


@st.composite
def completions(draw) -> Completion:
    ids = draw(token_ids)
    count = len(ids)
    return Completion(
        token_ids=ids,
        logprobs=tuple(draw(st.lists(st.floats(-1e9, 0), min_size=count, max_size=count))),
        versions=(Segment(draw(st.integers(0, 9)), count),) if count else (),
        finish=draw(st.sampled_from(["stop", "length", "abort"])),
        forced=tuple(sorted(draw(st.sets(st.integers(0, count - 1))))) if count else (),
    )


turns = st.builds(
    Turn, added_ids=token_ids.map(lambda ids: (1, *ids)), completion=completions(), trained=...
)
trajectories = st.builds(
    Trajectory,
    task_id=names,
    group_id=names,
    session_id=names,
    branch=st.integers(0, 3),
    turns=st.lists(turns, max_size=3).map(tuple),
    outcome=outcomes,
)

SAMPLE = TrainSample(
    id="s/0",
    token_ids=(7, 8),
    logprobs=(0.0, -0.1),
    loss_mask=(False, True),
    advantages=(0.0, 0.5),
    oldest_version=3,
)
TRAJECTORY = Trajectory(
    task_id="t", group_id="g", session_id="s", turns=(), outcome=Verdict(reward=1.0)
)


@settings(max_examples=50)
@given(messages | tasks | trajectories | st.just(SAMPLE))
def test_every_record_round_trips_through_json(record):
    assert decode(type(record), json.loads(json.dumps(encode(record), allow_nan=False))) == record


@settings(max_examples=20)
@given(trajectories)
def test_every_record_round_trips_through_pickle(record):
    assert pickle.loads(pickle.dumps(record)) == record


def test_an_encoded_record_shares_no_state_with_the_record():
    call = ToolCall(id="c", name="f", arguments={"x": [1]})
    encode(call)["arguments"]["x"].append(2)
    assert call.arguments == {"x": [1]}


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"token": []}, r"Sample\.token: unknown key"),
        ({"token_ids": None}, r"TrainSample\.token_ids: expected an array, got None"),
        ({"token_ids": [7, "8"]}, r"TrainSample\.token_ids\[1\]: expected int, got '8'"),
        ({"token_ids": [7, True]}, r"TrainSample\.token_ids\[1\]: expected int, got True"),
        ({"loss_mask": [0, 1]}, r"TrainSample\.loss_mask\[0\]: expected bool, got 0"),
        ({"logprobs": [0.0, None]}, r"Sample\.logprobs\[1\]: expected float, got None"),
        ({"oldest_version": 3.0}, r"Sample\.oldest_version: expected int, got 3\.0"),
        ({"loss_mask": [True, True]}, r"TrainSample\.loss_mask: the first token cannot be trained"),
    ],
)
def test_an_invalid_encoding_is_rejected_by_its_path(change, error):
    with pytest.raises(RecordDecodeError, match=error):
        decode(TrainSample, encode(SAMPLE) | change)


def test_a_key_may_be_missing_only_where_the_field_has_a_default():
    assert decode(Message, {"role": "user", "content": "Hi"}) == Message(role="user", content="Hi")
    with pytest.raises(RecordDecodeError, match=r"Message\.content: missing"):
        decode(Message, {"role": "user"})


def test_an_error_deep_inside_names_the_whole_path():
    call = {"id": "c", "name": "", "arguments": {}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    with pytest.raises(
        RecordDecodeError, match=r"^Message\.tool_calls\[0\]\.name: must not be empty$"
    ):
        decode(Message, message)


def test_an_integer_is_accepted_for_a_float():
    sample = decode(TrainSample, encode(SAMPLE) | {"logprobs": [0, -1]})
    assert sample.logprobs == (0.0, -1.0) and type(sample.logprobs[1]) is float
    with pytest.raises(RecordDecodeError, match=r"Verdict\.reward: expected float, got 1000"):
        decode(Verdict, {"reward": 10**400})


def test_an_outcome_is_recognized_by_its_keys():
    failure = Failure(kind="world", where="tool", what="gone")
    assert decode(Trajectory, encode(replace(TRAJECTORY, outcome=failure))).outcome == failure
    for neither in ({}, {"reward": 1.0, "kind": "world"}, None, 1.0):
        with pytest.raises(
            RecordDecodeError, match=r"Trajectory\.outcome: expected Verdict or Failure"
        ):
            decode(Trajectory, encode(TRAJECTORY) | {"outcome": neither})


def test_an_unsupported_field_type_is_a_type_error():
    @dataclass(frozen=True)
    class Odd:
        tags: set[str]

    with pytest.raises(TypeError, match=r"unsupported field type in a record: set\[str\]"):
        decode(Odd, {"tags": []})
